"""Where the tests find models, and engines that several tests share. Whatever is needed is here, is made, or comes from PyPI."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import headrace
import pytest

# A shell that starts a job in the background has it ignore Ctrl-C; the tests of Ctrl-C want the usual handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the tests of the model of a gigabyte too (fetches 1.1 GB once)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--large` its tests are deselected, and counted so."""
    if not config.getoption("--large"):
        large = [item for item in items if item.get_closest_marker("large")]
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache."""
    return headrace.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_onnx(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the builder of ONNX Runtime GenAI exports it for the CPU, made from the GGUF file (some 12 s)."""
    return make_export(smollm2, tmp_path_factory.mktemp("smollm2-onnx") / "cpu")


@pytest.fixture(scope="session")
def smollm2_onnx_cuda(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the builder exports it for CUDA (float16)."""
    return make_export(smollm2, tmp_path_factory.mktemp("smollm2-onnx") / "cuda")


def make_export(source: Path, out: Path) -> Path:
    """The export of the demo model that `out` is named after (`cpu` or `cuda`), made in `out`."""
    from reference import smollm2_onnx

    return smollm2_onnx.make(source, out, out.name)


@lru_cache(maxsize=None)
def golden(name: str) -> dict[str, Any]:
    """A golden file of `tests/data/golden`."""
    result: dict[str, Any] = json.loads((DATA / "golden" / f"{name}.json").read_text())
    return result


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[headrace.Engine]:
    """The demo model with default options. Tests that change its state put it back."""
    yield headrace.Engine.load(smollm2)
