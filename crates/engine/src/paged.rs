//! Weights on a device with memory of its own: what is mapped, the programs of the epoch, the change from one placement to
//! another (`moves`). Bytes are granted elsewhere (`budget`).

mod moves;

use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, Instr, ProgramId, Provider, RangeKind, StepInput, StepOutput, StepProgram, Ticket,
};

use crate::dynamic::Dynamic;
use crate::error::Result;
use crate::layout::PieceLayout;
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::residency::{ResidencyCounters, TensorTrace};
use crate::schedule::{Ring, Schedule};

/// Why an epoch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpochReason {
    /// The model was loaded.
    Load,
    /// KV grew and took bytes from the weights.
    KvGrowth,
    /// KV shrank and the weights took bytes back.
    KvShrink,
    /// The limit was changed.
    Limit,
    /// Another engine that shares the device took bytes from the weights, or left and gave them back.
    OtherEngine,
    /// A step failed, and the ring was filled anew.
    Recovery,
}

impl EpochReason {
    /// Every reason.
    pub const ALL: [EpochReason; 6] = [
        EpochReason::Load,
        EpochReason::KvGrowth,
        EpochReason::KvShrink,
        EpochReason::Limit,
        EpochReason::OtherEngine,
        EpochReason::Recovery,
    ];

    /// Name in stats.
    pub const fn name(self) -> &'static str {
        match self {
            EpochReason::Load => "load",
            EpochReason::KvGrowth => "kv-growth",
            EpochReason::KvShrink => "kv-shrink",
            EpochReason::Limit => "limit",
            EpochReason::OtherEngine => "other-engine",
            EpochReason::Recovery => "recovery",
        }
    }
}

/// What this file counts. Totals since the engine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedCounters {
    /// Bytes copied by steps and prologues.
    pub streamed_bytes: u64,
    /// Bytes that steps read where they stay.
    pub resident_bytes_read: u64,
    /// Bytes of weights that steps read in place on the host, and of embedding rows that they took from there.
    pub host_mapped_bytes: u64,
    /// Bytes of weights that the host's cores read and multiplied in place of a device.
    pub host_computed_bytes: u64,
    /// Bytes copied to become resident, at load and by promotions.
    pub loaded_bytes: u64,
    /// Steps submitted.
    pub steps: u64,
    /// Epochs by reason, in the order of [`EpochReason::ALL`].
    pub epochs: [u64; EpochReason::ALL.len()],
    /// What a residency policy did; all 0 under the static schedule.
    pub residency: ResidencyCounters,
}

/// What is to be resident, and the bytes that have to be granted for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Which pieces.
    pub placement: Placement,
    /// Bytes: those of the placement's granules, or, under a policy, those that it may come to fill.
    pub held: u64,
}

/// The programs of the present epoch.
struct Epoch {
    schedule: Schedule,
    step: ProgramId,
    prologue: Option<ProgramId>,
    /// True while the ring holds what the next step expects.
    primed: bool,
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
            mapped_budget: options.host_mapped_bytes(),
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

    /// Drops the programs. The next step records new ones.
    fn end_epoch(&mut self, reason: EpochReason) {
        if let Some(epoch) = self.epoch.take() {
            self.lost = self.abandoned;
            self.provider.discard(epoch.step);
            if let Some(prologue) = epoch.prologue {
                self.provider.discard(prologue);
            }
        }
        self.reason = reason;
    }

    /// Steps in flight whose results somebody waits for: what may not be discarded.
    pub fn in_flight(&self) -> usize {
        self.in_flight.saturating_sub(self.abandoned)
    }

    /// Nobody waits for the results of any step in flight.
    pub fn abandon(&mut self) {
        self.abandoned = self.in_flight;
    }

    /// Most steps that may be submitted and not collected. Under a policy, which decides between the programs of one step, 1.
    pub fn max_in_flight(&self) -> usize {
        if self.dynamic.is_some() { 1 } else { self.provider.max_in_flight() }
    }

    /// Submits one step; records the epoch's programs and fills the ring first where that is due. Under a policy the step has
    /// run when this returns.
    ///
    /// # Errors
    /// The device's. The ring is filled anew before the next step then.
    pub fn submit(&mut self, input: &StepInput) -> std::result::Result<Ticket, DeviceError> {
        if let Some(mut dynamic) = self.dynamic.take() {
            let mut output = self.finished.take().unwrap_or_default();
            let result = dynamic.run(self, input, &mut output);
            // A failure may have left less resident than was meant.
            dynamic.sync(&self.placement);
            self.dynamic = Some(dynamic);
            result?;
            self.finished = Some(output);
            self.count_step(input);
            return Ok(Ticket(self.counters.steps));
        }
        let mut epoch = match self.epoch.take() {
            Some(epoch) => epoch,
            None => self.begin_epoch()?,
        };
        let result = self.submit_in(&mut epoch, input);
        if result.is_err() {
            epoch.primed = false;
            self.reason = EpochReason::Recovery;
        }
        self.epoch = Some(epoch);
        result
    }

    /// Waits for the results of the step that was submitted first.
    ///
    /// # Errors
    /// The device's. The ring is filled anew before the next step then.
    pub fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> std::result::Result<(), DeviceError> {
        if let Some(finished) = &mut self.finished {
            std::mem::swap(finished, output);
            return Ok(());
        }
        let result = self.provider.collect(ticket, output);
        // Collected or failed: it is not in flight any more.
        self.in_flight = self.in_flight.saturating_sub(1);
        self.abandoned = self.abandoned.saturating_sub(1);
        if self.lost > 0 {
            // Its program was discarded meanwhile, because nobody wanted its results.
            self.lost -= 1;
            output.tokens.clear();
            output.logits.clear();
            return Ok(());
        }
        if result.is_err() {
            self.epoch.iter_mut().for_each(|epoch| epoch.primed = false);
            self.reason = EpochReason::Recovery;
        }
        result
    }

    fn begin_epoch(&mut self) -> std::result::Result<Epoch, DeviceError> {
        let (options, budget) = (&self.options, self.mapped_budget);
        let schedule = Schedule::new(&self.model, options, &self.layout, &self.placement, self.ring, budget);
        let step = self.provider.record(schedule.step.clone())?;
        let prologue = match schedule.prologue.instrs.is_empty() {
            true => None,
            false => match self.provider.record(schedule.prologue.clone()) {
                Ok(id) => Some(id),
                Err(error) => {
                    self.provider.discard(step);
                    return Err(error);
                }
            },
        };
        let reason = EpochReason::ALL.iter().position(|r| *r == self.reason).unwrap_or(0);
        self.counters.epochs[reason] += 1;
        log::info!(
            "epoch ({}): {} of {} pieces cold, {} bytes streamed a step, {} read in place",
            self.reason.name(),
            self.placement.cold().count(),
            self.layout.pieces.len(),
            schedule.streamed_bytes,
            schedule.host_mapped_bytes
        );
        Ok(Epoch { schedule, step, prologue, primed: false })
    }

    fn submit_in(&mut self, epoch: &mut Epoch, input: &StepInput) -> std::result::Result<Ticket, DeviceError> {
        if !epoch.primed {
            if let Some(prologue) = epoch.prologue {
                self.provider.run(prologue, &StepInput::default(), &mut StepOutput::default())?;
                self.counters.streamed_bytes += epoch.schedule.prologue_bytes;
            }
            epoch.primed = true;
        }
        let ticket = self.provider.submit(epoch.step, input)?;
        self.in_flight += 1;
        self.counters.streamed_bytes += epoch.schedule.streamed_bytes;
        self.counters.resident_bytes_read += epoch.schedule.resident_bytes;
        self.counters.host_mapped_bytes += epoch.schedule.host_mapped_bytes;
        self.count_step(input);
        Ok(ticket)
    }

    /// A step of `instrs` through `ring`.
    pub(crate) fn program(&self, instrs: Vec<Instr>, ring: Ring) -> StepProgram {
        StepProgram {
            instrs,
            activations: self.options.activations,
            max_rows: self.options.max_rows(),
            max_wanted: self.options.max_wanted(self.model.config.vocab),
            slot_bytes: ring.slot_bytes,
            slots: ring.slots,
        }
    }

    /// Records one of the small programs of a step under a policy.
    pub(crate) fn record_small(&mut self, program: StepProgram) -> std::result::Result<ProgramId, DeviceError> {
        self.provider.record_small(program)
    }

    fn count_step(&mut self, input: &StepInput) {
        let embedding = self.model.tensor(self.model.embedding);
        self.counters.host_mapped_bytes += (embedding.bytes() / embedding.rows.max(1) * input.rows.len()) as u64;
        self.counters.steps += 1;
    }
}
