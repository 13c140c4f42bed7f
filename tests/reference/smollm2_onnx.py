"""Makes the ONNX GenAI directories of SmolLM2-135M from its GGUF file: `python -m tests.reference.smollm2_onnx GGUF OUT [cpu|cuda]`.

The graph, the configuration and the frame of the tokenizer are those that the model builder of ONNX Runtime GenAI 0.18.0 wrote
(`tests/data/graphs/smollm2-*`); weights, vocabulary and rotary tables are made here. Weights are dequantised exactly, rounded to the
export's type, and quantised again as the builder does: a test holds their SHA-256 to that of the builder's own file. The builder's
rotary tables are those of another library's cosine, up to one unit in the last place from these.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import onnx

from .gguf_weights import dequantise
from .model import Array

GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
PARTS = {"cpu": np.float32, "cuda": np.float16}
WEIGHTS_SHA256 = {
    "cpu": "a6ddecda29617ea2bf96317abfa926479a086e4ba4f95ace5c3807f9b52f6272",
    "cuda": "0650c5f59bc760ef1a035c859f429accc874cba6f1db72c8f1e6986034abbd8c",
}
"""Of all tensors but the rotary tables, in the order of the file, as the builder wrote them."""
HEADS = {"attn_q": 9, "attn_k": 3}
BLOCK = 32
TABLES = ("cos_cache", "sin_cache")
ROPE_BASE = 1e5


def make(source: Path, out: Path, part: str) -> Path:
    """Makes the directory `out` (which must not exist) for the part `cpu` or `cuda`; returns it."""
    graph = GRAPHS / f"smollm2-{part}"
    shutil.copytree(graph, out, ignore=shutil.ignore_patterns("*.frame.json", "model.accuracy_level1.onnx"))
    reader = gguf.GGUFReader(str(source))
    (out / "tokenizer.json").write_text(tokenizer(reader), encoding="utf-8")
    layout = tensors(graph / "model.onnx")
    made = dict(_arrays(reader, PARTS[part]))
    data, sum_ = bytearray(max(offset + length for offset, length in layout.values())), hashlib.sha256()
    for name, (offset, length) in sorted(layout.items(), key=lambda item: item[1]):
        raw = made.pop(name).tobytes()
        if len(raw) != length:
            raise ValueError(f"{name}: {len(raw)} bytes, the graph says {length}")
        data[offset : offset + length] = raw
        if name not in TABLES:
            sum_.update(raw)
    if made:
        raise ValueError(f"the graph has no {sorted(made)}")
    if sum_.hexdigest() != WEIGHTS_SHA256[part]:
        raise ValueError(f"{part}: SHA-256 of the weights is {sum_.hexdigest()}, the builder's is {WEIGHTS_SHA256[part]}")
    (out / "model.onnx.data").write_bytes(data)
    return out


def tensors(model: Path) -> dict[str, tuple[int, int]]:
    """Offset and length of every tensor that a graph keeps in its data file."""
    found = {}
    for tensor in onnx.load(str(model), load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        found[tensor.name] = (int(place.get("offset", 0)), int(place["length"]))
    return found


def tokenizer(reader: gguf.GGUFReader) -> str:
    """The builder's `tokenizer.json`, its vocabulary and merges from the GGUF file."""
    frame = json.loads((GRAPHS / "smollm2-cpu" / "tokenizer.frame.json").read_text(encoding="utf-8"))
    tokens, merges = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    frame["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    frame["model"]["merges"] = [merge.split(" ") for merge in merges]
    return json.dumps(frame, ensure_ascii=False)


def quantise(weight: Array, dtype: type) -> tuple[Array, Array]:
    """Codes (rows, blocks, 16) of two 4-bit numbers each, low one first, and scales (rows, blocks), symmetric around 8.

    A block's scale is its largest number by magnitude over -8; all arithmetic is float32, on numbers rounded to `dtype`.
    """
    rows, columns = weight.shape
    blocks = weight.astype(np.float32).astype(dtype).astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    high, low = blocks.max(axis=2), blocks.min(axis=2)
    scale = np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-8)
    inverse = np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, np.float32(1), scale))
    codes = np.clip(np.floor(blocks * inverse[:, :, None] + np.float32(8) + np.float32(0.5)), 0, 15).astype(np.uint8)
    return codes[:, :, 0::2] | codes[:, :, 1::2] << 4, scale.astype(dtype)


def rotary(positions: int, head_dim: int, dtype: type) -> dict[str, Array]:
    """Cosines and sines (positions, head_dim / 2) of float32 angles, as the builder has them."""
    exponents = (np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)).astype(np.float64)
    inverse = (1 / np.power(ROPE_BASE, exponents).astype(np.float32).astype(np.float64)).astype(np.float32)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :]).astype(np.float64)
    return {name: of(angles).astype(np.float32).astype(dtype) for name, of in zip(TABLES, (np.cos, np.sin), strict=True)}


def _arrays(reader: gguf.GGUFReader, dtype: type):
    """Every tensor of the graph by name."""
    source = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Array:
        array = dequantise(source[f"{name}.weight"])
        heads = HEADS.get(name.rpartition(".")[2])
        if heads:
            # The GGUF file has the pairs that are rotated side by side, the export has halves.
            rows, columns = array.shape
            array = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        return array

    def matrix(name: str, *parts: str):
        codes, scales = quantise(np.concatenate([weight(part) for part in parts]), dtype)
        return ((f"{name}.MatMul.weight_Q4", codes), (f"{name}.MatMul.weight_scales", scales))

    layers = int(reader.fields["llama.block_count"].contents())
    for i in range(layers):
        b, name = f"blk.{i}", f"model.layers.{i}"
        yield f"{name}.input_layernorm.weight", weight(f"{b}.attn_norm").astype(dtype)
        yield f"{name}.post_attention_layernorm.weight", weight(f"{b}.ffn_norm").astype(dtype)
        yield from matrix(f"{name}.attn.qkv_proj", f"{b}.attn_q", f"{b}.attn_k", f"{b}.attn_v")
        yield from matrix(f"{name}.attn.o_proj", f"{b}.attn_output")
        for of in ("gate", "up", "down"):
            yield from matrix(f"{name}.mlp.{of}_proj", f"{b}.ffn_{of}")
    yield f"model.layers.{layers}.final_norm_layernorm.weight", weight("output_norm").astype(dtype)
    yield from matrix("lm_head", "token_embd")
    yield from rotary(8192, 64, dtype).items()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["cpu"], ["cuda"]):
        sys.exit(f"usage: {__doc__}")
    print(make(Path(sys.argv[1]), Path(sys.argv[2]), *(sys.argv[3:] or ["cpu"])))
