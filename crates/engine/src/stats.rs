//! What an engine counts: totals over the window that `reset_stats` opens, and gauges that survive it.

use headrace_memory_governor::{HolderReport, PoolReport, Source};
use serde::Serialize;

use crate::paged::{EpochReason, PagedCounters};

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
    /// Steps that may be in flight at once: `steps_in_flight`, or what the device allows if that is less.
    pub steps_in_flight: u64,
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

/// One holder's share of a pool, in bytes. Gauges, but for the peak, which starts again at a reset.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HolderStats {
    /// `weights`, `staging`, `kv`, `workspace`, `fixed`.
    pub name: String,
    /// Charged now.
    pub used: u64,
    /// Largest charge.
    pub peak: u64,
    /// Promised and unused: others may use it meanwhile.
    pub lent: u64,
    /// What it can be asked to yield.
    pub reclaimable: u64,
}

/// One pool of physical memory, in bytes. Gauges, but for the peaks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PoolStats {
    /// `device 0`.
    pub name: String,
    /// Hard limit.
    pub limit: u64,
    /// Charged now, by the ledger.
    pub used: u64,
    /// Largest charge.
    pub peak: u64,
    /// Neither charged nor withheld.
    pub unassigned: u64,
    /// Charge beyond the limit, at its largest. Must be 0.
    pub oversubscribed: u64,
    /// Releases of more than was charged, times. Must be 0.
    pub underflows: u64,
    /// Mapped now, by the device's own count.
    pub mapped: u64,
    /// Largest count.
    pub mapped_peak: u64,
    /// Mapped beyond what the ledger explains, at its largest. Must be 0.
    pub unaccounted: u64,
    /// Shares.
    pub holders: Vec<HolderStats>,
}

impl PoolStats {
    /// From the governor's report of one pool.
    pub fn of(pool: &PoolReport) -> PoolStats {
        let physical = pool.physical.iter().find(|(s, _)| *s == Source::MapCount).map(|(_, p)| *p).unwrap_or_default();
        let holder = |h: &HolderReport| HolderStats {
            name: h.name.clone(),
            used: h.used,
            peak: h.peak,
            lent: h.lent,
            reclaimable: h.reclaimable,
        };
        PoolStats {
            name: pool.pool.to_string(),
            limit: pool.limit,
            used: pool.used,
            peak: pool.peak,
            unassigned: pool.unassigned,
            oversubscribed: pool.peak_oversubscribed,
            underflows: pool.underflows,
            mapped: physical.bytes,
            mapped_peak: physical.peak,
            unaccounted: physical.peak_unaccounted,
            holders: pool.holders.iter().map(holder).collect(),
        }
    }
}

/// Recorded programs. Totals.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GraphStats {
    /// Programs recorded for steps.
    pub captures: u64,
    /// Steps that replayed a recorded program.
    pub replays: u64,
    /// Operations of a step that ran outside a recorded program. Must be 0.
    pub eager_ops: u64,
    /// Epochs that began, and why, as `(reason, count)`; reasons that did not occur are left out.
    pub epochs: Vec<(String, u64)>,
}

impl GraphStats {
    /// The totals of a window that opened at `before`.
    pub fn between(before: &PagedCounters, now: &PagedCounters) -> GraphStats {
        let epochs = EpochReason::ALL.iter().enumerate();
        let epochs = epochs.map(|(i, r)| (r.name().to_string(), now.epochs[i] - before.epochs[i]));
        GraphStats {
            captures: now.captures - before.captures,
            replays: now.replays - before.replays,
            eager_ops: 0,
            epochs: epochs.filter(|(_, count)| *count > 0).collect(),
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
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of one position.
    pub token_bytes: u64,
    /// Times that the bucket grew. Total.
    pub growth_events: u64,
    /// Bytes that growth moved. Total; 0 by construction.
    pub growth_moved_bytes: u64,
}

/// Time. Totals in seconds by the host's monotonic clock, from the submission of a step, or from the results of the step before
/// if they came later, to its results.
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
    /// Memory pools; empty where nothing is limited.
    pub memory: Vec<PoolStats>,
    /// Keys and values.
    pub kv: KvStats,
    /// Recorded programs.
    pub graph: GraphStats,
    /// Time.
    pub time: TimeStats,
}
