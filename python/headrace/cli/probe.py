"""`headrace probe`: what this machine can do."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from headrace._core import build_info
from headrace._probe import CardReport, HostReport
from headrace._probe import probe as measure
from headrace.cli.output import tables
from headrace.cli.verbose import verbose


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, with the facts about this build: for bug reports.")
@verbose
def probe(as_json: bool) -> None:
    """Measure what this machine can do: memory, links, cores. Without a card only the host is measured."""
    with Console(stderr=True).status("measuring"):
        machine = measure()
    if as_json:
        click.echo(json.dumps({"build": build_info(), **machine.as_dict()}, indent=2))
        return
    console = tables()
    console.print(_host(machine.host))
    for card in machine.cards:
        console.print(_card(card))
    for problem in machine.problems:
        click.echo(f"no card: {problem}" if not machine.cards else problem)


def _speed(speed: float | None) -> str:
    return "no kernel for this card" if speed is None else f"{speed / 1e9:,.1f} GB/s"


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _host(h: HostReport) -> Table:
    rows = [
        ("cores", f"{h.cores} ({h.hardware_threads} hardware threads)"),
        ("memory", f"{h.memory_bytes:,} bytes"),
        ("kernels", ", ".join(h.kernels)),
        ("features", ", ".join(h.features) or "none of those that kernels use"),
        ("memory read", f"{_speed(h.memory_read)}, all cores together"),
    ]
    return _table(h.processor, rows)


def _card(c: CardReport) -> Table:
    registered = "yes" if c.read_only_registration else "no: streaming needs pinned copies"
    rows = [
        ("driver", f"CUDA {c.driver}"),
        ("capability", c.capability),
        ("memory", f"{c.total_bytes:,} bytes, {c.free_bytes:,} free, in granules of {c.granule:,}"),
        ("file mappings can be registered", registered),
    ]
    rows += [(f"host to card, copies of {s.chunk >> 10:,} KiB", _speed(s.speed)) for s in c.host_to_device]
    rows += [
        ("card to host", _speed(c.device_to_host)),
        ("read from host memory in place", _speed(c.zero_copy_read)),
        ("read from the card's memory", _speed(c.device_read)),
        ("copy within the card, read", _speed(c.device_copy_read)),
    ]
    if c.memory_peak is not None:
        rows.append(("peak by clock and width", _speed(c.memory_peak)))
    return _table(f"{c.device}: {c.card}", rows)
