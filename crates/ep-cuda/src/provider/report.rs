//! What the device says of itself: the card's memory by driver and NVML, its own part by name, graphs, copies.

use headrace_provider::{
    ClockReport, DeviceReport, GraphReport, PhysicalFigure, PhysicalSource, RangeKind, SourceReport,
};

use crate::probe::memory_peak;

use super::{CudaProvider, FIXED, RANGES, SCRATCH, STATE};

impl CudaProvider {
    /// What [`headrace_provider::Provider::fixed_bytes`] consists of.
    pub(super) fn fixed_parts(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("kernels", self.kernel_bytes),
            ("vectors and tables", self.arena.mapped(FIXED)),
            ("scratch", self.arena.mapped(SCRATCH)),
            ("descriptors", self.arena.mapped(STATE)),
            ("pooled granules", self.arena.pooled_bytes()),
            ("quarantined granules", self.arena.quarantined_bytes()),
        ]
    }

    /// Bytes that this process takes of the card, by every source that says something.
    fn physical(&self) -> Vec<PhysicalFigure> {
        let ranges: u64 = RANGES.into_iter().map(|range: RangeKind| self.mapped_bytes(range)).sum();
        let fixed: u64 = self.fixed_parts().iter().map(|part| part.1).sum();
        let own = PhysicalFigure { source: PhysicalSource::MapCount, bytes: ranges + fixed + self.graph_bytes_now() };
        let mut figures = vec![own];
        if let Ok((free, _)) = self.context.memory_info() {
            let bytes = self.share.overhead.bytes + self.share.free_at_open.saturating_sub(free);
            figures.push(PhysicalFigure { source: PhysicalSource::Driver, bytes });
        }
        let nvml = self.meter.process_bytes();
        figures.extend(nvml.map(|bytes| PhysicalFigure { source: PhysicalSource::Nvml, bytes }));
        figures
    }

    /// Everything.
    pub(super) fn device_report(&self) -> DeviceReport {
        let counters = self.counters();
        let (graphs, uploads) = (counters.graphs, counters.uploads);
        DeviceReport {
            physical: self.physical(),
            fixed: self.fixed_parts(),
            graphs: GraphReport {
                captures: graphs.captures,
                replays: graphs.replays,
                eager_ops: graphs.eager_ops,
                dropped: graphs.dropped,
                fallbacks: Vec::new(),
                live: graphs.live,
                nodes: graphs.nodes,
                bytes: graphs.bytes,
            },
            clock: ClockReport {
                link_ceiling: self.link,
                memory_ceiling: memory_peak(&self.context),
                ..self.clock.report()
            },
            sources: SourceReport {
                registered_bytes: uploads.registered_bytes,
                bounced_bytes: uploads.bounced_bytes,
                pinned_copy_bytes: uploads.pinned_copy_bytes,
                pinned_bytes: self.context.host().bytes(),
                refusals: self.uploader.as_ref().map(|u| u.refusals().to_vec()).unwrap_or_default(),
            },
        }
    }
}
