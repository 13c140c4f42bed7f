//! Recorded programs, their graphs, and the ways that weights come from the host.

use headrace_provider::{GraphReport, SourceReport};
use serde::Serialize;

use crate::paged::{EpochReason, PagedCounters};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
