"""Model files that lack a tensor, a vocabulary or an end token, or are pointers: loaded for what they are, or refused by name."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import headrace
import onnx
import pytest
from conftest import DATA
from gguf import GGUFValueType
from rewrite import rewrite_gguf, rewrite_json

MODELS = DATA / "models"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1111\nsize 654336\n"
END, TEXT_END = 2, 0  # <|im_end|> and <|endoftext|> of the small models


def load(path: Path) -> headrace.Engine:
    return headrace.Engine.load(path, device="cpu", threads=1)


@pytest.mark.parametrize("tensor", ["blk.1.attn_k.bias", "blk.0.attn_q.bias"])
def test_a_missing_bias_is_named(tmp_path: Path, tensor: str) -> None:
    path = rewrite_gguf(MODELS / "qwen2-Q4_0.gguf", tmp_path / "a.gguf", keep_tensor=lambda name: name != tensor)
    with pytest.raises(headrace.ModelFormatError, match=f"{tensor}.*missing"):
        load(path)


def test_a_model_without_its_biases_is_refused(tmp_path: Path) -> None:
    path = rewrite_gguf(
        MODELS / "qwen2-Q4_0.gguf", tmp_path / "a.gguf", keep_tensor=lambda name: not name.endswith(".bias")
    )
    with pytest.raises(headrace.ModelFormatError, match=r"blk.0.attn_q.bias.*missing.*qwen2"):
        load(path)


def test_an_onnx_graph_without_its_biases_is_refused(tmp_path: Path) -> None:
    def say_qwen2(config: dict[str, Any]) -> None:
        config["model"]["type"] = "qwen2"

    path = rewrite_json(MODELS / "qwen3-int4-cpu", tmp_path / "a", "genai_config.json", say_qwen2)
    with pytest.raises(headrace.ModelFormatError, match="bias of .*missing.*qwen2"):
        load(path)

    def say_qwen3(config: dict[str, Any]) -> None:
        config["model"]["type"] = "qwen3"

    path = rewrite_json(MODELS / "qwen2-int4-cpu", tmp_path / "b", "genai_config.json", say_qwen3)
    with pytest.raises(headrace.ModelFormatError, match="q_norm of layer 0.*missing.*qwen3"):
        load(path)


@pytest.mark.parametrize("token", [None, TEXT_END])
def test_the_end_of_a_turn_ends_a_generation_of_a_gguf(tmp_path: Path, token: int | None) -> None:
    key = "tokenizer.ggml.eos_token_id"
    values = {} if token is None else {key: (GGUFValueType.UINT32, token)}
    path = rewrite_gguf(
        MODELS / "qwen2-Q4_0.gguf", tmp_path / "a.gguf", values=values, keep_key=lambda name: name != key
    )
    assert sorted(load(path).eos_token_ids) == [TEXT_END, END]


@pytest.mark.parametrize("value", ["absent", None, 0, [0, None], [-1]])
def test_the_end_of_a_turn_ends_a_generation_of_an_export(tmp_path: Path, value: object) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["model"]["eos_token_id"]
        if value != "absent":
            config["model"]["eos_token_id"] = value

    path = rewrite_json(MODELS / "qwen2-int4-cpu", tmp_path / "a", "genai_config.json", change)
    assert sorted(load(path).eos_token_ids) == [TEXT_END, END]


def test_the_tokenizer_and_generation_config_name_end_tokens_too(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["eos_token"] = "!"

    path = rewrite_json(MODELS / "qwen2-int4-cpu", tmp_path / "a", "tokenizer_config.json", change)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, null, 2]}')
    assert sorted(load(path).eos_token_ids) == [TEXT_END, END, 3, 5]
    (path / "generation_config.json").write_text('{"eos_token_id": 5000}')
    with pytest.raises(headrace.ModelFormatError, match="generation_config.json: eos_token_id: 5000"):
        load(path)


def test_no_end_token_at_all_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["model"]["eos_token_id"]

    path = rewrite_json(MODELS / "qwen2-int4-cpu", tmp_path / "a", "genai_config.json", change)
    (path / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING, logger="headrace_model"):
        engine = load(path)
    assert engine.eos_token_ids == []
    assert any("ends a generation" in record.getMessage() for record in caplog.records)


def test_a_gguf_without_a_vocabulary_takes_token_ids(tmp_path: Path) -> None:
    whole = MODELS / "qwen2-Q4_0.gguf"
    path = rewrite_gguf(
        whole,
        tmp_path / "a.gguf",
        values={"tokenizer.ggml.model": (GGUFValueType.STRING, "no_vocab")},
        keep_key=lambda key: not key.startswith("tokenizer."),
    )
    engine = load(path)
    prompt = [3, 14, 15, 92, 65]
    expected = load(whole).generate(prompt, max_new_tokens=8, stop_tokens=())
    assert engine.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids
    for call in (lambda: engine.encode("Hi"), lambda: engine.decode([3]), lambda: engine.generate("Hi")):
        with pytest.raises(headrace.HeadraceError, match="tokenizer"):
            call()


@pytest.mark.parametrize(
    "file",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
        "genai_config.json",
        "model.onnx",
        "model.onnx.data",
    ],
)
def test_a_pointer_in_place_of_any_file_says_how_to_fetch_it(tmp_path: Path, file: str) -> None:
    shutil.copytree(MODELS / "qwen2-int4-cpu", tmp_path / "a")
    (tmp_path / "a" / file).unlink(missing_ok=True)
    (tmp_path / "a" / file).write_text(POINTER)
    with pytest.raises(headrace.ModelFormatError, match=f"{file}: .*Git LFS pointer.*git lfs pull"):
        load(tmp_path / "a")


def share_layers(folder: Path, copies: bool) -> Path:
    """An export whose layer 1 has the matrices of layer 0: the same initializers, or `copies` of them."""
    source = MODELS / "qwen2-int4-cpu"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.onnx*"))
    model = onnx.load(source / "model.onnx")
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMulNBits" or ".layers.1." not in node.input[1]:
            continue
        for i in range(1, len(node.input)):
            name, other = node.input[i], node.input[i].replace(".layers.1.", ".layers.0.")
            if copies:
                by_name[name].raw_data = by_name[other].raw_data
            else:
                node.input[i] = other
    used = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    return folder


def test_layers_that_share_matrices_run_on_every_device(tmp_path: Path) -> None:
    shared, copies = share_layers(tmp_path / "shared", False), share_layers(tmp_path / "copies", True)
    assert (shared / "model.onnx.data").stat().st_size < (copies / "model.onnx.data").stat().st_size
    prompt = list(range(3, 30))

    def run(path: Path, **options: Any) -> tuple[list[int], bytes, int]:
        engine = headrace.Engine.load(path, threads=1, max_batch=1, max_context=64, **options)
        result = engine.generate(prompt, max_new_tokens=8, stop_tokens=())
        logits = engine.logits([prompt]).tobytes()
        return list(result.token_ids), logits, engine.stats().weights.streamed_bytes

    expected = run(copies, device="cpu")
    assert run(shared, device="cpu") == expected
    host: dict[str, Any] = {"device": "host-device", "piece_bytes": 8192, "ring_slots": 2}
    with pytest.raises(headrace.BudgetError) as refused:
        run(copies, vram_limit=1, **host)
    sizes = [int(n.replace(",", "")) for n in re.findall(r"[\d,]{5,}", str(refused.value))]
    streamed = set()
    for limit in [None, *sorted(sizes)[-3:], "64MiB"]:
        for policy in (None, "lru") if limit is not None else (None,):
            options = {**host, "vram_limit": limit, "policy": policy}
            try:
                got = run(copies, **options)
            except headrace.BudgetError:
                continue
            assert got[:2] == expected[:2]
            assert run(shared, **options) == got, options
            streamed.add(got[2] > 0)
    assert streamed == {True, False}, "limits under which weights are streamed, and one under which none are"
