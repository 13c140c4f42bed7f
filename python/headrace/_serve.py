"""Continuous generation: requests from threads and event loops, joining and leaving while others decode."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from headrace import _core
from headrace._arguments import prompts as prompt_arguments
from headrace._arguments.kinds import made_by
from headrace._arguments.tables import FLAG, TIMEOUT
from headrace._options import drawn_seed, generate_options
from headrace._results import FinishReason, Generation, generation

if TYPE_CHECKING:
    from headrace._engine import Engine

T = TypeVar("T")


class Server:
    """Continuous generation on an engine, from any number of threads and event loops. Made by `Engine.serve`.

    Requests start in the order in which they came: each as soon as one of the engine's `max_batch` seats is free and all
    the KV memory that it may come to need is promised to nobody else, and none before an earlier one. So what has started
    always reaches its end, and what waits does so for a bounded number of steps. Prompts are worked off in chunks beside
    the others' decoding. Every request gives the tokens that it gives alone, bit for bit.

        with engine.serve() as server:
            requests = [server.submit(p, max_new_tokens=64) for p in prompts]
            for request in requests:
                print(request.result().text)

    Leaving the `with` block waits for what was submitted; leaving it by an exception cancels that. The engine may be used
    otherwise meanwhile: other calls take turns with the server's steps.
    """

    def __init__(self, engine: Engine, inner: _core.Server) -> None:
        """Not for use: see `Engine.serve`."""
        made_by("engine.serve()", inner, _core.Server)
        self._engine = engine
        self._inner = inner
        self._wakeups = _Wakeups(inner)
        # A server that nobody holds any more ends; at the latest before the interpreter goes away.
        self._finalizer = weakref.finalize(self, inner.close, True)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        keep_logits: bool = False,
    ) -> Request:
        """Takes a request and returns at once. Arguments as for `Engine.generate`.

        A request without `max_new_tokens` is promised memory for the whole of `max_context`, and waits until there is so
        much: give a maximum wherever there is one.

        Raises:
            ContextLengthError: Prompt and `max_new_tokens` don't fit `max_context`.
            ValueError: An argument is out of range.
            TypeError: An argument is of another type.
            HeadraceError: The server is closed.
        """
        checked = prompt_arguments.prompt("prompt", prompt, self._engine.vocab_size)
        options = generate_options(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=self._engine._stop_tokens(stop_tokens),
            speculation=speculation,
            keep_logits=keep_logits,
        )
        return Request(self, self._inner.submit(self._engine._prompt_ids(checked), options), drawn_seed(options))

    def close(self, *, cancel: bool = False) -> None:
        """Takes no further request, and returns once all have ended. `cancel` ends them now, and so does Ctrl-C."""
        self._inner.close(FLAG.check("cancel", cancel))
        self._finalizer.detach()

    @property
    def closed(self) -> bool:
        """True once it takes no further request."""
        return self._inner.closed

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In a thread of its own: the event loop goes on serving those who wait for tokens.
        await asyncio.to_thread(self.close, cancel=kind is not None)


class Request:
    """One request to a `Server`. Made by `Server.submit`.

    Iterating gives its tokens as they are chosen, in a thread (`for token in request`) or an event loop (`async for token
    in request`); `pieces()` gives text instead. `result()` and `await request` give everything at its end. What a request
    failed with is raised by each of them. A request that nobody holds any more is cancelled.
    """

    def __init__(self, server: Server, inner: _core.Request, seed: int | None) -> None:
        """Not for use: see `Server.submit`."""
        made_by("server.submit(...)", inner, _core.Request)
        self._server = server
        self._seed = seed
        self._inner = inner
        self._given = 0

    def cancel(self) -> None:
        """Ends it now, whatever it is at. What it gave so far is its result, with `finish_reason` `"cancelled"`."""
        self._inner.cancel()

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for its end. Raises `TimeoutError` after `timeout` seconds."""
        row = self._inner.result(TIMEOUT.check("timeout", timeout))
        if row is None:
            raise TimeoutError(f"request {self.number} has not ended within {timeout} seconds")
        return generation(row, self._server._engine, self._seed)

    @property
    def number(self) -> int:
        """Its number on its server, from 0; later requests have larger ones."""
        return self._inner.number

    @property
    def seed(self) -> int | None:
        """The seed that its tokens are drawn with; `None` where the choice is greedy."""
        return self._seed

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far, without the stop token."""
        return self._inner.token_ids

    @property
    def done(self) -> bool:
        """True once it has ended."""
        return self._inner.done

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; `None` while it goes on."""
        return self.result().finish_reason if self.done else None

    @property
    def waited_steps(self) -> int | None:
        """Steps that it waited for its start; `None` if it hasn't started."""
        return self._inner.waited_steps

    def pieces(self) -> Pieces:
        """Its text piece by piece, for `for` and `async for`. A piece always holds whole characters."""
        return Pieces(self)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        token = self._inner.wait(self._given)
        if token is None:
            raise StopIteration
        self._given += 1
        return token

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        token = await self._server._wakeups.wait(self.number, lambda: self._inner.poll(self._given))
        if token is None:
            raise StopAsyncIteration
        self._given += 1
        return token

    def __await__(self) -> Generator[None, None, Generation]:
        return self._finished().__await__()

    async def _finished(self) -> Generation:
        # No token comes at a place beyond every context: the answer is the end.
        await self._server._wakeups.wait(self.number, lambda: self._inner.poll(1 << 62))
        return self.result()


class Pieces:
    """The text of a request, piece by piece. Made by `Request.pieces`."""

    def __init__(self, request: Request) -> None:
        """Not for use: see `Request.pieces`."""
        self._request = request
        self._text = request._server._engine._inner.text_stream()
        self._at_end = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._at_end:
            raise StopIteration
        for token in self._request:
            if piece := self._text.push(token):
                return piece
        self._at_end = True
        if rest := self._text.finish():
            return rest
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if self._at_end:
            raise StopAsyncIteration
        async for token in self._request:
            if piece := self._text.push(token):
                return piece
        self._at_end = True
        if rest := self._text.finish():
            return rest
        raise StopAsyncIteration


class _Wakeups:
    """Carries news of requests to the event loops that wait for them, by one thread for all of them.

    The engine's thread takes the GIL for no token (only to log): it leaves a number in a channel, and this thread, which
    waits there without the GIL, wakes the loops.
    """

    def __init__(self, inner: _core.Server) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._waiting: dict[int, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._thread: threading.Thread | None = None

    async def wait(self, number: int, poll: Callable[[], tuple[bool, T | None]]) -> T | None:
        """What `poll` finds, asked again whenever there is news of the request."""
        loop = asyncio.get_running_loop()
        while True:
            news: asyncio.Future[None] = loop.create_future()
            # Known before the question is asked: so no answer that comes in between is missed.
            with self._lock:
                self._waiting.setdefault(number, []).append((loop, news))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="headrace-wake", daemon=True)
                    self._thread.start()
            try:
                found, value = poll()
                if found:
                    return value
                await news
            finally:
                with self._lock:
                    left = [entry for entry in self._waiting.pop(number, []) if entry[1] is not news]
                    if left:
                        self._waiting[number] = left

    def _run(self) -> None:
        while (numbers := self._inner.next_woken()) is not None:
            for number in set(numbers):
                with self._lock:
                    waiting = list(self._waiting.get(number, ()))
                for loop, news in waiting:
                    try:
                        loop.call_soon_threadsafe(_set, news)
                    except RuntimeError:
                        # That loop was closed: nobody waits there.
                        pass


def _set(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
