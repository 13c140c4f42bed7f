"""Makes gguf_values.gguf and gguf_values.f32: a tiny model with every tensor type, and what the `gguf` package reads.

Run: pip install gguf numpy; python make_gguf_values.py. The model has random blocks with finite scales. The .f32 file
holds row 1 of each tensor below, 256 little-endian float32 each, in the order of TYPES, as gguf.quants.dequantize
gives them.
"""

import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = pathlib.Path(__file__).parent
COLS, ROWS, LAYERS = 256, 2, 2
# Tensor, type, and where the float16 scales of a block lie.
TYPES = [
    ("token_embd.weight", T.Q8_0, [0]),
    ("output.weight", T.Q6_K, [208]),
    ("blk.0.attn_q.weight", T.Q4_0, [0]),
    ("blk.0.attn_k.weight", T.Q4_1, [0, 2]),
    ("blk.0.attn_v.weight", T.Q5_0, [0]),
    ("blk.0.ffn_gate.weight", T.Q5_1, [0, 2]),
    ("blk.0.ffn_up.weight", T.Q4_K, [0, 2]),
    ("blk.1.attn_q.weight", T.Q5_K, [0, 2]),
    ("blk.1.attn_k.weight", T.F32, None),
    ("blk.1.attn_v.weight", T.F16, None),
    ("blk.1.ffn_gate.weight", T.BF16, None),
]


def main() -> None:
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(HERE / "gguf_values.gguf", "llama")
    w.add_name("every type")
    w.add_block_count(LAYERS)
    w.add_context_length(16)
    w.add_embedding_length(COLS)
    w.add_feed_forward_length(ROWS)
    w.add_head_count(1)
    w.add_key_length(2)
    w.add_value_length(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_token_list(["a", "b"])
    w.add_eos_token_id(1)

    expected = []
    for name, kind, scales in TYPES:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if scales is None:
            values = rng.standard_normal((ROWS, COLS)).astype(np.float32)
            raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(ROWS, -1)
        else:
            raw = rng.integers(0, 256, (ROWS, COLS // block, size), dtype=np.uint8)
            for at in scales:
                d = rng.standard_normal((ROWS, COLS // block)).astype(np.float16)
                raw[:, :, at : at + 2] = d.view(np.uint8).reshape(ROWS, COLS // block, 2)
            raw = raw.reshape(ROWS, -1)
        w.add_tensor(name, raw, raw_dtype=kind)
        typed = raw.view({T.F32: np.float32, T.F16: np.float16}.get(kind, np.uint8))
        expected.append(gguf.quants.dequantize(typed, kind)[1].astype("<f4"))

    half = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    w.add_tensor("output_norm.weight", half(COLS))
    for i in range(LAYERS):
        w.add_tensor(f"blk.{i}.attn_norm.weight", half(COLS))
        w.add_tensor(f"blk.{i}.ffn_norm.weight", half(COLS))
        w.add_tensor(f"blk.{i}.attn_output.weight", half(COLS, 2))
        w.add_tensor(f"blk.{i}.ffn_down.weight", half(COLS, ROWS))
    w.add_tensor("blk.1.ffn_up.weight", half(ROWS, COLS))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    np.stack(expected).tofile(HERE / "gguf_values.f32")


if __name__ == "__main__":
    main()
