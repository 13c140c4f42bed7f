"""The docs say what is true: links lead somewhere, commands exist, every option, counter and dependency is written down."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import cli_page
import headrace
import pytest
from conftest import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_s_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert "bash tests/all.sh" in text and (ROOT / "tests" / "all.sh").is_file()
    assert "headrace run smollm2-135m" in text
    assert "tests/all.sh" in (ROOT / ".ci" / "run").read_text()


def test_readme_s_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def first_column(page: str, head: str) -> set[str]:
    """The names in backticks of the first column of the table that begins with `head`."""
    text = (ROOT / "docs" / page).read_text()
    assert text.count(head) == 1, f"docs/{page} must have one table {head!r}"
    rows = text.split(head)[1].split("\n\n")[0].splitlines()[2:]
    assert rows
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def parameters(*functions: Callable[..., object]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters} - {"self"}


def test_options_and_their_page_are_the_same() -> None:
    assert first_column("knobs.md", "| `Engine.load` |") == parameters(headrace.Engine.load)
    engine = headrace.Engine
    calls = parameters(engine.generate, engine.stream, engine.decode_greedy_batch, headrace.Server.submit)
    assert first_column("knobs.md", "| `generate`, ") == calls
    assert parameters(headrace.plan) - parameters(headrace.Engine.load) == {"length"}


def test_commands_and_their_page_are_the_same() -> None:
    """The page holds every command and flag that exists, and no other."""
    page = cli_page.page()
    for flag in ("`--vram-limit`", "## `headrace fetch`", "`NAME`", "`--version`"):
        assert flag in page
    assert cli_page.PAGE.read_text(encoding="utf-8") == page, "run `python tests/cli_page.py`"


def sources() -> Iterator[tuple[Path, str]]:
    for pattern in ("crates/**/*.rs", "python/**/*.py", "tests/**/*.py", "benches/**/*.py", "examples/**/*.py", "fuzz/**/*.rs"):
        for path in ROOT.glob(pattern):
            if path != Path(__file__).resolve() and "target" not in path.parts:
                yield path, path.read_text()


def test_environment_variables_and_their_page_are_the_same() -> None:
    pattern, table = r"\bHEADRACE_[A-Z0-9_]+\b", ROOT / "crates" / "engine" / "src" / "environment.rs"
    # Names that are wrong on purpose are in the tests of that file and of test_errors.py.
    read = {name for path, text in sources() if path != table and path.name != "test_errors.py" for name in re.findall(pattern, text)}
    known = set(re.findall(pattern, table.read_text().split("#[cfg(test)]")[0]))
    documented = first_column("knobs.md", "| environment |")
    assert read == known == documented


def test_counters_and_their_page_are_the_same() -> None:
    text = (ROOT / "docs" / "stats.md").read_text()
    containers, counters = set(), set()

    def walk(kind: type, nested: bool) -> None:
        for field in dataclasses.fields(kind):
            # A record, or a tuple of records.
            inner = getattr(headrace, str(field.type).removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]"), None)
            if dataclasses.is_dataclass(inner):
                assert isinstance(inner, type)
                containers.add(field.name)
                walk(inner, True)
            elif field.name != "name" or nested:
                counters.add(field.name)

    walk(headrace.Stats, False)
    for name in counters:
        assert f"`{name}`" in text, f"docs/stats.md doesn't tell of {name}"
    extra = first_column("stats.md", "| field | kind | meaning |") - counters - containers
    assert not extra, f"docs/stats.md tells of {extra}, which are no counters"


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    with (ROOT / "Cargo.toml").open("rb") as file:
        rust = tomllib.load(file)["workspace"]["dependencies"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    python = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = [n for n in rust if not n.startswith("headrace-")]
    names += [re.split(r"[<>=~!\[ ]", requirement)[0] for requirement in python]
    for name in names:
        assert f"`{name}`" in text, f"docs/dependencies.md doesn't tell of {name}"
