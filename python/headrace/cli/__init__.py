"""The command line: `headrace run`, `plan`, `probe`, `fetch`, `info`."""

from __future__ import annotations

import sys
from typing import Any

import click

from headrace._core import HeadraceError, build_info
from headrace.cli.fetch import fetch
from headrace.cli.info import info
from headrace.cli.output import ReaderGone, drop_the_rest, noticing_a_closed_pipe
from headrace.cli.plan import plan
from headrace.cli.probe import probe
from headrace.cli.run import run
from headrace.cli.verbose import verbose


class _Commands(click.Group):
    """A group that tells a closed pipe from other errors, which click itself does not."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with noticing_a_closed_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with noticing_a_closed_pipe():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(build_info()["version"], prog_name="headrace")
@verbose
def cli() -> None:
    """Run decoder LLMs under one hard memory limit, with the same tokens as if everything fitted."""


for command in (run, plan, probe, fetch, info):
    cli.add_command(command)


def main() -> None:
    """Entry point: errors that a user can cause are one line, not a traceback."""
    try:
        sys.exit(cli(standalone_mode=False))
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ReaderGone:
        # As a shell reports a program that a closed pipe ended.
        drop_the_rest()
        sys.exit(141)
    except (HeadraceError, OSError, ValueError, TypeError) as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)
