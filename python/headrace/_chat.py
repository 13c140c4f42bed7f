"""Conversations on their way to the core: what a caller may hand over as messages, tools and variables, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace._arguments.kinds import wrong_type

Message = Mapping[str, Any]
"""One message: `role`, and `content` as a text, a list of text parts, or `None` beside `tool_calls`; further fields as the
model's chat template takes them."""


def conversation(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, object]
) -> tuple[str, str]:
    """Messages and variables as JSON.

    Raises `TypeError` for what is no list of mappings or can't be JSON, naming the argument.
    """
    if not _is_list(messages):
        raise wrong_type("messages", messages, "a list of messages such as {'role': 'user', 'content': 'Hi'}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise wrong_type(f"messages[{i}]", message, "a mapping with a role and a content")
    if tools is not None and not _is_list(tools):
        raise wrong_type("tools", tools, "a list of mappings that describe functions")
    given = dict(variables)
    if tools is not None:
        given["tools"] = list(tools)
    return _json("messages", list(messages)), "{" + ", ".join(f"{json.dumps(n)}: {_json(n, v)}" for n, v in given.items()) + "}"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: can't be handed to a chat template: {error}") from None


def _plain(value: object) -> object:
    """Mappings and sequences of other types as those that JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if _is_list(value):
        return list(value)  # type: ignore[call-overload]
    raise TypeError(f"{value!r} is no text, number, list or mapping")
