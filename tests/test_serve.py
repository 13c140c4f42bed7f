"""Continuous generation from Python: threads, event loops, lists, cancellation, errors, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import headrace
import numpy as np
import pytest
from conftest import DATA, ROOT

sys.path.insert(0, str(ROOT / "benches" / "gpu"))
import mixes  # noqa: E402

TINY = DATA / "models" / "qwen3-Q4_1.gguf"
PROMPTS = [[(7 * i + j * (i % 5 + 1)) % 250 + 3 for j in range(3 + 9 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def tiny() -> headrace.Engine:
    return headrace.Engine.load(TINY, device="cpu", max_batch=4, prefill_chunk=16, max_context=256, threads=1)


@pytest.fixture(scope="module")
def alone(tiny: headrace.Engine) -> list[tuple[int, ...]]:
    return [tiny.generate(p, max_new_tokens=5 + i, stop_tokens=()).token_ids for i, p in enumerate(PROMPTS)]


def submit_all(server: headrace.Server, **options: object) -> list[headrace.Request]:
    return [
        server.submit(p, max_new_tokens=5 + i, stop_tokens=(), **options)  # type: ignore[arg-type]
        for i, p in enumerate(PROMPTS)
    ]


def test_results_are_those_of_each_alone(tiny: headrace.Engine, alone: list[tuple[int, ...]]) -> None:
    with tiny.serve() as server:
        requests = submit_all(server)
        for request, expected in zip(requests, alone, strict=True):
            result = request.result(timeout=60)
            assert result.token_ids == expected and tuple(request.token_ids) == expected
            assert request.done and request.finish_reason == result.finish_reason == "length"
        assert [r.number for r in requests] == list(range(len(PROMPTS)))
        waits = [r.waited_steps for r in requests]
        assert waits[:4] == [0] * 4 and waits == sorted(waits, key=lambda w: w or 0)
    assert server.closed and tiny.stats().kv.sequences == 0
    with pytest.raises(headrace.HeadraceError, match="closed"):
        server.submit([1], max_new_tokens=1)


def test_tokens_come_one_by_one_in_threads(tiny: headrace.Engine, alone: list[tuple[int, ...]]) -> None:
    got: dict[int, list[int]] = {}

    def take(i: int) -> None:
        request = server.submit(PROMPTS[i], max_new_tokens=5 + i, stop_tokens=(), speculation=i % 3)
        got[i] = list(request)

    with tiny.serve() as server:
        threads = [threading.Thread(target=take, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert [tuple(got[i]) for i in range(len(PROMPTS))] == alone


def test_tokens_come_one_by_one_in_an_event_loop(tiny: headrace.Engine, alone: list[tuple[int, ...]]) -> None:
    async def take(server: headrace.Server, i: int) -> tuple[int, ...]:
        request = server.submit(PROMPTS[i], max_new_tokens=5 + i, stop_tokens=())
        tokens = [token async for token in request]
        assert list((await request).token_ids) == tokens
        return tuple(tokens)

    async def all_of_them() -> list[tuple[int, ...]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        async with tiny.serve() as server:
            results = await asyncio.gather(*(take(server, i) for i in range(len(PROMPTS))))
        ticking.cancel()
        # The loop was free all the time.
        assert ticks > 50
        return list(results)

    assert asyncio.run(all_of_them()) == alone
    # A second loop on the same engine, and one that only awaits.
    assert asyncio.run(all_of_them()) == alone


def test_waiting_for_one_token_is_cancelled_by_a_timeout_and_leaves_the_request(tiny: headrace.Engine) -> None:
    async def run() -> None:
        async with tiny.serve() as server:
            slow = [server.submit([1, 2, 3], max_new_tokens=200, stop_tokens=()) for _ in range(8)]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(slow[-1].__anext__(), timeout=0.001)
            for request in slow[:-1]:
                request.cancel()
            assert await slow[-1].__anext__() >= 0
            slow[-1].cancel()
            assert (await slow[-1]).finish_reason == "cancelled"

    asyncio.run(run())


def test_pieces_are_the_text(smollm2: Path, engine: headrace.Engine) -> None:
    prompt = "Write a line with an emoji: \U0001f600 and é."
    whole = engine.generate(prompt, max_new_tokens=40)

    async def collect(server: headrace.Server) -> str:
        return "".join([piece async for piece in server.submit(prompt, max_new_tokens=40).pieces()])

    with engine.serve() as server:
        assert "".join(server.submit(prompt, max_new_tokens=40).pieces()) == whole.text
        assert asyncio.run(collect(server)) == whole.text
        assert server.submit(prompt, max_new_tokens=40).result().text == whole.text


def test_cancelled_requests_keep_what_they_had(tiny: headrace.Engine) -> None:
    expected = tiny.generate([5, 6, 7], max_new_tokens=200, stop_tokens=()).token_ids
    with tiny.serve() as server:
        request = server.submit([5, 6, 7], max_new_tokens=200, stop_tokens=())
        waiting = [server.submit([5, 6, 7], max_new_tokens=200, stop_tokens=()) for _ in range(6)]
        first = [next(request) for _ in range(3)]
        request.cancel()
        result = request.result(timeout=60)
        assert result.finish_reason == "cancelled" and len(result.token_ids) >= 3
        assert tuple(first) == expected[:3] and result.token_ids == expected[: len(result.token_ids)]
        assert list(request) == list(result.token_ids[3:])
        waiting[-1].cancel()
        last = waiting[-1].result(timeout=60)
        assert (last.token_ids, last.finish_reason) == ((), "cancelled")
        # Letting go of a request cancels it.
        kept = waiting[0]
        del waiting
        assert kept.result(timeout=60).token_ids == expected
    assert tiny.stats().kv.sequences == 0


def test_leaving_by_an_exception_cancels(tiny: headrace.Engine) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        with tiny.serve() as server:
            request = server.submit([1, 2], max_new_tokens=250, stop_tokens=())
            next(request)
            raise RuntimeError("enough")
    assert request.result().finish_reason == "cancelled"
    server.close()
    assert tiny.stats().kv.sequences == 0


def test_wrong_requests_are_refused_at_once(tiny: headrace.Engine) -> None:
    with tiny.serve() as server:
        with pytest.raises(headrace.ContextLengthError):
            server.submit([1] * 250, max_new_tokens=50)
        for prompt, options, text in [
            ([], {}, "prompt"),
            ([10**6], {}, "vocabulary"),
            ([1], {"temperature": -1.0}, "temperature"),
            ([1], {"speculation": 2, "temperature": 1.0}, "speculation"),
        ]:
            with pytest.raises(ValueError, match=text):
                server.submit(prompt, max_new_tokens=5, **options)  # type: ignore[arg-type]
        assert server.submit([1], max_new_tokens=0).result(timeout=60).token_ids == ()
        with pytest.raises(TimeoutError):
            server.submit([1, 2], max_new_tokens=250, stop_tokens=()).result(timeout=0.0)


def test_the_engine_stays_usable_beside_its_server(tiny: headrace.Engine, alone: list[tuple[int, ...]]) -> None:
    with tiny.serve() as server:
        requests = submit_all(server)
        other = tiny.generate(PROMPTS[3], max_new_tokens=8, stop_tokens=())
        assert other.token_ids == alone[3]
        assert tiny.stats().tokens.steps > 0
        assert tiny.logits([[1, 2, 3]]).shape == (3, tiny.vocab_size)
        assert [r.result(timeout=60).token_ids for r in requests] == alone


def test_a_list_of_prompts(tiny: headrace.Engine, engine: headrace.Engine, alone: list[tuple[int, ...]]) -> None:
    results = tiny.generate(PROMPTS, max_new_tokens=9, stop_tokens=())
    assert [r.token_ids[:5] for r in results] == [a[:5] for a in alone]
    assert [r.stats.prompt_tokens for r in results] == [len(p) for p in PROMPTS]
    texts = ["The capital of France is", "Once upon a time", "Hello"]
    both = [engine.generate(t, max_new_tokens=6) for t in texts]
    assert [r.text for r in engine.generate(texts, max_new_tokens=6)] == [r.text for r in both]
    assert engine.generate(tuple(texts[:1]), max_new_tokens=6)[0].text == both[0].text
    with pytest.raises(ValueError, match="prompt"):
        tiny.generate([[1], []], max_new_tokens=2)
    # One prompt is one prompt, whatever holds its ids, and so are many.
    one = np.array(PROMPTS[2])
    assert tiny.generate(one, max_new_tokens=7, stop_tokens=()).token_ids == alone[2]  # type: ignore[call-overload]
    assert tiny.generate([one], max_new_tokens=7, stop_tokens=())[0].token_ids == alone[2]  # type: ignore[call-overload]
    assert tiny.generate([[1, 2]], max_new_tokens=0)[0].token_ids == ()


def test_a_list_shows_its_progress(tiny: headrace.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace import _progress

    monkeypatch.setattr(_progress, "DELAY_SECONDS", 0.0)
    seen: list[tuple[int, int, int]] = []
    update = _progress.GenerationProgress._update
    monkeypatch.setattr(
        _progress.GenerationProgress, "_update", lambda self, *p: (seen.append(p), update(self, *p))[1]
    )
    prompts = [PROMPTS[i % 12] for i in range(300)]
    tiny.generate(prompts, max_new_tokens=20, stop_tokens=(), progress=True)
    assert seen and all(total == sum(map(len, prompts)) for _, total, _ in seen)
    assert seen == sorted(seen) and seen[-1][2] <= 300 * 20


def test_speculation_changes_steps_and_nothing_else(engine: headrace.Engine) -> None:
    prompt = "one two three four five six seven eight nine ten, one two three four five six seven"
    plain = engine.generate(prompt, max_new_tokens=48, keep_logits=True)
    engine.reset_stats()
    drafted = engine.generate(prompt, max_new_tokens=48, speculation=6, keep_logits=True)
    stats = engine.stats().tokens
    assert drafted.token_ids == plain.token_ids and drafted.finish_reason == plain.finish_reason
    assert plain.logits is not None and drafted.logits is not None
    assert np.array_equal(plain.logits, drafted.logits)
    assert 0 < stats.accepted <= stats.drafted and stats.accepted_per_draft == stats.accepted / stats.drafts
    assert stats.steps == stats.emitted - stats.accepted
    assert (drafted.stats.drafted_tokens, drafted.stats.accepted_tokens) == (stats.drafted, stats.accepted)
    stop = plain.token_ids[20]
    for speculation in (0, 6):
        with engine.stream(prompt, max_new_tokens=48, stop_tokens=[stop], speculation=speculation) as stream:
            text = "".join(stream)
            assert stream.token_ids == list(plain.token_ids[: plain.token_ids.index(stop)])
            assert text == engine.decode(stream.token_ids)


@pytest.mark.parametrize("layout", ["head-major", "seq-major"])
@pytest.mark.parametrize("limit", [None, "smallest"])
def test_random_mixes_equal_each_alone(limit: str | None, layout: str) -> None:
    small = {"piece_bytes": 4096, "ring_slots": 2, "threads": 1}
    rows = mixes.check(
        TINY, device="host-device", limits=[limit], layouts=[layout], chunks=[1, 64, 512], seed=3, **small
    )
    assert len(rows) == 3 and all(row["equal"] for row in rows)
    assert (sum(row["streamed"] for row in rows) > 0) == (limit is not None)
    assert sum(row["accepted"] for row in rows) > 0


def test_ctrl_c_ends_a_wait_and_closing_cancels() -> None:
    script = f"""
import sys, headrace
engine = headrace.Engine.load({str(TINY)!r}, device="cpu", max_context=256)
try:
    with engine.serve() as server:
        requests = [server.submit([1, 2], max_new_tokens=250, stop_tokens=()) for _ in range(2000)]
        print("waiting", flush=True)
        requests[-1].result()
except KeyboardInterrupt:
    assert requests[-1].result().finish_reason == "cancelled"
    print("interrupted", len(engine.generate([1, 2], max_new_tokens=3, stop_tokens=()).token_ids), engine.stats().kv.sequences)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    os.kill(child.pid, signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted 3 0\n"
    assert child.returncode == 0


def test_a_server_that_nobody_closes_does_not_keep_the_process() -> None:
    script = f"""
import headrace
engine = headrace.Engine.load({str(TINY)!r}, device="cpu", max_context=256)
server = engine.serve()
requests = [server.submit([1, 2], max_new_tokens=250, stop_tokens=()) for _ in range(2000)]
print(next(requests[0]) >= 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_example_runs(smollm2: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serve.py"), str(smollm2)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Paris") == 3 and "after a wait of" in done.stdout
