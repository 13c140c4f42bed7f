"""The dynamic residency cache: what a policy made of each tensor, and what every policy would move."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from headrace import _core
from headrace._arguments.tables import POLICIES, SIMULATED_POLICIES, SIMULATED_STEPS, Device, KvDtype, KvLayout, Policy
from headrace._catalog import resolve
from headrace._options import load_options
from headrace._records import Record


@dataclass(frozen=True)
class TensorTrace(Record):
    """What became of the reads of one tensor. A tensor of several pieces is read once a piece."""

    name: str
    """Name in the file."""
    bytes: int
    """Bytes of the tensor."""
    pieces: int
    """Pieces that it is cut into."""
    resident_pieces: int
    """Pieces that are resident now."""
    pinned: bool
    """True if the policy never evicts it."""
    reads: int
    """Reads of its pieces."""
    read_bytes: int
    """Bytes of reads."""
    page_ins: int
    """Reads for which bytes were copied from the host."""
    page_in_bytes: int
    """Bytes of page-ins."""
    retained: int
    """Page-ins that stayed."""
    retained_bytes: int
    """Bytes of page-ins that stayed."""
    bypassed: int
    """Page-ins that did not stay."""
    bypassed_bytes: int
    """Bytes of page-ins that did not stay."""
    evictions: int
    """Times that a piece of it was evicted."""


@dataclass(frozen=True)
class PolicyOutcome(Record):
    """What a policy moves. Means over the second half of the steps, when what it will learn it has learnt."""

    policy: str
    bytes_per_step: float
    """Bytes copied from the host by a step."""
    hits_per_step: float
    """Reads of a step that found their piece resident."""
    page_ins_per_step: float
    """Reads of a step whose piece was copied."""
    evictions_per_step: float
    """Pieces evicted in a step."""
    hit_rate: float
    """Hits over reads."""
    byte_hit_rate: float
    """Bytes of hits over bytes read."""
    bypassed_share: float
    """Bytes that did not stay over bytes copied; 0 if nothing was copied."""
    total_bytes: int
    """Bytes copied by all steps, the first one included."""


@dataclass(frozen=True)
class Simulation(Record):
    """Policies side by side under the same limits. Sizes in bytes."""

    steps: int
    """Steps that were simulated."""
    step_bytes: int
    """Weights that a step reads."""
    accesses: int
    """Reads of a step."""
    budget: int
    """Weights that a policy may keep: what the static schedule keeps under the same limit."""
    capacity: int
    """Granules that they may touch."""
    pinned_bytes: int
    """Weights that are pinned."""
    optimum_bytes: int
    """Fewest bytes that a step can move with this budget, whatever the policy."""
    schedule_bytes: int
    """What a step of the static schedule streams under the same limit."""
    policies: tuple[PolicyOutcome, ...]
    """One entry a policy."""


def simulate(
    model: str | os.PathLike[str],
    *,
    vram_limit: int | str | None = None,
    policies: Sequence[Policy] = POLICIES,
    steps: int = 16,
    device: Device = "host-device",
    max_context: int | None = None,
    max_batch: int = 8,
    prefill_chunk: int = 256,
    kv_dtype: KvDtype = "float16",
    kv_layout: KvLayout = "head-major",
    piece_bytes: int | str | None = None,
    ring_slots: int = 4,
    pinned: Sequence[str] = (),
    pin_threshold: int | str | None = None,
    policy_budget: int | str | None = None,
) -> Simulation:
    """What each residency policy would move over `steps` steps (2 to 10,000), without loading anything.

    A step reads every piece of weights once, in read order. The other options are those of `Engine.load`; raises what that
    would.
    """
    path = resolve(model)
    names = SIMULATED_POLICIES.check("policies", policies)
    steps = SIMULATED_STEPS.check("steps", steps)
    options = load_options(
        device=device,
        vram_limit=vram_limit,
        max_context=max_context,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        piece_bytes=piece_bytes,
        ring_slots=ring_slots,
        policy=names[0],
        pinned=pinned,
        pin_threshold=pin_threshold,
        policy_budget=policy_budget,
    )
    return Simulation.from_dict(json.loads(_core.simulate(path, options, names, steps)))
