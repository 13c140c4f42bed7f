//! What an engine counts: totals over the window that `reset_stats` opens, and gauges that survive it.

use headrace_memory_governor::{HolderReport, PoolReport, Source};
use headrace_provider::{ClockReport, DeviceReport, GraphReport, SourceReport};
use serde::Serialize;

use crate::mode::PlacementChoice;
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

/// One holder's share of a pool, in bytes. Gauges, but for the peak, which starts again at a reset.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HolderStats {
    /// `weights`, `staging`, `kv`, `workspace`, `graphs`, `fixed`, `context`; another engine's end in `of engine N`.
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

/// What one source says of the physical memory that this process takes, in bytes. Gauges, but for the peaks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PhysicalStats {
    /// `map-count`: the device's own count of mapped granules; `driver`: by how much the card's free memory shrank, other
    /// processes' changes included; `nvml`: NVML's figure of this process.
    pub source: String,
    /// Now.
    pub bytes: u64,
    /// Largest figure seen: at load, at every change of what is mapped, and whenever stats are taken.
    pub peak: u64,
    /// Beyond what the ledger explained, at its largest.
    pub unaccounted: u64,
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
    /// What each source says of the memory that is really taken.
    pub physical: Vec<PhysicalStats>,
    /// What the holder `fixed` consists of, as `(name, bytes)`; what is set aside and not taken yet included.
    pub fixed_parts: Vec<(String, u64)>,
    /// Bytes that are counted and not limited: all of them under `placement = unmanaged`, else 0.
    pub unmanaged: u64,
    /// Shares.
    pub holders: Vec<HolderStats>,
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::MapCount => "map-count",
        Source::Driver => "driver",
        Source::Nvml => "nvml",
        Source::Os => "os",
    }
}

/// Parts of a charge of `used` bytes of which the device names `parts`.
fn fixed_parts(parts: &[(&'static str, u64)], used: u64) -> Vec<(String, u64)> {
    let named: u64 = parts.iter().map(|part| part.1).sum();
    let rest = ("set aside or rounded up", used.saturating_sub(named));
    let all = parts.iter().copied().chain([rest]).filter(|part| part.1 > 0);
    all.map(|(name, bytes)| (name.to_string(), bytes)).collect()
}

impl PoolStats {
    /// From the governor's report of one pool, and the device's of its own part.
    pub fn of(pool: &PoolReport, device: &DeviceReport) -> PoolStats {
        let physical = pool.physical.iter().find(|(s, _)| *s == Source::MapCount).map(|(_, p)| *p).unwrap_or_default();
        let holder = |h: &HolderReport| HolderStats {
            name: h.name.clone(),
            used: h.used,
            peak: h.peak,
            lent: h.lent,
            reclaimable: h.reclaimable,
        };
        let figure = |(source, p): &(Source, headrace_memory_governor::Physical)| PhysicalStats {
            source: source_name(*source).to_string(),
            bytes: p.bytes,
            peak: p.peak,
            unaccounted: p.peak_unaccounted,
        };
        let fixed = pool.holders.iter().find(|h| h.name == "fixed").map_or(0, |h| h.used);
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
            physical: pool.physical.iter().map(figure).collect(),
            fixed_parts: fixed_parts(&device.fixed, fixed),
            unmanaged: pool.unmanaged,
            holders: pool.holders.iter().map(holder).collect(),
        }
    }
}

/// Recorded programs and their graphs, as the device counts them. Totals, but for the gauges.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GraphStats {
    /// Graphs captured: one for each program and bucket of row counts.
    pub captures: u64,
    /// Replays of graphs that compute: one a step, or several where a residency policy cuts steps up.
    pub replays: u64,
    /// Operations of a step that were launched outside a graph. Must be 0, but for small programs of a policy's steps.
    pub eager_ops: u64,
    /// Graphs dropped to make room for another one.
    pub dropped: u64,
    /// Steps that ran in another way than was asked for. Must be 0.
    pub fallbacks: u64,
    /// Why they did, as `(reason, count)`.
    pub fallback_reasons: Vec<(String, u64)>,
    /// Graphs that live. Gauge.
    pub live: u64,
    /// Their nodes. Gauge.
    pub nodes: u64,
    /// Bytes of the device that they were seen to take; the holder `graphs` has their allowance. Gauge.
    pub bytes: u64,
    /// Epochs that began, and why, as `(reason, count)`; reasons that did not occur are left out.
    pub epochs: Vec<(String, u64)>,
}

impl GraphStats {
    /// The totals of a window that opened at `before` on the device and at `opened` in the engine.
    pub fn between(
        before: &GraphReport,
        now: &GraphReport,
        opened: &PagedCounters,
        counters: &PagedCounters,
    ) -> GraphStats {
        let epochs = EpochReason::ALL.iter().enumerate();
        let epochs = epochs.map(|(i, r)| (r.name().to_string(), counters.epochs[i] - opened.epochs[i]));
        let earlier = |reason: &str| before.fallbacks.iter().find(|f| f.0 == reason).map_or(0, |f| f.1);
        let fallbacks = now.fallbacks.iter().map(|(reason, count)| (reason.clone(), count - earlier(reason)));
        let fallback_reasons: Vec<(String, u64)> = fallbacks.filter(|f| f.1 > 0).collect();
        GraphStats {
            captures: now.captures - before.captures,
            replays: now.replays - before.replays,
            eager_ops: now.eager_ops - before.eager_ops,
            dropped: now.dropped - before.dropped,
            fallbacks: fallback_reasons.iter().map(|f| f.1).sum(),
            fallback_reasons,
            live: now.live,
            nodes: now.nodes,
            bytes: now.bytes,
            epochs: epochs.filter(|(_, count)| *count > 0).collect(),
        }
    }
}

/// The ways that weights come from the host to a device. In bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SourceStats {
    /// Loaded straight out of registered file mappings. Total.
    pub registered_bytes: u64,
    /// Loaded through the bounded pool of pinned buffers. Total.
    pub bounced_bytes: u64,
    /// Pinned copies that streaming reads from, because their file couldn't be registered. Gauge.
    pub pinned_copy_bytes: u64,
    /// Pinned host memory taken. Gauge.
    pub pinned_bytes: u64,
    /// Why files couldn't be registered, one entry a file. Gauge.
    pub refusals: Vec<String>,
}

impl SourceStats {
    /// The totals of a window that opened at `before`.
    pub fn between(before: &SourceReport, now: &SourceReport) -> SourceStats {
        SourceStats {
            registered_bytes: now.registered_bytes - before.registered_bytes,
            bounced_bytes: now.bounced_bytes - before.bounced_bytes,
            pinned_copy_bytes: now.pinned_copy_bytes,
            pinned_bytes: now.pinned_bytes,
            refusals: now.refusals.clone(),
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

/// Time by the device's own clock: events on a card, the copy thread's and the workers' clocks on the host device. Totals, but for
/// the gauges; all of it 0 on a device that reads weights in place.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClockStats {
    /// Steps that have ended.
    pub steps: u64,
    /// Seconds from the moment that the device turns to a step to the end of its last kernel and last copy.
    pub step_seconds: f64,
    /// Bytes that they copied into the ring.
    pub copied_bytes: u64,
    /// Steps of which the device knows what its lanes did: those after which nothing was in flight, or all.
    pub sampled_steps: u64,
    /// Their seconds.
    pub sampled_seconds: f64,
    /// Seconds in which their copies into the ring were under way.
    pub copy_seconds: f64,
    /// Seconds in which their kernels didn't wait for copies.
    pub compute_seconds: f64,
    /// Bytes a second of copies while they were under way; `None` where nothing was sampled.
    pub copy_rate: Option<f64>,
    /// Bytes a second that kernels read of the device's memory, over whole steps; `None` where nothing was timed.
    pub read_rate: Option<f64>,
    /// Bytes a second that the link carries at most, as measured when the ring was first mapped. Gauge.
    pub link_ceiling: Option<f64>,
    /// Bytes a second that the device's memory gives at most, by its clock and width. Gauge.
    pub memory_ceiling: Option<f64>,
    /// Copied bytes over step seconds and the link's ceiling.
    pub link_utilisation: Option<f64>,
    /// Figures above what the machine can do: such an instrument is broken, and its figure means nothing.
    pub broken_instruments: Vec<String>,
}

/// A figure this much above its ceiling is taken for broken: measured ceilings vary by a percent or two.
const TOLERANCE: f64 = 1.03;

/// Bytes that a step has to read at least for the memory's ceiling to bind: less may come out of a cache.
const BEYOND_CACHES: u64 = 512 << 20;

impl ClockStats {
    /// The totals of a window that opened at `before`, in which steps read `read` bytes of device memory.
    pub fn between(before: &ClockReport, now: &ClockReport, read: u64) -> ClockStats {
        let per = |bytes: u64, seconds: f64| (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds);
        let steps = now.steps - before.steps;
        let step_seconds = now.step_seconds - before.step_seconds;
        let copied_bytes = now.copied_bytes - before.copied_bytes;
        let copy_seconds = now.copy_seconds - before.copy_seconds;
        let copy_rate = per(now.sampled_bytes - before.sampled_bytes, copy_seconds);
        let read_rate = per(read, step_seconds);
        let over_steps = per(copied_bytes, step_seconds);
        let mut stats = ClockStats {
            steps,
            step_seconds,
            copied_bytes,
            sampled_steps: now.sampled_steps - before.sampled_steps,
            sampled_seconds: now.sampled_seconds - before.sampled_seconds,
            copy_seconds,
            compute_seconds: now.compute_seconds - before.compute_seconds,
            copy_rate,
            read_rate,
            link_ceiling: now.link_ceiling,
            memory_ceiling: now.memory_ceiling,
            link_utilisation: over_steps.zip(now.link_ceiling).map(|(rate, ceiling)| rate / ceiling),
            broken_instruments: Vec::new(),
        };
        let mut check = |name: &str, rate: Option<f64>, ceiling: Option<f64>| {
            if let Some((rate, ceiling)) = rate.zip(ceiling).filter(|(rate, ceiling)| *rate > ceiling * TOLERANCE) {
                let (rate, ceiling) = (rate / 1e9, ceiling / 1e9);
                stats.broken_instruments.push(format!("{name}: {rate:.1} GB/s, above a ceiling of {ceiling:.1} GB/s"));
            }
        };
        check("copies while under way", copy_rate, now.link_ceiling);
        check("copies over whole steps", over_steps, now.link_ceiling);
        let beyond = read / steps.max(1) >= BEYOND_CACHES;
        check("reads of device memory", read_rate.filter(|_| beyond), now.memory_ceiling);
        stats
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_charge_sum_to_it() {
        let parts = fixed_parts(&[("vectors", 3), ("nothing", 0), ("tables", 4)], 16);
        let named = [("vectors", 3), ("tables", 4), ("set aside or rounded up", 9)];
        assert_eq!(parts, named.map(|(name, bytes)| (name.to_string(), bytes)).to_vec());
        assert_eq!(fixed_parts(&[("vectors", 3)], 3).len(), 1);
    }

    #[test]
    fn fallbacks_of_a_window_keep_their_reasons() {
        let report = |counts: [u64; 2]| GraphReport {
            captures: counts[0],
            fallbacks: vec![("no capture".to_string(), counts[0]), ("no room".to_string(), counts[1])],
            ..GraphReport::default()
        };
        let epochs = PagedCounters::default();
        let stats = GraphStats::between(&report([2, 5]), &report([2, 8]), &epochs, &epochs);
        assert_eq!((stats.captures, stats.fallbacks), (0, 3));
        assert_eq!(stats.fallback_reasons, vec![("no room".to_string(), 3)]);
    }

    #[test]
    fn a_figure_above_its_ceiling_is_a_broken_instrument() {
        let report = |copied: u64, seconds: f64, copying: f64| ClockReport {
            steps: 10,
            step_seconds: seconds,
            copied_bytes: copied,
            sampled_steps: 10,
            sampled_bytes: copied,
            sampled_seconds: seconds,
            copy_seconds: copying,
            link_ceiling: Some(50e9),
            memory_ceiling: Some(4e12),
            ..ClockReport::default()
        };
        let none = ClockReport { link_ceiling: Some(50e9), ..ClockReport::default() };
        let good = ClockStats::between(&none, &report(49_000_000_000, 1.0, 0.99), 3_900_000_000_000);
        assert_eq!(good.broken_instruments, Vec::<String>::new());
        assert_eq!((good.steps, good.link_utilisation), (10, Some(0.98)));
        assert!(good.copy_rate.is_some_and(|rate| rate > 49e9 && rate < 50e9));
        let copies = ClockStats::between(&none, &report(49_000_000_000, 1.0, 0.9), 0).broken_instruments;
        assert!(copies.len() == 1 && copies[0].starts_with("copies while under way: 54.4 GB/s"), "{copies:?}");
        let all = ClockStats::between(&none, &report(60_000_000_000, 1.0, 1.0), 5_000_000_000_000);
        assert_eq!(all.broken_instruments.len(), 3, "{all:?}");
        // What fits a cache may be read faster than memory is.
        let cached = ClockStats::between(&none, &report(1, 1e-6, 1.0), 5_000_000_000);
        assert_eq!(cached.broken_instruments, Vec::<String>::new());
        // Nothing timed, nothing said.
        let empty = ClockStats::between(&none, &none, 0);
        assert_eq!((empty.copy_rate, empty.read_rate, empty.link_utilisation), (None, None, None));
    }
}
