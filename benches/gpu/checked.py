"""Short steps of every kind, to be run under a checker of memory accesses and races. Builds nothing.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benches/gpu/checked.py model.gguf small
    compute-sanitizer --tool racecheck --error-exitcode 9 python benches/gpu/checked.py model.gguf small

For each model: a prompt and a few tokens with everything resident, a ragged batch, the same under the smallest limit, and a
sequence that grows until weights are demoted for its pages (an epoch change in mid-generation). `small` is a random model that
is made here, whose one-row steps go through the persistent kernel. Tokens must be the resident run's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import headrace
import make_model
from run import limits_of

SMALL = make_model.Shape(4, 1024, 4096, 16, 8, 1024)
NEW = 6


def prompt(length: int) -> list[int]:
    return [(7 * i) % 900 + 3 for i in range(length)]


def check(path: Path, longest: int, device: str) -> list[str]:
    """What was run, each with what it moved."""
    base: dict[str, Any] = {"max_context": 1024, "max_batch": 3, "prefill_chunk": 64, "piece_bytes": "1MiB"}
    ragged = [prompt(n) for n in (1, 30, 7)]
    long = prompt(longest)
    done = []

    def run(what: str, limit: int | None) -> tuple[Any, ...]:
        engine = headrace.Engine.load(path, device=device, vram_limit=limit, **base)
        tokens = (
            engine.generate(prompt(40), max_new_tokens=NEW, stop_tokens=()).token_ids,
            engine.decode_greedy_batch(ragged, max_new_tokens=NEW, stop_tokens=()).token_ids.tolist(),
            engine.generate(long, max_new_tokens=NEW, stop_tokens=()).token_ids,
        )
        s = engine.stats()
        epochs = dict(s.graph.epochs)
        done.append(f"{path.name}, {what}: {s.tokens.steps} steps, {s.weights.streamed_bytes:,} bytes streamed, epochs {epochs}")
        print(done[-1], flush=True)
        if limit is not None:
            assert s.weights.streamed_bytes > 0, "nothing was streamed"
        return tokens

    expected = run("everything resident", None)
    minimum, _ = limits_of(path, device, **base)
    memory = headrace.plan(path, device=device, vram_limit="1TiB", **base).memory
    assert memory is not None
    held = memory.everything - memory.kv_max_bytes + memory.kv_floor_bytes
    for what, limit in (("the smallest limit", minimum), ("a limit that holds everything at the start", held)):
        assert run(what, limit) == expected, f"{what}: other tokens"
    assert "kv-growth" in done[-1], "no epoch began for KV"
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="models; `small` is made")
    parser.add_argument("--longest", type=int, default=300, help="prompt of the sequence that grows")
    parser.add_argument("--device", default="cuda")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = []
        for path in a.models:
            if path.name == "small" and not path.exists():
                path = Path(directory) / "small"
                make_model.build(SMALL, path, 1)
            runs += check(path, a.longest, a.device)
    print(f"{len(runs)} runs, tokens equal")
    sys.exit(0)


if __name__ == "__main__":
    main()
