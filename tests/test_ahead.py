"""Steps in flight on a real model: an independent engine's tokens at every depth, resident and streamed."""

from __future__ import annotations

from pathlib import Path

import headrace
import pytest
from conftest import golden
from test_limits import smallest

CASES = golden("gguf-q4_1-exact-fp64")["prompts"]
CASE = CASES["short"]
PROMPT, EXPECTED = CASE["prompt_ids"], tuple(CASE["generated_ids"])
CONTEXT = 128


def load(path: Path, depth: int | None, **options: object) -> headrace.Engine:
    options = {"device": "host-device", "max_context": CONTEXT, "max_batch": 2, "steps_in_flight": depth, **options}
    return headrace.Engine.load(path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("layout", ["head-major", "seq-major"])
def test_golden_tokens_through_the_ring(smollm2: Path, layout: str, depth: int) -> None:
    # The helper's limit is for a longer context, so it is enough here.
    engine = load(smollm2, depth, vram_limit=smallest(smollm2), kv_layout=layout)
    assert engine.generate(PROMPT, max_new_tokens=len(EXPECTED), stop_tokens=()).token_ids == EXPECTED
    stats = engine.stats()
    assert stats.weights.streamed_bytes > 0
    assert stats.device.steps_in_flight == depth
    assert (stats.tokens.steps, stats.tokens.discarded_steps) == (len(EXPECTED), 0)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_token_and_a_stream_left_early(smollm2: Path, depth: int) -> None:
    engine = load(smollm2, depth)
    # Within the first page: steps don't follow one another over the edge of what the KV holds, they let it grow first.
    stop = next(t for i, t in enumerate(EXPECTED[:20]) if i > 10 and t not in EXPECTED[:i])
    at = EXPECTED.index(stop)
    result = engine.generate(PROMPT, max_new_tokens=len(EXPECTED), stop_tokens=(stop,))
    assert (result.token_ids, result.finish_reason) == (EXPECTED[:at], "stop")
    tokens = engine.stats().tokens
    assert (tokens.steps, tokens.discarded_steps) == (at + depth, depth - 1)
    with engine.stream(PROMPT, max_new_tokens=len(EXPECTED), stop_tokens=()) as stream:
        for n, _ in enumerate(stream):
            if n == 5:
                break
    assert engine.stats().kv.sequences == 0
    # Several at once, one of which ends before the other.
    rows = engine.decode_greedy_batch([PROMPT, PROMPT[:2]], max_new_tokens=30, stop_tokens=(stop,))
    assert tuple(rows.token_ids[0][: rows.lengths[0]]) == EXPECTED[: min(at, 30)]


def test_by_default_two_while_everything_is_resident_and_one_while_weights_are_streamed(smollm2: Path) -> None:
    for options, depth in (({}, 2), ({"vram_limit": smallest(smollm2)}, 1)):
        engine = load(smollm2, None, **options)
        assert engine.generate(PROMPT, max_new_tokens=8, stop_tokens=(EXPECTED[4],)).token_ids == EXPECTED[:4]
        stats = engine.stats()
        assert stats.device.steps_in_flight == depth
        assert (stats.tokens.discarded_steps, stats.weights.streamed_bytes > 0) == (depth - 1, depth == 1)


def test_the_cpu_runs_one_step_at_a_time(smollm2: Path) -> None:
    engine = load(smollm2, 4, device="cpu")
    assert engine.stats().device.steps_in_flight == 1
    assert engine.generate(PROMPT, max_new_tokens=8, stop_tokens=()).token_ids == EXPECTED[:8]
    for wrong in (0, 9):
        with pytest.raises(ValueError, match="steps_in_flight"):
            load(smollm2, wrong)
