//! What an engine counts: totals over the window that `reset_stats` opens, and gauges that survive it.

mod clock;
mod graph;
mod memory;

use serde::Serialize;

pub use self::clock::{ClockStats, TimeStats};
pub use self::graph::{GraphStats, SourceStats};
pub use self::memory::{HolderStats, PhysicalStats, PoolStats};
use crate::mode::PlacementChoice;
use crate::paged::PagedCounters;

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
    /// Steps that may be in flight at once, as things are now: the option, or by default 2, and 1 while weights are cold; or what
    /// the device allows if that is less.
    pub steps_in_flight: u64,
    /// What the device does in another way than it would, and why, a sentence each; empty if nothing was refused.
    pub fallbacks: Vec<String>,
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
    /// Steps, counted above, that were submitted ahead and of whose results none was of use: a stop token came before.
    pub discarded_steps: u64,
    /// Rows, counted above, whose results were of no use: of these steps, and of generations that ended in a batch that went
    /// on.
    pub discarded_rows: u64,
    /// Generations that ended.
    pub generations: u64,
    /// Drafted tokens that were verified.
    pub drafted: u64,
    /// Those of them that were right: tokens that needed no step of their own.
    pub accepted: u64,
    /// Drafts that were verified: one a sequence and step.
    pub drafts: u64,
    /// Accepted tokens over drafts; `None` if there was none.
    pub accepted_per_draft: Option<f64>,
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
    /// Streamed bytes over the tokens that were chosen meanwhile; `None` if there was none.
    pub streamed_bytes_per_token: Option<f64>,
    /// Resident bytes over all bytes that the device read; `None` if it read none.
    pub byte_hit_rate: Option<f64>,
    /// Reads of pieces that a policy had resident. 0 under the static schedule, as all below.
    pub hits: u64,
    /// Reads for which a policy had a piece copied.
    pub page_ins: u64,
    /// Pieces that a policy evicted.
    pub evictions: u64,
    /// Page-ins that did not stay.
    pub bypassed_page_ins: u64,
    /// Bytes of page-ins that did not stay.
    pub bypassed_bytes: u64,
    /// Bypassed bytes over the bytes of all page-ins; `None` if there was none.
    pub bypassed_share: Option<f64>,
}

impl WeightStats {
    /// The totals of a window that opened at `before`.
    pub fn between(before: &PagedCounters, now: &PagedCounters) -> WeightStats {
        let resident = now.resident_bytes_read - before.resident_bytes_read;
        let streamed = now.streamed_bytes - before.streamed_bytes;
        let mapped = now.host_mapped_bytes - before.host_mapped_bytes;
        let read = resident + streamed + mapped;
        let policy = now.residency.since(&before.residency);
        WeightStats {
            resident_bytes_read: resident,
            streamed_bytes: streamed,
            host_mapped_bytes: mapped,
            host_computed_bytes: now.host_computed_bytes - before.host_computed_bytes,
            byte_hit_rate: (read > 0).then(|| resident as f64 / read as f64),
            hits: policy.hits,
            page_ins: policy.page_ins,
            evictions: policy.evictions,
            bypassed_page_ins: policy.bypassed_page_ins,
            bypassed_bytes: policy.bypassed_bytes,
            bypassed_share: policy.bypassed_share(),
            ..WeightStats::default()
        }
    }
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
    /// Pages that all sequences can be promised together.
    pub max_pages: u64,
    /// Pages that live sequences were promised.
    pub promised_pages: u64,
    /// Sequences of `max_context` positions that fit at once, `max_batch` at most.
    pub largest_batch: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of one position.
    pub token_bytes: u64,
    /// Times that the bucket grew. Total.
    pub growth_events: u64,
    /// Bytes that growth moved. Total; 0 by construction.
    pub growth_moved_bytes: u64,
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
    /// Where weights are read from, and why; `None` on a device that reads them in place. Gauge.
    pub placement: Option<PlacementChoice>,
    /// Memory pools; empty where nothing is limited.
    pub memory: Vec<PoolStats>,
    /// Keys and values.
    pub kv: KvStats,
    /// Recorded programs.
    pub graph: GraphStats,
    /// The ways from the host.
    pub sources: SourceStats,
    /// Time by the host's clock.
    pub time: TimeStats,
    /// Time by the device's clock.
    pub clock: ClockStats,
}
