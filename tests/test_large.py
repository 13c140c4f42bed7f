"""A real model of a gigabyte with k-quants, Qwen2.5-Coder-1.5B Q4_K_M: golden tokens, and the same ones under limits.

Only with `--large`: the first run fetches 1.1 GB. The golden is from `tests/reference/make_coder_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

import headrace
import numpy as np
import pytest
from conftest import golden
from test_golden import compare, generated_ids

pytestmark = pytest.mark.large
NAME = "qwen2.5-coder-1.5b-exact-fp64"
CONTEXT = 256

# Largest logit error allowed, by (activations, kv_dtype): twice what was measured.
BOUNDS = {("int16", "float16"): 0.012, ("int16", "float32"): 0.001}


@pytest.fixture(scope="module")
def coder() -> Path:
    return headrace.fetch("qwen2.5-coder-1.5b")


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_logits_and_tokens_are_the_model_s_own(coder: Path, activations: str, kv_dtype: str) -> None:
    engine = headrace.Engine.load(coder, device="cpu", activations=activations, kv_dtype=kv_dtype, max_context=CONTEXT)  # type: ignore[arg-type]
    bound, free_running = BOUNDS[activations, kv_dtype], 0
    for name, case in golden(NAME)["prompts"].items():
        worst, flipped, positions = compare(engine, case)
        print(f"{name}: largest logit error {worst:.2g} of {positions} positions, {flipped.size} arg-maxima differ")
        assert worst <= bound, name
        assert (flipped <= 2 * bound).all(), name
        if case["min_margin"] > bound:
            free_running += 1
            tokens = engine.generate(case["prompt_ids"], max_new_tokens=len(generated_ids(case)), stop_tokens=()).token_ids
            assert list(tokens) == generated_ids(case), name
    assert free_running > 0


@pytest.mark.parametrize("mebibytes", [900, 450, 300])
def test_tokens_under_a_limit(coder: Path, mebibytes: int) -> None:
    limit = mebibytes << 20
    options = {"device": "host-device", "max_context": CONTEXT, "max_batch": 2, "prefill_chunk": 32, "piece_bytes": "4MiB"}
    engine = headrace.Engine.load(coder, vram_limit=limit, **options)  # type: ignore[arg-type]
    for case in golden(NAME)["prompts"].values():
        if case["min_margin"] > BOUNDS["int16", "float16"]:
            tokens = engine.generate(case["prompt_ids"], max_new_tokens=8, stop_tokens=()).token_ids
            assert list(tokens) == generated_ids(case)[:8]
    stats = engine.stats()
    (pool,) = stats.memory
    assert stats.weights.streamed_bytes > (1_000 - mebibytes) << 20
    assert pool.limit == limit and pool.peak <= limit and pool.mapped_peak <= limit
    assert pool.unaccounted == pool.oversubscribed == pool.underflows == 0
    assert np.isfinite(engine.logits([[1, 2, 3]])).all()
