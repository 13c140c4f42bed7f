"""`headrace plan`: what a model's files hold and what a step reads."""

from __future__ import annotations

import json
from collections import Counter

import click
from rich.table import Table

from headrace._arguments.kinds import Choice
from headrace._arguments.tables import LENGTH, POLICIES, SIMULATED_STEPS
from headrace._plan import MemoryPlan, Plan, Trade
from headrace._plan import plan as make_plan
from headrace._residency import Simulation
from headrace._residency import simulate as simulate_policies
from headrace.cli import options
from headrace.cli.output import tables
from headrace.cli.verbose import verbose


_OF_A_SIMULATION = ("policy", "steps")
_OF_A_PLAN = ("placement", "host_mapped_budget", "headroom", "length", "tensors", "pieces")


@click.command()
@click.argument("model")
@options.device
@options.vram_limit
@options.placement
@options.host_mapped_budget
@options.headroom
@options.max_context
@options.max_batch
@options.option("--length", argument=LENGTH, help="Positions of each sequence in the table of batches.  [default: most]")
@click.option("--tensors", is_flag=True, help="List every tensor in read order.")
@click.option("--pieces", is_flag=True, help="List every piece of weights and its place.")
@click.option("--simulate", is_flag=True, help="Show what residency policies would move beside the optimum.")
@options.option("--policy", argument=Choice(("all", *POLICIES)), default="all", help="For --simulate.")
@options.option("--steps", argument=SIMULATED_STEPS, default=16, help="For --simulate.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@verbose
def plan(
    model: str,
    device: str,
    vram_limit: str | None,
    placement: str,
    host_mapped_budget: str | None,
    headroom: str | None,
    max_context: int | None,
    max_batch: int,
    length: int | None,
    tensors: bool,
    pieces: bool,
    simulate: bool,
    policy: str,
    steps: int,
    as_json: bool,
) -> None:
    """Show what MODEL's files hold, in the order in which a step reads it, and what a memory limit would mean for it.

    A card need not be here: with a limit, a placement or --device cuda it is planned for with assumed figures, and that is said.
    """
    ignored = _OF_A_PLAN if simulate else _OF_A_SIMULATION
    context = click.get_current_context()
    for name in ignored:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            how = "does not go with" if simulate else "goes with"
            raise click.UsageError(f"--{name.replace('_', '-')} {how} --simulate")
    if simulate:
        simulation = simulate_policies(
            model,
            device="host-device" if device == "auto" else device,  # type: ignore[arg-type]
            vram_limit=vram_limit,
            max_context=max_context,
            max_batch=max_batch,
            policies=POLICIES if policy == "all" else (policy,),  # type: ignore[arg-type]
            steps=steps,
        )
        if as_json:
            click.echo(json.dumps(simulation.as_dict(), indent=2))
        else:
            tables().print(_simulation(simulation))
        return
    result = make_plan(
        model,
        device=device,  # type: ignore[arg-type]
        vram_limit=vram_limit,
        placement=placement,  # type: ignore[arg-type]
        host_mapped_budget=host_mapped_budget,
        headroom=headroom,
        max_context=max_context,
        max_batch=max_batch,
        length=length,
    )
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
        return
    console = tables()
    console.print(_summary(result))
    console.print(_formats(result))
    if result.memory is not None:
        if result.memory.assumed is not None:
            console.print(result.memory.assumed, markup=False, highlight=False)
        console.print(_memory(result.memory))
        if result.trade is not None:
            console.print(_trade(result.trade))
        if pieces:
            console.print(_pieces(result.memory))
    if tensors:
        console.print(_tensors(result))


def _summary(result: Plan) -> Table:
    m = result.model
    table = Table(show_header=False, box=None)
    for name, value in [
        ("model", f"{m.name} ({m.container}, {m.arch})"),
        ("shape", f"{m.layers} layers, hidden {m.hidden}, feed-forward {m.ffn}, vocabulary {m.vocab:,}"),
        ("heads", f"{m.heads} query, {m.kv_heads} KV, {m.head_dim} elements each"),
        ("context", f"{m.max_context:,} positions; {m.kv_token_bytes:,} KV bytes each (float16)"),
        ("parameters", f"{m.parameters:,}"),
        ("weights", f"{m.weight_bytes:,} bytes referenced, of files of {m.file_bytes:,}"),
        ("a step reads", f"{m.step_bytes:,} bytes" + (" (the head is the embedding)" if m.tied else "")),
    ]:
        table.add_row(name, value)
    return table


def _formats(result: Plan) -> Table:
    tensors, sizes = Counter[str](), Counter[str]()
    for t in result.model.tensors:
        tensors[t.format] += 1
        sizes[t.format] += t.bytes
    table = Table("format")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    for name, size in sizes.most_common():
        table.add_row(name, f"{tensors[name]:,}", f"{size:,}")
    return table


def _memory(m: MemoryPlan) -> Table:
    chosen = m.placement
    table = Table("memory", "bytes", "", title=f"limit {m.limit:,} bytes, placement {chosen.mode}: {chosen.reason}")
    table.columns[1].justify = "right"
    for need in m.needs:
        table.add_row(need.name, f"{need.bytes:,}", need.why)
    table.add_row("smallest limit", f"{m.minimum:,}", "everything above")
    table.add_row("nothing cold", f"{m.everything:,}", "the limit from which on all weights always stay")
    table.add_row("resident", f"{m.resident_bytes:,}", "weights that stay, while KV is small")
    table.add_row("streamed", f"{m.streamed_bytes:,}", f"weights that every step copies, through {m.ring_slots} slots")
    if m.host_mapped_bytes:
        table.add_row("host-mapped", f"{m.host_mapped_bytes:,}", "weights that every step reads in place")
    return table


def _trade(t: Trade) -> Table:
    table = Table("sequences", title=f"decode steps of sequences of {t.length:,} positions")
    for column in ("KV bytes", "resident", "streamed a step", "streamed a token", "by bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in t.rows:
        sizes = (f"{size:,.0f}" for size in (r.kv_bytes, r.resident_bytes, r.streamed_bytes, r.streamed_bytes_per_token))
        table.add_row(f"{r.sequences:,}", *sizes, f"{r.byte_hit_rate:.1%}")
    more = f"; memory would hold {t.largest_by_memory:,}" if t.largest_by_memory > t.largest else ""
    table.caption = f"at most {t.largest:,} at once{more}; KV takes weights beyond {t.before_kv_takes_weights}"
    return table


def _pieces(m: MemoryPlan) -> Table:
    table = Table("piece", "tensors", "bytes", "")
    table.columns[2].justify = "right"
    for index, piece in enumerate(m.pieces):
        names = ", ".join(f"{name}[{start}:{end}]" for name, start, end in piece.tensors)
        table.add_row(str(index), names, f"{piece.bytes:,}", piece.place)
    return table


def _simulation(s: Simulation) -> Table:
    title = f"{s.steps} steps of {s.step_bytes:,} bytes in {s.accesses:,} pieces, of which {s.budget:,} may stay"
    table = Table("policy", title=title)
    for column in ("bytes a step", "over", "hits", "by bytes", "evicted", "bypassed"):
        table.add_column(column, justify="right", no_wrap=True)

    def row(name: str, moved: float, *rest: str) -> None:
        over = f"{moved / s.optimum_bytes - 1:+.1%}" if s.optimum_bytes else f"{moved - s.optimum_bytes:+,.0f}"
        table.add_row(name, f"{moved:,.0f}", over, *rest)

    for name, moved in (("optimum", s.optimum_bytes), ("(schedule)", s.schedule_bytes)):
        row(name, moved, "", f"{1 - moved / max(s.step_bytes, 1):.1%}")
    for p in s.policies:
        shares = f"{p.byte_hit_rate:.1%}", f"{p.evictions_per_step:,.1f}", f"{p.bypassed_share:.1%}"
        row(p.policy, p.bytes_per_step, f"{p.hits_per_step:,.1f}", *shares)
    return table


def _tensors(result: Plan) -> Table:
    table = Table("order", "tensor", "format")
    for column in ("rows", "cols", "bytes", "offset"):
        table.add_column(column, justify="right")
    for t in result.model.tensors:
        numbers = (f"{n:,}" for n in (t.rows, t.cols, t.bytes, t.offset))
        table.add_row(str(t.order), t.name, t.format, *numbers)
    return table
