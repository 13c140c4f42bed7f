"""Writes a GGUF file of a given shape with random weights in one format: large models made where they are needed.

    python benches/gpu/make_gguf.py 14b q4_k /tmp/14b-q4_k.gguf

Needs the package gguf. The architecture is qwen2. Blocks are random bytes with scales of an ordinary size; at most 4,096 rows of a
matrix differ, further ones repeat them. The model says nothing sensible, but reads, multiplies and streams as a real one does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from make_model import CONTEXT, ROPE_BASE, SHAPES, Shape

Bytes = npt.NDArray[np.uint8]


class Block(NamedTuple):
    """How a format packs a row: elements and bytes of a block, where its binary16 scale and minimum are, and their size."""

    kind: gguf.GGMLQuantizationType
    elements: int
    size: int
    scale: tuple[int, float]
    minimum: tuple[int, float] | None = None


Q = gguf.GGMLQuantizationType
FORMATS = {
    "q4_0": Block(Q.Q4_0, 32, 18, (0, 3e-3)),
    "q4_1": Block(Q.Q4_1, 32, 20, (0, 3e-3), (2, -2.2e-2)),
    "q5_0": Block(Q.Q5_0, 32, 22, (0, 1.5e-3)),
    "q5_1": Block(Q.Q5_1, 32, 24, (0, 1.5e-3), (2, -2.2e-2)),
    "q8_0": Block(Q.Q8_0, 32, 34, (0, 1.8e-4)),
    "q4_k": Block(Q.Q4_K, 256, 144, (0, 1e-4), (2, 7e-4)),
    "q5_k": Block(Q.Q5_K, 256, 176, (0, 5e-5), (2, 7e-4)),
    "q6_k": Block(Q.Q6_K, 256, 210, (208, 2e-5)),
}


MIXES = {
    "q4_k_m": ("q4_k", {"attn_v": "q6_k", "ffn_down": "q6_k"}, "q6_k"),
}
"""Files of two formats, as quantising tools make them: the format of most matrices, of some matrices in every second layer, of the head."""


def rows_of(rng: np.random.Generator, block: Block, rows: int, cols: int) -> Bytes:
    """Random rows as the file has them: [rows, bytes of a row]."""
    made = min(rows, 4096)
    blocks = rng.integers(0, 256, (made, cols // block.elements, block.size), dtype=np.uint8)
    for at in (block.scale, block.minimum):
        if at is not None:
            values = (at[1] * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
            blocks[:, :, at[0] : at[0] + 2] = values.view(np.uint8).reshape(*blocks.shape[:2], 2)
    flat = blocks.reshape(made, -1)
    return flat if made == rows else np.concatenate([flat] * -(-rows // made))[:rows]


def build(shape: Shape, name: str, path: Path, seed: int = 1) -> None:
    """Writes the file."""
    most, better, head = MIXES.get(name, (name, {}, name))
    block, rng = FORMATS[most], np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" if i != 7 else "t0t1" for i in range(shape.vocab)])
    writer.add_token_types([1] * shape.vocab)
    writer.add_token_merges(["t0 t1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(tensor: str, data: Bytes, kind: str = most) -> None:
        writer.add_tensor(tensor, data, raw_dtype=FORMATS[kind].kind)

    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ones = np.ones(shape.hidden, np.float32)
    made = {
        "attn_q": rows_of(rng, block, width, shape.hidden),
        "attn_k": rows_of(rng, block, kv_width, shape.hidden),
        "attn_v": rows_of(rng, block, kv_width, shape.hidden),
        "attn_output": rows_of(rng, block, shape.hidden, width),
        "ffn_gate": rows_of(rng, block, shape.ffn, shape.hidden),
        "ffn_up": rows_of(rng, block, shape.ffn, shape.hidden),
        "ffn_down": rows_of(rng, block, shape.hidden, shape.ffn),
    }
    sizes = {"attn_v": (kv_width, shape.hidden), "ffn_down": (shape.hidden, shape.ffn)}
    other = {part: rows_of(rng, FORMATS[kind], *sizes[part]) for part, kind in better.items()}
    matrix("token_embd.weight", rows_of(rng, block, shape.vocab, shape.hidden))
    matrix("output.weight", rows_of(rng, FORMATS[head], shape.vocab, shape.hidden), head)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            writer.add_tensor(f"blk.{layer}.attn_{part}.bias", np.zeros(rows, np.float32))
        for part, data in made.items():
            if layer % 2 == 0 and part in better:
                matrix(f"blk.{layer}.{part}.weight", other[part], better[part])
            else:
                matrix(f"blk.{layer}.{part}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", choices=[*FORMATS, *MIXES])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    start = time.monotonic()
    build(SHAPES[a.shape], a.format, a.path, a.seed)
    print(f"{a.path}: {a.path.stat().st_size:,} bytes in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
