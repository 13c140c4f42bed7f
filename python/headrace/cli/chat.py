"""A simple chat on a terminal: `headrace run MODEL` without a prompt. Every turn goes through the model's chat template."""

from __future__ import annotations

from typing import Any

import click

from headrace._core import ContextLengthError
from headrace._engine import Engine

_HELP = "Type a message and press Enter. /clear starts anew; /quit or Ctrl-D ends; Ctrl-C stops an answer."


def chat(engine: Engine, opening: list[dict[str, str]], generate: dict[str, Any]) -> None:
    """Reads messages and prints answers until the end of the input. `opening` are messages before the first one; `generate` are
    arguments of `Engine.stream`."""
    click.echo(_HELP, err=True)
    messages = list(opening)
    while True:
        known = len(messages)
        try:
            if not _turn(engine, messages, opening, generate):
                return
        except KeyboardInterrupt:
            # At the prompt, or before the first word of an answer: what was typed is forgotten, and the chat goes on.
            del messages[known:]
            click.echo()


def _turn(engine: Engine, messages: list[dict[str, str]], opening: list[dict[str, str]], generate: dict[str, Any]) -> bool:
    """Reads one message and answers it; both are added to `messages`. False at the end of the input."""
    try:
        text = input("> ").strip()
    except EOFError:
        click.echo()
        return False
    if text == "/quit":
        return False
    if text == "/clear":
        messages[:] = opening
        return True
    if not text:
        return True
    messages.append({"role": "user", "content": text})
    try:
        answer = _answer(engine, messages, generate)
    except ContextLengthError as error:
        messages.pop()
        click.echo(f"{error}\n/clear starts anew", err=True)
        return True
    messages.append({"role": "assistant", "content": answer})
    return True


def _answer(engine: Engine, messages: list[dict[str, str]], generate: dict[str, Any]) -> str:
    """Prints what the model says to `messages`, and returns it. Ctrl-C ends it where it is."""
    ids = engine.chat_token_ids(messages)
    said: list[str] = []
    with engine.stream(ids, **generate) as pieces:
        try:
            for piece in pieces:
                said.append(piece)
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            pass
    click.echo()
    if pieces.finish_reason == "context":
        click.echo("the context is full: /clear starts anew", err=True)
    return "".join(said)
