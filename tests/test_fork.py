"""An engine in a forked child: refused in words at every entry, without hanging; a new engine there works."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace

MODELS = Path(__file__).parent / "data" / "models"
MODEL = MODELS / "qwen2-Q4_0.gguf"
PROMPT = [1, 2, 3]
SECONDS = 60

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    # Python says so of every fork of a process with threads, which is what this is about.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, which ends as `multiprocessing`'s do; fails if it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # A child that hangs dies, and its stack says where.
            faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
            signal.alarm(SECONDS)
            try:
                answer: tuple[bool, Any] = (True, work())
            except BaseException:
                answer = (False, traceback.format_exc())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(answer, pipe)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text, "the child hung or died"
    ok, answer = pickle.loads(text)
    assert ok, answer
    return answer


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(headrace.EngineFailedError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "host-device"])
def test_every_entry_says_so_and_nothing_hangs(device: Any) -> None:
    engine = headrace.Engine.load(MODEL, device=device, threads=2, max_context=64, max_batch=2)
    expected = engine.generate(PROMPT, max_new_tokens=8).token_ids
    stream = engine.stream(PROMPT, max_new_tokens=8)
    first = next(iter(stream))
    server = engine.serve()
    request = server.submit(PROMPT, max_new_tokens=8)
    request.result()

    def child() -> list[str]:
        nonlocal engine, stream, server, request
        calls: list[Callable[[], Any]] = [
            lambda: engine.generate(PROMPT, max_new_tokens=2),
            lambda: engine.generate([PROMPT, PROMPT], max_new_tokens=2),
            lambda: engine.decode_greedy_batch([PROMPT], max_new_tokens=2),
            lambda: engine.logits([PROMPT]),
            lambda: engine.stream(PROMPT, max_new_tokens=2),
            lambda: next(iter(stream)),
            lambda: engine.serve(),
            lambda: server.submit(PROMPT, max_new_tokens=2),
            lambda: request.result(),
            lambda: engine.stats(),
            lambda: engine.reset_stats(),
            lambda: engine.plan,
            lambda: engine.set_vram_limit("1GiB"),
        ]
        said = [refusal(call) for call in calls]
        # Ends of all kinds: they wait for nothing.
        stream.close()
        server.close()
        assert server.closed and request.done
        del engine, stream, server, request, calls
        gc.collect()
        return said

    for text in in_fork(child):
        assert "fork" in text and '"spawn"' in text, text
    # The parent's go on.
    assert engine.generate(PROMPT, max_new_tokens=8).token_ids == expected
    rest = [piece for piece in stream]
    assert first is not None and tuple(stream.token_ids) == tuple(expected), rest
    server.close()


@pytest.mark.parametrize("device", ["cpu", "host-device"])
def test_a_new_engine_in_the_child_works(device: Any) -> None:
    engine = headrace.Engine.load(MODEL, device=device, threads=2, max_context=64)
    expected = engine.generate(PROMPT, max_new_tokens=8).token_ids

    def child() -> tuple[list[int], int]:
        own = headrace.Engine.load(MODEL, device=device, threads=2, max_context=64)
        tokens = own.generate(PROMPT, max_new_tokens=8).token_ids
        memory = own.stats().memory
        # The parent's engine has no part in the child's books.
        return list(tokens), sum("of engine" in holder.name for pool in memory for holder in pool.holders)

    assert in_fork(child) == (list(expected), 0)


def test_a_fork_in_the_middle_of_another_thread_s_call() -> None:
    import threading

    engine = headrace.Engine.load(MODEL, device="cpu", threads=2, max_context=512)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            engine.generate(PROMPT, max_new_tokens=200)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            # The other thread holds the engine's lock most of the time: in the child it stays locked.
            text = in_fork(lambda: refusal(lambda: engine.generate(PROMPT, max_new_tokens=1)))
            assert "fork" in text
    finally:
        stop.set()
        thread.join()


def test_multiprocessing_s_fork_method() -> None:
    import multiprocessing

    engine = headrace.Engine.load(MODEL, device="cpu", threads=2, max_context=64)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(refusal(lambda: engine.generate(PROMPT, max_new_tokens=1))))
    process.start()
    assert receive.poll(SECONDS), "the child hangs"
    assert '"spawn"' in receive.recv()
    process.join(SECONDS)
    assert process.exitcode == 0
