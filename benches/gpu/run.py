"""Checks a CUDA card against the CPU bit for bit, then times a model of a given shape. Builds nothing.

    python benches/gpu/run.py --check model.gguf onnx-dir --shape 14b --model-dir /tmp/models --out results

Correctness comes first: if a bit differs, nothing is timed; and under every limit the tokens are compared with those of the run without a limit. The table comes last; `results/gpu.json` holds everything.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import headrace
import make_model
import numpy as np
from instruments import add_arguments, header, sound

CONTEXT = 512
PREFILL_CHUNK = 512
COMPARED = 24
"""New tokens of a sequence that are compared with the resident run's before a row is timed."""
HBM_SHAPES = ("0.5b", "1.5b", "7b", "14b")


def limits_of(path: Path, device: str = "cuda", **options: Any) -> tuple[int, int]:
    """The smallest limit that works, and the one from which on nothing is cold (without what a policy's many programs take)."""
    try:
        headrace.Engine.load(path, device=device, vram_limit=1, **options)  # type: ignore[arg-type]
    except headrace.BudgetError as error:
        minimum = int(str(error).split("at least ")[1].split(" ")[0])
    options.pop("policy", None)
    memory = headrace.plan(path, device=device, vram_limit="100TiB", **options).memory  # type: ignore[arg-type]
    assert memory is not None
    return minimum, memory.everything


def memory_of(engine: headrace.Engine) -> dict[str, Any]:
    pool = sound(engine).memory[0]  # the device; the host's page-locked memory has a pool of its own
    holders = {h.name: h.used for h in pool.holders}
    assert pool.peak <= pool.limit, pool
    assert pool.unaccounted == pool.oversubscribed == pool.underflows == 0, pool
    return {"limit": pool.limit, "peak": pool.peak, "mapped_peak": pool.mapped_peak, **holders}


def check(path: Path) -> list[dict[str, Any]]:
    """Compares logits and tokens of the card with the CPU's; returns a row for each comparison."""
    rows: list[dict[str, Any]] = []

    def compare(what: str, card: headrace.Engine, cpu: headrace.Engine) -> None:
        rng = np.random.default_rng(5)
        equal = True
        for length in (1, 7, 40, 400):
            ids = [int(t) for t in rng.integers(3, cpu.vocab_size - 1, length)]
            equal &= bool(np.array_equal(card.logits([ids]), cpu.logits([ids])))
            tokens = [e.generate(ids, max_new_tokens=64, stop_tokens=()).token_ids for e in (card, cpu)]
            equal &= tokens[0] == tokens[1]
        batch = [[int(t) for t in rng.integers(3, cpu.vocab_size - 1, n)] for n in (1, 30, 12, 100, 3)]
        both = [e.decode_greedy_batch(batch, max_new_tokens=16, stop_tokens=()).token_ids for e in (card, cpu)]
        equal &= bool(np.array_equal(*both))
        w = sound(card).weights
        rows.append({"model": path.name, "what": what, "equal": equal, "streamed": w.streamed_bytes, **memory_of(card)})
        print(f"{path.name}: {what}: {'equal' if equal else 'DIFFERENT'}, {w.streamed_bytes:,} bytes streamed", flush=True)

    for activations in ("int16", "int8"):
        options: dict[str, Any] = {"max_context": CONTEXT, "activations": activations}
        cpu = headrace.Engine.load(path, device="cpu", **options)
        for layout in ("head-major", "seq-major"):
            card = headrace.Engine.load(path, device="cuda", kv_layout=layout, **options)
            compare(f"{activations} {layout}", card, cpu)
            del card
    cpu = headrace.Engine.load(path, device="cpu", max_context=CONTEXT)
    minimum, everything = limits_of(path, max_context=CONTEXT)
    for share in (0.0, 0.5):
        limit = int(minimum + (everything - minimum) * share)
        card = headrace.Engine.load(path, device="cuda", vram_limit=limit, max_context=CONTEXT)
        compare(f"int16, limit {limit:,}", card, cpu)
        del card
    return rows


def device_ms(s: headrace.Stats) -> dict[str, float]:
    """Of a step by the device's clock, from the moment that it turns to the step to its last kernel's end."""
    return {"device_ms": s.clock.step_seconds / max(s.clock.steps, 1) * 1e3}


def batch(engine: headrace.Engine, sequences: int, tokens: int) -> list[list[int]]:
    """The tokens of that many sequences."""
    prompts = [[(7 * i + j) % 1000 + 3 for j in range(16)] for i in range(sequences)]
    rows: list[list[int]] = engine.decode_greedy_batch(prompts, max_new_tokens=tokens, stop_tokens=()).token_ids.tolist()
    return rows


def same_tokens(what: str, got: list[list[int]], expected: list[list[int]]) -> bool:
    """True, or the run ends: a row of wrong tokens is no figure."""
    if got != expected:
        raise SystemExit(f"{what}: other tokens than with everything resident: {got} instead of {expected}")
    return True


def decode(engine: headrace.Engine, sequences: int, tokens: int) -> dict[str, float]:
    """Time of one decode step: the median over short runs, by the engine's own clock."""
    batch(engine, sequences, 8)
    times = []
    for _ in range(3):
        engine.reset_stats()
        batch(engine, sequences, tokens)
        s = sound(engine)
        times.append(s.time.decode_seconds / s.time.decode_steps)
    step = float(np.median(times))
    streamed = s.weights.streamed_bytes / max(s.graph.replays, 1)
    return {
        "step_ms": step * 1e3,
        "tokens_per_s": sequences / step,
        "streamed_per_step": streamed,
        "link_gb_per_s": streamed / step / 1e9,
    } | device_ms(s)


def at_context(engine: headrace.Engine, sequences: int, context: int, steps: int = 24) -> dict[str, Any]:
    """Time of a decode step of sequences that are `context` positions long, by the engine's own clock.

    Prompts are read one after the other, and who is done goes on while the others are read, in the same steps of PREFILL_CHUNK
    rows. Limits are such that all decode together for the last `steps` steps, which are those without a prompt's rows. Up to 8
    sequences it is done twice, and the second time counted: graphs for contexts this long are captured in the first.
    """
    prompts = [[(7 * i + j) % 1000 + 3 for j in range(context)] for i in range(sequences)]
    reads = [context / (PREFILL_CHUNK - i) for i in range(sequences)]  # steps for prompt i, while i sequences decode
    news = [math.ceil(sum(reads[i + 1 :])) + steps for i in range(sequences)]
    for _ in range(2 if sequences <= 8 else 1):
        engine.reset_stats()
        engine.decode_greedy_batch(prompts, max_new_tokens=news, stop_tokens=())
    s = sound(engine)
    step, rows = s.time.decode_seconds / s.time.decode_steps, s.time.decode_tokens / s.time.decode_steps
    # Some end a few steps before the others: the reads of prompts are reckoned in whole steps.
    assert rows > 0.9 * sequences, f"{rows} of {sequences} sequences decoded together"
    return {
        "context": context, "step_ms": step * 1e3, "tokens_per_s": rows / step, "timed_steps": s.time.decode_steps,
        "rows_per_step": rows, "captures": s.graph.captures, "streamed_per_step": 0.0, "link_gb_per_s": 0.0,
    }  # fmt: skip


def prefill(engine: headrace.Engine) -> dict[str, float]:
    """Time of a prompt of 512 tokens in one step, by the engine's own clock: the median of three, after one that warms up."""
    times = []
    for i in range(4):
        engine.reset_stats()
        engine.generate([(11 * j + i) % 1000 + 3 for j in range(512)], max_new_tokens=1, stop_tokens=())
        times.append(sound(engine).time.prefill_seconds)
    step = float(np.median(times[1:]))
    return {"prefill": 512, "step_ms": step * 1e3, "tokens_per_s": 512 / step} | device_ms(sound(engine))


def measure(
    path: Path, shape: str, batches: list[int], cold: list[float], contexts: list[int], rows_out: list[dict[str, Any]]
) -> None:
    # Beyond the longest prompt, room for what its sequence says while the others are read.
    longest = max([2048 - PREFILL_CHUNK, *contexts]) + PREFILL_CHUNK
    options: dict[str, Any] = {"max_context": longest, "max_batch": 32, "prefill_chunk": PREFILL_CHUNK}
    for activations in ("int16", "int8"):
        start = time.monotonic()
        engine = headrace.Engine.load(path, device="cuda", activations=activations, **options)
        load = time.monotonic() - start
        step_bytes = engine.plan.model.step_bytes
        for sequences in batches:
            row = {"shape": shape, "activations": activations, "sequences": sequences, "cold": 0.0, "load_s": load}
            row["load_parts_s"] = dict(sound(engine).time.load_parts)
            row |= decode(engine, sequences, 64)
            row["weights_gb_per_s"] = step_bytes / row["step_ms"] / 1e6
            rows_out.append(row | {"memory": memory_of(engine)})
            print(row, flush=True)
        rows_out.append({"shape": shape, "activations": activations, "cold": 0.0} | prefill(engine))
        print(rows_out[-1], flush=True)
        for context in contexts:
            for sequences in (1, 8, 32):
                row = {"shape": shape, "activations": activations, "sequences": sequences, "cold": 0.0}
                rows_out.append(row | at_context(engine, sequences, context))
                rows_out[-1]["weights_gb_per_s"] = step_bytes / rows_out[-1]["step_ms"] / 1e6
                print(rows_out[-1], flush=True)
        del engine
    over_budget(path, shape, cold, rows_out)


def over_budget(path: Path, shape: str, cold: list[float], rows_out: list[dict[str, Any]]) -> None:
    """One sequence with shares of the weights cold; 1, 8 and 32 sequences and a prompt with half of them cold, tokens first."""
    options: dict[str, Any] = {"max_context": CONTEXT, "max_batch": 1, "prefill_chunk": 64}
    minimum, everything = limits_of(path, **options)
    weights = headrace.plan(path, device="cpu").model.step_bytes
    engine = headrace.Engine.load(path, device="cuda", **options)
    resident = batch(engine, 1, COMPARED)
    assert sound(engine).weights.streamed_bytes == 0, "nothing is cold without a limit"
    del engine
    for share in cold:
        limit = max(minimum, int(everything - weights * share))
        engine = headrace.Engine.load(path, device="cuda", vram_limit=limit, **options)
        plan = engine.plan.memory
        assert plan is not None
        row = {"shape": shape, "activations": "int16", "sequences": 1, "cold": plan.streamed_bytes / weights, "limit": limit}
        row["tokens_equal"] = same_tokens(f"limit {limit:,}", batch(engine, 1, COMPARED), resident)
        row |= decode(engine, 1, 24)
        same_tokens(f"limit {limit:,}, after it was timed", batch(engine, 1, COMPARED), resident)
        rows_out.append(row | {"memory": memory_of(engine)})
        print(row, flush=True)
        del engine
    if not cold:
        return
    options = {"max_context": 2 * CONTEXT, "max_batch": 32, "prefill_chunk": 512}
    for activations in ("int16", "int8"):
        memory = headrace.plan(path, device="cuda", vram_limit="1TiB", activations=activations, **options).memory  # type: ignore[arg-type]
        assert memory is not None
        # Room for 32 sequences of 32 positions, or one of 512; the weights give way to more.
        limit = memory.everything - memory.kv_max_bytes + memory.kv_max_bytes // 32 - weights // 2
        engine = headrace.Engine.load(path, device="cuda", activations=activations, **options)  # type: ignore[arg-type]
        expected = {sequences: batch(engine, sequences, COMPARED) for sequences in (1, 8, 32)}
        del engine
        engine = headrace.Engine.load(path, device="cuda", vram_limit=limit, activations=activations, **options)  # type: ignore[arg-type]
        for sequences in (1, 8, 32):
            row = {"shape": shape, "activations": activations, "sequences": sequences, "limit": limit}
            what = f"{sequences} sequences, half cold, {activations}"
            row["tokens_equal"] = same_tokens(what, batch(engine, sequences, COMPARED), expected[sequences])
            row |= decode(engine, sequences, 8)
            row["cold"] = row["streamed_per_step"] / weights
            row["streamed_per_token"] = row["streamed_per_step"] / sequences
            rows_out.append(row | {"memory": memory_of(engine)})
            print(row, flush=True)
        rows_out.append({"shape": shape, "activations": activations, "cold": row["cold"]} | prefill(engine))
        print(rows_out[-1], flush=True)
        del engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", type=Path, default=[], help="models whose bits are compared with the CPU's")
    parser.add_argument("--shape", choices=HBM_SHAPES, action="append", default=[], help="shapes to time")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32], help="sequences at once, up to 32, all weights resident")
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="decode steps of sequences this long, of the shape 14b")
    parser.add_argument("--cold", type=float, nargs="*", default=[0.06, 0.12, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/headrace-models"))
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"header": header("cuda", a.commit), "failed": "", "checks": [], "times": []}
    try:
        for path in a.check:
            result["checks"] += check(path)
        wrong = [c for c in result["checks"] if not c["equal"]]
        if wrong:
            print(f"{len(wrong)} comparisons differ; nothing is timed")
            sys.exit(1)
        for shape in a.shape:
            path = a.model_dir / shape
            if not (path / "model.onnx").exists():
                make_model.build(make_model.SHAPES[shape], path, 1)
            large = shape == "14b"
            measure(path, shape, a.sequences, a.cold if large else [], a.contexts if large else [], result["times"])
    except BaseException as error:
        result["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (a.out / "gpu.json").write_text(json.dumps(result, indent=1))
    print(f"\n{len(result['checks'])} comparisons equal")
    print(f"{'shape':>6} {'act':>6} {'seqs':>5} {'cold':>6} {'step ms':>9} {'tokens/s':>9} {'weights GB/s':>13} {'link GB/s':>10}")
    for r in result["times"]:
        if "prefill" in r:
            print(f"{r['shape']:>6} {r['activations']:>6} prefill of {r['prefill']}, {r['cold']:.0%} cold: {r['tokens_per_s']:,.0f} tokens/s")
            continue
        gb = r.get("weights_gb_per_s", 0.0)
        context = f"  context {r['context']:,}" if "context" in r else ""
        print(
            f"{r['shape']:>6} {r['activations']:>6} {r['sequences']:>5} {r['cold']:>6.1%} {r['step_ms']:>9.3f} "
            f"{r['tokens_per_s']:>9.1f} {gb:>13,.0f} {r['link_gb_per_s']:>10.1f}{context}"
        )


if __name__ == "__main__":
    main()
