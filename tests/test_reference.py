"""The float64 reference against outputs of other engines: what the golden files rest on."""

from __future__ import annotations

import json
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

DATA = HERE / "data"
GOLDEN_ROUNDING = 2e-6  # those goldens carry six decimals


def load(name: str) -> Decoder:
    path = str(DATA / name)
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
    ("models/qwen2-F16.gguf", "tiny-qwen2-F16-gguf-fp32", 1e-4),
    ("models/qwen2-Q4_0.gguf", "tiny-qwen2-Q4_0-gguf-fp32", 1e-4),
    ("models/qwen3-Q4_1.gguf", "tiny-qwen3-Q4_1-gguf-fp32", 1e-4),
    ("models/qwen3-Q8_0.gguf", "tiny-qwen3-Q8_0-gguf-fp32", 1e-4),
    ("models/qwen2-int4-cpu", "tiny-qwen2-int4-cpu-acc1", 2e-5),
    ("models/qwen3-int4-cpu", "tiny-qwen3-int4-cpu-acc1", 2e-5),
    ("models/qwen2-kquant-nofuse-cpu", "tiny-qwen2-kquant-nofuse-cpu", 2e-5),
    ("models/qwen2-int4-cuda", "tiny-qwen2-int4-cuda-on-cpu", 2e-2),
]


@pytest.mark.parametrize(("model", "golden", "tolerance"), TINY, ids=[t[1] for t in TINY])
def test_tiny_models_agree_with_other_engines(model: str, golden: str, tolerance: float) -> None:
    error = worst_error(load(model), DATA / "golden" / "others" / f"{golden}.json", ["code", "import", "one", "long"], 48)
    assert error < tolerance


@pytest.mark.parametrize("model", ["qwen2-int4-cuda", "qwen3-int4-cuda", "qwen2-Q4_0.gguf", "qwen3-Q4_1.gguf"])
def test_committed_tiny_goldens_are_reproduced(model: str) -> None:
    name = f"tiny-{model.removesuffix('.gguf')}{'-gguf' if model.endswith('.gguf') else ''}-exact-fp64.json"
    data = json.loads((DATA / "golden" / name).read_text(encoding="utf-8"))["prompts"]["one"]
    tokens, logits = greedy(load(f"models/{model}"), data["prompt_ids"], 64)
    assert tokens == data["generated_ids"]
    for row, step in zip(logits, data["steps"], strict=True):
        np.testing.assert_allclose(row[step["top_ids"]], step["top_logits"], rtol=1e-6, atol=0)


def test_growing_cache_and_one_pass_agree() -> None:
    model = load("models/qwen3-int4-cpu")
    tokens = [69, 81, 80, 72, 75, 73, 16, 80]
    session = Session(model)
    steps = np.concatenate([session.step(tokens[:3]), session.step(tokens[3:4]), session.step(tokens[4:])])
    np.testing.assert_allclose(steps, Session(model).step(tokens), rtol=0, atol=1e-12)


@pytest.mark.timeout(300)
def test_smollm2_onnx_agrees_with_an_independent_float64_golden(smollm2_onnx: Path) -> None:
    golden = DATA / "golden" / "onnx-int4-cpu-exact-fp64.json"
    # The weights are the builder's own, byte for byte (`smollm2_onnx.make` checks their hash). That golden computed RoPE in float64; with the file's fp32 tables logits move by 4e-5 (fp16 tables: 1.4e-2).
    model = onnx_weights.load(str(smollm2_onnx), rope_base=1e5)
    assert worst_error(model, golden, ["short", "single"], 24) < GOLDEN_ROUNDING


@pytest.mark.timeout(300)
def test_smollm2_gguf_agrees_with_an_independent_float64_golden(smollm2: Path) -> None:
    golden = DATA / "golden" / "gguf-q4_1-exact-fp64.json"
    model = gguf_weights.load(str(smollm2))
    assert worst_error(model, golden, ["short", "single"], 24) < GOLDEN_ROUNDING


def test_the_exports_rotary_tables_are_cosines_and_sines(smollm2_onnx: Path, smollm2_onnx_cuda: Path) -> None:
    """Weights are held to the builder's by their hash; the tables to float64 ones of the same angles."""
    from reference import smollm2_onnx as export

    for path, dtype, most in ((smollm2_onnx, np.float32, 5e-4), (smollm2_onnx_cuda, np.float16, 8e-4)):
        data = np.memmap(path / "model.onnx.data", dtype=np.uint8, mode="r")
        places = export.tensors(path / "model.onnx")
        inverse = 1 / 1e5 ** (np.arange(0, 64, 2) / 64)
        angles = np.arange(8192)[:, None] * inverse[None, :]
        for name, of in (("cos_cache", np.cos), ("sin_cache", np.sin)):
            offset, length = places[name]
            table = np.asarray(data[offset : offset + length]).view(dtype).reshape(8192, 32)
            # Float32 angles of 8,192 positions are off by up to 5e-4.
            assert np.abs(table - of(angles)).max() < most
            assert np.abs(table[:256] - of(angles[:256])).max() < (2e-5 if dtype is np.float32 else 2.6e-4)


def test_an_export_of_other_weights_is_refused(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference import smollm2_onnx as export

    monkeypatch.setitem(export.WEIGHTS_SHA256, "cpu", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256 of the weights"):
        export.make(smollm2, tmp_path / "cpu", "cpu")
