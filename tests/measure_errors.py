"""Prints how far each model's logits are from float64, for docs/numerics.md: `python tests/measure_errors.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import headrace
import numpy as np
from conftest import golden, make_export
from test_golden import BOUNDS, TINY, compare, tiny_model


def main() -> None:
    """One row a model; a cell holds the largest logit error and the number of arg-maxima that differ."""
    print("| model | positions | " + " | ".join(f"{a}, {kv} KV" for a, kv in BOUNDS) + " |")
    print("| --- | ---: |" + " ---: |" * len(BOUNDS))
    with tempfile.TemporaryDirectory() as scratch:
        source = headrace.fetch("smollm2-135m")
        models: list[tuple[str, Path, str]] = [
            ("SmolLM2-135M, GGUF Q4_1", source, "gguf-q4_1-exact-fp64"),
            ("SmolLM2-135M, ONNX cpu", make_export(source, Path(scratch) / "cpu"), "onnx-int4-cpu-exact-fp64"),
        ]
        cuda = make_export(source, Path(scratch) / "cuda")
        models.append(("SmolLM2-135M, ONNX cuda", cuda, "onnx-int4-cuda-own-tables-exact-fp64"))
        models.append(("the same, golden with float64 RoPE tables", cuda, "onnx-int4-cuda-exact-fp64"))
        for name in TINY:
            stem = name.replace(".gguf", "-gguf")
            models.append((f"tiny {name}", tiny_model(name), f"tiny-{stem}-exact-fp64"))
        for label, path, golden_name in models:
            cells, positions = [], 0
            for activations, kv_dtype in BOUNDS:
                engine = headrace.Engine.load(path, activations=activations, kv_dtype=kv_dtype)  # type: ignore[arg-type]
                results = [compare(engine, case) for case in golden(golden_name)["prompts"].values()]
                worst = max(r[0] for r in results)
                flips = np.concatenate([r[1] for r in results])
                positions = sum(r[2] for r in results)
                cells.append(f"{worst:.2g}; {flips.size}")
            print(f"| {label} | {positions} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
