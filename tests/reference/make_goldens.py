"""Writes float64 golden files: `python -m tests.reference.make_goldens OUT_DIR [SMOLLM2_CUDA_EXPORT]`.

Those of the tiny models; and, where the directory of SmolLM2's CUDA export is given, one of it with the file's own RoPE
tables, for the prompts and tokens of the golden that computes them.

prompts.NAME.{text, prompt_ids, generated_ids, min_margin, steps}. Logits carry
seven significant digits; RoPE tables are those of the file (ONNX) or computed in float64 (GGUF, which holds none).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from . import gguf_weights, onnx_weights
from .model import Decoder, greedy, teacher_forced

DATA = Path(__file__).resolve().parents[1] / "data"
TOKENS = 64
TOP = 5
GGUF = ["qwen2-F16.gguf", "qwen2-Q4_0.gguf", "qwen3-Q4_1.gguf", "qwen3-Q8_0.gguf"]
ONNX = ["qwen2-int4-cpu", "qwen2-int4-cuda", "qwen2-kquant-nofuse-cpu", "qwen3-int4-cpu", "qwen3-int4-cuda"]


def golden(model: Decoder, name: str, rope: str, digests: dict[str, str], prompts: dict[str, dict]) -> dict:
    """The golden of one model for prompts that carry `text` and `prompt_ids`, and `generated_ids` where they are known."""
    result = {}
    for key, prompt in prompts.items():
        if "generated_ids" in prompt:
            tokens = prompt["generated_ids"]
            logits = teacher_forced(model, prompt["prompt_ids"], tokens)
            if logits.argmax(axis=1).tolist() != tokens:
                raise ValueError(f"{name}, {key}: the tokens given are not greedy ones")
        else:
            tokens, logits = greedy(model, prompt["prompt_ids"], TOKENS)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
        steps = []
        for row, top in zip(logits, order, strict=True):
            peak = row.max()
            steps.append(
                {
                    "top_ids": [int(i) for i in top],
                    "top_logits": [float(f"{row[i]:.7g}") for i in top],
                    "logsumexp": float(f"{peak + np.log(np.exp(row - peak).sum()):.7g}"),
                }
            )
        ranked = np.take_along_axis(logits, order, axis=1)
        result[key] = {
            "text": prompt["text"],
            "prompt_ids": prompt["prompt_ids"],
            "generated_ids": tokens,
            "min_margin": float(f"{(ranked[:, 0] - ranked[:, 1]).min():.7g}"),
            "steps": steps,
        }
    return {
        "model": name,
        "sha256": digests,
        "generator": f"tests/reference, float64, weights exactly dequantised; rope {rope}; eps {model.eps!r}",
        "greedy": True,
        "max_new_tokens": TOKENS,
        "note": "generated_ids never stops at an end token; ties go to the lower id",
        "prompts": result,
    }


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(out: Path) -> None:
    """Write one file per tiny model."""
    out.mkdir(parents=True, exist_ok=True)
    for name in GGUF + ONNX:
        path = DATA / "models" / name
        family = name.split("-")[0]
        # Only texts and prompt ids are taken from the goldens of other engines.
        given = json.loads((DATA / "golden" / "others" / f"tiny-{family}-int4-cpu-acc1.json").read_text())["prompts"]
        prompts = {key: {k: p[k] for k in ("text", "prompt_ids")} for key, p in given.items()}
        if name in GGUF:
            model, rope, files = gguf_weights.load(str(path)), "computed in float64", [path]
        else:
            model, rope = onnx_weights.load(str(path)), "tables of the file"
            files = [path / "model.onnx", path / "model.onnx.data"]
        data = golden(model, name, rope, {f.name: sha256(f) for f in files}, prompts)
        write(out / f"tiny-{name.removesuffix('.gguf')}{'-gguf' if name in GGUF else ''}-exact-fp64.json", data)


def smollm2_cuda(out: Path, export: Path) -> None:
    """Write the file of SmolLM2's CUDA export with its own tables."""
    prompts = json.loads((DATA / "golden" / "onnx-int4-cuda-exact-fp64.json").read_text())["prompts"]
    for prompt in prompts.values():
        prompt.setdefault("generated_ids", prompt.get("generated_ids_raw"))
    files = {f: sha256(export / f) for f in ("model.onnx", "model.onnx.data")}
    data = golden(onnx_weights.load(str(export)), "smollm2-onnx-int4/cuda", "tables of the file", files, prompts)
    write(out / "onnx-int4-cuda-own-tables-exact-fp64.json", data)


def write(target: Path, data: dict) -> None:
    """Write a golden file, and print its size and margins."""
    target.write_text(json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    margins = {k: p["min_margin"] for k, p in data["prompts"].items()}
    print(target.name, target.stat().st_size, "bytes; smallest margins", margins, flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {__doc__}")
    main(Path(sys.argv[1]))
    if len(sys.argv) == 3:
        smollm2_cuda(Path(sys.argv[1]), Path(sys.argv[2]))
