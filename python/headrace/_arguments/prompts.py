"""Prompts, token ids and stop tokens: what they may be, and how one prompt is told from a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace._arguments.kinds import Argument, as_int, as_list, shown, wrong_type, wrong_value

TOKEN_WORDS = "a token id, 0 to {}: the vocabulary has {} tokens"


def token_ids(name: str, value: object, vocab: int, *, sets: bool = False) -> list[int]:
    """Token ids, each in a vocabulary of `vocab` tokens."""
    items = as_list(value, sets=sets)
    if items is None:
        raise wrong_type(name, value, "a list of token ids (int)")
    words = TOKEN_WORDS.format(vocab - 1, vocab)
    ids = []
    for i, item in enumerate(items):
        number = item if type(item) is int else as_int(item)
        if number is None:
            hint = "engine.encode gives the ids of a text" if isinstance(item, str) else ""
            raise wrong_type(f"{name}[{i}]", item, words, hint)
        if not 0 <= number < vocab:
            raise wrong_value(f"{name}[{i}]", number, words)
        ids.append(number)
    return ids


PROMPT_WORDS = "a text (str) or a list of token ids (int)"


def prompt(name: str, value: object, vocab: int) -> str | list[int]:
    """One prompt: a text as it is, or token ids, at least one."""
    if isinstance(value, str):
        return value
    items = as_list(value)
    if items is None or any(as_list(item) is not None for item in items[:1]):
        raise wrong_type(name, value, PROMPT_WORDS, _messages_hint(value))
    if items and _messages_hint(items):
        raise wrong_type(f"{name}[0]", items[0], "a token id (int)", _messages_hint(items))
    if not items:
        raise ValueError(f"{name} = []: must hold at least one token")
    return token_ids(name, items, vocab)


def prompts(name: str, value: object, vocab: int) -> list[str | list[int]]:
    """A list of prompts; it may be empty."""
    items = as_list(value)
    if items is None:
        hint = f"for one prompt give [{shown(value)}]" if isinstance(value, str) else ""
        raise wrong_type(name, value, "a list of prompts", hint)
    if items and _messages_hint(items):
        raise wrong_type(f"{name}[0]", items[0], PROMPT_WORDS, _messages_hint(items))
    if items and as_int(items[0]) is not None:
        raise TypeError(f"{name} = {shown(value)}: must be a list of prompts, not one of token ids; for one prompt give [[...]]")
    return [prompt(f"{name}[{i}]", item, vocab) for i, item in enumerate(items)]


def one_or_more(name: str, value: object, vocab: int) -> str | list[int] | list[str | list[int]]:
    """One prompt or a list of them, as `is_one` tells apart afterwards; an empty list is a list without prompts."""
    items = as_list(value)
    if items is None:
        if isinstance(value, str):
            return value
        raise wrong_type(name, value, f"{PROMPT_WORDS}, or a list of such prompts", _messages_hint(value))
    if not items and isinstance(value, (list, tuple)):
        return []
    if items and (isinstance(items[0], (str, Mapping)) or as_list(items[0]) is not None or isinstance(items[0], bytes)):
        return prompts(name, items, vocab)
    return prompt(name, items, vocab)


def is_one(checked: str | list[int] | list[str | list[int]]) -> bool:
    """True if what `one_or_more` gave is one prompt."""
    return isinstance(checked, str) or (len(checked) > 0 and isinstance(checked[0], int))


def _messages_hint(value: object) -> str:
    """What to do with messages of a chat."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return "messages of a chat go to engine.chat, or become a prompt by engine.chat_token_ids"
    return ""


def for_each_prompt(name: str, value: object, count: int, kind: Argument) -> list[Any]:
    """A value for each of `count` prompts: one for all of them, or a list of as many."""
    items = as_list(value)
    if items is None:
        return [kind.check(name, value)] * count
    _as_many(name, items, count)
    return [kind.check(f"{name}[{i}]", item) for i, item in enumerate(items)]


def stop_tokens(name: str, value: object, vocab: int) -> list[int] | None:
    """Token ids, also in a set; `None` for the model's own."""
    return None if value is None else token_ids(name, value, vocab, sets=True)


def stop_tokens_for_each(name: str, value: object, count: int, vocab: int) -> list[list[int] | None]:
    """Stop tokens for each of `count` prompts: the same for all of them, or a list of as many lists."""
    items = as_list(value, sets=True)
    if items is None or not any(as_list(item, sets=True) is not None for item in items):
        return [stop_tokens(name, value, vocab)] * count
    _as_many(name, items, count)
    return [stop_tokens(f"{name}[{i}]", item, vocab) for i, item in enumerate(items)]


def _as_many(name: str, items: list[Any], count: int) -> None:
    if len(items) != count:
        raise ValueError(f"{name}: {len(items)} given for {count} prompts")


def sequences(name: str, value: object, vocab: int) -> list[list[int]]:
    """Lists of token ids, at least one in each."""
    items = as_list(value)
    if items is None:
        raise wrong_type(name, value, "a list of lists of token ids (int)")
    checked = [token_ids(f"{name}[{i}]", item, vocab) for i, item in enumerate(items)]
    for i, ids in enumerate(checked):
        if not ids:
            raise ValueError(f"{name}[{i}] = []: must hold at least one token")
    return checked
