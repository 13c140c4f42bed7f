"""Loading options: their types, and the form in which the core takes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, get_args

from headrace._sizes import parse_size

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


class LoadOptions(TypedDict):
    """What the core takes: every key, sizes in bytes."""

    device: str
    vram_limit: int | None
    placement: str
    host_mapped_budget: int | None
    headroom: int | None
    max_context: int | None
    max_batch: int
    prefill_chunk: int
    steps_in_flight: int | None
    activations: str
    kv_dtype: str
    kv_layout: str
    threads: int | None
    piece_bytes: int | None
    ring_slots: int
    policy: str | None
    pinned: list[str]
    pin_threshold: int
    policy_budget: int | None


class GenerateOptions(TypedDict):
    """What the core takes for one generation: every key."""

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_tokens: list[int]
    speculation: int
    keep_logits: bool


def generate_options(
    *,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop_tokens: list[int],
    speculation: int,
    keep_logits: bool = False,
) -> GenerateOptions:
    """The options of a generation as the core takes and checks them."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_tokens": stop_tokens,
        "speculation": speculation,
        "keep_logits": keep_logits,
    }


def per_prompt(name: str, value: Any, count: int, one: bool) -> list[Any]:
    """A value for each of `count` prompts: `value` if it is `one` for all, else its elements."""
    if one:
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} given for {count} prompts")
    return list(value)


def load_options(
    *,
    device: Device = "auto",
    vram_limit: int | str | None = None,
    placement: Placement = "auto",
    host_mapped_budget: int | str | None = None,
    headroom: int | str | None = None,
    max_context: int | None = None,
    max_batch: int = 8,
    prefill_chunk: int = 256,
    steps_in_flight: int | None = None,
    activations: Activations = "int16",
    kv_dtype: KvDtype = "float16",
    kv_layout: KvLayout = "head-major",
    threads: int | None = None,
    piece_bytes: int | str | None = None,
    ring_slots: int = 4,
    policy: Policy | None = None,
    pinned: Sequence[str] = (),
    pin_threshold: int | str | None = None,
    policy_budget: int | str | None = None,
) -> LoadOptions:
    """The options as the core takes them. Sizes are parsed here; everything else is checked by the core."""
    return {
        "device": device,
        "vram_limit": None if vram_limit is None else parse_size("vram_limit", vram_limit, _total_memory(device)),
        "placement": placement,
        "host_mapped_budget": _or_zero("host_mapped_budget", host_mapped_budget),
        "headroom": _or_zero("headroom", headroom),
        "max_context": max_context,
        "max_batch": max_batch,
        "prefill_chunk": prefill_chunk,
        "steps_in_flight": steps_in_flight,
        "activations": activations,
        "kv_dtype": kv_dtype,
        "kv_layout": kv_layout,
        "threads": threads,
        "piece_bytes": None if piece_bytes is None else parse_size("piece_bytes", piece_bytes),
        "ring_slots": ring_slots,
        "policy": policy,
        "pinned": [pinned] if isinstance(pinned, str) else list(pinned),
        "pin_threshold": 0 if pin_threshold is None else parse_size("pin_threshold", pin_threshold),
        "policy_budget": None if policy_budget is None else parse_size("policy_budget", policy_budget),
    }


def _or_zero(name: str, value: int | str | None) -> int | None:
    """Bytes of a size that may be 0, or `None`."""
    return value if value is None or isinstance(value, int) else parse_size(name, value)


def _total_memory(device: Device) -> int | None:
    """Bytes of which a percentage is taken: the host's memory for a host device."""
    if device != "host-device":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
