"""What this machine can do: its host, its cards, and the links between them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace import _core
from headrace._records import Record


@dataclass(frozen=True)
class HostReport(Record):
    """The host. Speeds are in bytes a second."""

    processor: str
    """The processor's name."""
    cores: int
    """Cores that this process may use."""
    hardware_threads: int
    """Hardware threads that this process may use."""
    memory_bytes: int
    kernels: tuple[str, ...]
    """Kernel families that the processor can run, the best one last."""
    features: tuple[str, ...]
    """Instruction sets that matter here."""
    memory_read: float
    """What all cores together read from memory."""


@dataclass(frozen=True)
class ChunkSpeed(Record):
    """The speed of copies of one size."""

    chunk: int
    """Bytes of one copy."""
    speed: float
    """Bytes a second."""


@dataclass(frozen=True)
class CardReport(Record):
    """One card. Speeds are in bytes a second."""

    device: str
    """`cuda:0`."""
    card: str
    """The card's name."""
    capability: str
    """Compute capability, such as `9.0`."""
    driver: str
    """The newest CUDA version that the driver supports, such as `12.8`."""
    total_bytes: int
    free_bytes: int
    granule: int
    """Bytes of the unit in which its memory is mapped."""
    read_only_registration: bool
    """True if file mappings can be registered, so that streaming needs no second copy in memory."""
    host_to_device: tuple[ChunkSpeed, ...]
    """From pinned memory to the card, by the size of a copy."""
    device_to_host: float
    """From the card to pinned memory."""
    device_read: float | None
    """What kernels read from the card's memory; `None` without a kernel for the card."""
    device_copy_read: float
    """What a copy within the card reads; it writes as many."""
    zero_copy_read: float | None
    """What kernels read in place from pinned host memory; `None` without a kernel for the card."""
    memory_peak: float | None
    """What the memory's clock and width allow; `None` where the driver doesn't say."""


@dataclass(frozen=True)
class MachineReport(Record):
    """The machine."""

    host: HostReport
    cards: tuple[CardReport, ...]
    """Cards that can be used."""
    problems: tuple[str, ...]
    """Why there are no cards, or not all that the driver sees; empty if nothing is wrong."""


def probe() -> MachineReport:
    """Measures what the machine can do: the ceilings that every other speed is compared with.

    Takes a second or two, and for that time 64 MiB of memory a core, and 256 MiB of pinned memory and 512 MiB of each card.
    A machine without a driver or a card is no error: `problems` says what is missing.
    """
    return MachineReport.from_dict(json.loads(_core.probe()))
