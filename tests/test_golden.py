"""Logits and tokens of real models against float64 evaluations of the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headrace
import numpy as np
import numpy.typing as npt
import pytest
from conftest import DATA, golden

PROMPTS = ["short", "long", "chat", "unicode", "code", "single", "digits"]

# Largest logit error allowed, by (activations, kv_dtype). The int8 bound is what that choice costs on this model; it is
# here to notice a broken kernel, not to recommend the choice.
BOUNDS = {("int16", "float16"): 0.03, ("int16", "float32"): 0.008, ("int8", "float16"): 2.0}


def compare(engine: headrace.Engine, case: dict[str, Any]) -> tuple[float, npt.NDArray[np.float64], int]:
    """Teacher-forced comparison of a prompt: the largest logit error, the margins by which float64 prefers its token at
    the positions where the engine prefers another, and the number of positions."""
    prompt, generated = case["prompt_ids"], generated_ids(case)
    logits = engine.logits([prompt + generated[:-1]])[len(prompt) - 1 :]
    assert logits.shape == (len(generated), engine.vocab_size)
    ids = np.array([step["top_ids"] for step in case["steps"]])
    top = np.array([step["top_logits"] for step in case["steps"]])
    worst = float(np.abs(np.take_along_axis(logits, ids, axis=1) - top).max())
    flipped = logits.argmax(axis=1) != ids[:, 0]
    return worst, (top[:, 0] - top[:, 1])[flipped], len(generated)


def check(engine: headrace.Engine, case: dict[str, Any], bound: float) -> None:
    """Logits within the bound, and the same arg-maximum wherever that follows."""
    worst, flipped_margins, _ = compare(engine, case)
    assert worst <= bound
    assert (flipped_margins <= 2 * bound).all()


def generated_ids(case: dict[str, Any]) -> list[int]:
    ids: list[int] = case["generated_ids"] if "generated_ids" in case else case["generated_ids_raw"]
    return ids


def check_model(path: Path, name: str, prompts: list[str], activations: str, kv_dtype: str, tables: float = 0) -> None:
    """`tables`: how far the golden's RoPE tables and those of the file are apart, in logits."""
    bound = BOUNDS[activations, kv_dtype]
    if kv_dtype == "float32":
        bound += tables
    engine = headrace.Engine.load(path, activations=activations, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    cases = golden(name)["prompts"]
    free_running = 0
    for prompt in prompts:
        case = cases[prompt]
        check(engine, case, bound)
        if case["min_margin"] > bound:
            free_running += 1
            result = engine.generate(case["prompt_ids"], max_new_tokens=64, stop_tokens=())
            assert list(result.token_ids) == generated_ids(case)
    assert free_running > 0 or activations == "int8"


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_smollm2_gguf(smollm2: Path, activations: str, kv_dtype: str) -> None:
    check_model(smollm2, "gguf-q4_1-exact-fp64", PROMPTS, activations, kv_dtype)


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_smollm2_onnx(smollm2_onnx: Path, activations: str, kv_dtype: str) -> None:
    check_model(smollm2_onnx, "onnx-int4-cpu-exact-fp64", PROMPTS, activations, kv_dtype)


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_smollm2_onnx_cuda(smollm2_onnx_cuda: Path, activations: str, kv_dtype: str) -> None:
    """The file stores its RoPE tables in float16, and the engine uses what the file says. This golden used float64 tables
    instead, which alone moves logits by up to 0.0144 (the difference of the two goldens of this file)."""
    check_model(smollm2_onnx_cuda, "onnx-int4-cuda-exact-fp64", PROMPTS, activations, kv_dtype, tables=0.0145)


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_smollm2_onnx_cuda_with_its_own_tables(smollm2_onnx_cuda: Path, activations: str, kv_dtype: str) -> None:
    check_model(smollm2_onnx_cuda, "onnx-int4-cuda-own-tables-exact-fp64", PROMPTS, activations, kv_dtype)


# Every variant of the tiny models, and what its file asks of the loader. The goldens of ONNX files use the RoPE tables that
# the file stores, as the engine does; so the float16 tables of the CUDA exports cost no accuracy here.
TINY = {
    "qwen2-F16.gguf": "unquantised weights, biases",
    "qwen2-Q4_0.gguf": "Q4_0, biases",
    "qwen2-int4-cpu": "4 bits, float32 scales, biases",
    "qwen2-int4-cuda": "4 bits, float16 scales, biases",
    "qwen2-kquant-nofuse-cpu": "zero points; q, k and v apart",
    "qwen3-Q4_1.gguf": "Q4_1, norms of q and k",
    "qwen3-Q8_0.gguf": "Q8_0, norms of q and k",
    "qwen3-int4-cpu": "norms of q and k as nodes",
    "qwen3-int4-cuda": "norms of q and k as attributes of the attention",
}


def tiny_model(name: str) -> Path:
    """A tiny model of this repository."""
    return DATA / "models" / name


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, activations: str, kv_dtype: str) -> None:
    stem = name.removesuffix(".gguf") + ("-gguf" if name.endswith(".gguf") else "")
    golden_name = f"tiny-{stem}-exact-fp64"
    check_model(tiny_model(name), golden_name, list(golden(golden_name)["prompts"]), activations, kv_dtype)


def test_every_tiny_golden_is_used() -> None:
    stems = {p.name.removeprefix("tiny-").removesuffix("-exact-fp64.json") for p in (DATA / "golden").glob("tiny-*")}
    assert stems == {n.replace(".gguf", "-gguf") for n in TINY}


@pytest.mark.parametrize("prompt", ["short", "chat"])
def test_every_logit_of_the_first_step(smollm2: Path, engine: headrace.Engine, prompt: str) -> None:
    with np.load(DATA / "golden" / "gguf-q4_1-exact-fp64.firstlogits.npz") as file:
        expected = file[prompt]
    ids = golden("gguf-q4_1-exact-fp64")["prompts"][prompt]["prompt_ids"]
    assert np.abs(engine.logits([ids], last_only=True)[0] - expected).max() <= BOUNDS["int16", "float16"]
