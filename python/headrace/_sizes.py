"""Sizes as people write them: bytes, "8GiB", "750 MB", "80%"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip


def parse_size(name: str, value: int | str, total: int | None = None) -> int:
    """Bytes of `value`: a number of bytes, a number with a unit (KB, MiB, GiB, ...), or a percentage of `total`.

    Raises `ValueError` that names the argument `name`.
    """
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", value)
        if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
            raise ValueError(f'{name} = {value!r}: give bytes, or a size such as "8GiB", "750MB" or "80%"')
        if match[2] == "%":
            if total is None:
                raise ValueError(f"{name} = {value!r}: this device has no total memory to take a percentage of")
            size = int(float(match[1]) / 100 * total)
        else:
            size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"{name} = {value!r}: must be above 0")
    return size
