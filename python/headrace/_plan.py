"""What a model's files hold, without loading it onto a device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from headrace import _core
from headrace._catalog import resolve
from headrace._arguments.tables import LENGTH, Activations, Device, KvDtype, KvLayout, Placement
from headrace._options import load_options
from headrace._records import Record


@dataclass(frozen=True)
class TensorEntry(Record):
    """One tensor of a model."""

    name: str
    """Name in the file."""
    format: str
    """Storage format, such as `Q4_1` or `int4/32 f16`."""
    rows: int
    """Outputs."""
    cols: int
    """Inputs."""
    bytes: int
    """Bytes referenced."""
    order: int
    """Place in the order in which a step reads the weights, from 0."""
    file: str
    """File of the first extent."""
    offset: int
    """Offset of the first extent in that file."""


@dataclass(frozen=True)
class ModelSummary(Record):
    """What a model's files hold."""

    name: str
    container: str
    """`gguf` or `onnx`."""
    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    """Context length that the file declares."""
    tied: bool
    """True if the output head is the embedding."""
    parameters: int
    weight_bytes: int
    """Bytes that tensors reference, each extent once."""
    step_bytes: int
    """Bytes of weights that one step reads."""
    file_bytes: int
    """Size of the files, of which some bytes may be referenced by nothing."""
    kv_token_bytes: int
    """KV bytes of one position with float16 entries."""
    tensors: tuple[TensorEntry, ...]
    """In read order."""


@dataclass(frozen=True)
class Need(Record):
    """One part of what a memory limit has to hold."""

    name: str
    """`fixed`, `workspace`, `kv`, and `staging` or `weights`."""
    bytes: int
    why: str


@dataclass(frozen=True)
class PieceEntry(Record):
    """A piece of weights: the unit of placement and of copying."""

    tensors: tuple[tuple[str, int, int], ...]
    """Name, first row and end row of each run in it."""
    bytes: int
    resident: bool
    """True if it stays in device memory."""
    place: str
    """`resident`, `streamed` (every step copies it there) or `host-mapped` (read in place over the link)."""


@dataclass(frozen=True)
class PlacementChoice(Record):
    """The placement mode in force, and why."""

    mode: str
    """`resident`, `stream`, `zero-copy`, `hybrid` or `unmanaged`."""
    asked_for: str
    """What was asked for; `auto` chooses."""
    reason: str
    """Why this mode, with the figures that decided; in stats also what this machine's link was measured at, if it was and the
    mode streams."""
    host_mapped_budget: int
    """Most bytes of weights that a step reads in place."""
    headroom: int
    """Bytes that stay free below the limit."""


@dataclass(frozen=True)
class MemoryPlan(Record):
    """What a memory limit means for a model. Sizes in bytes."""

    limit: int
    placement: PlacementChoice
    minimum: int
    """The smallest limit that works."""
    everything: int
    """The limit from which on nothing is ever cold."""
    needs: tuple[Need, ...]
    """What must fit in any case."""
    ring_slots: int
    slot_bytes: int
    kv_floor_bytes: int
    """KV from the beginning. More comes from the weights as sequences grow."""
    kv_max_bytes: int
    resident_bytes: int
    """Weights that stay in device memory."""
    streamed_bytes: int
    """Weights that every step copies."""
    host_mapped_bytes: int
    """Weights that every step reads in place on the host."""
    pieces: tuple[PieceEntry, ...]
    """In read order."""
    assumed: str | None
    """What was assumed of a card that isn't here, and why it isn't; `None` for a device that is here."""


@dataclass(frozen=True)
class TradeRow(Record):
    """A decode step of so many sequences, all of them as long as the table says. Sizes in bytes."""

    sequences: int
    kv_bytes: int
    """KV capacity that they need."""
    resident_bytes: int
    """Weights that stay in device memory."""
    streamed_bytes: int
    """Weights that a step copies."""
    host_mapped_bytes: int
    """Weights that a step reads in place on the host."""
    streamed_bytes_per_token: float
    """Streamed bytes over the step's tokens, one a sequence."""
    byte_hit_rate: float
    """Resident bytes over all bytes of weights that a step reads."""


@dataclass(frozen=True)
class Trade(Record):
    """What more sequences at once buy and cost: they share what is streamed, and their KV takes room from the weights."""

    length: int
    """Positions of each sequence."""
    largest: int
    """Most sequences of that length at once, `max_batch` at most."""
    largest_by_memory: int
    """What memory alone would allow, with buffers for `max_batch` rows."""
    before_kv_takes_weights: int
    """Most sequences beside which a step reads at most 2% more bytes of cold weights than beside one: up to here
    streamed bytes a token fall as one over their number."""
    rows: tuple[TradeRow, ...]
    """1, 2, 4, ... sequences, and the most."""


@dataclass(frozen=True)
class Plan(Record):
    """What a run of a model reads, and from where."""

    model: ModelSummary
    memory: MemoryPlan | None
    """The placement under the limit; `None` on a device that reads weights in place."""
    trade: Trade | None
    """What batches take and save under the limit; `None` likewise."""

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """From what the core reports: `[model, [memory, trade] or null]`."""
        model, limited = json.loads(text)
        memory, trade = limited or (None, None)
        return cls(
            ModelSummary.from_dict(model),
            None if memory is None else MemoryPlan.from_dict(memory),
            None if trade is None else Trade.from_dict(trade),
        )


def plan(
    model: str | os.PathLike[str],
    *,
    device: Device = "auto",
    vram_limit: int | str | None = None,
    placement: Placement = "auto",
    host_mapped_budget: int | str | None = None,
    headroom: int | str | None = None,
    max_context: int | None = None,
    max_batch: int = 8,
    prefill_chunk: int = 256,
    activations: Activations = "int16",
    kv_dtype: KvDtype = "float16",
    kv_layout: KvLayout = "head-major",
    piece_bytes: int | str | None = None,
    ring_slots: int = 4,
    length: int | None = None,
) -> Plan:
    """Reads a model's files and returns what a step would read, without loading anything.

    `model` and the options are those of `Engine.load`; `length` is that of the sequences in `Plan.trade`, by default
    `max_context`. Raises what that would, `BudgetError` for a limit that can't work among them. A card need not be here:
    `device="cuda"`, or a limit or a placement with `"auto"`, is planned with assumed figures then, and `Plan.memory.assumed` says so.
    """
    path = resolve(model)
    length = LENGTH.check("length", length)
    options = load_options(
        device=device,
        vram_limit=vram_limit,
        placement=placement,
        host_mapped_budget=host_mapped_budget,
        headroom=headroom,
        max_context=max_context,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        activations=activations,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        piece_bytes=piece_bytes,
        ring_slots=ring_slots,
    )
    return Plan.from_json(_core.plan(path, options, length))
