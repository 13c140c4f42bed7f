"""What an engine counts. Totals cover the window that `Engine.reset_stats` opens; gauges, marked so, survive it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._records import Record


@dataclass(frozen=True)
class DeviceStats(Record):
    """What computes. Gauges."""

    name: str
    """`cpu`, `host-device`, `cuda:0`."""
    description: str
    """The processor's or the card's name."""
    kernels: str
    """Kernel family in use, such as `avx512-vnni`."""
    threads: int
    """Threads that compute."""
    asked_for: str
    """What was asked for, if that was something else than what is used; else empty."""
    steps_in_flight: int
    """Steps that may be in flight at once: the option, or what the device allows if that is less."""


@dataclass(frozen=True)
class TokenStats(Record):
    """Tokens and steps. Totals."""

    prompt: int
    """Prompt tokens that went through a step."""
    emitted: int
    """Tokens chosen and given to a caller."""
    steps: int
    """Passes over the weights."""
    rows: int
    """Token rows of all steps."""
    discarded_steps: int
    """Steps, counted above, that were submitted ahead and of whose results none was of use."""
    discarded_rows: int
    """Rows, counted above, whose results were of no use."""
    generations: int
    """Generations that ended."""


@dataclass(frozen=True)
class WeightStats(Record):
    """Where the weights of the steps were read from. Totals in bytes, but for the gauges."""

    referenced_bytes: int
    """Bytes that the model's tensors reference, each extent once. Gauge."""
    repacked_bytes: int
    """Bytes of tensors that had to be laid out anew at load. Gauge."""
    resident_bytes_read: int
    """Read from device memory, where they stay."""
    streamed_bytes: int
    """Copied from the host to the device for one step."""
    host_mapped_bytes: int
    """Read in place over the link by the device's kernels."""
    host_computed_bytes: int
    """Read and multiplied by the host's cores."""
    byte_hit_rate: float | None
    """Resident bytes over all bytes that the device read; `None` if it read none."""
    hits: int
    """Reads of pieces that a residency policy had resident. 0 without a policy, as all below."""
    page_ins: int
    """Reads for which a policy had a piece copied."""
    evictions: int
    """Pieces that a policy evicted."""
    bypassed_page_ins: int
    """Page-ins that did not stay."""
    bypassed_bytes: int
    """Bytes of page-ins that did not stay."""
    bypassed_share: float | None
    """Bypassed bytes over the bytes of all page-ins; `None` if there was none."""


@dataclass(frozen=True)
class HolderStats(Record):
    """One holder's share of a pool, in bytes. Gauges, but for the peak."""

    name: str
    """`weights`, `staging`, `kv`, `workspace`, `fixed`."""
    used: int
    """Charged now."""
    peak: int
    """Largest charge in the window."""
    lent: int
    """Promised and unused: others may use it meanwhile."""
    reclaimable: int
    """What it can be asked to yield."""


@dataclass(frozen=True)
class PoolStats(Record):
    """One pool of physical memory, in bytes. Gauges, but for the peaks."""

    name: str
    limit: int
    """Hard limit."""
    used: int
    """Charged now, by the ledger."""
    peak: int
    """Largest charge in the window."""
    unassigned: int
    """Neither charged nor withheld."""
    oversubscribed: int
    """Charge beyond the limit, at its largest. Must be 0."""
    underflows: int
    """Releases of more than was charged, times. Must be 0."""
    mapped: int
    """Mapped now, by the device's own count."""
    mapped_peak: int
    """Largest count."""
    unaccounted: int
    """Mapped beyond what the ledger explains, at its largest. Must be 0."""
    holders: tuple[HolderStats, ...]


@dataclass(frozen=True)
class GraphStats(Record):
    """Recorded programs. Totals."""

    captures: int
    """Programs recorded for steps."""
    replays: int
    """Steps that replayed a recorded program."""
    eager_ops: int
    """Operations of a step that ran outside a recorded program. Must be 0."""
    epochs: tuple[tuple[str, int], ...]
    """Epochs that began, and why: `load`, `kv-growth`, `kv-shrink`, `limit`, `recovery`."""


@dataclass(frozen=True)
class KvStats(Record):
    """Keys and values. Gauges, but for the totals."""

    sequences: int
    """Live sequences."""
    tokens: int
    """Their positions."""
    pages: int
    """Pages in use."""
    bucket_pages: int
    """Pages that the current bucket holds."""
    page_bytes: int
    """Bytes of a page."""
    token_bytes: int
    """Bytes of one position."""
    growth_events: int
    """Times that the bucket grew. Total."""
    growth_moved_bytes: int
    """Bytes that growth moved. Total; 0 by construction."""


@dataclass(frozen=True)
class TimeStats(Record):
    """Time. Totals in seconds, from the call that starts a step to its return, by the host's monotonic clock."""

    load_seconds: float
    """Reading and laying out the model. Gauge."""
    prefill_seconds: float
    """Steps that hold prompt rows."""
    decode_seconds: float
    """Steps that hold none."""
    decode_steps: int
    """Steps that hold no prompt rows: what `decode_seconds` is the time of."""
    decode_tokens: int
    """Tokens that these steps gave."""


@dataclass(frozen=True)
class Stats(Record):
    """Everything an engine counts."""

    contract_version: int
    """Version of the arithmetic contract: bits may differ between versions, and between nothing else. Gauge."""
    device: DeviceStats
    tokens: TokenStats
    weights: WeightStats
    memory: tuple[PoolStats, ...]
    """Memory pools; empty where nothing is limited."""
    kv: KvStats
    graph: GraphStats
    time: TimeStats
