"""Seeds: a fresh one by default, in the result, so that any run can be repeated; none where nothing is drawn."""

from __future__ import annotations

import pickle

import headrace
import pytest
from conftest import DATA

TINY = DATA / "models" / "qwen3-Q4_1.gguf"
DRAW = {"max_new_tokens": 12, "temperature": 1.0, "stop_tokens": ()}


@pytest.fixture(scope="module")
def tiny() -> headrace.Engine:
    return headrace.Engine.load(TINY, device="cpu", threads=1)


def test_samples_differ_and_can_be_repeated(tiny: headrace.Engine) -> None:
    samples = [tiny.generate([1, 2, 3], **DRAW) for _ in range(4)]  # type: ignore[call-overload]
    assert len({s.seed for s in samples}) == 4 and len({s.token_ids for s in samples}) == 4
    for s in samples:
        again = tiny.generate([1, 2, 3], **DRAW, seed=s.seed)  # type: ignore[call-overload]
        assert again.token_ids == s.token_ids and again.seed == s.seed
        assert pickle.loads(pickle.dumps(s)).seed == s.seed


def test_each_prompt_of_a_list_draws_for_itself(tiny: headrace.Engine) -> None:
    samples = tiny.generate([[1, 2, 3]] * 4, **DRAW)  # type: ignore[call-overload]
    assert len({s.token_ids for s in samples}) == 4
    assert [tiny.generate([1, 2, 3], **DRAW, seed=s.seed).token_ids for s in samples] == [s.token_ids for s in samples]  # type: ignore[call-overload]
    # One seed for all: each gives what it gives alone.
    same = tiny.generate([[1, 2, 3]] * 2, **DRAW, seed=7)  # type: ignore[call-overload]
    assert same[0].token_ids == same[1].token_ids and [s.seed for s in same] == [7, 7]


def test_streams_and_requests_tell_their_seeds(tiny: headrace.Engine) -> None:
    stream = tiny.stream([1, 2, 3], **DRAW)  # type: ignore[arg-type]
    list(stream)
    with tiny.serve() as server:
        request = server.submit([1, 2, 3], **DRAW)  # type: ignore[arg-type]
        result = request.result()
        assert result.seed == request.seed
    assert stream.seed != request.seed
    assert stream.token_ids == list(tiny.generate([1, 2, 3], **DRAW, seed=stream.seed).token_ids)  # type: ignore[call-overload]
    assert result.token_ids == tiny.generate([1, 2, 3], **DRAW, seed=request.seed).token_ids  # type: ignore[call-overload]


def test_a_greedy_generation_has_no_seed(tiny: headrace.Engine) -> None:
    for seed in (None, 3):
        assert tiny.generate([1, 2, 3], max_new_tokens=2, seed=seed).seed is None
        assert tiny.stream([1, 2, 3], max_new_tokens=2, seed=seed).seed is None


def test_the_largest_seed(tiny: headrace.Engine) -> None:
    assert tiny.generate([1, 2, 3], **DRAW, seed=2**64 - 1).seed == 2**64 - 1  # type: ignore[call-overload]
