"""`headrace info`: facts about this build, for bug reports."""

from __future__ import annotations

import json

import click

from headrace._core import build_info


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def info(as_json: bool) -> None:
    """Print facts about this build, for bug reports."""
    facts = build_info()
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(f"{k}: {v}" for k, v in facts.items()))
