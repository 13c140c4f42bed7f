"""What an engine counts. Totals cover the window that `Engine.reset_stats` opens; gauges, marked so, survive it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._plan import PlacementChoice
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
    """Steps that may be in flight at once, as things are now: the option, or by default 2, and 1 while weights are cold; or what
    the device allows if that is less."""
    fallbacks: tuple[str, ...]
    """What the device does in another way than it would, and why, a sentence each; empty if nothing was refused."""


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
    drafted: int
    """Tokens of drafts, each verified in a step."""
    accepted: int
    """Those of them that were right, and needed no step of their own."""
    drafts: int
    """Drafts that were verified: one a sequence and step."""
    accepted_per_draft: float | None
    """Accepted tokens over drafts; `None` if there was none."""


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
    streamed_bytes_per_token: float | None
    """Streamed bytes over the tokens that were chosen meanwhile; `None` if there was none."""
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
    """`weights`, `staging`, `kv`, `workspace`, `graphs`, `fixed`, `context`; another engine's on the same card: `kv of engine 2`."""
    used: int
    """Charged now."""
    peak: int
    """Largest charge in the window."""
    lent: int
    """Promised and unused: others may use it meanwhile."""
    reclaimable: int
    """What it can be asked to yield."""


@dataclass(frozen=True)
class PhysicalStats(Record):
    """What one source says of the memory that this process really takes, in bytes. Gauges, but for the peaks."""

    source: str
    """`map-count`: the device's own count of mapped granules; `driver`: by how much the card's free memory shrank, other
    processes' changes included; `nvml`: NVML's figure of this process."""
    bytes: int
    """Now."""
    peak: int
    """Largest figure seen in the window: at load, at every change of what is mapped, and whenever stats are taken."""
    unaccounted: int
    """Beyond what the ledger explained, at its largest."""


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
    physical: tuple[PhysicalStats, ...]
    """What each source says of the memory that is really taken."""
    fixed_parts: tuple[tuple[str, int], ...]
    """What the holder `fixed` consists of, as (name, bytes), what is set aside and not taken yet included."""
    unmanaged: int
    """Counted and not limited: everything under `placement="unmanaged"`, else 0."""
    holders: tuple[HolderStats, ...]


@dataclass(frozen=True)
class GraphStats(Record):
    """Recorded programs and their graphs, as the device counts them. Totals, but for the gauges."""

    captures: int
    """Graphs captured: one for each program and bucket of row counts."""
    replays: int
    """Replays of graphs that compute: one a step, or several where a residency policy cuts steps up."""
    eager_ops: int
    """Operations of a step that were launched outside a graph. Must be 0, but for small programs of a policy's steps."""
    dropped: int
    """Graphs dropped to make room for another one."""
    fallbacks: int
    """Steps that ran in another way than was asked for. Must be 0."""
    fallback_reasons: tuple[tuple[str, int], ...]
    """Why they did, as (reason, count)."""
    live: int
    """Graphs that live. Gauge."""
    nodes: int
    """Their nodes. Gauge."""
    bytes: int
    """Bytes of the device that they were seen to take; the holder `graphs` has their allowance. Gauge."""
    epochs: tuple[tuple[str, int], ...]
    """Epochs that began, and why: `load`, `kv-growth`, `kv-shrink`, `limit`, `other-engine`, `recovery`."""


@dataclass(frozen=True)
class SourceStats(Record):
    """The ways that weights come from the host to a device, in bytes."""

    registered_bytes: int
    """Loaded straight out of registered file mappings. Total."""
    bounced_bytes: int
    """Loaded through the bounded pool of pinned buffers. Total."""
    pinned_copy_bytes: int
    """Pinned copies that streaming reads from, because their file couldn't be registered. Gauge."""
    pinned_bytes: int
    """Pinned host memory taken. Gauge."""
    refusals: tuple[str, ...]
    """Why files couldn't be registered, one entry a file. Gauge."""


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
    max_pages: int
    """Pages that all sequences can be promised together."""
    promised_pages: int
    """Pages that live sequences were promised."""
    largest_batch: int
    """Sequences of `max_context` positions that fit at once, `max_batch` at most."""
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
    """Time. Totals in seconds by the host's monotonic clock, from the submission of a step, or from the results of the step
    before if they came later, to its results."""

    load_seconds: float
    """Loading the engine. Gauge."""
    load_parts: tuple[tuple[str, float], ...]
    """What loading it was spent on, in order, with seconds: reading the `files`, opening the `device`, its tables and streams
    (`attach`), its `kernels`, the `plan`, placing `weights`, KV `pages`. Gauge."""
    prefill_seconds: float
    """Steps that hold prompt rows."""
    decode_seconds: float
    """Steps that hold none."""
    decode_steps: int
    """Steps that hold no prompt rows: what `decode_seconds` is the time of."""
    decode_tokens: int
    """Tokens that these steps gave."""


@dataclass(frozen=True)
class ClockStats(Record):
    """Time by the device's own clock: events on a card, the copy thread's and the workers' clocks on `host-device`.

    Totals, but for the gauges; all of it 0 on a device that reads weights in place. Rates are in bytes a second.
    """

    steps: int
    """Steps that have ended."""
    step_seconds: float
    """From the moment that the device turns to a step to the end of its last kernel and last copy."""
    copied_bytes: int
    """Bytes that these steps copied into the ring."""
    sampled_steps: int
    """Steps of which the device knows what its lanes did: on a card those after which nothing was in flight."""
    sampled_seconds: float
    """Their time."""
    copy_seconds: float
    """Time in which their copies into the ring were under way."""
    compute_seconds: float
    """Time in which their kernels didn't wait for copies."""
    copy_rate: float | None
    """Of copies while they were under way; `None` where nothing was sampled."""
    read_rate: float | None
    """What kernels read of the device's memory, over whole steps; `None` where nothing was timed."""
    link_ceiling: float | None
    """What the link carries at most, measured when the ring was first mapped. Gauge."""
    memory_ceiling: float | None
    """What the device's memory gives at most, by its clock and width. Gauge."""
    link_utilisation: float | None
    """Copied bytes over step seconds and the link's ceiling."""
    broken_instruments: tuple[str, ...]
    """Figures above what the machine can do: such an instrument is broken, and its figure means nothing."""


@dataclass(frozen=True)
class Stats(Record):
    """Everything an engine counts."""

    contract_version: int
    """Version of the arithmetic contract: bits may differ between versions, and between nothing else. Gauge."""
    device: DeviceStats
    tokens: TokenStats
    weights: WeightStats
    placement: PlacementChoice | None
    """Where weights are read from, and why; `None` on a device that reads them in place. Gauge."""
    memory: tuple[PoolStats, ...]
    """Memory pools; empty where nothing is limited."""
    kv: KvStats
    graph: GraphStats
    sources: SourceStats
    time: TimeStats
    clock: ClockStats
