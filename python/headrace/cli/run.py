"""`headrace run`: prints what a model says."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from headrace._engine import Engine
from headrace._options import PLACEMENTS
from headrace._stats import Stats
from headrace.cli.verbose import verbose


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("-n", "--max-new-tokens", type=click.IntRange(min=1), help="Most new tokens.  [default: until it stops]")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the model's chat template.")
@click.option("--system", help="System message for the chat template.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Draw from the K likeliest tokens; 0 for all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Draw from this much probability.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the draws.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "host-device"]), default="auto", show_default=True)
@click.option("--vram-limit", help='Memory that everything on the device may take, such as "8GiB" or "80%".')
@click.option("--placement", type=click.Choice(PLACEMENTS), default="auto", show_default=True, help="Where weights are read.")
@click.option("--host-mapped-budget", help="Most bytes that a step reads in place.  [default: by platform]")
@click.option("--headroom", help="Bytes that stay free below the limit.  [default: by platform]")
@click.option("--threads", type=click.IntRange(min=1), help="Host threads.  [default: all cores]")
@click.option("--max-context", type=click.IntRange(min=1), help="Most positions.  [default: what the model declares]")
@click.option(
    "--activations",
    type=click.Choice(["int16", "int8"]),
    default="int16",
    show_default=True,
    help="int16: the model's own tokens. int8: faster, coarser.",
)
@click.option("--kv-dtype", type=click.Choice(["float16", "float32"]), default="float16", show_default=True)
@click.option("--stats", is_flag=True, help="Print speed and memory to standard error at the end.")
@verbose
def run(
    model: str,
    prompt: str,
    max_new_tokens: int | None,
    raw: bool,
    system: str | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str,
    vram_limit: str | None,
    placement: str,
    host_mapped_budget: str | None,
    headroom: str | None,
    threads: int | None,
    max_context: int | None,
    activations: str,
    kv_dtype: str,
    stats: bool,
) -> None:
    """Print what MODEL says to PROMPT ("-" reads it from standard input).

    MODEL is a GGUF file, an ONNX Runtime GenAI directory, or a name that `headrace fetch` knows; such a model is fetched
    on first use. If the model has a chat template, PROMPT is put to it as a user's message, unless --raw is given.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with Console(stderr=True).status(f"loading {model}"):
        engine = Engine.load(
            model,
            device=device,  # type: ignore[arg-type]
            vram_limit=vram_limit,
            placement=placement,  # type: ignore[arg-type]
            host_mapped_budget=host_mapped_budget,
            headroom=headroom,
            max_context=max_context,
            activations=activations,  # type: ignore[arg-type]
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            threads=threads,
        )
    if system is not None and (raw or not engine.has_chat_template):
        raise click.UsageError("--system needs a chat template, and does not go with --raw")
    if raw or not engine.has_chat_template:
        ids = engine.encode(text)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        ids = engine.encode(engine.apply_chat_template(messages), add_special=False)
    with engine.stream(
        ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    ) as pieces:
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()
    if stats:
        click.echo(_summary(engine.stats(), pieces.finish_reason), err=True)


def _summary(s: Stats, reason: str | None) -> str:
    decode = s.time.decode_tokens / s.time.decode_seconds if s.time.decode_seconds else 0.0
    prefill = s.tokens.prompt / s.time.prefill_seconds if s.time.prefill_seconds else 0.0
    return "\n".join(
        [
            f"{s.device.name} ({s.device.description}), {s.device.threads} threads, {s.device.kernels}",
            f"prompt {s.tokens.prompt} tokens, {prefill:.1f} tokens/s; new {s.tokens.emitted} tokens, "
            f"{decode:.1f} tokens/s; ended by {reason}",
            f"weights {s.weights.referenced_bytes:,} bytes; KV {s.kv.bucket_pages * s.kv.page_bytes:,} bytes in "
            f"{s.kv.bucket_pages} pages; load {s.time.load_seconds:.2f} s ("
            + ", ".join(f"{part} {seconds:.2f}" for part, seconds in s.time.load_parts if seconds >= 0.005)
            + ")",
        ]
    )
