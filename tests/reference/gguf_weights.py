"""GGUF file to a float64 `Decoder`, read with the `gguf` package; block formats are expanded without any rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gguf
import numpy as np

from .model import Array, Decoder, Layer, rope_tables

BLOCK = 32
SUPER = 256
"""Numbers of a k-quant's block."""
# llama's converter permutes q and k for interleaved pairs; Qwen's rotates halves.
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}


OF_LAYER = {
    "attention_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
}  # fmt: skip
"""Fields of `Layer` by the names of their tensors; the last five are not in every model."""


class LazyLayers(Sequence[Layer]):
    """Layers that are expanded whenever they are asked for: a model of gigabytes takes a layer's float64 memory at a time."""

    def __init__(self, count: int, expand: Callable[[int], Layer]) -> None:
        self._count, self._expand = count, expand

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Layer:  # type: ignore[override]
        return self._expand(index)


def load(path: str, rope_dtype: type = np.float64, positions: int = 1024, lazy: bool = False) -> Decoder:
    """Read a llama, qwen2 or qwen3 GGUF. RoPE tables are computed (GGUF holds none), in `rope_dtype`.

    `lazy`: expand a layer at each use of it.
    """
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

    n_heads, d = int(value("attention.head_count")), int(value("embedding_length"))
    head_dim = int(value("attention.key_length", d // n_heads))
    count = int(value("block_count"))
    used.update(f"blk.{i}.{name}" for i in range(count) for name in OF_LAYER.values() if f"blk.{i}.{name}" in tensors)

    def layer(i: int) -> Layer:
        found = {field: f"blk.{i}.{name}" for field, name in OF_LAYER.items()}
        return Layer(**{field: dequantise(tensors[name]) for field, name in found.items() if name in tensors})

    layers = LazyLayers(count, layer) if lazy else [layer(i) for i in range(count)]
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
    if kind in ("Q4_K", "Q6_K"):
        return _k_quant(tensor)
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


def _k_quant(tensor: gguf.ReaderTensor) -> Array:
    """Q4_K or Q6_K: blocks of 256 with integer scales of 32 or 16 numbers each. Products are exact in float64."""
    shape = tuple(int(n) for n in tensor.shape[::-1])
    if tensor.tensor_type.name == "Q4_K":
        # d, dmin: fp16; 12 bytes: eight 6-bit scales and minima; 128 bytes: codes, 64 numbers in 32 bytes, low halves first.
        blocks = np.ascontiguousarray(tensor.data).reshape(-1, 144)
        packed = blocks[:, 4:16]
        scales, mins = np.empty((2, len(blocks), 8), dtype=np.uint8)
        scales[:, :4], mins[:, :4] = packed[:, :4] & 63, packed[:, 4:8] & 63
        scales[:, 4:] = packed[:, 8:] & 15 | packed[:, :4] >> 6 << 4
        mins[:, 4:] = packed[:, 8:] >> 4 | packed[:, 4:8] >> 6 << 4
        pairs = blocks[:, 16:].reshape(-1, 4, 32)
        codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32).astype(np.float64)
        scale, least = _half(blocks, 0) * scales, _half(blocks, 2) * mins
        return (codes * scale[:, :, None] - least[:, :, None]).reshape(shape)
    # 128 bytes of low halves, 64 of high pairs, 16 signed scales, d: fp16.
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, 210)
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float64) - 32.0
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float64) * _half(blocks, 208)
    return (codes * scale[:, :, None]).reshape(shape)


def _half(blocks: Array, offset: int) -> Array:
    """The fp16 number at a byte offset of every block, as a float64 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float64)
