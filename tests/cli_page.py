"""Writes docs/cli.md from the commands themselves: `python tests/cli_page.py`. A test compares the page with them."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
from headrace._arguments.kinds import Choice, OrNone
from headrace.cli import cli
from headrace.cli.options import Checked

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# The command line

Made by `python tests/cli_page.py`; a test compares it with the commands. `headrace COMMAND --help` says the same at a terminal.
"""
ARGUMENTS = {
    "model": "a GGUF file, an ONNX GenAI directory or its `.onnx` file, or a name that `headrace fetch` knows",
    "prompt": "the text; `-` reads it from standard input",
}


def choices_of(kind: click.ParamType) -> tuple[str, ...]:
    """The names that may be given, where there is a list of them."""
    argument = kind.argument if isinstance(kind, Checked) else None
    argument = argument.of if isinstance(argument, OrNone) else argument
    return argument.all_names() if isinstance(argument, Choice) else ()


def table(command: click.Command) -> str:
    """Every argument and option of a command."""
    rows = ["| argument | meaning |", "| --- | --- |"]
    for parameter in command.params:
        choices = choices_of(parameter.type)
        said = f"One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        if isinstance(parameter, click.Option):
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            said = " ".join(filter(None, (parameter.help, said)))
        else:
            names = f"`{(parameter.name or '').upper()}`"
            said = said or ARGUMENTS.get(parameter.name or "", "")
        rows.append(f"| {names} | {said.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD, table(cli)]
    for name, command in cli.commands.items():
        first = inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"## `headrace {name}`\n\n{first}\n\n{table(command)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
