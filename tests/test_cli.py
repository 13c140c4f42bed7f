"""The command line, as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEADRACE = [sys.executable, "-m", "headrace"]


def run(*arguments: str, code: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*HEADRACE, *arguments], capture_output=True, text=True, input=text, timeout=300)
    assert done.returncode == code, done.stderr
    return done


def test_run_prints_what_the_model_says(smollm2: Path) -> None:
    done = run("run", str(smollm2), "The capital of France is", "--raw", "-n", "8", "--stats")
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr and "ended by length" in done.stderr


def test_run_by_name_with_the_chat_template(smollm2: Path) -> None:
    done = run("run", "smollm2-135m", "-", "-n", "20", text="What is the capital of France?")
    assert "Paris" in done.stdout
    assert done.stderr == "", "a model that is as it should be warns of nothing"


def test_fetch_prints_the_cached_path(smollm2: Path) -> None:
    path = Path(run("fetch", "smollm2-135m").stdout.strip())
    assert path == smollm2
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("b179c952")


def test_fetch_refuses_a_wrong_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import dataclasses

    import headrace
    from headrace import _catalog

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    entry = dataclasses.replace(_catalog.CATALOG["smollm2-135m"], sha256="0" * 64)
    monkeypatch.setitem(_catalog.CATALOG, "smollm2-135m", entry)
    with pytest.raises(headrace.HeadraceError, match="SHA-256"):
        headrace.fetch("smollm2-135m")
    assert list((tmp_path / "smollm2-135m").iterdir()) == []


def test_plan_shows_what_batches_take_and_save(smollm2: Path) -> None:
    options = ("--device", "host-device", "--vram-limit", "120MiB", "--max-context", "512", "--max-batch", "16")
    table = run("plan", str(smollm2), *options, "--length", "256").stdout
    assert "sequences of 256 positions" in table and "streamed a token" in table and "at most 16 at once" in table
    plan = json.loads(run("plan", str(smollm2), *options, "--length", "256", "--json").stdout)
    rows = plan["trade"]["rows"]
    assert [row["sequences"] for row in rows] == [1, 2, 4, 8, 16]
    assert all(row["resident_bytes"] + row["streamed_bytes"] == sum(p["bytes"] for p in plan["memory"]["pieces"]) for row in rows)


def test_plan(smollm2: Path) -> None:
    table = run("plan", str(smollm2), "--tensors").stdout
    assert "blk.29.ffn_down.weight" in table and "Q4_1" in table
    plan = json.loads(run("plan", str(smollm2), "--json").stdout)
    assert plan["model"]["layers"] == 30 and len(plan["model"]["tensors"]) == 272


def test_probe_measures_the_host_and_says_what_is_missing() -> None:
    machine = json.loads(run("probe", "--json").stdout)
    assert machine["build"]["contract_version"] == "1"
    assert machine["host"]["memory_read"] > 1e8 and machine["host"]["cores"] >= 1
    assert machine["host"]["kernels"][0] == "scalar"
    assert bool(machine["cards"]) != bool(machine["problems"])
    for card in machine["cards"]:
        speeds = [s["speed"] for s in card["host_to_device"]]
        assert 1e9 < min(speeds) and max(speeds) < card["device_read"] < card["memory_peak"]
    text = run("probe").stdout
    assert "memory read" in text and "GB/s" in text
    for problem in machine["problems"]:
        assert problem in text


def test_errors_are_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing")
    for arguments in (["run", str(bad), "x"], ["run", "no-such-model", "x"], ["plan", str(bad)]):
        done = run(*arguments, code=1)
        assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("run", "plan", "probe", "fetch", "info"):
        assert command in text
        assert "Usage" in run(command, "--help").stdout


def test_ctrl_c_ends_a_run(smollm2: Path) -> None:
    process = subprocess.Popen(
        [*HEADRACE, "run", str(smollm2), "Tell me a long story about a dragon."],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr and "Traceback" not in stderr
