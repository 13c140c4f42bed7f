"""Holds a card's own figures against the ledger: the probe, memory under three limits by NVML, two engines, the device's clock.

    python benches/gpu/books.py --model-dir /tmp/models --out results

A thread asks NVML about this process every few milliseconds while a model of 14B shape is loaded, prefilled and decoded under
each limit (`pip install nvidia-ml-py`). Exits with 1 if a figure is above its limit, if the books disagree, or if an instrument is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import headrace
import make_model
import numpy as np
import pynvml
from instruments import add_arguments, header, sound

CONTEXT = 1024
PROMPT = 400
NEW_TOKENS = 24


class Nvml:
    """Two witnesses of NVML: this process's bytes, and the card's growth since before this process used it."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.before = self.card()

    def card(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.device).used)

    def process(self) -> int | None:
        """`None` where NVML doesn't say."""
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self.device)
        except pynvml.NVMLError:
            return None
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)


class Sampler:
    """The largest figures that a thread saw, by phase."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml, self.phase, self.done = nvml, "load", False
        self.peaks: dict[str, dict[str, int]] = {}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.done:
            row = self.peaks.setdefault(self.phase, {"samples": 0, "process": 0, "card": 0})
            row["samples"] += 1
            row["process"] = max(row["process"], self.nvml.process() or 0)
            row["card"] = max(row["card"], self.nvml.card() - self.nvml.before)
            time.sleep(0.001)

    def stop(self) -> dict[str, dict[str, int]]:
        self.done = True
        self.thread.join()
        return self.peaks


def under_limit(path: Path, limit: int, nvml: Nvml, faults: list[str]) -> dict[str, Any]:
    sampler = Sampler(nvml)
    start = time.monotonic()
    engine = headrace.Engine.load(path, device="cuda", vram_limit=limit, max_context=CONTEXT, max_batch=2)
    seconds = time.monotonic() - start
    rng = np.random.default_rng(1)
    prompt = [int(t) for t in rng.integers(3, 1000, PROMPT)]
    sampler.phase = "prefill"
    engine.generate(prompt, max_new_tokens=1, stop_tokens=())
    sampler.phase = "decode"
    engine.generate(prompt[:4], max_new_tokens=8, stop_tokens=())
    engine.reset_stats()
    tokens = engine.generate(prompt[:4], max_new_tokens=NEW_TOKENS, stop_tokens=()).token_ids
    stats = sound(engine)
    peaks = sampler.stop()
    pool = stats.memory[0]  # the device
    for phase, row in peaks.items():
        if max(row["process"], row["card"]) > limit:
            faults.append(f"limit {limit:,}: {phase}: {row}")
    for figure in pool.physical:
        if figure.peak > limit or (figure.source == "map-count" and figure.unaccounted):
            faults.append(f"limit {limit:,}: {figure}")
    if pool.unaccounted or pool.oversubscribed or pool.underflows or pool.peak > limit:
        faults.append(f"limit {limit:,}: {pool}")
    if stats.graph.replays != stats.tokens.steps or stats.graph.eager_ops or stats.graph.fallbacks:
        faults.append(f"limit {limit:,}: {stats.graph}, {stats.tokens.steps} steps")
    row = {"limit": limit, "load_seconds": seconds, "peaks": peaks, "tokens": tokens, "stats": stats.as_dict()}
    c, t = stats.clock, stats.time
    step = c.step_seconds / max(c.steps, 1)
    print(
        f"limit {limit / 1e9:6.2f} GB: ledger {pool.used / 1e9:6.3f}, peaks: process "
        f"{max(r['process'] for r in peaks.values()) / 1e9:6.3f}, card {max(r['card'] for r in peaks.values()) / 1e9:6.3f} GB; "
        f"step {step * 1e3:7.3f} ms by the device, {t.decode_seconds / max(t.decode_steps, 1) * 1e3:7.3f} by the host; "
        f"sampled {c.sampled_steps}: copies {c.copy_seconds / max(c.sampled_steps, 1) * 1e3:7.3f} ms, kernels "
        f"{c.compute_seconds / max(c.sampled_steps, 1) * 1e3:7.3f} ms; link {c.link_utilisation or 0:.1%}",
        flush=True,
    )
    return row


def two_engines(path: Path, limit: int, nvml: Nvml, faults: list[str]) -> dict[str, Any]:
    """Two engines under one limit that doesn't hold both: the second takes from the first, which takes back when it leaves."""
    sampler = Sampler(nvml)
    options: dict[str, Any] = {"device": "cuda", "max_context": CONTEXT, "max_batch": 1, "prefill_chunk": 64}

    def run(engine: headrace.Engine) -> tuple[int, ...]:
        return engine.generate([1, 2, 3], max_new_tokens=8, stop_tokens=()).token_ids

    first = headrace.Engine.load(path, vram_limit=limit, **options)
    tokens = [run(first)]
    sampler.phase = "both"
    second = headrace.Engine.load(path, **options)
    pools = {}
    for _ in range(2):
        tokens += [run(first), run(second)]
    pools["both"] = sound(second).memory[0]
    sampler.phase = "one again"
    del second
    tokens += [run(first), run(first)]
    pools["one again"] = sound(first).memory[0]
    streamed = first.plan.memory.streamed_bytes if first.plan.memory else 0
    peaks = sampler.stop()
    for name, pool in pools.items():
        print(f"{name}: " + ", ".join(f"{h.name} {h.used:,}" for h in pool.holders if h.used), flush=True)
        over = [figure for figure in pool.physical if figure.peak > limit]
        if over or pool.unaccounted or pool.oversubscribed or pool.underflows or pool.limit != limit:
            faults.append(f"two engines, {name}: {pool}")
    if any(max(row["process"], row["card"]) > limit for row in peaks.values()):
        faults.append(f"two engines: {peaks} under {limit:,}")
    if len(set(tokens)) != 1 or streamed:
        faults.append(f"two engines: tokens {tokens}, {streamed:,} bytes still streamed")
    print(f"two engines under {limit:,}: {peaks}", flush=True)
    return {"limit": limit, "peaks": peaks, "memory": {name: pool.as_dict() for name, pool in pools.items()}}


def cost_of_marks(path: Path, limit: int) -> list[dict[str, Any]]:
    """Streamed steps with and without marks inside the graph, in turns."""
    rows = []
    for marks in ("1", "0", "1", "0"):
        os.environ["HEADRACE_LANE_CLOCK"] = marks
        engine = headrace.Engine.load(path, device="cuda", vram_limit=limit, max_context=CONTEXT, max_batch=1, prefill_chunk=64)
        engine.generate([1, 2, 3], max_new_tokens=4, stop_tokens=())
        engine.reset_stats()
        engine.generate([1, 2, 3], max_new_tokens=16, stop_tokens=())
        c = sound(engine).clock
        rows.append({"limit": limit, "marks": marks == "1", "step_ms": c.step_seconds / c.steps * 1e3, "clock": c.as_dict()})
        print(f"marks {marks}: {rows[-1]['step_ms']:.3f} ms a step, link {c.link_utilisation or 0:.2%}", flush=True)
        del engine
    os.environ.pop("HEADRACE_LANE_CLOCK")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=make_model.SHAPES, default="14b")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/headrace-models"))
    parser.add_argument("--cold", type=float, nargs="*", default=[1.0, 0.12], help="shares for the cost of marks")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    faults: list[str] = []
    result: dict[str, Any] = {"header": header("cuda", a.commit), "limits": [], "two_engines": {}, "marks": []}
    try:
        nvml = Nvml()
        result["probe"] = headrace.probe().as_dict()
        print(json.dumps(result["probe"]), flush=True)
        path = a.model_dir / a.shape
        if not (path / "model.onnx").exists():
            make_model.build(make_model.SHAPES[a.shape], path, 1, repeat=True)
        options: dict[str, Any] = {"max_context": CONTEXT, "max_batch": 2}
        try:
            headrace.Engine.load(path, device="cuda", vram_limit=1, **options)
        except headrace.BudgetError as error:
            minimum = int(str(error).split("at least ")[1].split(" ")[0])
            print(error, flush=True)
        memory = headrace.plan(path, device="cuda", vram_limit="100GiB", **options).memory
        assert memory is not None
        # What the context takes varies a little from one to the next.
        minimum += 64 << 20
        for limit in (minimum, (minimum + memory.everything) // 2, memory.everything):
            result["limits"].append(under_limit(path, limit, nvml, faults))
        if any(row["tokens"] != result["limits"][0]["tokens"] for row in result["limits"]):
            faults.append("the limits' tokens differ")
        result["two_engines"] = two_engines(path, memory.everything, nvml, faults)
        for share in a.cold:
            limit = int(memory.everything - share * (memory.everything - minimum))
            result["marks"] += cost_of_marks(path, limit)
    finally:
        result["faults"] = faults
        (a.out / "books.json").write_text(json.dumps(result, indent=1))
    print("\n".join(faults) or "no figure is above its limit, and no instrument is broken")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
