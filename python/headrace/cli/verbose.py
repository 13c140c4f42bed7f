"""`-v`: what the core says, on standard error."""

from __future__ import annotations

import logging
import sys

import click


class _Lines(logging.Handler):
    """A line a message. Looks for `sys.stderr` each time: while something spins on a terminal, another one stands there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _listen(context: click.Context, parameter: click.Parameter, times: int) -> None:
    logger = logging.getLogger("headrace")
    if times and not any(isinstance(handler, _Lines) for handler in logger.handlers):
        handler = _Lines()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if times:
        level = logging.INFO if times == 1 else logging.DEBUG
        logger.setLevel(min(level, logger.level or level))


verbose = click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    callback=_listen,
    help="Say what is decided, on standard error; -vv says more.",
)
