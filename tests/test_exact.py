"""Bits that may not depend on threads, SIMD level, chunk size, batch, layout, or what ran before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import headrace
import numpy as np
import numpy.typing as npt
import pytest
from conftest import golden

LONG = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"]


def logits(path: Path, ids: list[int], **options: object) -> npt.NDArray[np.float32]:
    return headrace.Engine.load(path, **options).logits([ids])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(engine: headrace.Engine) -> npt.NDArray[np.float32]:
    return engine.logits([LONG])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads(smollm2: Path, expected: npt.NDArray[np.float32], threads: int) -> None:
    assert np.array_equal(logits(smollm2, LONG, threads=threads), expected)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_prefill_chunks(smollm2: Path, expected: npt.NDArray[np.float32], chunk: int) -> None:
    assert np.array_equal(logits(smollm2, LONG, prefill_chunk=chunk), expected)


def test_kv_layouts(smollm2: Path, expected: npt.NDArray[np.float32]) -> None:
    assert np.array_equal(logits(smollm2, LONG, kv_layout="seq-major"), expected)


@pytest.mark.parametrize("level", ["scalar", "avx2"])
def test_simd_levels(smollm2: Path, expected: npt.NDArray[np.float32], level: str, tmp_path: Path) -> None:
    """Each level in a process of its own: the level is chosen once. 40 tokens, the scalar level being slow."""
    script = (
        "import sys, numpy, headrace; "
        f"numpy.save(sys.argv[2], headrace.Engine.load(sys.argv[1]).logits([{LONG[:40]}]))"
    )
    env = os.environ | {"HEADRACE_SIMD": level}
    done = subprocess.run(
        [sys.executable, "-c", script, str(smollm2), str(tmp_path / "out.npy")],
        env=env, capture_output=True, text=True,
    )
    if "this processor offers" in done.stderr:
        pytest.skip(f"this processor has no {level}")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected[:40])


def test_batch_rows_equal_single_rows(engine: headrace.Engine) -> None:
    prompts = [LONG[:n] for n in (1, 40, 13, 200, 7)]
    batch = engine.decode_greedy_batch(prompts, max_new_tokens=12, stop_tokens=())
    for row, prompt in enumerate(prompts):
        alone = engine.generate(prompt, max_new_tokens=12, stop_tokens=())
        assert batch[row] == list(alone.token_ids)


def test_generations_leave_nothing_behind(engine: headrace.Engine, expected: npt.NDArray[np.float32]) -> None:
    first = engine.generate(LONG[:50], max_new_tokens=20, stop_tokens=())
    engine.generate(LONG, max_new_tokens=3, stop_tokens=())
    second = engine.generate(LONG[:50], max_new_tokens=20, stop_tokens=())
    assert first.token_ids == second.token_ids
    assert np.array_equal(engine.logits([LONG]), expected)
    assert engine.stats().kv.pages == 0
