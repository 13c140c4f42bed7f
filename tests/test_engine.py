"""The Python surface: generation, streaming, batches, stats, interruption."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import headrace
import numpy as np
import pytest
from headrace._stats import Stats


def test_generate_text(engine: headrace.Engine) -> None:
    result = engine.generate("The capital of France is", max_new_tokens=8)
    assert result.text == engine.decode(result.token_ids)
    assert "Paris" in result.text
    assert result.finish_reason == "length"
    assert (result.stats.prompt_tokens, result.stats.new_tokens) == (5, 8)
    assert result.stats.decode_tokens == 7


def test_stop_token_ends_a_generation_and_is_left_out(engine: headrace.Engine) -> None:
    free = engine.generate("The capital of France is", max_new_tokens=12, stop_tokens=())
    stop = free.token_ids[5]
    stopped = engine.generate("The capital of France is", max_new_tokens=12, stop_tokens=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop)]


def test_context_ends_a_generation(smollm2: Path) -> None:
    engine = headrace.Engine.load(smollm2, max_context=40)
    result = engine.generate(list(range(30)), stop_tokens=())
    assert (result.finish_reason, len(result.token_ids)) == ("context", 10)


def test_stream_is_generate_in_pieces(engine: headrace.Engine) -> None:
    prompt = "Write a line with an emoji: \U0001f600 and é."
    whole = engine.generate(prompt, max_new_tokens=40)
    with engine.stream(prompt, max_new_tokens=40) as pieces:
        text = "".join(pieces)
        assert text == whole.text
        assert pieces.token_ids == list(whole.token_ids)
        assert pieces.finish_reason == whole.finish_reason


def test_two_streams_take_turns(engine: headrace.Engine) -> None:
    prompts = ["Once upon a time", "The three laws of motion are"]
    expected = [engine.generate(p, max_new_tokens=10).text for p in prompts]
    a, b = (engine.stream(p, max_new_tokens=10) for p in prompts)
    texts = ["", ""]
    for pair in zip(a, b):
        for i, piece in enumerate(pair):
            texts[i] += piece
    texts = [t + "".join(rest) for t, rest in zip(texts, (a, b), strict=True)]
    assert texts == expected


def test_a_stream_left_early_gives_its_pages_back(engine: headrace.Engine) -> None:
    stream = engine.stream("Once upon a time", max_new_tokens=100)
    next(stream)
    assert engine.stats().kv.sequences == 1
    stream.close()
    assert engine.stats().kv.sequences == 0
    stream = engine.stream("Once upon a time", max_new_tokens=100)
    next(stream)
    del stream
    assert engine.stats().kv.sequences == 0


def test_sampling_is_seeded(engine: headrace.Engine) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        return engine.generate("Once upon a time", max_new_tokens=16, temperature=1.0, top_p=0.95, seed=seed).token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_batch_shapes(engine: headrace.Engine) -> None:
    prompts: list[str | list[int]] = ["Hello", [1, 2, 3], "The capital of France is"] * 4
    batch = engine.decode_greedy_batch(prompts, max_new_tokens=5, stop_tokens=())
    assert len(batch) == 12 and batch.token_ids.shape == (12, 5) and batch.token_ids.dtype == np.int32
    assert batch.lengths.tolist() == [5] * 12
    assert batch.finish_reasons == ("length",) * 12
    assert len(engine.decode_greedy_batch([], max_new_tokens=5)) == 0


def test_each_sequence_of_a_batch_has_its_own_limit_and_stop_tokens(engine: headrace.Engine) -> None:
    prompts = [[1, 2, 3], [9] * 20, [5]]
    alone = [engine.generate(p, max_new_tokens=8, stop_tokens=()).token_ids for p in prompts]
    # The second stops at a token that the third may say; the third stops at nothing.
    stops = [(), (alone[1][4],), ()]
    batch = engine.decode_greedy_batch(prompts, max_new_tokens=[2, 8, 6], stop_tokens=stops)
    first = alone[1].index(alone[1][4])
    assert [batch[i] for i in range(3)] == [list(alone[0][:2]), list(alone[1][:first]), list(alone[2][:6])]
    assert batch.finish_reasons == ("length", "stop", "length")
    assert engine.decode_greedy_batch(prompts, max_new_tokens=np.array([1, 2, 3]), stop_tokens=()).lengths.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="max_new_tokens: 2 given for 3 prompts"):
        engine.decode_greedy_batch(prompts, max_new_tokens=[1, 2])
    with pytest.raises(ValueError, match="stop_tokens: 1 given for 3 prompts"):
        engine.decode_greedy_batch(prompts, max_new_tokens=1, stop_tokens=[(3,)])


def test_logits_rows(engine: headrace.Engine) -> None:
    rows = engine.logits([[1, 2, 3], [4, 5]])
    assert rows.shape == (5, engine.vocab_size) and rows.dtype == np.float32
    last = engine.logits([[1, 2, 3], [4, 5]], last_only=True)
    assert np.array_equal(last, rows[[2, 4]])


def test_stats_count_a_window_and_keep_gauges(engine: headrace.Engine) -> None:
    engine.reset_stats()
    engine.generate([1] * 10, max_new_tokens=4, stop_tokens=())
    s = engine.stats()
    assert (s.tokens.prompt, s.tokens.emitted, s.tokens.steps, s.tokens.rows) == (10, 4, 4, 13)
    assert s.tokens.generations == 1
    assert s.weights.referenced_bytes == engine.plan.model.weight_bytes
    assert s.weights.host_computed_bytes == 4 * engine.plan.model.step_bytes
    assert s.weights.streamed_bytes == 0 and s.weights.byte_hit_rate is None
    assert s.kv.bucket_pages >= 1 and s.kv.growth_moved_bytes == 0
    # Bytes over time must stay below what any machine's memory gives: a broken clock or counter would show here.
    rate = 3 * engine.plan.model.step_bytes / s.time.decode_seconds
    assert 1e6 < rate < 2e12
    engine.reset_stats()
    s = engine.stats()
    assert (s.tokens.prompt, s.tokens.steps, s.time.decode_seconds) == (0, 0, 0.0)
    assert s.weights.referenced_bytes > 0 and s.contract_version >= 1


def test_stats_are_typed_frozen_and_picklable(engine: headrace.Engine) -> None:
    s = engine.stats()
    assert pickle.loads(pickle.dumps(s)) == s
    assert Stats.from_dict(s.as_dict()) == s
    with pytest.raises(AttributeError):
        s.tokens = None  # type: ignore[misc, assignment]
    with pytest.raises(TypeError, match="fields differ"):
        Stats.from_dict(s.as_dict() | {"unknown": 1})


def test_ctrl_c_ends_a_call_and_leaves_the_engine(engine: headrace.Engine) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1] * 100, max_new_tokens=8000, stop_tokens=())
    assert time.monotonic() - start < 20
    assert engine.stats().kv.sequences == 0
    assert len(engine.generate([1, 2], max_new_tokens=2, stop_tokens=()).token_ids) == 2


def test_other_threads_run_while_a_call_computes(engine: headrace.Engine) -> None:
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    engine.generate([1] * 200, max_new_tokens=40, stop_tokens=())
    done.set()
    thread.join()
    assert ticks > 20


def test_chat_template(engine: headrace.Engine) -> None:
    text = engine.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_plan_equals_the_engine_s_own(engine: headrace.Engine, smollm2: Path) -> None:
    plan = headrace.plan(smollm2)
    assert plan == engine.plan
    assert len(plan.model.tensors) == 272
    assert [t.order for t in plan.model.tensors] == list(range(272))
    assert sum(t.bytes for t in plan.model.tensors) == plan.model.weight_bytes < plan.model.file_bytes
