"""Each typed error, provoked."""

from __future__ import annotations

import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import headrace
import pytest
from conftest import DATA


def test_every_error_is_a_headrace_error() -> None:
    names = [
        "ModelFormatError", "UnsupportedModelError", "BudgetError", "ContextLengthError", "DeviceError", "NonFiniteError",
    ]
    for name in names:
        kind = getattr(headrace, name)
        assert issubclass(kind, headrace.HeadraceError)
        assert pickle.loads(pickle.dumps(kind("why"))).args == ("why",)


def test_missing_file() -> None:
    for call in (headrace.Engine.load, headrace.plan, headrace.simulate):
        with pytest.raises(FileNotFoundError, match="^no-such-model.gguf: .* the names are: .*smollm2-135m.* by its path"):
            call("no-such-model.gguf")


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 10)
    with pytest.raises(headrace.ModelFormatError, match="model.gguf"):
        headrace.Engine.load(path)


def test_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(headrace.ModelFormatError, match="git lfs pull"):
        headrace.Engine.load(path)


def test_truncated_file_names_tensor_and_offset(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(smollm2.read_bytes()[: 60_000_000])
    with pytest.raises(headrace.ModelFormatError, match=r"(blk|token_embd|output).*byte"):
        headrace.Engine.load(path)


def test_unsupported_model_is_named() -> None:
    with pytest.raises(headrace.UnsupportedModelError, match="(?i)gpt-?oss"):
        headrace.Engine.load(DATA / "graphs" / "gptoss-cpu")


def test_context_length(engine: headrace.Engine) -> None:
    with pytest.raises(headrace.ContextLengthError, match="max_context = 8192"):
        engine.generate([1, 2, 3], max_new_tokens=8190)
    with pytest.raises(headrace.ContextLengthError):
        engine.decode_greedy_batch([[1], [1] * 8192], max_new_tokens=1)
    with pytest.raises(headrace.ContextLengthError):
        engine.logits([[1] * 8193])


def test_what_is_wrong_with_one_prompt_of_a_list_names_it(engine: headrace.Engine) -> None:
    for call in (
        lambda prompts: engine.generate(prompts, max_new_tokens=1),
        lambda prompts: engine.decode_greedy_batch(prompts, max_new_tokens=1),
    ):
        with pytest.raises(headrace.ContextLengthError, match=r"^prompts\[2\]: 8192 tokens of prompt and 1 new ones exceed"):
            call([[1], [2], [1] * 8192, [1] * 8192])
    with pytest.raises(headrace.ContextLengthError, match=r"^sequences\[1\]: 8193 tokens"):
        engine.logits([[1], [1] * 8193])
    assert engine.stats().kv.sequences == 0


def test_arguments(smollm2: Path, engine: headrace.Engine) -> None:
    with pytest.raises(ValueError, match='device = "gpu": must be one of "auto", "cpu"'):
        headrace.Engine.load(smollm2, device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_context = 9000"):
        headrace.Engine.load(smollm2, max_context=9000)
    with pytest.raises(ValueError, match="threads = 0"):
        headrace.Engine.load(smollm2, threads=0)
    with pytest.raises(ValueError, match="at least one token"):
        engine.generate([[]])
    with pytest.raises(ValueError, match="49152 tokens"):
        engine.generate([49152])
    with pytest.raises(ValueError, match="temperature"):
        engine.generate([1], temperature=-1)
    with pytest.raises(ValueError, match="top_p"):
        engine.generate([1], top_p=0)


def test_non_finite_logits(smollm2: Path, tmp_path: Path) -> None:
    """A weight that became infinite is an error, not a token."""
    data = bytearray(smollm2.read_bytes())
    plan = headrace.plan(smollm2)
    norm = next(t for t in plan.model.tensors if t.name == "output_norm.weight")
    assert norm.format == "F32"
    struct.pack_into("<f", data, norm.offset, float("inf"))
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    engine = headrace.Engine.load(path)
    with pytest.raises(headrace.NonFiniteError, match="position 2"):
        engine.generate([1, 2, 3], max_new_tokens=2)
    # The one prompt of a list that can't be gone on with is named; here that is the first.
    with pytest.raises(headrace.NonFiniteError, match=r"^prompts\[0\]: .*position 2"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert engine.stats().kv.pages == 0


def test_device_error(smollm2: Path) -> None:
    """Kernels that no processor has, asked of a process of its own: they are chosen once."""
    script = "import sys, headrace; headrace.Engine.load(sys.argv[1])"
    env = os.environ | {"HEADRACE_SIMD": "avx1024"}
    done = subprocess.run([sys.executable, "-c", script, str(smollm2)], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'DeviceError: cpu: HEADRACE_SIMD is "avx1024"; it must be' in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_SIMMD", "avx2", "HEADRACE_SIMMD: is no variable that Headrace reads"),
        ("HEADRACE_PROFILE_OPS", "yes", "HEADRACE_PROFILE_OPS = yes: must be 0 or 1"),
        ("HEADRACE_LANE_CLOCK", "", "HEADRACE_LANE_CLOCK = : must be 0 or 1"),
    ],
)
def test_an_environment_variable_that_is_not_known_or_can_not_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    model = DATA / "models" / "qwen2-Q4_0.gguf"
    headrace.plan(model, device="cpu")
    monkeypatch.setenv(name, value)
    for use in (lambda: headrace.Engine.load(model, device="cpu"), lambda: headrace.plan(model, device="cpu"), headrace.probe):
        with pytest.raises(ValueError, match=re.escape(said)):
            use()
