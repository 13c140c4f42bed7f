"""Times the public surface with the demo model: load, first token, decode, batch, plan, stats, tokens of a text.

    python -m pytest benches/python                                # with their spread
    python -m pytest benches/python --benchmark-disable            # once each, as CI does: that they run

Every function asserts that what was timed is what it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headrace
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

PROMPT = [(37 * i) % 4096 + 504 for i in range(64)]
TEXT = "The channel carries water to the wheel at a governed flow, and the miller watches the gate. " * 20
NEW = 16


def test_load(benchmark: BenchmarkFixture, model: Path, device: dict[str, Any]) -> None:
    engine = benchmark.pedantic(headrace.Engine.load, (model,), device, rounds=3)
    assert engine.vocab_size == 49_152


def test_first_token(benchmark: BenchmarkFixture, engine: headrace.Engine) -> None:
    """A prompt of 64 tokens, and its first new one."""
    result = benchmark(engine.generate, PROMPT, max_new_tokens=1, stop_tokens=())
    assert result.stats.prompt_tokens == len(PROMPT) and len(result.token_ids) == 1


def test_decode(benchmark: BenchmarkFixture, engine: headrace.Engine) -> None:
    """Sixteen tokens of one sequence."""
    result = benchmark(engine.generate, PROMPT[:1], max_new_tokens=NEW, stop_tokens=())
    assert len(result.token_ids) == NEW


def test_batch(benchmark: BenchmarkFixture, engine: headrace.Engine) -> None:
    """Sixteen tokens of each of four sequences."""
    rows = benchmark(engine.decode_greedy_batch, [PROMPT[i : i + 4] for i in range(4)], max_new_tokens=NEW, stop_tokens=())
    assert rows.token_ids.shape == (4, NEW)


def test_plan(benchmark: BenchmarkFixture, model: Path, device: dict[str, Any]) -> None:
    options = {name: value for name, value in device.items() if name != "threads"}
    plan = benchmark(headrace.plan, model, **options)
    assert (plan.memory is not None) == (device["device"] == "host-device")


def test_stats(benchmark: BenchmarkFixture, engine: headrace.Engine) -> None:
    stats = benchmark(engine.stats)
    assert stats.contract_version >= 1


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_tokens_of_a_text(benchmark: BenchmarkFixture, engine: headrace.Engine, way: str) -> None:
    ids = engine.encode(TEXT)
    if way == "encode":
        assert benchmark(engine.encode, TEXT) == ids
    else:
        assert benchmark(engine.decode, ids) == TEXT
