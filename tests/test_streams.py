"""Streams that are closed, and streams that several threads use."""

from __future__ import annotations

import threading
import time

import headrace
import pytest
from conftest import DATA

TINY = DATA / "models" / "qwen3-Q4_1.gguf"


@pytest.fixture(scope="module")
def tiny() -> headrace.Engine:
    return headrace.Engine.load(TINY, device="cpu", threads=1)


def test_a_closed_stream_has_ended(tiny: headrace.Engine) -> None:
    for taken in (0, 3):
        stream = tiny.stream([1, 2], max_new_tokens=50, stop_tokens=())
        for _ in range(taken):
            next(stream)
        ids = stream.token_ids
        assert len(ids) >= taken
        stream.close()
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(stream)
        assert list(stream) == [] and stream.token_ids == ids
        stream.close()
        assert tiny.stats().kv.sequences == 0


def test_a_stream_that_has_ended_stays_so(tiny: headrace.Engine) -> None:
    with tiny.stream([1, 2], max_new_tokens=3, stop_tokens=()) as stream:
        list(stream)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(stream)
        assert stream.finish_reason == "length" and len(stream.token_ids) == 3
    assert tiny.stream([1], max_new_tokens=0).finish_reason == "length"


def test_a_stream_in_several_threads_says_that_it_is_for_one(engine: headrace.Engine) -> None:
    """Also the tokens so far and the end can be asked for at any time, and by any thread."""
    expected = engine.generate([1, 2, 3], max_new_tokens=60, stop_tokens=())
    stream = engine.stream([1, 2, 3], max_new_tokens=60, stop_tokens=())
    pieces: list[str] = []
    errors: list[BaseException] = []
    refused = threading.Event()

    def take() -> None:
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration:
                return
            except headrace.HeadraceError as error:
                errors.append(error)
                refused.set()
            except BaseException as error:
                errors.append(error)
                return

    def ask() -> None:
        while stream.finish_reason is None:
            ids = stream.token_ids
            if tuple(ids) != expected.token_ids[: len(ids)]:
                errors.append(AssertionError(ids))
                return

    threads = [threading.Thread(target=f) for f in (take, take, take, take, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused.is_set(), "no thread met another one: the test shows nothing"
    for error in errors:
        assert isinstance(error, headrace.HeadraceError) and "thread" in str(error) and "borrowed" not in str(error), error
    # Whatever they met, nothing was lost or given twice.
    assert len("".join(pieces)) == len(expected.text) and tuple(stream.token_ids) == expected.token_ids
    assert stream.finish_reason == "length" and engine.stats().kv.sequences == 0


def test_a_stream_closed_by_another_thread_ends(engine: headrace.Engine) -> None:
    for delay in (0.0, 0.001, 0.01, 0.03):
        stream = engine.stream([1, 2, 3], max_new_tokens=8000, stop_tokens=())
        ended = threading.Event()

        def take(stream: headrace.Stream = stream, ended: threading.Event = ended) -> None:
            for _ in stream:
                pass
            ended.set()

        thread = threading.Thread(target=take)
        thread.start()
        time.sleep(delay)
        stream.close()
        thread.join(timeout=30)
        assert ended.is_set()
        assert engine.stats().kv.sequences == 0 and stream.finish_reason is None


def test_the_text_of_a_request_in_several_threads(tiny: headrace.Engine) -> None:
    """No object of the core says that it is borrowed."""
    errors: list[BaseException] = []
    with tiny.serve() as server:
        request = server.submit([1, 2, 3], max_new_tokens=300, stop_tokens=())
        pieces = request.pieces()

        def take() -> None:
            try:
                for _ in pieces:
                    request.token_ids, request.done, request.waited_steps  # noqa: B018
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert request.result().finish_reason == "length"
    assert not errors


def test_every_class_of_the_core_may_be_shared_between_threads() -> None:
    """Their state is behind locks of their own. PyO3's borrowing, which fails in a second thread, is not in use."""
    from pathlib import Path

    sources = Path(__file__).resolve().parents[1].glob("crates/python/src/*.rs")
    text = "".join(path.read_text() for path in sources)
    classes = [line for line in text.splitlines() if line.startswith("#[pyclass")]
    assert len(classes) >= 5 and all("frozen" in line for line in classes), classes
