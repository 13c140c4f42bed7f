"""Loading options: their types, and the form in which the core takes them."""

from __future__ import annotations

import os
from typing import Literal, TypedDict

from headrace._sizes import parse_size

Device = Literal["auto", "cpu", "host-device"]
Activations = Literal["int16", "int8"]
KvDtype = Literal["float16", "float32"]
KvLayout = Literal["head-major", "seq-major"]


class LoadOptions(TypedDict):
    """What the core takes: every key, sizes in bytes."""

    device: str
    vram_limit: int | None
    max_context: int | None
    max_batch: int
    prefill_chunk: int
    activations: str
    kv_dtype: str
    kv_layout: str
    threads: int | None
    piece_bytes: int | None
    ring_slots: int


def load_options(
    *,
    device: Device = "auto",
    vram_limit: int | str | None = None,
    max_context: int | None = None,
    max_batch: int = 8,
    prefill_chunk: int = 256,
    activations: Activations = "int16",
    kv_dtype: KvDtype = "float16",
    kv_layout: KvLayout = "head-major",
    threads: int | None = None,
    piece_bytes: int | str | None = None,
    ring_slots: int = 4,
) -> LoadOptions:
    """The options as the core takes them. Sizes are parsed here; everything else is checked by the core."""
    return {
        "device": device,
        "vram_limit": None if vram_limit is None else parse_size("vram_limit", vram_limit, _total_memory(device)),
        "max_context": max_context,
        "max_batch": max_batch,
        "prefill_chunk": prefill_chunk,
        "activations": activations,
        "kv_dtype": kv_dtype,
        "kv_layout": kv_layout,
        "threads": threads,
        "piece_bytes": None if piece_bytes is None else parse_size("piece_bytes", piece_bytes),
        "ring_slots": ring_slots,
    }


def _total_memory(device: Device) -> int | None:
    """Bytes of which a percentage is taken: the host's memory for a host device."""
    if device != "host-device":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
