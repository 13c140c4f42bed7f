"""Times decoding of 1, 2, 4, 8 sequences side by side: what a batch gains over one sequence on this machine.

    python benches/batch_decode.py smollm2-135m --threads 2 --activations int8 --activations int16

The runs of all batch sizes alternate, so that a busy machine slows them alike; a row gives the median of the rounds' own ratios.
Times are of the decode steps alone, by the engine's clock.
"""

from __future__ import annotations

import argparse
import statistics

import headrace


def step_seconds(engine: headrace.Engine, sequences: int, tokens: int) -> float:
    """Seconds of one decode step of so many sequences: the mean over `tokens` steps."""
    prompts = [[(7 * i + j) % 1000 + 3 for j in range(16)] for i in range(sequences)]
    engine.reset_stats()
    engine.decode_greedy_batch(prompts, max_new_tokens=tokens + 1, stop_tokens=())
    time = engine.stats().time
    assert time.decode_tokens == sequences * tokens, time
    return time.decode_seconds / time.decode_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", choices=["int8", "int16"], action="append", default=[])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    print(headrace.build_info()["cpu_kernels"], f"{a.threads} threads, {a.rounds} rounds of {a.tokens} steps")
    print("| activations | sequences | step | tokens/s | over one sequence | smallest and largest ratio of a round |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for activations in a.activations or ["int8", "int16"]:
        engine = headrace.Engine.load(
            a.model,
            device=a.device,
            threads=a.threads,
            activations=activations,
            max_context=256,
            max_batch=max(a.sequences),
        )
        for n in a.sequences:
            step_seconds(engine, n, 4)
        rounds = [{n: step_seconds(engine, n, a.tokens) for n in a.sequences} for _ in range(a.rounds)]
        for n in a.sequences:
            ratios = [n * r[a.sequences[0]] / (a.sequences[0] * r[n]) for r in rounds]
            step = statistics.median(r[n] for r in rounds)
            print(
                f"| {activations} | {n} | {step * 1e3:.2f} ms | {n / step:.0f} | {statistics.median(ratios):.2f} |"
                f" {min(ratios):.2f} to {max(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
