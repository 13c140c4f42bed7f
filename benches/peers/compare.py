"""Compares Headrace's decode and prefill speed with its peers on the same weights, threads and machine.

Every engine lives in its own process, loaded and warm; measurements take turns, so that a disturbance of the machine
hits all of them. Prints a table last (median, best, spread in tokens/s, ratio to the best peer) and writes JSON. On a
busy machine look at `per cpu-s`, the median of tokens per second of processor time: with one thread it hardly moves
with the load (with more, threads that spin while they wait are in it).

    python benches/peers/compare.py --onnx DIR --gguf FILE [--threads 2] [--rounds 9] [--out peers.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from header import add_arguments, header  # noqa: E402  (benches/header.py)

SHORT_PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is" in SmolLM2's vocabulary


class Arm:
    """One engine on one model: a child process and the rates that it has given so far."""

    def __init__(self, name: str, engine: str, path: str, threads: int, max_context: int, options: dict) -> None:
        self.name, self.engine = name, engine
        self.rates: dict[str, list[float]] = {"decode": [], "prefill": []}
        self.cpu_rates: dict[str, list[float]] = {"decode": [], "prefill": []}
        worker = Path(__file__).with_name("worker.py")
        self.child = subprocess.Popen(
            [sys.executable, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        setup = {"engine": engine, "path": path, "threads": threads, "max_context": max_context, "options": options}
        self.about = self._ask(setup)["about"]

    def _ask(self, request: dict) -> dict:
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        answer = json.loads(line) if line else {"error": f"process ended ({self.child.wait()})"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def measure(self, kind: str, prompt: list[int], count: int, keep: bool) -> None:
        """One run, in tokens/s. Decode leaves out the first token, prefill is the prompt over the time to it."""
        answer = self._ask({"prompt_ids": prompt, "count": count})
        tokens = answer["token_ids"]
        if tokens and len(tokens) != count:
            raise RuntimeError(f"{self.name}: {len(tokens)} tokens came, {count} were asked for")
        if keep:
            rate = len(prompt) / answer["first_s"] if kind == "prefill" else (count - 1) / answer["rest_s"]
            self.rates[kind].append(rate)
            self.cpu_rates[kind].append((len(prompt) if kind == "prefill" else count) / answer["cpu_s"])

    def close(self) -> None:
        """End the child."""
        self.child.stdin.close()
        self.child.wait(timeout=30)


def wanted_arms(args: argparse.Namespace) -> list[tuple[str, str, str, dict]]:
    """(name, engine, path, options) of everything that could run."""
    arms = []
    if args.onnx:
        for kind in args.activations:
            arms.append((f"headrace onnx {kind}", "headrace", args.onnx, {"activations": kind}))
        arms.append(("onnxruntime-genai", "onnxruntime-genai", args.onnx, {}))
    if args.gguf:
        for kind in args.activations:
            arms.append((f"headrace gguf {kind}", "headrace", args.gguf, {"activations": kind}))
        arms.append(("xllamacpp", "xllamacpp", args.gguf, {"flash_attention": args.flash_attention}))
        arms.append(("llama-cpp-python", "llama-cpp-python", args.gguf, {"flash_attention": args.flash_attention}))
    return [a for a in arms if not args.only or a[1] in args.only]


def summary(rates: list[float], cpu_rates: list[float]) -> dict[str, float]:
    """Median, best, worst of a list of tokens/s, and the median per second of processor time."""
    return {
        "median": statistics.median(rates), "best": max(rates), "worst": min(rates),
        "per_cpu_s": statistics.median(cpu_rates), "runs": len(rates),
    }  # fmt: skip


def table(results: dict[str, dict], bars: dict[str, str]) -> str:
    """Rows of tokens/s; the ratio is to the fastest peer of the same statistic."""
    heads = f"{'median':>8} {'best':>8} {'worst':>8} {'median x':>9} {'best x':>7} {'per cpu-s':>10} {'x':>5}"
    lines = [f"{'engine':26} {'what':8} {heads}   tokens/s"]
    for kind, bar in bars.items():
        for name, result in results.items():
            s, b = result[kind], results[bar][kind] if bar else None
            ratio = f"{s['median'] / b['median']:9.2f} {s['best'] / b['best']:7.2f}" if b else f"{'-':>9} {'-':>7}"
            cpu = f"{s['per_cpu_s']:10.1f} {s['per_cpu_s'] / b['per_cpu_s']:5.2f}" if b else f"{s['per_cpu_s']:10.1f}"
            lines.append(f"{name:26} {kind:8} {s['median']:8.1f} {s['best']:8.1f} {s['worst']:8.1f} {ratio} {cpu}")
    named = ", ".join(f"{kind}: {bar or 'none ran'}" for kind, bar in bars.items())
    lines.append(f"x: against the better peer by median ({named})")
    return "\n".join(lines)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", help="ONNX GenAI model directory")
    parser.add_argument("--gguf", help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each kind per engine")
    parser.add_argument("--decode", type=int, default=96, help="tokens to decode")
    parser.add_argument("--prefill", type=int, default=512, help="prompt length of the prefill measurement")
    parser.add_argument("--activations", nargs="*", default=["int16", "int8"], help="Headrace's arms")
    parser.add_argument("--flash-attention", type=int, choices=[0, 1], default=1, help="for llama.cpp")
    parser.add_argument("--only", nargs="*", help="engines to run")
    parser.add_argument("--out", default="peers.json")
    add_arguments(parser)
    args = parser.parse_args()
    long_prompt = [504 + (i * 37) % 4096 for i in range(args.prefill)]
    context = max(args.prefill + 8, len(SHORT_PROMPT) + args.decode)
    context = -(-context // 256) * 256

    arms, absent = [], {}
    for name, engine, path, options in wanted_arms(args):
        try:
            arms.append(Arm(name, engine, path, args.threads, context, options))
        except RuntimeError as error:
            absent[name] = str(error)
            print(f"not run: {error}", file=sys.stderr)
    if not arms:
        print("no engine could be loaded", file=sys.stderr)
        return 1
    work = [("decode", SHORT_PROMPT, args.decode), ("prefill", long_prompt, 1)]
    for turn in range(args.rounds + 1):
        for kind, prompt, count in work:
            for arm in arms if turn % 2 else arms[::-1]:
                arm.measure(kind, prompt, count, keep=turn > 0)  # the first turn warms up
        print(f"round {turn}/{args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    for arm in arms:
        arm.close()

    results = {arm.name: {k: summary(v, arm.cpu_rates[k]) for k, v in arm.rates.items()} for arm in arms}
    peers = [arm.name for arm in arms if arm.engine != "headrace"]
    bars = {k: max(peers, key=lambda n: results[n][k]["median"]) if peers else "" for k in ("decode", "prefill")}
    record = {
        "header": header("cpu", args.commit), "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads": args.threads, "decode_tokens": args.decode, "prefill_tokens": args.prefill,
        "load_at_end": os.getloadavg()[0], "bars": bars, "not_run": absent, "results": results,
        "engines": {arm.name: {"about": arm.about, "rates": arm.rates, "cpu_rates": arm.cpu_rates} for arm in arms},
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(results, bars))
    return 0


if __name__ == "__main__":
    sys.exit(main())
