"""Figures say what they are of: headers of JSON files, the README's table, instruments that are broken, tokens that differ."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import headrace
import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "benches" / "gpu")]

import formats_table  # noqa: E402
import header  # noqa: E402
import instruments  # noqa: E402
import make_model  # noqa: E402
import readme_table  # noqa: E402
import run  # noqa: E402
import sweep  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
FILES = sorted(FOLDER.rglob("*.json"))
PAGES = [ROOT / "README.md", *sorted(FOLDER.glob("*.md"))]


def head(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["header"]
    return result


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(FOLDER)))
def test_every_file_says_what_it_is_of(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict) and "header" in data, f"{path.name} has no header"
    assert not header.faults(data["header"])


def test_the_page_lists_the_headers_as_they_are() -> None:
    assert len(FILES) > 10
    assert header.table(FOLDER) in (FOLDER / "README.md").read_text(encoding="utf-8"), "run `python benches/header.py docs/benchmarks`"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"commit": ""}, "commit"),
        ({"commit": "main"}, "commit"),
        ({"command": "unknown: "}, "gives no reason"),
        ({"build": {"version": "0.1.0", "profile": "release"}}, "debug_assertions"),
        ({"build": "release"}, "build"),
        ({"card": None}, "card"),
        ({"extra": "x"}, "must have"),
    ],
)
def test_a_header_that_lacks_something_is_found(change: dict[str, Any], said: str) -> None:
    right = header.header("cpu", commit="0123abc")
    assert not header.faults(right) and right["card"] == "none: computed on cpu"
    (fault,) = header.faults(right | change)
    assert said in fault


def test_this_build_says_what_it_is() -> None:
    build = headrace.build_info()
    assert build["profile"] in ("debug", "release") and build["debug_assertions"] in ("on", "off")
    assert build["opt_level"] in ("0", "1", "2", "3", "s", "z")
    assert header.is_release({"build": build}) == (build["profile"] == "release" and build["debug_assertions"] == "off")


def test_the_readme_s_figures_are_those_of_the_file_that_it_names() -> None:
    found = readme_table.BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) == 1
    name, text = found[0]
    data = json.loads((ROOT / name).read_text(encoding="utf-8"))
    assert text == readme_table.block(data, name), f"run `python benches/gpu/readme_table.py {name} --write`"
    assert header.is_release(data["header"]) or "debug assertions" in text


def test_the_readme_s_table_claims_nothing_that_its_file_does_not_show() -> None:
    data = json.loads((FOLDER / "h200" / "steps.json").read_text(encoding="utf-8"))
    assert "did not compare tokens" in readme_table.block(data, "x.json")
    data["header"]["build"] |= {"profile": "release", "debug_assertions": "off"}
    limited = [r for r in data["times"] if r.get("limit")]
    for r in limited:
        r["tokens_equal"] = True
    assert "are the same" in readme_table.block(data, "x.json") and "assertions" not in readme_table.block(data, "x.json")
    smallest = min((r for r in limited if "streamed_per_token" not in r), key=lambda r: r["limit"])
    del smallest["tokens_equal"]
    assert "did not compare tokens" in readme_table.block(data, "x.json")


def test_the_table_of_formats_is_made_from_its_file() -> None:
    data = json.loads((FOLDER / "h200" / "kernels.json").read_text(encoding="utf-8"))
    page = (FOLDER / "h200.md").read_text(encoding="utf-8")
    between = page.split(formats_table.START)[1].split(formats_table.END)[0]
    assert between.strip() == formats_table.table(data), "run `python benches/gpu/formats_table.py docs/benchmarks/h200/kernels.json --write`"
    assert header.is_release(data["header"])
    fields = {"format", "activations", "rows", "linear_ms", "tokens_per_s", "peer", "peer_tokens_per_s"}
    assert all(fields <= set(r) for r in data["rows"])


def test_one_ceiling_of_the_card_s_memory() -> None:
    assert f"{instruments.HBM:,.0f}" == "4,814"
    others = re.compile(r"4,?540 GB/s|4,?159 GB/s|4,?000 GB/s")
    for page in PAGES:
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if others.search(line)]
        # One sentence says what a file's own column is reckoned with.
        assert all("earlier ceiling" in line or "`floor_ms` of 4,540 GB/s" in line for line in lines), (page.name, lines)


class Broken:
    """An engine whose clock says more than the machine can do."""

    def __init__(self, engine: headrace.Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def stats(self) -> headrace.Stats:
        import dataclasses

        stats = self._engine.stats()
        clock = dataclasses.replace(stats.clock, broken_instruments=("copies while under way: 60 GB/s, above a ceiling of 55 GB/s",))
        return dataclasses.replace(stats, clock=clock)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small"
    make_model.build(make_model.Shape(2, 256, 512, 4, 2, 1024), path, 1)
    return path


def test_a_broken_instrument_fails_every_script(small: Path) -> None:
    engine: Any = Broken(headrace.Engine.load(small, device="host-device", max_context=128, max_batch=2))
    for use in (lambda: run.decode(engine, 1, 4), lambda: run.memory_of(engine), lambda: sweep.timed(engine, 4), lambda: sweep.books(engine)):
        with pytest.raises(instruments.BrokenInstrument, match="60 GB/s"):
            use()


def test_no_script_reads_stats_past_the_instruments() -> None:
    scripts = [p for p in (ROOT / "benches" / "gpu").glob("*.py") if p.name != "instruments.py"]
    assert len(scripts) > 5
    for script in scripts:
        calls = [n.lineno for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.Attribute) and n.attr == "stats"]
        assert not calls, f"{script.name}, lines {calls}: use `sound(engine)`"


def test_a_sweep_with_a_broken_instrument_has_failed(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = sweep.Sweep.load
    monkeypatch.setattr(sweep.Sweep, "load", lambda self, path, **options: Broken(load(self, path, **options)))
    arguments = ["sweep.py", "--device", "host-device", "--model", str(small), "--parts", "limits", "--steps", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        sweep.main()
    assert end.value.code == 1
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert "BrokenInstrument" in data["failed"] and not header.faults(data["header"])


def test_other_tokens_under_a_limit_end_the_run(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.py` compares before it times: with a wrong resident answer there is no row."""
    real, asked = headrace.Engine.load, []

    def load(path: Path, device: str, **options: Any) -> headrace.Engine:
        asked.append(options.get("vram_limit"))
        return real(path, device="host-device", piece_bytes="64KiB", **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run.headrace.Engine, "load", load)
    plan = headrace.plan
    monkeypatch.setattr(run.headrace, "plan", lambda path, device, **o: plan(path, device="cpu" if device == "cpu" else "host-device", **o))
    monkeypatch.setattr(run, "limits_of", lambda path, **o: limits(path, **o))
    rows: list[dict[str, Any]] = []
    run.over_budget(small, "14b", [0.5], rows)
    single = [r for r in rows if r.get("limit") and "streamed_per_token" not in r]
    assert len(single) == 1 and all(r["tokens_equal"] for r in rows if r.get("limit"))
    answers = iter([[[1]], [[2]]])
    monkeypatch.setattr(run, "batch", lambda *a: next(answers))
    with pytest.raises(SystemExit, match="other tokens than with everything resident"):
        run.over_budget(small, "14b", [0.5], [])


def limits(path: Path, **options: Any) -> tuple[int, int]:
    options["piece_bytes"] = "64KiB"
    with pytest.raises(headrace.BudgetError) as error:
        headrace.Engine.load(path, "host-device", vram_limit=1, **{k: v for k, v in options.items() if k != "piece_bytes"})
    memory = headrace.plan(path, device="host-device", vram_limit="100TiB", **options).memory
    assert memory is not None
    return int(str(error.value).split("at least ")[1].split(" ")[0]), memory.everything
