"""Writes an ONNX Runtime GenAI directory of a given shape with random int4 weights: large models made where they are needed.

    python benches/gpu/make_model.py 14b /tmp/model-14b

The graph is what the model builder exports for Qwen2 (`-p int4 -e cuda`): packed qkv with a bias, MatMulNBits in blocks of 32
with float16 scales, an embedding that shares the head's bytes. Weights are random, scaled so that activations stay of order 1;
the model says nothing sensible, but reads, multiplies and streams as a real one does.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

BLOCK = 32
CONTEXT = 8192
ROPE_BASE = 1e6


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 2, 1024),
    "small": Shape(8, 1024, 2816, 16, 4, 16384),
    "0.5b": Shape(24, 896, 4864, 14, 2, 151936),
    "1.5b": Shape(28, 1536, 8960, 12, 2, 151936),
    "7b": Shape(28, 3584, 18944, 28, 4, 152064),
    "14b": Shape(48, 5120, 13824, 40, 8, 152064),
}


class Writer:
    """Initializers and the external data file that they lie in."""

    def __init__(self, data: BinaryIO, seed: int, repeat: bool = False) -> None:
        self.data = data
        self.rng = np.random.default_rng(seed)
        self.repeat = repeat
        self.made: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.initializers: list[TensorProto] = []

    def add(self, name: str, kind: int, dims: list[int], raw: bytes | memoryview) -> str:
        tensor = TensorProto(name=name, data_type=kind, dims=dims)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in [("location", "model.onnx.data"), ("offset", self.data.tell()), ("length", len(raw))]:
            tensor.external_data.add(key=key, value=str(value))
        self.data.write(raw)
        self.initializers.append(tensor)
        return name

    def vector(self, name: str, values: np.ndarray) -> str:
        return self.add(name, TensorProto.FLOAT16, [len(values)], values.astype(np.float16).tobytes())

    def quantised(self, name: str, rows: int, cols: int) -> list[str]:
        made = self.made.get((rows, cols)) if self.repeat else None
        if made is None:
            codes = self.rng.bytes(rows * cols // 2)
            # Codes are uniform in -8 .. 7, of standard deviation 4.6.
            scale = 1 / (4.6 * np.sqrt(cols))
            scales = (scale * self.rng.uniform(0.8, 1.2, rows * cols // BLOCK)).astype(np.float16)
            made = codes, scales.tobytes()
        if self.repeat:
            self.made[rows, cols] = made
        return [
            self.add(f"{name}_Q4", TensorProto.UINT8, [rows, cols // BLOCK, BLOCK // 2], made[0]),
            self.add(f"{name}_scales", TensorProto.FLOAT16, [rows, cols // BLOCK], made[1]),
        ]


def build(shape: Shape, directory: Path, seed: int, repeat: bool = False) -> None:
    """Writes `model.onnx`, `model.onnx.data` and `genai_config.json`.

    `repeat`: every layer gets the same weights, which makes the file at the speed of the disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    nodes: list[onnx.NodeProto] = []

    def node(op: str, name: str, inputs: list[str], outputs: list[str] | None = None, **attributes: object) -> str:
        domain = "" if op in CORE_OPS else "com.microsoft"
        outputs = outputs or [f"{name}/output_0"]
        nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def constant(name: str, value: list[int], dims: list[int]) -> str:
        tensor = helper.make_tensor("value", TensorProto.INT64, dims, value)
        return node("Constant", f"{name}/node", [], [name], value=tensor)

    with (directory / "model.onnx.data").open("wb") as data:
        w = Writer(data, seed, repeat)
        mask = "/model/attn_mask_reformat/attn_mask_subgraph"
        one = constant("/model/constants/INT64/[1]", [1], [1])
        total = node("ReduceSum", f"{mask}/ReduceSum", ["attention_mask", one], keepdims=0)
        last = node("Sub", f"{mask}/Sub", [total, one])
        seqlens = node("Cast", f"{mask}/Sub/Cast", [last], to=TensorProto.INT32)
        size = node("Shape", f"{mask}/Shape", ["attention_mask"])
        index = constant("/model/constants/INT64/1", [1], [])
        length = node("Gather", f"{mask}/Gather", [size, index], axis=0)
        length = node("Cast", f"{mask}/Gather/Cast", [length], to=TensorProto.INT32)

        head = w.quantised("lm_head.MatMul.weight", shape.vocab, shape.hidden)
        dims = constant("/model/constants/INT64/embed", [shape.vocab, shape.hidden // 2], [2])
        table = node("Reshape", "/model/embed_tokens/Reshape", [head[0], dims])
        x = node(
            "GatherBlockQuantized", "/model/embed_tokens/GatherBlockQuantized", [table, "input_ids", head[1]],
            bits=4, block_size=BLOCK, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        angles = np.outer(np.arange(CONTEXT), ROPE_BASE ** (-2 * np.arange(shape.head_dim // 2) / shape.head_dim))
        for name, values in [("cos_cache", np.cos(angles)), ("sin_cache", np.sin(angles))]:
            w.add(name, TensorProto.FLOAT16, list(values.shape), values.astype(np.float16).tobytes())
        norm = 1 + 0.1 * w.rng.standard_normal(shape.hidden)

        def linear(name: str, source: str, rows: int, cols: int) -> str:
            weight = w.quantised(f"model.{name}.MatMul.weight", rows, cols)
            path = f"/model/{name.replace('.', '/')}/MatMul"
            return node("MatMulNBits", path, [source, *weight], K=cols, N=rows, bits=4, block_size=BLOCK)

        eps = 1e-6
        pending = ""
        for i in range(shape.layers):
            layer = f"layers.{i}"
            weight = w.vector(f"model.{layer}.input_layernorm.weight", norm)
            path = f"/model/{layer}/input_layernorm"
            if i == 0:
                a = node("SimplifiedLayerNormalization", path, [x, weight], axis=-1, epsilon=eps, stash_type=1)
            else:
                out = [f"{path}/output_0", "", "", f"{path}/output_3"]
                a = node("SkipSimplifiedLayerNormalization", path, [x, pending, weight], out, epsilon=eps)
                x = out[3]
            rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            qkv = linear(f"{layer}.attn.qkv_proj", a, rows, shape.hidden)
            bias = w.vector(f"model.{layer}.attn.qkv_proj.Add.bias", 0.1 * w.rng.standard_normal(rows))
            qkv = node("Add", f"/model/{layer}/attn/qkv_proj/Add", [qkv, bias])
            past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
            path = f"/model/{layer}/attn/GroupQueryAttention"
            attended = node(
                "GroupQueryAttention", path, [qkv, "", "", *past, seqlens, length, "cos_cache", "sin_cache"],
                [f"{path}/output_0", f"present.{i}.key", f"present.{i}.value"],
                num_heads=shape.heads, kv_num_heads=shape.kv_heads, scale=shape.head_dim**-0.5,
                local_window_size=-1, softcap=0.0, do_rotary=1, rotary_interleaved=0,
            )  # fmt: skip
            o = linear(f"{layer}.attn.o_proj", attended, shape.hidden, shape.hidden)
            path = f"/model/{layer}/post_attention_layernorm"
            weight = w.vector(f"model.{layer}.post_attention_layernorm.weight", norm)
            out = [f"{path}/output_0", "", "", f"{path}/output_3"]
            a = node("SkipSimplifiedLayerNormalization", path, [x, o, weight], out, epsilon=eps)
            x = out[3]
            gate = linear(f"{layer}.mlp.gate_proj", a, shape.ffn, shape.hidden)
            up = linear(f"{layer}.mlp.up_proj", a, shape.ffn, shape.hidden)
            sigmoid = node("Sigmoid", f"/model/{layer}/mlp/act_fn/Sigmoid", [gate])
            silu = node("Mul", f"/model/{layer}/mlp/act_fn/Mul", [gate, sigmoid])
            product = node("Mul", f"/model/{layer}/mlp/Mul", [silu, up])
            pending = linear(f"{layer}.mlp.down_proj", product, shape.hidden, shape.ffn)
        weight = w.vector("model.final_norm.weight", norm)
        a = node("SkipSimplifiedLayerNormalization", "/model/final_norm", [x, pending, weight], epsilon=eps)
        node("MatMulNBits", "/lm_head/MatMul", [a, *head], ["logits"], K=shape.hidden, N=shape.vocab, bits=4, block_size=BLOCK)

    graph = helper.make_graph(nodes, "main_graph", *_values(shape), initializer=w.initializers)
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    (directory / "genai_config.json").write_text(json.dumps(_config(shape), indent=2))


CORE_OPS = {
    "Constant", "ReduceSum", "Sub", "Cast", "Shape", "Gather", "Reshape", "Add", "Mul", "Sigmoid",
    "SimplifiedLayerNormalization",
}  # fmt: skip


def _values(shape: Shape) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    def kv(kind: str, i: int, length: str) -> list[onnx.ValueInfoProto]:
        dims = ["batch_size", shape.kv_heads, length, shape.head_dim]
        names = [f"{kind}.{i}.{part}" for part in ("key", "value")]
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT16, dims) for n in names]

    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    dims = ["batch_size", "sequence_length", shape.vocab]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT16, dims)]
    for i in range(shape.layers):
        inputs += kv("past_key_values", i, "past_sequence_length")
        outputs += kv("present", i, "total_sequence_length")
    return inputs, outputs


def _config(shape: Shape) -> dict[str, object]:
    return {
        "model": {
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            "context_length": CONTEXT, "type": "qwen2", "vocab_size": shape.vocab,
            "decoder": {
                "filename": "model.onnx",
                "head_size": shape.head_dim, "hidden_size": shape.hidden,
                "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
                "num_key_value_heads": shape.kv_heads,
                "inputs": {
                    "input_ids": "input_ids", "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key", "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": CONTEXT},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", action="store_true", help="the same weights in every layer: faster")
    arguments = parser.parse_args()
    start = time.monotonic()
    build(SHAPES[arguments.shape], arguments.directory, arguments.seed, arguments.repeat)
    size = (arguments.directory / "model.onnx.data").stat().st_size
    print(f"{arguments.directory}: {size:,} bytes in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
