"""`headrace run`: prints what a model says."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console

from headrace._engine import Engine
from headrace._stats import Stats
from headrace.cli import options
from headrace.cli.chat import chat
from headrace.cli.verbose import verbose


class _Run(click.Command):
    """A command whose last argument is any text, one that looks like an option among them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        text = _meant_for_the_model(args)
        hint = f'A prompt that starts with "-" goes behind "--": headrace run MODEL -- "{text or "-1 + 2 is"}"'
        try:
            rest = super().parse_args(ctx, list(args))
        except click.UsageError as error:
            if text is None and not isinstance(error, click.NoSuchOption):
                raise
            raise click.UsageError(f"{error.format_message().rstrip('.')}. {hint}", ctx) from None
        if text is not None and ctx.params.get("prompt") is None and not ctx.resilient_parsing:
            raise click.UsageError(f"PROMPT is missing. {hint}", ctx)
        return rest


def _meant_for_the_model(args: list[str]) -> str | None:
    """The first word that looks like an option and can't be one, because of a space or as a number; not the value of an option."""
    for before, word in zip(["", *args], args):
        if word == "--":
            return None
        value = before.startswith("-") or (word.startswith("--") and "=" in word)
        if word.startswith("-") and not value and (" " in word or _is_number(word)):
            return word
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@click.command(cls=_Run)
@click.argument("model")
@click.argument("prompt", required=False)
@options.max_new_tokens
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the model's chat template.")
@click.option("--system", help="System message for the chat template.")
@options.temperature
@options.top_k
@options.top_p
@options.seed
@options.device
@options.vram_limit
@options.host_limit
@options.placement
@options.host_mapped_budget
@options.headroom
@options.threads
@options.max_context
@options.activations
@options.kv_dtype
@click.option("--stats", is_flag=True, help="Print speed and memory to standard error at the end.")
@verbose
def run(
    model: str,
    prompt: str | None,
    max_new_tokens: int | None,
    raw: bool,
    system: str | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stats: bool,
    **engine_options: Any,
) -> None:
    """Print what MODEL says to PROMPT ("-" reads it from standard input). Without PROMPT, on a terminal: a chat.

    MODEL is a GGUF file, an ONNX Runtime GenAI directory, or a name that `headrace fetch` knows; such a model is fetched
    on first use. If the model has a chat template, PROMPT is put to it as a user's message, unless --raw is given. A PROMPT
    that starts with "-" goes behind "--".
    """
    if prompt is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            'PROMPT is missing: give a text, or "-" to read it from standard input. Without one there is a chat, which needs a '
            "terminal"
        )
    if prompt is None and raw:
        raise click.UsageError("a chat goes through the model's chat template: give a PROMPT with --raw")
    text = sys.stdin.read() if prompt == "-" else prompt
    with Console(stderr=True).status(f"loading {model}"):
        engine = Engine.load(model, **engine_options)
    if system is not None and (raw or not engine.has_chat_template):
        raise click.UsageError("--system needs a chat template, and does not go with --raw")
    messages = [{"role": "system", "content": system}] if system is not None else []
    if text is None and not engine.has_chat_template:
        raise click.UsageError("this model has no chat template, and so there is no chat: give a PROMPT for it to continue")
    generate: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
    }  # fmt: skip
    if text is None:
        chat(engine, messages, generate)
        if stats:
            click.echo(summary(engine.stats(), None, None), err=True)
        return
    if raw or not engine.has_chat_template:
        ids = engine.encode(text)
    else:
        messages.append({"role": "user", "content": text})
        ids = engine.chat_token_ids(messages)
    with engine.stream(ids, **generate) as pieces:
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()
    if pieces.seed is not None and seed is None:
        click.echo(f"seed {pieces.seed}: with --seed {pieces.seed} the same is drawn again", err=True)
    if stats:
        click.echo(summary(engine.stats(), pieces.finish_reason, pieces.seed), err=True)


def summary(s: Stats, reason: str | None, seed: int | None) -> str:
    """Speed and memory, for people."""
    decode = s.time.decode_tokens / s.time.decode_seconds if s.time.decode_seconds else 0.0
    prefill = s.tokens.prompt / s.time.prefill_seconds if s.time.prefill_seconds else 0.0
    return "\n".join(
        [
            f"{s.device.name} ({s.device.description}), {s.device.threads} threads, {s.device.kernels}",
            f"prompt {s.tokens.prompt} tokens, {prefill:.1f} tokens/s; new {s.tokens.emitted} tokens, "
            f"{decode:.1f} tokens/s; ended by {reason}" + ("" if seed is None else f"; seed {seed}"),
            f"weights {s.weights.referenced_bytes:,} bytes; KV {s.kv.bucket_pages * s.kv.page_bytes:,} bytes in "
            f"{s.kv.bucket_pages} pages; load {s.time.load_seconds:.2f} s ("
            + ", ".join(f"{part} {seconds:.2f}" for part, seconds in s.time.load_parts if seconds >= 0.005)
            + ")",
        ]
    )
