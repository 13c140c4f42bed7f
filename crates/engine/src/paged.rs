//! Weights on a device with memory of its own: what is mapped; the epoch's programs and their steps (`steps`), the change from
//! one placement to another (`moves`). Bytes are granted elsewhere (`budget`).

mod counters;
mod moves;
mod steps;

use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_provider::{DeviceError, DeviceReport, LinkCeilings, Provider, RangeKind, StepOutput};

use crate::dynamic::Dynamic;
use crate::error::Result;
use crate::layout::PieceLayout;
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::residency::TensorTrace;
use crate::schedule::{Ring, Schedule};

pub use self::counters::{EpochReason, PagedCounters};
use self::steps::Epoch;

/// What is to be resident, and the bytes that have to be granted for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Which pieces.
    pub placement: Placement,
    /// Bytes: those of the placement's granules, or, under a policy, those that it may come to fill.
    pub held: u64,
}

/// The weights of one model on one device.
pub struct PagedWeights {
    provider: Box<dyn Provider>,
    model: Arc<ModelSpec>,
    options: EngineOptions,
    layout: PieceLayout,
    granule: u64,
    /// Bytes of weights that a step may read in place on the host.
    mapped_budget: u64,
    placement: Placement,
    ring: Ring,
    epoch: Option<Epoch>,
    reason: EpochReason,
    counters: PagedCounters,
    /// Steps submitted and not collected; of those, the first so many whose results nobody waits for, and whose program is gone.
    in_flight: usize,
    abandoned: usize,
    lost: usize,
    /// True if another engine has had results dropped that somebody waited for, until that is noticed.
    overtaken: bool,
    /// The policy in charge; `None` under the static schedule.
    dynamic: Option<Box<Dynamic>>,
    /// Under a policy, the results of the last step.
    finished: Option<StepOutput>,
}

impl PagedWeights {
    /// Nothing mapped yet; `provider` has the model attached. `target` is the size of a piece in bytes.
    ///
    /// # Errors
    /// [`crate::EngineError::Argument`] for a pin that matches nothing.
    pub fn new(
        provider: Box<dyn Provider>,
        model: Arc<ModelSpec>,
        options: EngineOptions,
        target: u64,
    ) -> Result<PagedWeights> {
        let granule = provider.info().granule;
        let mut layout = PieceLayout::new(&model, target);
        let mut dynamic = None;
        if let Some(kind) = options.policy {
            let schedule = std::mem::replace(&mut layout, PieceLayout::by_tensor(&model, target));
            let pieces = Arc::new(layout.clone());
            dynamic = Some(Box::new(Dynamic::new(&model, &options, kind, pieces, schedule, granule)?));
        }
        Ok(PagedWeights {
            mapped_budget: 0,
            granule,
            provider,
            model,
            options,
            placement: Placement { resident: vec![false; layout.pieces.len()] },
            layout,
            ring: Ring::default(),
            epoch: None,
            reason: EpochReason::Load,
            counters: PagedCounters::default(),
            in_flight: 0,
            abandoned: 0,
            lost: 0,
            overtaken: false,
            dynamic,
            finished: None,
        })
    }

    /// The device.
    pub fn provider(&self) -> &dyn Provider {
        self.provider.as_ref()
    }

    /// The device, for ranges other than the weights and the ring.
    pub fn provider_mut(&mut self) -> &mut dyn Provider {
        self.provider.as_mut()
    }

    /// Pieces.
    pub fn layout(&self) -> &PieceLayout {
        &self.layout
    }

    /// The pieces that the static schedule has, or would have: what a limit is planned for.
    pub fn schedule_layout(&self) -> &PieceLayout {
        self.dynamic.as_ref().map_or(&self.layout, |d| d.schedule())
    }

    /// Mapping unit in bytes.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// Which pieces are resident.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The ring as it is mapped.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Counters.
    pub fn counters(&self) -> PagedCounters {
        let mut counters = self.counters.clone();
        if let Some(dynamic) = &self.dynamic {
            let cache = *dynamic.cache().counters();
            counters.residency = cache;
            counters.resident_bytes_read = cache.hit_bytes;
            counters.streamed_bytes = cache.page_in_bytes;
        }
        counters
    }

    /// What the device has done and holds; the time of steps under a policy is that of whole steps, page-ins included.
    pub fn device_report(&self) -> DeviceReport {
        let mut report = self.provider.report();
        if let Some(dynamic) = &self.dynamic {
            dynamic.clock().complete(&mut report.clock);
        }
        report
    }

    /// Bytes copied to become resident, and the nanoseconds that took.
    pub(crate) fn loaded(&self) -> (u64, u64) {
        (self.counters.loaded_bytes, self.counters.loading_nanos)
    }

    /// What became of the reads of each tensor; empty under the static schedule.
    pub fn residency_trace(&self) -> Vec<TensorTrace> {
        self.dynamic.as_ref().map_or_else(Vec::new, |d| d.trace(&self.model))
    }

    /// Begins the trace anew.
    pub fn reset_residency_trace(&mut self) {
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.reset_trace();
        }
    }

    /// The present epoch's programs; `None` between a change and the next step.
    pub fn schedule(&self) -> Option<&Schedule> {
        self.epoch.as_ref().map(|e| &e.schedule)
    }

    /// Bytes that have to be granted: those of the granules of resident pieces, or those that a policy may fill.
    pub fn held_bytes(&self) -> u64 {
        match &self.dynamic {
            Some(dynamic) => dynamic.capacity(),
            None => self.placement.mapped_bytes(&self.layout, self.granule),
        }
    }

    /// Bytes of the granules of all pieces.
    pub fn all_bytes(&self) -> u64 {
        Placement::all_resident(&self.layout).mapped_bytes(&self.layout, self.granule)
    }

    /// Says to the device that the weights will take what all of them take, and no more.
    pub fn expect_all(&mut self) {
        let bytes = self.layout.range_bytes.next_multiple_of(self.granule);
        self.provider.expect_at_most(RangeKind::Weights, bytes);
    }

    /// What is to be resident with `bytes` granted. The policy picks what leaves; the static schedule also what comes.
    pub fn within(&self, bytes: u64) -> Target {
        match &self.dynamic {
            Some(dynamic) => {
                let held = bytes.min(self.all_bytes()) / self.granule * self.granule;
                Target { placement: dynamic.within(held), held }
            }
            None => {
                let placement = Placement::within(&self.layout, self.granule, bytes);
                Target { held: placement.mapped_bytes(&self.layout, self.granule), placement }
            }
        }
    }

    /// True if a step may have to stream something with `bytes` granted.
    pub fn may_stream(&self, bytes: u64) -> bool {
        match &self.dynamic {
            Some(dynamic) => bytes < self.all_bytes() || dynamic.may_bypass(bytes),
            None => {
                let placement = Placement::within(&self.layout, self.granule, bytes);
                placement.streams(&self.layout, self.mapped_budget)
            }
        }
    }

    /// True if the next step may have to stream something.
    pub fn streams(&self) -> bool {
        match (&self.dynamic, &self.epoch) {
            (Some(dynamic), _) => self.may_stream(dynamic.capacity()),
            (None, Some(epoch)) => epoch.schedule.streamed_bytes > 0,
            (None, None) => self.placement.streams(&self.layout, self.mapped_budget),
        }
    }

    /// True if some pieces are cold: the next step streams them, or reads them in place on the host.
    pub fn has_cold(&self) -> bool {
        self.placement.cold().next().is_some()
    }

    /// From the next step on, kernels read up to `bytes` of cold weights in place.
    pub fn set_mapped_budget(&mut self, bytes: u64) {
        if bytes != self.mapped_budget {
            self.end_epoch(self.reason);
            self.mapped_budget = bytes;
        }
    }

    /// What the link carries, measured with the ring; what that held is lost. Nothing is in flight.
    ///
    /// # Errors
    /// Why it can't be measured, in words for a user.
    pub fn measure_link(&mut self) -> std::result::Result<LinkCeilings, String> {
        self.end_epoch(self.reason);
        self.provider.link_ceilings()
    }

    /// Maps or unmaps the ring, once its bytes are granted.
    ///
    /// # Errors
    /// The device's; the ring is as before then.
    pub fn set_ring(&mut self, ring: Ring) -> std::result::Result<(), DeviceError> {
        if ring != self.ring {
            self.end_epoch(self.reason);
            if let Some(dynamic) = &mut self.dynamic {
                dynamic.forget_ring(self.provider.as_mut());
            }
            self.provider.resize(RangeKind::Staging, u64::from(ring.slots) * ring.slot_bytes)?;
            self.ring = ring;
        }
        Ok(())
    }
}
