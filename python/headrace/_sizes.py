"""Sizes as people write them: bytes, "8GiB", "750 MB", "80%"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A percentage of a memory, as a share of 1."""

    part: Fraction

    def of(self, total: int) -> int:
        """Bytes of a memory of `total` bytes."""
        return int(self.part * total)


def read_size(text: str) -> int | Share | None:
    """Bytes of a number with or without a unit (KB, MiB, GiB, ...), a share for a percentage, `None` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", text, re.ASCII)
    if match is None:
        return None
    # Exact: a large number of bytes is not rounded to a float.
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        return Share(number / 100)
    return int(number * _UNITS[unit]) if unit in _UNITS else None
