"""Progress of long calls on a terminal; silence anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Callback = Callable[[int, int, int], None]

DELAY_SECONDS = 1.5
"""A call that ends sooner shows nothing."""


class GenerationProgress:
    """Two bars on standard error, prompt tokens and new tokens, shown once a call has taken `DELAY_SECONDS`."""

    def __init__(self, show: bool | None, new_total: int | None) -> None:
        self._enabled = sys.stderr.isatty() if show is None else show
        self._new_total = new_total
        self._start = time.monotonic()
        self._bars: Progress | None = None

    @property
    def callback(self) -> Callback | None:
        """What the core calls between steps; `None` where nothing is to be shown."""
        return self._update if self._enabled else None

    @property
    def prompt_callback(self) -> Callable[[int, int], None] | None:
        """As `callback`, for a prompt alone."""
        return self._update_prompt if self._enabled else None

    def _update_prompt(self, done: int, total: int) -> None:
        self._update(done, total, None)

    def _update(self, prompt_done: int, prompt_total: int, new_tokens: int | None) -> None:
        if not self._enabled:
            return
        if self._bars is None:
            if time.monotonic() - self._start < DELAY_SECONDS:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
            self._prompt = self._bars.add_task("prompt", total=prompt_total)
            self._new = None if new_tokens is None else self._bars.add_task("tokens", total=self._new_total)
        self._bars.update(self._prompt, completed=prompt_done, total=prompt_total)
        if self._new is not None:
            self._bars.update(self._new, completed=new_tokens)

    def stop(self) -> None:
        """Takes the bars away. Nothing is shown afterwards."""
        self._enabled = False
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
