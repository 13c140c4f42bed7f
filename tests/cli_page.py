"""Writes docs/cli.md from the commands themselves: `python tests/cli_page.py`. A test compares the page with them."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
from headrace.cli import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# The command line

Made by `python tests/cli_page.py`; a test compares it with the commands. `headrace COMMAND --help` says the same at a terminal.
"""
ARGUMENTS = {
    "model": "a GGUF file, an ONNX GenAI directory or its `.onnx` file, or a name that `headrace fetch` knows",
    "prompt": "the text; `-` reads it from standard input",
}


def table(command: click.Command) -> str:
    """Every argument and option of a command."""
    rows = ["| argument | meaning |", "| --- | --- |"]
    for parameter in command.params:
        choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
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
