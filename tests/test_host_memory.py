"""What the host allows: a process of few addresses loads what fits, and is told of ulimit -v where that is too little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "data" / "models" / "qwen2-Q4_0.gguf"

PROGRAM = """
import resource, sys
import headrace

device, more, batch = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    engine = headrace.Engine.load(sys.argv[1], device=device, threads=1, max_batch=batch)
    print("tokens", len(engine.generate([1, 2, 3], max_new_tokens=4).token_ids))
except headrace.HeadraceError as error:
    print("refused", type(error).__name__, error)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are Linux's")


def limited(device: str, more: int, batch: int) -> str:
    command = [sys.executable, "-c", PROGRAM, str(MODEL), device, str(more), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("device", ["cpu", "host-device"])
def test_addresses_are_reserved_in_proportion_to_the_plan(device: str) -> None:
    # Far less than the machine's memory.
    assert limited(device, 256 << 20, 2) == "tokens 4\n"


@pytest.mark.parametrize("device", ["cpu", "host-device"])
def test_too_few_addresses_are_refused_with_what_to_do(device: str) -> None:
    said = limited(device, 256 << 20, 65_536)
    assert said.startswith("refused"), said
    assert "ulimit -v" in said and "max_batch" in said, said
