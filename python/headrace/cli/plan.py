"""`headrace plan`: what a model's files hold and what a step reads."""

from __future__ import annotations

import json
import sys
from collections import Counter

import click
from rich.console import Console
from rich.table import Table

from headrace._plan import Plan
from headrace._plan import plan as make_plan


@click.command()
@click.argument("model")
@click.option("--tensors", is_flag=True, help="List every tensor in read order.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def plan(model: str, tensors: bool, as_json: bool) -> None:
    """Show what MODEL's files hold: shapes, formats, bytes, and the order in which a step reads them."""
    result = make_plan(model)
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
        return
    # A file or a pipe has no width: there nothing is cut.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(_summary(result))
    console.print(_formats(result))
    if tensors:
        console.print(_tensors(result))


def _summary(result: Plan) -> Table:
    m = result.model
    table = Table(show_header=False, box=None)
    for name, value in [
        ("model", f"{m.name} ({m.container}, {m.arch})"),
        ("shape", f"{m.layers} layers, hidden {m.hidden}, feed-forward {m.ffn}, vocabulary {m.vocab:,}"),
        ("heads", f"{m.heads} query, {m.kv_heads} KV, {m.head_dim} elements each"),
        ("context", f"{m.max_context:,} positions; {m.kv_token_bytes:,} KV bytes each (float16)"),
        ("parameters", f"{m.parameters:,}"),
        ("weights", f"{m.weight_bytes:,} bytes referenced, of files of {m.file_bytes:,}"),
        ("a step reads", f"{m.step_bytes:,} bytes" + (" (the head is the embedding)" if m.tied else "")),
    ]:
        table.add_row(name, value)
    return table


def _formats(result: Plan) -> Table:
    tensors, sizes = Counter[str](), Counter[str]()
    for t in result.model.tensors:
        tensors[t.format] += 1
        sizes[t.format] += t.bytes
    table = Table("format")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    for name, size in sizes.most_common():
        table.add_row(name, f"{tensors[name]:,}", f"{size:,}")
    return table


def _tensors(result: Plan) -> Table:
    table = Table("order", "tensor", "format")
    for column in ("rows", "cols", "bytes", "offset"):
        table.add_column(column, justify="right")
    for t in result.model.tensors:
        numbers = (f"{n:,}" for n in (t.rows, t.cols, t.bytes, t.offset))
        table.add_row(str(t.order), t.name, t.format, *numbers)
    return table
