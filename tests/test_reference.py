"""The float64 reference against outputs of other engines: what the golden files rest on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("gguf")
pytest.importorskip("onnx")

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from reference import gguf_weights, onnx_weights  # noqa: E402
from reference.model import Decoder, Session, greedy, teacher_forced  # noqa: E402

SHARED = Path(os.environ.get("HEADRACE_SHARED", HERE.parent.parent / "shared")) / "models"
GOLDEN_ROUNDING = 2e-6  # those goldens carry six decimals
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared models at {SHARED}; set HEADRACE_SHARED")


def load(name: str) -> Decoder:
    path = str(SHARED / name)
    return gguf_weights.load(path) if path.endswith(".gguf") else onnx_weights.load(path)


def worst_error(model: Decoder, golden: Path, prompts: list[str], count: int) -> float:
    """Largest |logit error| over the golden's top ids; also checks that the arg-maxima are the golden's tokens."""
    data = json.loads(golden.read_text(encoding="utf-8"))["prompts"]
    worst = 0.0
    for name in prompts:
        generated = data[name]["generated_ids"][:count]
        logits = teacher_forced(model, data[name]["prompt_ids"], generated)
        assert logits.argmax(axis=1).tolist() == generated
        for row, step in zip(logits, data[name]["steps"], strict=False):
            worst = max(worst, float(np.abs(row[step["top_ids"]] - np.array(step["top_logits"])).max()))
    return worst


# Other engines' fp32 (or, for `cuda`, fp16) arithmetic is the tolerance here, not the reference's own error.
TINY = [
    ("tiny/qwen2-F16.gguf", "tiny-qwen2-F16-gguf-fp32", 1e-4),
    ("tiny/qwen2-Q4_0.gguf", "tiny-qwen2-Q4_0-gguf-fp32", 1e-4),
    ("tiny/qwen3-Q4_1.gguf", "tiny-qwen3-Q4_1-gguf-fp32", 1e-4),
    ("tiny/qwen3-Q8_0.gguf", "tiny-qwen3-Q8_0-gguf-fp32", 1e-4),
    ("tiny/qwen2-int4-cpu", "tiny-qwen2-int4-cpu-acc1", 2e-5),
    ("tiny/qwen3-int4-cpu", "tiny-qwen3-int4-cpu-acc1", 2e-5),
    ("tiny/qwen2-kquant-nofuse-cpu", "tiny-qwen2-kquant-nofuse-cpu", 2e-5),
    ("tiny/qwen2-int4-cuda", "tiny-qwen2-int4-cuda-on-cpu", 2e-2),
]


@needs_shared
@pytest.mark.parametrize(("model", "golden", "tolerance"), TINY, ids=[t[1] for t in TINY])
def test_tiny_models_agree_with_other_engines(model: str, golden: str, tolerance: float) -> None:
    error = worst_error(load(model), SHARED / "golden" / f"{golden}.json", ["code", "import", "one", "long"], 48)
    assert error < tolerance


@needs_shared
@pytest.mark.parametrize("model", ["qwen2-int4-cuda", "qwen3-int4-cuda", "qwen2-Q4_0.gguf", "qwen3-Q4_1.gguf"])
def test_committed_tiny_goldens_are_reproduced(model: str) -> None:
    name = f"tiny-{model.removesuffix('.gguf')}{'-gguf' if model.endswith('.gguf') else ''}-exact-fp64.json"
    data = json.loads((HERE / "data" / "golden" / name).read_text(encoding="utf-8"))["prompts"]["one"]
    tokens, logits = greedy(load(f"tiny/{model}"), data["prompt_ids"], 64)
    assert tokens == data["generated_ids"]
    for row, step in zip(logits, data["steps"], strict=True):
        np.testing.assert_allclose(row[step["top_ids"]], step["top_logits"], rtol=1e-6, atol=0)


@needs_shared
def test_growing_cache_and_one_pass_agree() -> None:
    model = load("tiny/qwen3-int4-cpu")
    tokens = [69, 81, 80, 72, 75, 73, 16, 80]
    session = Session(model)
    steps = np.concatenate([session.step(tokens[:3]), session.step(tokens[3:4]), session.step(tokens[4:])])
    np.testing.assert_allclose(steps, Session(model).step(tokens), rtol=0, atol=1e-12)


@needs_shared
@pytest.mark.timeout(300)
def test_smollm2_onnx_agrees_with_an_independent_float64_golden() -> None:
    golden = HERE / "data" / "golden" / "onnx-int4-cpu-exact-fp64.json"
    # That golden computed RoPE in float64; with the file's fp32 tables logits move by 4e-5 (fp16 tables: 1.4e-2).
    model = onnx_weights.load(str(SHARED / "smollm2-onnx-int4" / "cpu"), rope_base=1e5)
    assert worst_error(model, golden, ["short", "single"], 24) < GOLDEN_ROUNDING


@pytest.mark.timeout(300)
def test_smollm2_gguf_agrees_with_an_independent_float64_golden(smollm2: Path) -> None:
    golden = HERE / "data" / "golden" / "gguf-q4_1-exact-fp64.json"
    model = gguf_weights.load(str(smollm2))
    assert worst_error(model, golden, ["short", "single"], 24) < GOLDEN_ROUNDING
