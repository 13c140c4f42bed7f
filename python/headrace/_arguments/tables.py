"""Every argument of the Python surface and of the command line, and what it may be. Nothing is checked elsewhere.

A test tries each of them with every wrong kind of value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from headrace._arguments.kinds import Argument, Choice, Each, Flag, Integer, ModelPath, Number, OrNone, Size, Text

_COUNT = 2**32 - 1
"""Most of what is counted."""

Device = Literal["auto", "cpu", "cuda", "host-device"]
Activations = Literal["int16", "int8"]
KvDtype = Literal["float16", "float32"]
KvLayout = Literal["head-major", "seq-major"]
Placement = Literal["auto", "resident", "stream", "zero-copy", "hybrid", "unmanaged"]
Policy = Literal["static", "stable", "lru", "mru", "smallest", "largest", "byte-aware"]

POLICIES: tuple[Policy, ...] = get_args(Policy)
"""Every residency policy."""

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
"""Every placement mode."""

LOAD: dict[str, Argument] = {
    "device": Choice(get_args(Device), r"cuda:\d{1,4}", "cuda:N"),
    "vram_limit": OrNone(Size(1, share=True)),
    "host_limit": OrNone(Size(0, share=True)),
    "placement": Choice(PLACEMENTS),
    "host_mapped_budget": OrNone(Size(0)),
    "headroom": OrNone(Size(0)),
    "max_context": OrNone(Integer(1, _COUNT)),
    "max_batch": Integer(1, 65_536),
    "prefill_chunk": Integer(1, 65_536),
    "steps_in_flight": OrNone(Integer(1, 8)),
    "activations": Choice(get_args(Activations)),
    "kv_dtype": Choice(get_args(KvDtype)),
    "kv_layout": Choice(get_args(KvLayout)),
    "threads": OrNone(Integer(1, 1024)),
    "piece_bytes": OrNone(Size(4096, 2**30)),
    "ring_slots": Integer(2, 64),
    "policy": OrNone(Choice(POLICIES)),
    "pinned": Each(Text(), alone=True),
    "pin_threshold": OrNone(Size(0)),
    "policy_budget": OrNone(Size(0)),
}
"""Options of `Engine.load`, `plan` and `simulate`."""

GENERATE: dict[str, Argument] = {
    "max_new_tokens": OrNone(Integer(0, _COUNT)),
    "temperature": Number(0),
    "top_k": Integer(0, _COUNT),
    "top_p": Number(0, 1, above=True),
    "seed": OrNone(Integer(0, 2**64 - 1)),
    "speculation": Integer(0, 256),
    "keep_logits": Flag(),
}
"""Options of a generation, but for prompt and stop tokens, which need a vocabulary."""

MODEL = ModelPath()
TEXT = Text()
FLAG = Flag()
PROGRESS = OrNone(Flag())
NEW_TOKENS = Integer(0, _COUNT)
LENGTH = OrNone(Integer(1, _COUNT))
LIMIT = Size(1, share=True)
SIMULATED_POLICIES = Each(Choice(POLICIES), least=1)
SIMULATED_STEPS = Integer(2, 10_000)
TIMEOUT = OrNone(Number(0, single=False, finite=False))


def check_all(table: Mapping[str, Argument], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a table, each checked, in the table's order. All names of `values` are in the table."""
    return {name: argument.check(name, values[name]) for name, argument in table.items() if name in values}
