//! What an engine counts: totals over the window that `reset_stats` opens, and gauges that survive it.

use serde::Serialize;

/// What computes. Gauges.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceStats {
    /// `cpu`, `host-device`, `cuda:0`.
    pub name: String,
    /// The processor's or the card's name.
    pub description: String,
    /// Kernel family in use.
    pub kernels: String,
    /// Threads that compute.
    pub threads: u64,
    /// What was asked for, if that was something else than what is used; else empty.
    pub asked_for: String,
}

/// Tokens and steps. Totals.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TokenStats {
    /// Prompt tokens that went through a step.
    pub prompt: u64,
    /// Tokens chosen and given to a caller.
    pub emitted: u64,
    /// Passes over the weights.
    pub steps: u64,
    /// Token rows of all steps.
    pub rows: u64,
    /// Generations that ended.
    pub generations: u64,
}

/// Where the weights of the steps were read from. Totals in bytes, but for the gauges that say so.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WeightStats {
    /// Bytes that the model's tensors reference, each extent once. Gauge.
    pub referenced_bytes: u64,
    /// Bytes of tensors that had to be laid out anew at load (column-major ones). Gauge.
    pub repacked_bytes: u64,
    /// Read from device memory, where they stay.
    pub resident_bytes_read: u64,
    /// Copied from the host to the device for one step.
    pub streamed_bytes: u64,
    /// Read in place over the link by the device's kernels.
    pub host_mapped_bytes: u64,
    /// Read and multiplied by the host's cores.
    pub host_computed_bytes: u64,
    /// Resident bytes over all bytes that the device read; `None` if it read none.
    pub byte_hit_rate: Option<f64>,
}

/// Keys and values. Gauges, but for the totals that say so.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KvStats {
    /// Live sequences.
    pub sequences: u64,
    /// Their positions.
    pub tokens: u64,
    /// Pages in use.
    pub pages: u64,
    /// Pages that the current bucket holds.
    pub bucket_pages: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of one position.
    pub token_bytes: u64,
    /// Times that the bucket grew. Total.
    pub growth_events: u64,
    /// Bytes that growth moved. Total; 0 by construction.
    pub growth_moved_bytes: u64,
}

/// Time. Totals in seconds, from the call that starts a step to its return, by the host's monotonic clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimeStats {
    /// Reading and laying out the model. Gauge.
    pub load_seconds: f64,
    /// Steps that hold prompt rows.
    pub prefill_seconds: f64,
    /// Steps that hold none.
    pub decode_seconds: f64,
    /// Steps that hold no prompt rows: what `decode_seconds` is the time of.
    pub decode_steps: u64,
    /// Tokens that these steps gave.
    pub decode_tokens: u64,
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Version of the arithmetic contract. Gauge.
    pub contract_version: u32,
    /// What computes.
    pub device: DeviceStats,
    /// Tokens and steps.
    pub tokens: TokenStats,
    /// Weights.
    pub weights: WeightStats,
    /// Keys and values.
    pub kv: KvStats,
    /// Time.
    pub time: TimeStats,
}
