"""The kinds of arguments: integers, numbers, sizes, names. Each says what it takes, and words the error for anything else."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from headrace._sizes import Share, read_size

_SHOWN = 60
"""Most characters of a value in an error."""


def shown(value: object) -> str:
    """A value in an error: short, text in double quotes."""
    try:
        if isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, np.generic):
            text = repr(value.item())
        else:
            text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def wrong_value(name: str, value: object, must: str) -> ValueError:
    """The error of a value out of range."""
    return ValueError(f"{name} = {shown(value)}: must be {must}")


def wrong_type(name: str, value: object, must: str, hint: str = "") -> TypeError:
    """The error of a value of another type. `hint` says what to do."""
    return TypeError(f"{name} = {shown(value)}: must be {must}, not {type(value).__name__}{hint and '; ' + hint}")


class Argument(ABC):
    """What an argument may be."""

    label = "VALUE"
    """What stands for a value in the help of the command line."""

    @abstractmethod
    def words(self) -> str:
        """What is allowed, to stand behind "must be"."""

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """`value` as everything behind this module takes it, or the error that names it `name`."""

    def read(self, name: str, text: str) -> Any:
        """The value of a text on the command line, checked."""
        return self.check(name, text)


def as_int(value: object) -> int | None:
    """An integer, NumPy's included; `None` for anything else, `True` and `False` too."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        return None
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True)
class Integer(Argument):
    """An integer from `least` to `most`."""

    least: int
    most: int
    label = "INTEGER"

    def words(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def check(self, name: str, value: Any) -> int:
        number = as_int(value)
        if number is None:
            raise wrong_type(name, value, self.words())
        if not self.least <= number <= self.most:
            raise wrong_value(name, number, f"{self.least} to {self.most}")
        return number

    def read(self, name: str, text: str) -> int:
        if re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", text) is None:
            raise wrong_value(name, text, self.words())
        return self.check(name, int(text))


@dataclass(frozen=True)
class Number(Argument):
    """A finite number that `least` (or, if `above` is set, more than that) to `most` holds, and that stays so in binary32 where
    `single` is set."""

    least: float
    most: float = math.inf
    above: bool = False
    single: bool = True
    finite: bool = True
    label = "NUMBER"

    def words(self) -> str:
        low = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        return low if self.most == math.inf else f"{low} and at most {self.most:g}"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
            raise wrong_type(name, value, f"a number, {self.words()}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if bool(value > 0) else -math.inf  # type: ignore[operator]
        inside = number > self.least if self.above else number >= self.least
        if not inside or number > self.most:
            raise wrong_value(name, value, self.words())
        if self.finite and math.isinf(number):
            raise wrong_value(name, value, f"{self.words()}, and finite")
        if self.single and not _is_single(number):
            raise wrong_value(name, value, f"{self.words()}, and a number that binary32 holds: 0, or 1.2e-38 to 3.4e38")
        return number

    def read(self, name: str, text: str) -> float:
        try:
            number: float = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", text) else float(text)
        except ValueError:
            raise wrong_value(name, text, f"a number, {self.words()}") from None
        return self.check(name, number)


def _is_single(number: float) -> bool:
    """True if binary32 holds the number, rounded, as a normal one."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        return False
    return number == 0 or abs(rounded) >= 2.0**-126


@dataclass(frozen=True)
class Flag(Argument):
    """`True` or `False`."""

    def words(self) -> str:
        return "True or False"

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_type(name, value, self.words())
        return bool(value)


@dataclass(frozen=True)
class Text(Argument):
    """A text."""

    label = "TEXT"

    def words(self) -> str:
        return "a text (str)"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, value, self.words())
        return str(value)


@dataclass(frozen=True)
class Choice(Argument):
    """One of some names, or what `pattern` matches, for which `stands` stands in the list."""

    names: tuple[str, ...]
    pattern: str | None = None
    stands: str = ""

    @property
    def label(self) -> str:  # type: ignore[override]
        return "[" + "|".join(self.all_names()) + "]"

    def all_names(self) -> tuple[str, ...]:
        """The names, and what stands for the others."""
        return (*self.names, self.stands) if self.pattern else self.names

    def words(self) -> str:
        return "one of " + ", ".join(f'"{name}"' for name in self.all_names())

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, value, self.words())
        if value in self.names or (self.pattern and re.fullmatch(self.pattern, value, re.ASCII)):
            return str(value)
        raise wrong_value(name, value, self.words())


@dataclass(frozen=True)
class Size(Argument):
    """Bytes: an integer, or a text such as "8GiB"; where `share` is set, also a percentage such as "80%"."""

    least: int
    most: int = 2**60
    share: bool = False
    label = "SIZE"

    def words(self) -> str:
        text = '"8GiB" or "80%"' if self.share else '"8GiB"'
        return f"bytes (int) or a size such as {text}, {self._range()}"

    def _range(self) -> str:
        low = "above 0" if self.least == 1 else f"at least {self.least}"
        return f"{low} and at most {_round(self.most)}" + (" or 100%" if self.share else "")

    def check(self, name: str, value: Any) -> int | Share:
        size: int | Share | None = as_int(value)
        if size is None:
            if not isinstance(value, str):
                raise wrong_type(name, value, self.words())
            size = read_size(value)
        if size is None or (isinstance(size, Share) and not self.share):
            raise wrong_value(name, value, self.words())
        inside = 0 < size.part <= 1 if isinstance(size, Share) else self.least <= size <= self.most
        if not inside:
            raise wrong_value(name, value, self._range())
        return size


def _round(size: int) -> str:
    """A size with its unit, where it is a whole number of one."""
    for unit, name in ((2**60, "EiB"), (2**30, "GiB"), (2**20, "MiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return str(size)


@dataclass(frozen=True)
class ModelPath(Argument):
    """A path of a model, or a name of the catalogue."""

    label = "MODEL"

    def words(self) -> str:
        return "a path (str or os.PathLike), or the name of a model that can be fetched"

    def check(self, name: str, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str):
            raise wrong_type(name, value, self.words())
        if not path or "\0" in path:
            raise wrong_value(name, value, self.words())
        return path


@dataclass(frozen=True)
class Each(Argument):
    """A list whose elements are each `of`; where `alone` is set, one of them may stand for a list of it. `least` elements at
    least."""

    of: Argument
    least: int = 0
    alone: bool = False

    def words(self) -> str:
        return f"a list, each element {self.of.words()}"

    def check(self, name: str, value: Any) -> list[Any]:
        if self.alone and isinstance(value, str):
            return [self.of.check(name, value)]
        items = as_list(value)
        if items is None:
            raise wrong_type(name, value, self.words())
        if len(items) < self.least:
            raise wrong_value(name, value, f"{self.words()}, and at least {self.least}")
        return [self.of.check(f"{name}[{i}]", item) for i, item in enumerate(items)]


@dataclass(frozen=True)
class OrNone(Argument):
    """`None`, or what `of` takes."""

    of: Argument

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.of.label

    def words(self) -> str:
        return f"None or {self.of.words()}"

    def check(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            return self.of.check(name, value)
        except TypeError:
            raise wrong_type(name, value, self.words()) from None

    def read(self, name: str, text: str) -> Any:
        return self.of.read(name, text)


def as_list(value: object, *, sets: bool = False) -> list[Any] | None:
    """The elements of a list, a tuple, an array or another sequence; `None` for text, bytes and anything else."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    if isinstance(value, Sequence) or (sets and isinstance(value, Set)):
        return list(value)
    # Arrays of NumPy and its like.
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        elements = value.tolist()
        return elements if isinstance(elements, list) else None
    return None


def made_by(maker: str, value: object, kind: type) -> None:
    """Refuses to make an object by hand that `maker` makes."""
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)}: this class isn't called: {maker} makes its objects")
