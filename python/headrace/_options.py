"""Options in the form in which the core takes them. What they may be is said in `_arguments`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypedDict

from headrace import _core
from headrace._arguments import tables
from headrace._arguments.tables import Activations, Device, KvDtype, KvLayout, Placement, Policy
from headrace._sizes import Share


class LoadOptions(TypedDict):
    """What the core takes: every key, sizes in bytes."""

    device: str
    vram_limit: int | None
    host_limit: int | None
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
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_tokens: list[int],
    speculation: int = 0,
    keep_logits: bool = False,
) -> GenerateOptions:
    """The options of a generation, checked, but for `stop_tokens`, which were. Without a seed, a fresh one if anything is drawn."""
    checked: dict[str, Any] = tables.check_all(
        tables.GENERATE,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "speculation": speculation,
            "keep_logits": keep_logits,
        },
    )
    if checked["seed"] is None:
        checked["seed"] = fresh_seed() if checked["temperature"] > 0 else 0
    return {**checked, "stop_tokens": stop_tokens}  # type: ignore[typeddict-item]


def fresh_seed() -> int:
    """A seed that was not used before, of 53 bits: every JSON reader takes it as it is."""
    return secrets.randbits(53)


def drawn_seed(options: GenerateOptions) -> int | None:
    """The seed that a generation with these options draws with; `None` for a greedy one, which draws nothing."""
    return options["seed"] if options["temperature"] > 0 else None


def load_options(
    *,
    device: Device = "auto",
    vram_limit: int | str | None = None,
    host_limit: int | str | None = None,
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
    """The options of an engine, checked, sizes in bytes. What depends on the model or on other options the core checks."""
    checked: dict[str, Any] = tables.check_all(tables.LOAD, dict(locals()))
    if isinstance(checked["vram_limit"], Share):
        checked["vram_limit"] = share_of_device("vram_limit", str(vram_limit), checked["vram_limit"], checked["device"])
    if isinstance(checked["host_limit"], Share):
        # What this process may take of the host's memory.
        checked["host_limit"] = share_of_device("host_limit", str(host_limit), checked["host_limit"], "host-device")
    checked["pin_threshold"] = checked["pin_threshold"] or 0
    return checked  # type: ignore[return-value]


def share_of_device(name: str, value: str, share: Share, device: str) -> int:
    """Bytes of a share of a device's memory. Raises `ValueError` that says why, if the device has no such figure."""
    try:
        return share.of(_core.total_memory(device))
    except ValueError as error:
        raise ValueError(f'{name} = "{value}": {error}') from None
