"""The command line: `headrace run`, `plan`, `probe`, `fetch`, `info`."""

from __future__ import annotations

import os
import sys

import click

from headrace._core import HeadraceError, build_info
from headrace.cli.fetch import fetch
from headrace.cli.info import info
from headrace.cli.plan import plan
from headrace.cli.probe import probe
from headrace.cli.run import run
from headrace.cli.verbose import verbose


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    except BrokenPipeError:
        # The reader of our output went away, as `headrace plan | head` does.
        sys.stdout = open(os.devnull, "w")
        sys.exit(141)
    except (HeadraceError, OSError, ValueError) as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)
