"""The command line's arguments: every option with wrong values, prompts that look like options, names that nobody knows."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from conftest import DATA
from headrace._arguments.kinds import Choice, Integer, Number, OrNone, Size
from headrace.cli import cli
from headrace.cli.options import Checked

TINY = str(DATA / "models" / "qwen3-Q4_1.gguf")
WRONG = {
    Integer: ["x", "", "1.0", "1.5", "-1", "1e3", "0x10", "nan", "True", str(2**64), "9" * 50, "٣"],
    Number: ["x", "", "-1", "-0.1", "nan", "inf", "-inf", "1e400", "1e-46", "True"],
    Choice: ["x", "", "AUTO", "auto "],
    Size: ["x", "", "-1", "-1GiB", "1e9", "1.5.5GiB", "1XB", "nan", "120%", "٣"],
}


def options() -> list[tuple[str, click.Option, Checked]]:
    return [
        (name, parameter, parameter.type)
        for name, command in cli.commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and isinstance(parameter.type, Checked)
    ]


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("command, option, kind", options(), ids=lambda v: v.opts[-1] if isinstance(v, click.Option) else str(v) if isinstance(v, str) else "")
def test_every_option_with_every_wrong_value(command: str, option: click.Option, kind: Checked) -> None:
    name = max(option.opts, key=len)
    argument = kind.argument.of if isinstance(kind.argument, OrNone) else kind.argument
    for value in WRONG[type(argument)]:
        for given in ([name, value], [f"{name}={value}"]):
            code, output = invoke(command, TINY, *(["x"] if command == "run" else []), *given)
            assert code == 2 and f"Error: {name} = " in output and ": must be " in output, f"{given}: {output}"
            assert output.count("\n") == 4, output


def test_no_option_of_the_command_line_is_checked_elsewhere() -> None:
    """Flags, counts and texts aside, all options are of the kind above; and those that Python has too are Python's."""
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.count:
                assert isinstance(parameter.type, Checked) or parameter.name == "system", f"{name} {parameter.name}"
    assert len(options()) >= 24


def test_a_prompt_that_looks_like_an_option() -> None:
    for prompt in ("-5 + 3 is?", "-5", "--what is this?", "-no idea"):
        code, output = invoke("run", TINY, prompt, "-n", "1")
        assert code == 2 and f'goes behind "--": headrace run MODEL -- "{prompt}"' in output, output
    code, output = invoke("run", TINY, "--wat")
    assert code == 2 and "No such option" in output and 'goes behind "--"' in output
    # An option's own mistake gets no such hint.
    assert "goes behind" not in invoke("run", TINY, "x", "--top-p", "0")[1]
    code, output = invoke("run", TINY, "--raw", "-n", "1", "--", "-5 + 3 is?")
    assert code == 0, output


def test_an_unknown_name_lists_the_known_ones() -> None:
    for command in (["run", "smollm3", "hi"], ["plan", "smollm3"]):
        done = subprocess.run([sys.executable, "-m", "headrace", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "smollm3: no such file" in done.stderr and "smollm2-135m" in done.stderr and "GGUF" in done.stderr


def test_a_name_that_can_t_be_fetched() -> None:
    code, output = invoke("fetch", "smollm3")
    assert code == 2 and 'name = "smollm3": must be one of ' in output and '"smollm2-135m"' in output


def test_without_a_prompt_and_a_terminal() -> None:
    code, output = invoke("run", TINY)
    assert code == 2 and "PROMPT is missing" in output and "terminal" in output and '"-"' in output


def test_zero_is_a_size() -> None:
    for name in ("--headroom", "--host-mapped-budget"):
        code, output = invoke("plan", TINY, "--device", "host-device", "--vram-limit", "64MiB", "--max-context", "64", name, "0")
        assert code == 0, output


def test_a_card_that_isn_t_here_can_be_planned_for() -> None:
    code, output = invoke("plan", TINY, "--vram-limit", "8GiB", "--max-context", "64")
    assert code == 0 and "smallest limit" in output
    code, output = invoke("plan", TINY, "--device", "cuda:9", "--vram-limit", "8GiB", "--max-context", "64")
    assert code == 0 and "planned for a card that isn't here (" in output and "assumed" in output


def test_options_that_a_simulation_would_ignore_are_refused() -> None:
    for options in (["--steps", "5"], ["--policy", "lru"]):
        code, output = invoke("plan", TINY, *options)
        assert code == 2 and f"{options[0]} goes with --simulate" in output
    for options in (["--placement", "stream"], ["--headroom", "0"], ["--pieces"], ["--length", "3"]):
        code, output = invoke("plan", TINY, "--simulate", *options)
        assert code == 2 and f"{options[0]} does not go with --simulate" in output


def test_a_seed_is_printed_and_taken() -> None:
    draw = ["run", TINY, "Hello", "--raw", "-n", "12", "--temperature", "1"]

    def run(*more: str) -> tuple[str, str]:
        done = CliRunner().invoke(cli, [*draw, *more])
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    first, said = run()
    other, said_otherwise = run()
    seed = said.split("seed ")[1].split(":")[0]
    assert first != other and said != said_otherwise
    assert run("--seed", seed) == (first, "")
    assert f"seed {seed}" in run("--seed", seed, "--stats")[1]
    assert "seed" not in CliRunner().invoke(cli, ["run", TINY, "Hello", "--raw", "-n", "2", "--stats"]).stderr
