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

    def _update(self, prompt_done: int, prompt_total: int, new_tokens: int) -> None:
        if self._bars is None:
            if time.monotonic() - self._start < DELAY_SECONDS:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
            self._prompt = self._bars.add_task("prompt", total=prompt_total)
            self._new = self._bars.add_task("tokens", total=self._new_total)
        self._bars.update(self._prompt, completed=prompt_done, total=prompt_total)
        self._bars.update(self._new, completed=new_tokens)

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
