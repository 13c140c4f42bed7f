"""ONNX GenAI-builder directory to a float64 `Decoder`, read with the `onnx` package.

Knows the builder's node names (`/model/layers.N/attn/qkv_proj/...`); weights come from MatMulNBits (4 or 8 bit, with or
without zero points, scales 1-D or 2-D, fp16 or fp32) or from plain MatMul initialisers.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .model import Array, Decoder, Layer, rope_tables

LAYER = re.compile(r"layers\.(\d+)/")


class Graph:
    """The graph's nodes by name pattern and its initialisers as arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        graph = onnx.load(str(path)).graph
        self.nodes = list(graph.node)
        self.tensors = {t.name: t for t in graph.initializer}
        self.used: set[str] = set()

    def array(self, name: str) -> Array:
        """An initialiser in its own dtype."""
        self.used.add(name)
        return numpy_helper.to_array(self.tensors[name])

    def find(self, fragment: str, *op_types: str) -> onnx.NodeProto | None:
        """The only node of these types whose name contains the fragment, or None."""
        found = [n for n in self.nodes if fragment in n.name and n.op_type in op_types]
        if len(found) > 1:
            raise ValueError(f"{self.path}: {len(found)} nodes match {fragment!r}: {[n.name for n in found][:3]}")
        return found[0] if found else None

    def weight(self, fragment: str) -> Array:
        """The (outputs, inputs) matrix of a linear node, float64."""
        node = self.find(fragment, "MatMulNBits", "MatMul")
        if node is None:
            raise ValueError(f"{self.path}: no MatMulNBits or MatMul node matches {fragment!r}")
        if node.op_type == "MatMul":
            return self.array(node.input[1]).astype(np.float64).T
        a = attributes(node)
        zero = self.array(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        packed, scales = self.array(node.input[1]), self.array(node.input[2])
        return dequantise(packed, scales, zero, a["N"], a["K"], a["bits"], a["block_size"])

    def add_bias(self, fragment: str) -> Array | None:
        """The initialiser that an Add node (or a MatMulNBits bias input) adds after a linear node."""
        node = self.find(fragment, "Add")
        if node is not None:
            name = next(i for i in node.input if i in self.tensors)
            return self.array(name).astype(np.float64)
        node = self.find(fragment, "MatMulNBits")
        if node is not None and len(node.input) > 5 and node.input[5]:
            return self.array(node.input[5]).astype(np.float64)
        return None

    def norm(self, fragment: str) -> Array | None:
        """The weight of a (Skip)SimplifiedLayerNormalization."""
        node = self.find(fragment, "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
        if node is None:
            return None
        name = next(i for i in node.input if i in self.tensors)
        return self.array(name).astype(np.float64)


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    """A node's attributes as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def dequantise(packed: Array, scales: Array, zero: Array | None, n: int, k: int, bits: int, block: int) -> Array:
    """MatMulNBits weights as float64 (n, k): (code - zero point) * scale. Low nibble first; zero defaults to half."""
    if bits not in (4, 8):
        raise ValueError(f"the reference does not expand {bits}-bit weights")
    n_blocks = -(-k // block)
    codes = _codes(packed.reshape(n, -1), bits)[:, : n_blocks * block].reshape(n, n_blocks, block)
    scale = scales.astype(np.float64).reshape(n, n_blocks, 1)
    if zero is None:
        shift: Array | float = float(1 << (bits - 1))
    elif zero.dtype == np.uint8:
        shift = _codes(zero.reshape(n, -1), bits)[:, :n_blocks].reshape(n, n_blocks, 1)
    else:
        shift = zero.astype(np.float64).reshape(n, n_blocks, 1)
    return ((codes - shift) * scale).reshape(n, n_blocks * block)[:, :k]


def _codes(rows: Array, bits: int) -> Array:
    if bits == 8:
        return rows.astype(np.float64)
    return np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1).astype(np.float64)


def load(
    directory: str, rope_base: float | None = None, rope_dtype: type = np.float64, file: str = "model.onnx"
) -> Decoder:
    """Read a model directory. RoPE tables come from the file, or are computed when `rope_base` is given."""
    graph = Graph(Path(directory) / file)
    attention = {int(LAYER.search(n.name)[1]): n for n in graph.nodes if n.op_type == "GroupQueryAttention"}
    count = len(attention)
    if count == 0 or sorted(attention) != list(range(count)):
        raise ValueError(f"{graph.path}: no GroupQueryAttention per layer ({sorted(attention)})")
    a = attributes(attention[0])
    head = graph.weight("/lm_head/")
    layers = [_layer(graph, i, attention[i], a) for i in range(count)]
    width = layers[0].q.shape[0] // a["num_heads"]
    cos, sin = (graph.array(attention[0].input[i]).astype(np.float64) for i in (7, 8))
    if rope_base is not None:
        cos, sin = rope_tables(width, rope_base, len(cos), rope_dtype)
    first = graph.find("layers.0/input_layernorm", "SimplifiedLayerNormalization")
    model = Decoder(
        n_heads=a["num_heads"], n_kv_heads=a["kv_num_heads"], head_dim=width, eps=attributes(first)["epsilon"],
        cos=cos, sin=sin, rope_interleaved=bool(a.get("rotary_interleaved", 0)), embedding=_embedding(graph, head),
        layers=layers, final_norm=graph.norm("final_norm"), lm_head=head,
    )  # fmt: skip
    unused = {n for n in graph.tensors if n not in graph.used and "constant" not in n.lower()}
    if unused:
        raise ValueError(f"{graph.path}: initialisers that the reference does not use: {sorted(unused)[:5]}")
    return model


def _layer(graph: Graph, index: int, attention: onnx.NodeProto, a: dict) -> Layer:
    p = f"layers.{index}/"
    if any(len(attention.input) > i and attention.input[i] for i in (9, 10, 11)) or a.get("local_window_size", -1) > 0:
        raise ValueError(f"{attention.name}: the reference has no sinks, attention bias or sliding window")
    if graph.find(p + "attn/qkv_proj/", "MatMulNBits", "MatMul") is not None:
        fused, bias = graph.weight(p + "attn/qkv_proj/"), graph.add_bias(p + "attn/qkv_proj/")
        unit = len(fused) // (a["num_heads"] + 2 * a["kv_num_heads"])
        cuts = [unit * a["num_heads"], unit * (a["num_heads"] + a["kv_num_heads"])]
        q, k, v = np.split(fused, cuts)
        biases = [None] * 3 if bias is None else np.split(bias, cuts)
    else:
        q, k, v = (graph.weight(f"{p}attn/{x}_proj/") for x in "qkv")
        biases = [graph.add_bias(f"{p}attn/{x}_proj/") for x in "qkv"]
    q_norm, k_norm = graph.norm(p + "attn/q_norm/"), graph.norm(p + "attn/k_norm/")
    if len(attention.input) > 15 and attention.input[14]:
        q_norm, k_norm = (graph.array(attention.input[i]).astype(np.float64) for i in (14, 15))
    return Layer(
        attention_norm=graph.norm(p + "input_layernorm/"), q=q, k=k, v=v, o=graph.weight(p + "attn/o_proj/"),
        ffn_norm=graph.norm(p + "post_attention_layernorm/"), gate=graph.weight(p + "mlp/gate_proj/"),
        up=graph.weight(p + "mlp/up_proj/"), down=graph.weight(p + "mlp/down_proj/"),
        q_bias=biases[0], k_bias=biases[1], v_bias=biases[2], q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip


def _embedding(graph: Graph, head: Array) -> Array:
    """The (vocab, d) embedding; a quantised gather shares the lm_head's tensors through a Reshape."""
    node = graph.find("/model/embed_tokens/", "GatherBlockQuantized", "Gather")
    if node is None:
        raise ValueError(f"{graph.path}: no Gather or GatherBlockQuantized under /model/embed_tokens/")
    if node.op_type == "Gather":
        return graph.array(node.input[0]).astype(np.float64) if node.input[0] in graph.tensors else head
    a = attributes(node)
    source = node.input[0]
    if source not in graph.tensors:
        source = next(n for n in graph.nodes if source in n.output).input[0]
    zero = graph.array(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    rows, columns = head.shape
    return dequantise(
        graph.array(source), graph.array(node.input[2]), zero, rows, columns, a.get("bits", 4), a["block_size"]
    )
