//! What a device says of itself: what it physically takes and by whose word, its own part by name, graphs, copies, time.

/// Who measured a physical figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PhysicalSource {
    /// The device's own count of what it has mapped, its fixed part and its graphs. What the process takes once, however many
    /// devices share a memory, is not in it.
    MapCount,
    /// The driver: by how much the card's free memory shrank since the device was opened, what the context took
    /// included. Other processes' changes are in it.
    Driver,
    /// NVML's figure of this process.
    Nvml,
}

/// Bytes that this process takes of the device, by one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysicalFigure {
    /// Who says so.
    pub source: PhysicalSource,
    /// Bytes.
    pub bytes: u64,
}

/// What the link to the host's memory was measured at, both ways in which cold weights come over it. Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCeilings {
    /// Copies into the device's memory.
    pub copies: f64,
    /// Reads in place by kernels.
    pub in_place: f64,
    /// What the device's own memory can be read at, at most; `None` where nobody knows.
    pub memory: Option<f64>,
}

/// Recorded programs and their replays. Counts since the device was made, but for the gauges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphReport {
    /// Graphs captured: on a card one for each program and bucket of row counts, else one for each program.
    pub captures: u64,
    /// Replays of graphs that compute. A step is one; a step that a residency policy cuts up is several.
    pub replays: u64,
    /// Operations of a step that were launched outside a graph. Must be 0, but for small programs of a policy's steps.
    pub eager_ops: u64,
    /// Graphs that were dropped to make room for another one.
    pub dropped: u64,
    /// Steps that ran in another way than was asked for, by reason.
    pub fallbacks: Vec<(String, u64)>,
    /// Graphs that live. Gauge.
    pub live: u64,
    /// Their nodes; the operations of the programs where the device has no nodes. Gauge.
    pub nodes: u64,
    /// Bytes of the device that they were seen to take. Gauge.
    pub bytes: u64,
}

/// The ways that weights come from the host. Counts since the device was made, in bytes, but for those that say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceReport {
    /// Loaded straight out of registered file mappings.
    pub registered_bytes: u64,
    /// Loaded through the bounded pool of pinned buffers.
    pub bounced_bytes: u64,
    /// Pinned copies that streaming reads from, because their file couldn't be registered. Gauge.
    pub pinned_copy_bytes: u64,
    /// Page-locked host memory taken: registered mappings, those copies, the pool, buffers of steps. Gauge.
    pub pinned_bytes: u64,
    /// Why files couldn't be registered, one entry a file.
    pub refusals: Vec<String>,
}

/// Time by the device's own clock. Sums since the device was made, in seconds, but for those that say otherwise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClockReport {
    /// Steps that were timed: all that have ended.
    pub steps: u64,
    /// From the moment that the device turns to a step to the end of its last kernel and its last copy.
    pub step_seconds: f64,
    /// Bytes that these steps copied into the ring.
    pub copied_bytes: u64,
    /// Steps of which the device knows what its lanes did: all, or those after which nothing was in flight.
    pub sampled_steps: u64,
    /// Their time.
    pub sampled_seconds: f64,
    /// Bytes that they copied into the ring.
    pub sampled_bytes: u64,
    /// Time in which copies into the ring were under way.
    pub copy_seconds: f64,
    /// Time in which kernels didn't wait for copies.
    pub compute_seconds: f64,
    /// Bytes a second that the link carries at most, as measured; `None` before anything was streamed, and where there is no link.
    pub link_ceiling: Option<f64>,
    /// Bytes a second that the device's memory gives at most; `None` where nobody says.
    pub memory_ceiling: Option<f64>,
}

/// Everything a device reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceReport {
    /// What the process takes, by each source that says something; empty on a device without memory of its own.
    pub physical: Vec<PhysicalFigure>,
    /// What [`crate::Provider::fixed_bytes`] consists of: names and bytes that sum to it.
    pub fixed: Vec<(&'static str, u64)>,
    /// Graphs.
    pub graphs: GraphReport,
    /// Copies.
    pub sources: SourceReport,
    /// Time.
    pub clock: ClockReport,
}
