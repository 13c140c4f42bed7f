"""GGUF file to a float64 `Decoder`, read with the `gguf` package; block formats are expanded without any rounding."""

from __future__ import annotations

import gguf
import numpy as np

from .model import Array, Decoder, Layer, rope_tables

BLOCK = 32
# llama's converter permutes q and k for interleaved pairs; Qwen's rotates halves.
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}


def load(path: str, rope_dtype: type = np.float64, positions: int = 1024) -> Decoder:
    """Read a llama, qwen2 or qwen3 GGUF. RoPE tables are computed (GGUF holds none), in `rope_dtype`."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    arch = reader.fields["general.architecture"].contents()
    if arch not in INTERLEAVED:
        raise ValueError(f"{path}: the reference does not know architecture {arch!r}")

    def value(key: str, default: object = None) -> object:
        entry = reader.fields.get(f"{arch}.{key}")
        if entry is None and default is None:
            raise ValueError(f"{path}: metadata {arch}.{key} is missing")
        return default if entry is None else entry.contents()

    used: set[str] = set()

    def take(name: str) -> Array:
        used.add(name)
        return dequantise(tensors[name])

    def maybe(name: str) -> Array | None:
        return take(name) if name in tensors else None

    n_heads, d = int(value("attention.head_count")), int(value("embedding_length"))
    head_dim = int(value("attention.key_length", d // n_heads))
    layers = []
    for i in range(int(value("block_count"))):
        b = f"blk.{i}."
        layers.append(
            Layer(
                attention_norm=take(b + "attn_norm.weight"),
                q=take(b + "attn_q.weight"), k=take(b + "attn_k.weight"), v=take(b + "attn_v.weight"),
                o=take(b + "attn_output.weight"), ffn_norm=take(b + "ffn_norm.weight"),
                gate=take(b + "ffn_gate.weight"), up=take(b + "ffn_up.weight"), down=take(b + "ffn_down.weight"),
                q_bias=maybe(b + "attn_q.bias"), k_bias=maybe(b + "attn_k.bias"), v_bias=maybe(b + "attn_v.bias"),
                q_norm=maybe(b + "attn_q_norm.weight"), k_norm=maybe(b + "attn_k_norm.weight"),
            )
        )  # fmt: skip
    embedding = take("token_embd.weight")
    cos, sin = rope_tables(head_dim, float(value("rope.freq_base", 10000.0)), positions, rope_dtype)
    model = Decoder(
        n_heads=n_heads, n_kv_heads=int(value("attention.head_count_kv", n_heads)), head_dim=head_dim,
        eps=float(value("attention.layer_norm_rms_epsilon")), cos=cos, sin=sin, rope_interleaved=INTERLEAVED[arch],
        embedding=embedding, layers=layers, final_norm=take("output_norm.weight"),
        lm_head=take("output.weight") if "output.weight" in tensors else embedding,
    )  # fmt: skip
    if used != set(tensors):
        raise ValueError(f"{path}: tensors that the reference does not use: {sorted(set(tensors) - used)[:5]}")
    return model


def dequantise(tensor: gguf.ReaderTensor) -> Array:
    """A tensor as float64, shape (rows, columns) or (columns,). Every product and sum is exact in float64."""
    kind, data = tensor.tensor_type.name, tensor.data
    if kind in ("F32", "F16", "F64"):
        return np.array(data, dtype=np.float64)
    if kind not in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        raise ValueError(f"{tensor.name}: the reference does not expand {kind}")
    shape = tuple(int(n) for n in tensor.shape[::-1])
    size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    scale = _half(blocks, 0)
    if kind == "Q8_0":
        return (blocks[:, 2:].view(np.int8).astype(np.float64) * scale).reshape(shape)
    codes_at = size - BLOCK // 2
    packed = blocks[:, codes_at:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float64)
    if kind.startswith("Q5"):
        high = np.unpackbits(np.ascontiguousarray(blocks[:, codes_at - 4 : codes_at]), axis=1, bitorder="little")
        codes += 16.0 * high
    if kind.endswith("_1"):
        return (codes * scale + _half(blocks, 2)).reshape(shape)
    return ((codes - (8.0 if kind == "Q4_0" else 16.0)) * scale).reshape(shape)


def _half(blocks: Array, offset: int) -> Array:
    """The fp16 number at a byte offset of every block, as a float64 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float64)
