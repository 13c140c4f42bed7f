"""Frozen dataclasses from what the core reports, checked field by field."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound="Record")


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of the typed results: immutable, comparable, picklable."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and tuples, nested."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
        """Builds the record. A missing or an unknown field is an error: core and facade must agree on every name."""
        hints = typing.get_type_hints(cls)
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(values):
            raise TypeError(f"{cls.__name__}: fields differ: {sorted(names ^ set(values))}")
        return cls(**{name: _convert(hints[name], value) for name, value in values.items()})


def _convert(hint: Any, value: Any) -> Any:
    if type(None) in typing.get_args(hint):
        (inner,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
        return None if value is None else _convert(inner, value)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_dict(value)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if len(inner) == 2 and inner[1] is ...:
            return tuple(_convert(inner[0], item) for item in value)
        return tuple(_convert(kind, item) for kind, item in zip(inner, value, strict=True))
    return value
