"""What every script of this folder asks of an engine's own instruments, and of the header of its JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import headrace

sys.path.append(str(Path(__file__).resolve().parents[1]))

import header as _header  # noqa: E402  (benches/header.py)

add_arguments, header = _header.add_arguments, _header.header

HBM = 4814.3
"""GB/s that the memory's clock and width allow on an H200, the one ceiling that figures are held against: what the driver says
(`headrace probe`: `memory_peak`; `stats().clock.memory_ceiling`)."""
LINK = 55.1
"""GB/s that the H200's link carries in copies of 32 MiB, as `headrace probe` measured it."""


class BrokenInstrument(AssertionError):
    """A rate above its ceiling: nothing that this clock says can be used."""


def sound(engine: headrace.Engine) -> headrace.Stats:
    """The engine's stats. Raises `BrokenInstrument` if a clock of it says more than the machine can do."""
    stats = engine.stats()
    if stats.clock.broken_instruments:
        raise BrokenInstrument("; ".join(stats.clock.broken_instruments))
    return stats
