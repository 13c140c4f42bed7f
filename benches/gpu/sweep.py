"""Runs a model over its limit in every way there is: tokens first, then bytes and times. Builds nothing.

    python benches/gpu/sweep.py --check model.gguf onnx-dir --model 14b-dir --parts limits policies growth total --out results

Parts: `identity` (small models against the CPU: every mode, layout and policy at two limits, twice in a row), `limits` (a large
model from 100% to 10% of its weights, by mode), `policies` (the static schedule against every policy), `layouts` (both of KV, by
mode), `choice` (`auto` beside what it chooses from), `growth` (one position to the whole context under a limit that held
everything), `total` (where each byte of a limit goes), `checksum` (all weights after many steps). A wrong token, or a rate above
its ceiling (a broken instrument), ends a part. `sweep.json` holds everything; tables come last, `sweep.svg` if matplotlib is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import make_model
import numpy as np
import sweep_report
from headrace._arguments.tables import POLICIES
from instruments import HBM, LINK, add_arguments, header, sound
from run import limits_of

Row = dict[str, Any]
PARTS = ("identity", "limits", "policies", "layouts", "choice", "growth", "total", "checksum")
SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
NEW = 12
"""Tokens of a comparison with the CPU."""
PROMPT = [(7 * i) % 1000 + 3 for i in range(16)]


class Sweep:
    """The device, the clock's ceilings, and what was found."""

    def __init__(self, device: str, link: float, hbm: float, file: Path, commit: str | None = None) -> None:
        self.device, self.link, self.hbm, self.file = device, link * 1e9, hbm * 1e9, file
        self.header = header(device, commit)
        self.rows: dict[str, list[Row]] = {part: [] for part in PARTS}
        self.failed, self.seconds = "", dict[str, float]()

    def load(self, path: Path, **options: Any) -> headrace.Engine:
        return headrace.Engine.load(path, device=self.device, **options)  # type: ignore[arg-type]

    def add(self, part: str, row: Row) -> None:
        self.rows[part].append(row)
        self.save()
        print(part, {k: v for k, v in row.items() if k not in ("holders", "fixed_parts")}, flush=True)

    def save(self) -> Row:
        """Writes what is known: a run that is cut short has lost nothing."""
        result = {
            "header": self.header, "link_gb_per_s": self.link / 1e9,
            "hbm_gb_per_s": self.hbm / 1e9, "failed": self.failed, "seconds": self.seconds, **self.rows,
        }  # fmt: skip
        self.file.write_text(json.dumps(result, indent=1))
        return result


def books(engine: headrace.Engine) -> Row:
    """The pool's figures; asserts that no source has seen more than the limit, or than is counted where there is none."""
    pool = sound(engine).memory[0]  # the device; the host's page-locked memory has a pool of its own
    assert pool.peak <= pool.limit, pool
    if pool.unmanaged:
        # What the process takes once is used; the rest is counted apart.
        counted = pool.used + pool.unmanaged
        assert pool.unaccounted == pool.underflows == 0, pool
        assert max(p.peak for p in pool.physical if p.source != "driver") <= counted, pool
        return {"limit": None, "peak": counted, "physical": {p.source: p.peak for p in pool.physical}}
    assert pool.unaccounted == pool.oversubscribed == pool.underflows == 0, pool
    physical = {p.source: p.peak for p in pool.physical}
    for source, peak in physical.items():
        # The driver's figure holds what other processes do.
        assert source == "driver" or peak <= pool.limit, (source, pool)
    holders = {h.name: h.used for h in pool.holders}
    return {"limit": pool.limit, "peak": pool.peak, "physical": physical, "holders": holders, "fixed_parts": pool.fixed_parts}


def tokens(engine: headrace.Engine, new: int, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    return engine.generate(prompt, max_new_tokens=new, stop_tokens=()).token_ids


def same(what: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise SystemExit(f"{what}: other tokens than the resident run's: {got} instead of {expected}")


def identity(sweep: Sweep, path: Path) -> None:
    """Every mode, layout and policy at two limits against the CPU, two generations in a row."""
    # Small pieces, so that a small model has some to stream.
    base: Row = {"max_context": 256, "max_batch": 1, "prefill_chunk": 64, "piece_bytes": "1MiB"}
    rng = np.random.default_rng(5)
    cpu = headrace.Engine.load(path, device="cpu", max_context=256)
    prompts = [[int(t) for t in rng.integers(3, cpu.vocab_size - 1, n)] for n in (1, 150)]
    expected = [tokens(cpu, NEW, p) for p in prompts]

    def compare(what: str, cold: bool, **options: Any) -> None:
        engine = sweep.load(path, **base, **options)
        for _ in range(2):
            for prompt, right in zip(prompts, expected, strict=True):
                same(f"{path.name}: {what}", tokens(engine, NEW, prompt), right)
        w, memory = sound(engine).weights, engine.plan.memory
        assert memory is not None
        moved = w.streamed_bytes + memory.host_mapped_bytes
        assert (moved > 0) == cold, (what, w)
        sweep.add("identity", {"model": path.name, "what": what, "moved": moved, **books(engine)})

    minimum, everything = limits(sweep, path, placement="stream", **base)
    for policy in POLICIES:
        least, _ = limits(sweep, path, policy=policy, **base)
        for limit in (least + (everything - minimum) // 4, least + (everything - minimum) // 2):
            cold = plan(sweep, path, **base, vram_limit=limit).resident_bytes < weights(path)
            compare(f"policy {policy} {limit:,}", cold, policy=policy, vram_limit=limit)
    compare("unmanaged", False, placement="unmanaged")
    for placement in ("resident", "auto", "stream", "hybrid", "zero-copy"):
        budget = {"host_mapped_budget": "1GiB" if placement == "zero-copy" else "8MiB"}
        extra: Row = budget if placement in ("zero-copy", "hybrid") else {}
        minimum, everything = limits(sweep, path, placement=placement, **base, **extra)
        for layout in ("head-major", "seq-major"):
            for limit in {minimum, (minimum + everything) // 2}:
                options = {"vram_limit": limit, "placement": placement, "kv_layout": layout, **extra}
                cold = placement != "resident" and plan(sweep, path, **base, **options).resident_bytes < weights(path)
                compare(f"{placement} {layout} {limit:,}", cold, **options)


def plan(sweep: Sweep, path: Path, **options: Any) -> headrace.MemoryPlan:
    memory = headrace.plan(path, device=sweep.device, **{k: v for k, v in options.items() if k != "policy"}).memory  # type: ignore[arg-type]
    assert memory is not None
    return memory


def limits(sweep: Sweep, path: Path, **options: Any) -> tuple[int, int]:
    return limits_of(path, sweep.device, **options)


def weights(path: Path) -> int:
    return headrace.plan(path, device="cpu").model.step_bytes


def timed(engine: headrace.Engine, steps: int, sequences: int = 1) -> Row:
    """Time and bytes of a decode step: the median of three runs, after one that warms up."""
    prompts = [[t + i for t in PROMPT] for i in range(sequences)]
    times = []
    engine.decode_greedy_batch(prompts, max_new_tokens=4, stop_tokens=())
    for _ in range(3):
        engine.reset_stats()
        engine.decode_greedy_batch(prompts, max_new_tokens=steps + 1, stop_tokens=())
        s = sound(engine)
        times.append(s.time.decode_seconds / s.time.decode_steps)
    each = max(s.tokens.steps, 1)
    step = statistics.median(times)
    graph = s.graph
    assert graph.eager_ops == 0 and graph.replays >= s.tokens.steps, graph
    return {
        "step_ms": step * 1e3,
        "tokens_per_s": sequences / step,
        "streamed": s.weights.streamed_bytes / each,
        "host_mapped": s.weights.host_mapped_bytes / each,
        "captures": graph.captures,
        "graph_bytes": graph.bytes,
        "link_utilisation": s.clock.link_utilisation,
    }


def floored(sweep: Sweep, row: Row, total: int) -> Row:
    """Adds the floor of the row's own bytes, and how near it came."""
    moved = row["streamed"] + row["host_mapped"]
    floor = max(moved / sweep.link, total / sweep.hbm)
    over_link = {"link_gb_per_s": moved / row["step_ms"] / 1e6} if moved > 1e6 else {}
    return row | {"cold": moved / total, "floor_ms": floor * 1e3, "of_floor": floor * 1e3 / row["step_ms"], **over_link}


def over_limits(sweep: Sweep, path: Path, steps: int, shares: dict[str, list[float]]) -> None:
    """One sequence under limits that leave room for a share of the weights, by mode."""
    base: Row = {"max_context": 512, "max_batch": 1, "prefill_chunk": 64}
    total = weights(path)
    engine = sweep.load(path, **base)
    expected = tokens(engine, NEW)
    row = floored(sweep, timed(engine, 4 * steps), total)
    sweep.add("limits", {"share": 1.0, "mode": "resident", **row, **books(engine)})
    del engine
    engine = sweep.load(path, placement="unmanaged", **base)
    same("unmanaged", tokens(engine, NEW), expected)
    row = floored(sweep, timed(engine, 4 * steps), total)
    sweep.add("limits", {"share": 1.0, "mode": "unmanaged", **row, **books(engine)})
    del engine
    minimum, everything = limits(sweep, path, placement="stream", **base)
    for mode, of_mode in shares.items():
        for share in of_mode:
            budget: Row = {"host_mapped_budget": "64GiB"} if mode == "zero-copy" else {}
            limit = max(minimum, int(everything - total * (1 - share)))
            engine = sweep.load(path, vram_limit=limit, placement=mode, **budget, **base)
            same(f"{mode} at {limit:,}", tokens(engine, NEW), expected)
            row = floored(sweep, timed(engine, steps), total)
            same(f"{mode} at {limit:,}, again", tokens(engine, NEW), expected)
            if share < 0.95:
                assert row["streamed"] + row["host_mapped"] > 1e6, row
            sweep.add("limits", {"share": share, "mode": mode, **row, **books(engine)})
            del engine


def layouts(sweep: Sweep, path: Path, shares: list[float]) -> None:
    """Both layouts of KV, every mode that leaves weights out, by the share that stays: tokens of two generations, and bytes moved."""
    base: Row = {"max_context": 512, "max_batch": 1, "prefill_chunk": 64}
    prompts = [PROMPT, [(13 * j) % 1000 + 3 for j in range(200)]]
    engine = sweep.load(path, **base)
    expected = [tokens(engine, NEW, p) for p in prompts]
    del engine
    total = weights(path)
    minimum, everything = limits(sweep, path, placement="stream", **base)
    for layout in ("head-major", "seq-major"):
        for mode in ("stream", "zero-copy", "hybrid"):
            for share in shares:
                extra: Row = {"host_mapped_budget": "64GiB" if mode == "zero-copy" else "1GiB"} if mode != "stream" else {}
                limit = max(minimum, int(everything - total * (1 - share)))
                engine = sweep.load(path, vram_limit=limit, placement=mode, kv_layout=layout, **extra, **base)
                for _ in range(2):
                    for prompt, right in zip(prompts, expected, strict=True):
                        same(f"{mode} {layout} at {limit:,}", tokens(engine, NEW, prompt), right)
                w = sound(engine).weights
                assert w.streamed_bytes + w.host_mapped_bytes > 1e6, w
                row = {"layout": layout, "mode": mode, "share": share, "streamed": w.streamed_bytes, "host_mapped": w.host_mapped_bytes}
                sweep.add("layouts", row | books(engine))
                del engine


def choice(sweep: Sweep, path: Path, steps: int, shares: list[float]) -> None:
    """`auto` beside the modes that it chooses from, under the same limits: what it says of them, and what steps take."""
    base: Row = {"max_context": 512, "max_batch": 1, "prefill_chunk": 64}
    total = weights(path)
    engine = sweep.load(path, **base)
    expected = tokens(engine, NEW)
    del engine
    minimum, everything = limits(sweep, path, placement="auto", **base)
    for share in shares:
        limit = max(minimum, int(everything - total * (1 - share)))
        took, said, measured = dict[str, float](), "", False
        for mode in ("auto", "stream", "hybrid"):
            engine = sweep.load(path, vram_limit=limit, placement=mode, **base)
            same(f"{mode} at {limit:,}", tokens(engine, NEW), expected)
            row = floored(sweep, timed(engine, steps), total)
            chosen = sound(engine).placement
            assert chosen is not None
            took[mode] = row["step_ms"]
            if mode == "auto":
                said, measured = chosen.mode, "were measured at" in chosen.reason
            sweep.add("choice", {"share": share, "asked_for": mode, "mode": chosen.mode, "reason": chosen.reason, **row, **books(engine)})
            del engine
        other = "hybrid" if said == "stream" else "stream"
        # The host device has no link to measure, so that `auto` knows nothing there.
        assert not measured or took["auto"] <= 1.02 * took[other], f"auto chose {said} at {limit:,}: {took}"


def policies(sweep: Sweep, path: Path, steps: int, share: float) -> None:
    """The static schedule and every policy at the same limit: bytes moved and tokens a second."""
    base: Row = {"max_context": 512, "max_batch": 1, "prefill_chunk": 16}
    total = weights(path)
    _, everything = limits(sweep, path, placement="stream", **base)
    limit = int(everything - total * (1 - share))
    expected: tuple[int, ...] = ()
    for policy in (None, *POLICIES):
        engine = sweep.load(path, vram_limit=limit, policy=policy, **base)
        for _ in range(2):
            got = tokens(engine, steps)
            expected = expected or got
            same(f"policy {policy}", got, expected)
        engine.reset_stats()
        same(f"policy {policy}", tokens(engine, steps), expected)
        s = sound(engine)
        row = {
            "policy": policy or "(schedule)",
            "share": share,
            "streamed": s.weights.streamed_bytes / s.tokens.steps,
            "step_ms": s.time.decode_seconds / max(s.time.decode_steps, 1) * 1e3,
            "evictions": s.weights.evictions / s.tokens.steps,
            "bypassed_share": s.weights.bypassed_share,
        }
        sweep.add("policies", row | {"tokens_per_s": 1e3 / row["step_ms"], "floor_ms": row["streamed"] / sweep.link * 1e3, **books(engine)})
        del engine


def growth(sweep: Sweep, path: Path, context: int) -> None:
    """One sequence after the other from one position to the whole context, at a limit that held everything at the start."""
    base: Row = {"max_context": context, "max_batch": 1, "prefill_chunk": 256}
    lengths = [n for n in (1, 64, 128, 256, 512, 1024, 2048, 4096) if n < context // 2 + 1] + [context - 24]
    prompts = [[(11 * j) % 1000 + 3 for j in range(length)] for length in lengths]
    news = [12] * (len(lengths) - 1) + [24]
    engine = sweep.load(path, **base)
    expected = [tokens(engine, new, prompt) for prompt, new in zip(prompts, news, strict=True)]
    del engine
    memory = plan(sweep, path, vram_limit="1TiB", **base)
    limit = memory.everything - memory.kv_max_bytes + memory.kv_floor_bytes
    engine = sweep.load(path, vram_limit=limit, **base)
    at_start = engine.plan.memory
    assert at_start is not None and at_start.streamed_bytes == 0, at_start
    total = weights(path)
    for length, prompt, new, right in zip(lengths, prompts, news, expected, strict=True):
        engine.reset_stats()
        same(f"growth to {length + new}", tokens(engine, new, prompt), right)
        s, now = sound(engine), engine.plan.memory
        assert now is not None
        step = s.time.decode_seconds / max(s.time.decode_steps, 1) * 1e3
        row = {"positions": length + new, "step_ms": step, "cold": now.streamed_bytes / total, "epochs": dict(s.graph.epochs)}
        sweep.add("growth", row | {"weights": now.resident_bytes, "moved_by_growth": s.kv.growth_moved_bytes, **books(engine)})
    assert any(r["cold"] > 0 for r in sweep.rows["growth"]), "nothing ever became cold"


def total(sweep: Sweep, path: Path, limits: list[str], context: int, steps: int) -> None:
    """Where each byte of a limit over everything goes, and how near a step comes to the floor of its own cold bytes."""
    for limit in limits:
        engine = sweep.load(path, vram_limit=limit, max_context=context, max_batch=1, prefill_chunk=64)
        row = floored(sweep, timed(engine, steps), weights(path))
        chosen = sound(engine).placement
        assert chosen is not None
        sweep.add("total", {"mode": chosen.mode, "reason": chosen.reason, "context": context, **row, **books(engine)})
        del engine


def checksum(sweep: Sweep, path: Path, steps: int) -> None:
    """Checksums of all weights in device memory before and after many steps, a tenth of them cold."""
    base: Row = {"max_context": 1280, "max_batch": 1, "prefill_chunk": 64}
    _, everything = limits(sweep, path, placement="stream", **base)
    engine = sweep.load(path, vram_limit=int(everything - weights(path) * 0.08), **base)
    tokens(engine, 2)
    before, done = engine.weight_checksums(), 0
    while done < steps:
        part = min(steps - done, 1000)
        tokens(engine, part)
        done += part
    pairs = list(zip(before, engine.weight_checksums(), strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    changed = sum(a != b for a, b in both)
    sweep.add("checksum", {"steps": steps, "pieces": len(both), "cold": len(pairs) - len(both), "changed": changed, **books(engine)})
    assert changed == 0 and both, "weights in device memory have changed"


def parts_of(a: argparse.Namespace, sweep: Sweep) -> Iterator[tuple[str, Any]]:
    for path in a.check if "identity" in a.parts else []:
        if not path.exists() and path.name in make_model.SHAPES:
            make_model.build(make_model.SHAPES[path.name], path, 1)
        yield f"identity of {path.name}", lambda path=path: identity(sweep, path)
    if a.model is None:
        return
    if not (a.model / "model.onnx").exists():
        yield "a model", lambda: make_model.build(make_model.SHAPES[a.shape], a.model, 1)
    calls = {
        "limits": lambda: over_limits(
            sweep, a.model, a.steps, {"stream": a.shares, "zero-copy": a.other_shares, "hybrid": a.other_shares}
        ),
        "total": lambda: total(sweep, a.model, a.limits, a.context, 4 * a.steps),
        "policies": lambda: [policies(sweep, a.model, a.policy_steps, share) for share in a.policy_shares],
        "layouts": lambda: layouts(sweep, a.model, a.policy_shares),
        "choice": lambda: choice(sweep, a.model, a.steps, a.choice_shares),
        "growth": lambda: growth(sweep, a.model, a.context),
        "checksum": lambda: checksum(sweep, a.model, a.checksum_steps),
    }
    yield from ((part, call) for part, call in calls.items() if part in a.parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", type=Path, default=[], help="small models for the part `identity`; one that is named after a shape is made")
    parser.add_argument("--model", type=Path, help="directory of the large model; made if it isn't there")
    parser.add_argument("--shape", choices=make_model.SHAPES, default="14b")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES), help="shares of the weights that limits leave")
    parser.add_argument("--other-shares", type=float, nargs="*", default=[0.75, 0.5, 0.1], help="the same for reads in place")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a run")
    parser.add_argument("--policy-steps", type=int, default=6)
    parser.add_argument("--policy-shares", type=float, nargs="*", default=[0.5, 0.25], help="shares of the weights, for `policies` and `layouts`")
    parser.add_argument("--choice-shares", type=float, nargs="*", default=[0.99, 0.95, 0.5], help="shares of the weights, for `choice`")
    parser.add_argument("--checksum-steps", type=int, default=1000)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--limits", nargs="*", default=["8GiB", "6GiB"], help="limits over everything, for the part `total`")
    parser.add_argument("--link", type=float, default=LINK, help="GB/s of the link, as `headrace probe` says")
    parser.add_argument("--hbm", type=float, default=HBM, help="GB/s that the memory's clock and width allow")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(a.device, a.link, a.hbm, a.out / "sweep.json", a.commit)
    for name, call in parts_of(a, sweep):
        start = time.monotonic()
        try:
            call()
        except (AssertionError, headrace.HeadraceError, SystemExit) as error:
            sweep.failed = f"{name}: {type(error).__name__}: {error}"
            print(f"FAILED {sweep.failed}", flush=True)
            if name.startswith("identity"):
                break
        sweep.seconds[name] = round(time.monotonic() - start, 1)
        print(f"-- {name}: {sweep.seconds[name]} s", flush=True)
    result = sweep.save()
    print(sweep_report.tables(result))
    sweep_report.plot(result, a.out / "sweep.svg")
    sys.exit(1 if sweep.failed else 0)


if __name__ == "__main__":
    main()
