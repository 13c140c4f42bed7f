"""Short steps of every kind, to be run under a checker of memory accesses and races. Builds nothing.

    for way in resident smallest grown; do
        compute-sanitizer --tool memcheck --error-exitcode 9 python benches/gpu/checked.py model.gguf small --ways $way
    done

For each model and each way: a prompt and a few tokens, a ragged batch, a long prompt. The ways: everything `resident`, the
`smallest` limit, one that holds everything at the start, so that weights are demoted when a sequence has `grown` (an epoch
change in mid-generation), and plain allocations (`unmanaged`). `small` is a random model that is made here, whose one-row steps
go through the persistent kernel. Tokens must be the CPU's. One way a run under compute-sanitizer: it holds on to Python objects,
engines too. For `--tool racecheck`, which is slow, `small --layers 1 --longest 70 --ways resident` takes half a minute on an H200;
a real model wants short prompts: SmolLM2 takes two minutes with `--new 2 --shortest 6 --longest 20`.
Each part says when it is done, so that a run that was ended says how far it came.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import headrace
import make_model
from instruments import sound
from run import limits_of

SMALL = make_model.Shape(4, 1024, 4096, 16, 8, 1024)
WAYS = ("resident", "smallest", "grown", "unmanaged")


def prompt(length: int) -> list[int]:
    return [(7 * i) % 900 + 3 for i in range(length)]


def check(path: Path, ways: list[str], shortest: int, longest: int, new: int, chunk: int, device: str) -> None:
    base: dict[str, Any] = {"max_context": 1024, "max_batch": 3, "prefill_chunk": chunk}
    pieces = {"device": device, "piece_bytes": "1MiB"}
    ragged = [prompt(n) for n in (1, shortest * 3 // 4, shortest // 6 + 1)]
    start = time.monotonic()

    def done(what: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {what}", flush=True)

    def tokens(engine: headrace.Engine) -> tuple[Any, ...]:
        done("loaded")
        short = engine.generate(prompt(shortest), max_new_tokens=new, stop_tokens=()).token_ids
        done(f"a prompt of {shortest}, {new} new tokens")
        batch = engine.decode_greedy_batch(ragged, max_new_tokens=new, stop_tokens=()).token_ids.tolist()
        done(f"a batch of prompts of {', '.join(str(len(p)) for p in ragged)}")
        long = engine.generate(prompt(longest), max_new_tokens=new, stop_tokens=()).token_ids
        done(f"a prompt of {longest}")
        return short, batch, long

    expected = tokens(headrace.Engine.load(path, device="cpu", **base))
    for way in ways:
        limit = None
        cold = way in ("smallest", "grown")
        if cold:
            minimum, _ = limits_of(path, piece_bytes="1MiB", device=device, **base)
            memory = headrace.plan(path, vram_limit="1TiB", **pieces, **base).memory
            assert memory is not None
            limit = minimum if way == "smallest" else memory.everything - memory.kv_max_bytes + memory.kv_floor_bytes
        placement: Any = way if way == "unmanaged" else "auto"
        engine = headrace.Engine.load(path, vram_limit=limit, placement=placement, **pieces, **base)
        assert tokens(engine) == expected, f"{path.name}, {way}: other tokens"
        s = sound(engine)
        epochs = dict(s.graph.epochs)
        print(f"{path.name}, {way}: {s.tokens.steps} steps, {s.weights.streamed_bytes:,} bytes streamed, epochs {epochs}", flush=True)
        assert (s.weights.streamed_bytes > 0) == cold, "what was streamed"
        assert way != "grown" or "kv-growth" in epochs, "no epoch began for KV"
        del engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="models; `small` is made")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--shortest", type=int, default=40, help="tokens of the first prompt; those of the batch are shorter")
    parser.add_argument("--longest", type=int, default=300, help="tokens of the last prompt, whose sequence grows")
    parser.add_argument("--new", type=int, default=6, help="new tokens of every sequence")
    parser.add_argument("--layers", type=int, default=SMALL.layers, help="of the model that is made")
    parser.add_argument("--chunk", type=int, default=64, help="prefill_chunk")
    parser.add_argument("--device", default="cuda")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for path in a.models:
            if path.name == "small" and not path.exists():
                path = Path(directory) / "small"
                make_model.build(dataclasses.replace(SMALL, layers=a.layers), path, 1)
            check(path, a.ways, a.shortest, a.longest, a.new, a.chunk, a.device)
    print("tokens equal")


if __name__ == "__main__":
    main()
