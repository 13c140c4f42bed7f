"""The examples run, and say how they are called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_it_is_called(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and "model" in done.stdout, done.stderr
    wrong = subprocess.run([sys.executable, str(example), "--no-such-option"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "usage: " in wrong.stderr


def test_serve_runs() -> None:
    model = DATA / "models" / "qwen3-Q4_1.gguf"
    example = ROOT / "examples" / "serve.py"
    done = subprocess.run([sys.executable, str(example), str(model)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for way in ("list:", "threads:", "asyncio:"):
        assert done.stdout.count(way) == 4
