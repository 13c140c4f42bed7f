"""Things that end inside of the engine's own work: on a thread of their own, or later where no thread can be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "data" / "models" / "qwen2-Q4_0.gguf"

# A stream is let go inside a call of its own engine, from a callback; meanwhile the process can't map another thread's stack.
PROGRAM = """
import logging, resource, sys, threading
import headrace

logging.basicConfig(level=logging.WARNING)
engine = headrace.Engine.load(sys.argv[1], device="cpu", threads=1, max_context=512, max_batch=2)
stream = engine.stream([1, 2, 3], max_new_tokens=8)
next(iter(stream))
held = [stream]
del stream

class Handler(logging.Handler):
    pass

def let_go(*_):
    if held:
        pages = int(open("/proc/self/statm").read().split()[0])
        old = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), old[1]))
        try:
            held.clear()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)

# The callback comes after some time, not after some tokens: a fast machine needs more than one generation until then.
for _ in range(200):
    if held:
        headrace._core.Engine.generate(
            engine._inner, [1, 2, 3],
            dict(max_new_tokens=400, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_tokens=[], speculation=0, keep_logits=False),
            let_go,
        )
assert not held, "the callback was never called"
stats = engine.stats()
assert stats.kv.sequences == 0, "the stream's pages were not given back"
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_end_inside_without_a_thread_comes_later_and_never_waits_for_itself() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(MODEL)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr
    assert "no thread for what is to end" in done.stderr, done.stderr
