"""Options of the command line. What each may be is said in `_arguments`, as for Python: a value is checked there, under its
option's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from headrace._arguments.kinds import Argument
from headrace._arguments.tables import GENERATE, LOAD
from headrace._sizes import Share

F = TypeVar("F", bound=Callable[..., Any])


class Checked(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A value that `argument` checks."""

    def __init__(self, argument: Argument) -> None:
        self.argument = argument
        self.name = argument.label.lower()

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.argument.label

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # A default is what Python's is.
        if not isinstance(value, str):
            return value
        name = max(param.opts, key=len) if isinstance(param, click.Option) else (param.name if param else "") or ""
        try:
            checked = self.argument.read(name, value)
            # Python takes a percentage as it is written.
            return value if isinstance(checked, Share) else checked
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error), ctx) from None


def option(*names: str, argument: Argument, default: Any = None, help: str) -> Callable[[F], F]:
    """An option that takes what `argument` takes."""
    shown = default is not None and "[default" not in help
    return click.option(*names, type=Checked(argument), default=default, show_default=shown, help=help)


def _engine(name: str, default: Any, help: str) -> Callable[[F], F]:
    return option("--" + name.replace("_", "-"), argument=LOAD[name], default=default, help=help)


device = _engine("device", "auto", "What computes.")
vram_limit = _engine("vram_limit", None, 'Memory that everything on the device may take, such as "8GiB" or "80%".')
host_limit = _engine("host_limit", None, "Host memory that cards may page-lock.  [default: 80%]")
placement = _engine("placement", "auto", "Where weights are read.")
host_mapped_budget = _engine("host_mapped_budget", None, "Most bytes that a step reads in place.  [default: by platform]")
headroom = _engine("headroom", None, "Bytes that stay free below the limit.  [default: by platform]")
max_context = _engine("max_context", None, "Most positions.  [default: what the model declares]")
max_batch = _engine("max_batch", 8, "Most sequences at once.")
threads = _engine("threads", None, "Host threads.  [default: all cores]")
activations = _engine("activations", "int16", "int16: the model's own tokens. int8: faster, coarser.")
kv_dtype = _engine("kv_dtype", "float16", "Storage of keys and values.")

max_new_tokens = option(
    "-n", "--max-new-tokens", argument=GENERATE["max_new_tokens"], help="Most new tokens.  [default: until it stops]"
)
temperature = option("--temperature", argument=GENERATE["temperature"], default=0.0, help="0 is greedy.")
top_k = option("--top-k", argument=GENERATE["top_k"], default=0, help="Draw from the K likeliest tokens; 0 for all.")
top_p = option("--top-p", argument=GENERATE["top_p"], default=1.0, help="Draw from this much probability.")
seed = option("--seed", argument=GENERATE["seed"], help="Seed of the draws.  [default: a fresh one, which is printed]")

