"""Where the tests find models, and engines that several tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
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


def shared_dir() -> Path | None:
    """The folder of large models and goldens that lies beside a developer's checkout, if it is there."""
    path = Path(os.environ.get("HEADRACE_SHARED", ROOT.parent / "shared"))
    return path if (path / "models").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """`shared/`, or the test is skipped."""
    path = shared_dir()
    if path is None:
        pytest.skip("the folder of shared models is not here (HEADRACE_SHARED names it)")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache."""
    return headrace.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_onnx(shared: Path) -> Path:
    """The demo model as the builder exports it for the CPU."""
    return shared / "models" / "smollm2-onnx-int4" / "cpu"


@pytest.fixture(scope="session")
def smollm2_onnx_cuda(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the builder exports it for CUDA (float16), made from the CPU export's weights and a patch."""
    return make_cuda_export(shared, tmp_path_factory.mktemp("smollm2-onnx-int4"))


def make_cuda_export(shared: Path, family: Path) -> Path:
    """Makes the CUDA export of the demo model in the empty directory `family`."""
    for part in ("cpu", "cuda"):
        shutil.copytree(shared / "models" / "smollm2-onnx-int4" / part, family / part)
    for path in family.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    subprocess.run([sys.executable, "make_data.py"], cwd=family / "cuda", check=True)
    shutil.rmtree(family / "cpu")
    return family / "cuda"


@lru_cache(maxsize=None)
def golden(name: str) -> dict[str, Any]:
    """A golden file of `tests/data/golden`."""
    result: dict[str, Any] = json.loads((DATA / "golden" / f"{name}.json").read_text())
    return result


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[headrace.Engine]:
    """The demo model with default options. Tests that change its state put it back."""
    yield headrace.Engine.load(smollm2)
