"""Compares random mixes of requests that join and leave at random steps with each request alone, by tokens and logits.

    python benches/gpu/mixes.py --device cuda --check model.gguf onnx-dir --out results

Every mix runs on the device under test, continuously batched, with logits and drafts and without; every request runs alone on the
CPU. `results/mixes.json` holds a row for each mix; the exit status is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headrace
import numpy as np
from instruments import add_arguments, header, sound

CONTEXT = 400


def plan_mix(rng: random.Random, vocab: int, sequences: int, longest: int) -> list[dict[str, Any]]:
    """Requests of 1 to `longest` positions; half of the prompts repeat themselves, so that drafts are found."""
    mix = []
    for _ in range(sequences):
        length = max(2, int(longest ** rng.uniform(0.3, 1.0)))
        prompt = rng.randint(1, length - 1)
        start, period = rng.randrange(vocab), rng.choice([3, 11, 100_000])
        drawn = rng.random() < 0.2
        mix.append(
            {
                "prompt": [(start + i % period * 7919) % (vocab - 3) + 3 for i in range(prompt)],
                "max_new_tokens": rng.randint(1, length - prompt),
                "temperature": 0.8 if drawn else 0.0,
                "seed": rng.randrange(1 << 32),
                "speculation": 0 if drawn else rng.choice([0, 0, 1, 4, 8]),
                # How many tokens of the request before this one are waited for before this one is submitted.
                "after": rng.choice([0, 0, 0, 1, 5]),
                # A token that it will choose, and that ends it then.
                "stop_at": rng.randint(0, 30) if rng.random() < 0.4 else None,
                "cancel_after": rng.randint(0, 20) if rng.random() < 0.2 else None,
            }
        )
    return mix


def run_mix(engine: headrace.Engine, mix: list[dict[str, Any]], keep_logits: bool) -> list[headrace.Generation]:
    with engine.serve() as server:
        requests: list[headrace.Request] = []
        for m in mix:
            if requests:
                for _, _token in zip(range(m["after"]), requests[-1]):
                    pass
            options = {k: m[k] for k in ("max_new_tokens", "temperature", "seed", "speculation")}
            if not keep_logits:
                # Steps with drafts are followed by none, and neither are those whose logits are wanted.
                options["speculation"] = 0
            requests.append(server.submit(m["prompt"], stop_tokens=m["stop_tokens"], keep_logits=keep_logits, **options))
            if m["cancel_after"] == 0:
                requests[-1].cancel()
        for m, request in zip(mix, requests, strict=True):
            if m["cancel_after"]:
                for _, _token in zip(range(m["cancel_after"]), request):
                    pass
                request.cancel()
        return [request.result() for request in requests]


def alone(engine: headrace.Engine, m: dict[str, Any]) -> headrace.Generation:
    """What a request gives by itself. Chooses the token at which it stops, if it is to."""
    options = {k: m[k] for k in ("max_new_tokens", "temperature", "seed")}
    m["stop_tokens"] = ()
    result: headrace.Generation = engine.generate(m["prompt"], stop_tokens=(), keep_logits=True, **options)
    if m["stop_at"] is not None and m["stop_at"] < len(result.token_ids):
        m["stop_tokens"] = (result.token_ids[m["stop_at"]],)
        result = engine.generate(m["prompt"], stop_tokens=m["stop_tokens"], keep_logits=True, **options)
    return result


def same(got: headrace.Generation, one: headrace.Generation) -> bool:
    """True if tokens and logits are equal, or their beginning, for a request that was cancelled."""
    n = len(got.token_ids)
    if got.finish_reason != "cancelled" and (n != len(one.token_ids) or got.finish_reason != one.finish_reason):
        return False
    if got.token_ids != one.token_ids[:n]:
        return False
    if got.logits is None:
        return True
    # The choice of a stop token has logits as well.
    assert one.logits is not None and len(got.logits) == n + (got.finish_reason == "stop")
    return np.array_equal(got.logits.view(np.uint32), one.logits[: len(got.logits)].view(np.uint32))


def smallest_limit(path: Path, device: str, **options: Any) -> int:
    try:
        headrace.Engine.load(path, device=device, vram_limit=1, **options)  # type: ignore[arg-type]
    except headrace.BudgetError as error:
        return int(str(error).split("at least ")[1].split(" ")[0])
    raise AssertionError("one byte is too small a limit")


def check(
    path: Path,
    *,
    device: str,
    limits: Sequence[str | int | None] = (None, "smallest"),
    layouts: Sequence[str] = ("head-major", "seq-major"),
    chunks: Sequence[int] = (1, 16, 64, 512),
    sequences: Sequence[int] = (1, 7, 32),
    longest: int = CONTEXT,
    seed: int = 1,
    **more: Any,
) -> list[dict[str, Any]]:
    """A row for each limit, layout and chunk: whether everything was equal, and what the device did for it.

    The limit `"smallest"` is the smallest that works; numbers of sequences and chunks are paired in turn. `more` are
    options of `Engine.load` for the device under test.
    """
    rng = random.Random(seed)
    cpu = headrace.Engine.load(path, device="cpu", max_context=min(CONTEXT, longest))
    rows = []
    for layout in layouts:
        for limit in limits:
            for i, chunk in enumerate(chunks):
                count = sequences[i % len(sequences)]
                options: dict[str, Any] = {
                    "max_context": min(CONTEXT, longest),
                    "max_batch": max(1, min(count, 16)),
                    "prefill_chunk": chunk,
                    "kv_layout": layout,
                    **more,
                }
                bytes_ = smallest_limit(path, device, **options) if limit == "smallest" else limit
                card = headrace.Engine.load(path, device=device, vram_limit=bytes_, **options)  # type: ignore[arg-type]
                mix = plan_mix(rng, cpu.vocab_size, count, min(CONTEXT, longest))
                expected = [alone(cpu, m) for m in mix]
                # Plainly, too: only such steps are followed by others in flight.
                runs = zip(run_mix(card, mix, keep_logits=True), run_mix(card, mix, keep_logits=False), strict=True)
                equal = 0
                for got, one in zip(runs, expected, strict=True):
                    equal += all(same(g, one) for g in got)
                s = sound(card)
                assert s.kv.sequences == s.kv.pages == 0, s.kv
                for pool in s.memory:
                    assert pool.peak <= pool.limit, pool
                    assert pool.unaccounted == pool.oversubscribed == pool.underflows == 0, pool
                row = {
                    "model": path.name,
                    "layout": layout,
                    "limit": bytes_,
                    "chunk": chunk,
                    "sequences": count,
                    "equal": equal == count,
                    "streamed": s.weights.streamed_bytes,
                    "steps": s.tokens.steps,
                    "rows": s.tokens.rows,
                    "accepted": s.tokens.accepted,
                    "discarded": s.tokens.discarded_rows,
                }
                rows.append(row)
                print(row, flush=True)
                del card
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, required=True, help="models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 7, 32])
    parser.add_argument("--longest", type=int, default=CONTEXT, help="most positions of a request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--piece-bytes", default="1MiB", help="small, so that small models stream at the smallest limit")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for path in a.check:
        rows += check(
            path, device=a.device, chunks=a.chunks, sequences=a.sequences, longest=a.longest, seed=a.seed,
            piece_bytes=a.piece_bytes,
        )
    (a.out / "mixes.json").write_text(json.dumps({"header": header(a.device, a.commit), "mixes": rows}, indent=1))
    wrong = [row for row in rows if not row["equal"]]
    streamed = sum(row["streamed"] > 0 for row in rows)
    print(f"{len(rows)} mixes, {streamed} of them streamed, {len(wrong)} with differences")
    if not streamed:
        sys.exit("nothing was streamed: pieces are too large for these models")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
