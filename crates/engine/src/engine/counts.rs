//! What the engine counted since the window opened.

use headrace_numerics::CONTRACT_VERSION;

use super::{Counters, Engine};
use crate::error::Result;
use crate::stats::{ClockStats, DeviceStats, GraphStats, PoolStats, SourceStats, Stats, TimeStats, WeightStats};

impl Engine {
    /// Everything counted since [`Engine::reset_stats`], and the gauges.
    ///
    /// # Errors
    /// The governor's, if its books were wrong.
    pub fn stats(&self) -> Result<Stats> {
        self.check_usable()?;
        let info = self.home.info();
        let weights = self.home.counters();
        let (device, opened) = (self.home.device_report(), &self.device_before);
        let ledgers = self.home.reports(&device)?;
        let mut stats = Stats {
            contract_version: CONTRACT_VERSION,
            device: DeviceStats {
                name: info.name,
                description: info.description,
                kernels: info.kernels,
                threads: info.threads as u64,
                asked_for: self.asked_for.clone(),
                steps_in_flight: self.in_flight().min(self.home.max_in_flight()) as u64,
                fallbacks: self.home.fallbacks(),
            },
            tokens: self.counters.tokens.clone(),
            weights: WeightStats::between(&self.before, &weights),
            placement: self.home.budget().map(|b| b.plan().choice.clone().with_link(device.clock.link_ceiling)),
            memory: ledgers.iter().flat_map(|r| &r.pools).map(|pool| PoolStats::of(pool, &device)).collect(),
            kv: self.kv.stats(),
            graph: GraphStats::between(&opened.graphs, &device.graphs, &self.before, &weights),
            sources: SourceStats::between(&opened.sources, &device.sources),
            time: TimeStats {
                load_seconds: self.laps.seconds(),
                load_parts: self.laps.parts(),
                ..self.counters.time.clone()
            },
            clock: ClockStats::default(),
        };
        let drafts = stats.tokens.drafts;
        stats.tokens.accepted_per_draft = (drafts > 0).then(|| stats.tokens.accepted as f64 / drafts as f64);
        let emitted = stats.tokens.emitted;
        stats.weights.streamed_bytes_per_token =
            (emitted > 0).then(|| stats.weights.streamed_bytes as f64 / emitted as f64);
        let most = self.max_pages() / self.pages_for(self.max_context).max(1);
        stats.kv.largest_batch = most.min(self.options.max_batch) as u64;
        let read = stats.weights.resident_bytes_read + stats.weights.streamed_bytes;
        stats.clock = ClockStats::between(&opened.clock, &device.clock, read);
        stats.weights.referenced_bytes = self.model.weight_bytes() as u64;
        stats.weights.repacked_bytes = info.repacked_bytes;
        Ok(stats)
    }

    /// Opens a new window: totals and peaks start again, gauges stay.
    ///
    /// # Errors
    /// [`crate::EngineError::Failed`], [`crate::EngineError::Forked`].
    pub fn reset_stats(&mut self) -> Result<()> {
        self.guarded(|engine| {
            engine.open_window();
            Ok(())
        })
    }

    fn open_window(&mut self) {
        self.counters = Counters::default();
        self.before = self.home.counters();
        self.device_before = self.home.device_report();
        self.home.reset_peaks();
        self.kv.reset_stats();
    }
}
