"""The docs say what is true: links lead somewhere, commands exist, every option, counter and dependency is written down."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

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


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    for function in (headrace.Engine.load, headrace.Engine.generate, headrace.Engine.decode_greedy_batch):
        for name in inspect.signature(function).parameters:
            assert name == "self" or f"`{name}`" in text, f"docs/knobs.md doesn't tell of {name}"


def test_every_environment_variable_is_documented_and_read() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    sources = [p for pattern in ("crates/**/*.rs", "python/**/*.py", "tests/**/*.py") for p in ROOT.glob(pattern)]
    read = {name for p in sources for name in re.findall(r"HEADRACE_[A-Z0-9_]+", p.read_text())}
    documented = set(re.findall(r"HEADRACE_[A-Z0-9_]+", text))
    assert read == documented


def test_every_counter_is_documented() -> None:
    text = (ROOT / "docs" / "stats.md").read_text()

    def names(kind: type) -> list[str]:
        found = []
        for field in dataclasses.fields(kind):
            # A record, or a tuple of records.
            inner = getattr(headrace, str(field.type).removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]"), None)
            found += names(inner) if dataclasses.is_dataclass(inner) else [field.name]
        return found

    for name in names(headrace.Stats):
        assert f"`{name}`" in text, f"docs/stats.md doesn't tell of {name}"


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
