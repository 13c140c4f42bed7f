"""What the command line prints with: tables that are never cut in a pipe, and a reader that goes away."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console


class ReaderGone(Exception):
    """Nobody reads standard output any more, as after `headrace plan ... | head -1`."""


class _Tables(Console):
    def on_broken_pipe(self) -> None:
        # The library's own way ends the process with status 1.
        raise ReaderGone


def tables() -> Console:
    """Standard output for tables. A file or a pipe has no width: there nothing is cut."""
    return _Tables(width=None if sys.stdout.isatty() else 10_000)


@contextlib.contextmanager
def noticing_a_closed_pipe() -> Iterator[None]:
    """Raises `ReaderGone` for a `BrokenPipeError`, and looks for one in what was printed so far."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def drop_the_rest() -> None:
    """Sends what is still to be printed nowhere, so that the interpreter's own flush at its end finds no closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
