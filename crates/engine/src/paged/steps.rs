//! The programs of an epoch, and the steps that run them.

use headrace_provider::{DeviceError, Instr, ProgramId, StepInput, StepOutput, StepProgram, Ticket};

use super::{EpochReason, PagedWeights};
use crate::schedule::{Ring, Schedule};

type Result<T> = std::result::Result<T, DeviceError>;

/// The programs of the present epoch.
pub(super) struct Epoch {
    pub(super) schedule: Schedule,
    pub(super) step: ProgramId,
    pub(super) prologue: Option<ProgramId>,
    /// True while the ring holds what the next step expects.
    pub(super) primed: bool,
}

impl PagedWeights {
    /// Drops the programs. The next step records new ones.
    pub(super) fn end_epoch(&mut self, reason: EpochReason) {
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

    /// Drops the results of every step in flight, for another engine that can't wait until they are collected.
    pub fn overtake(&mut self) {
        self.overtaken |= self.in_flight() > 0;
        self.abandon();
    }

    /// True if results were dropped so and nobody has taken note yet: nothing may be submitted behind them.
    pub fn is_overtaken(&self) -> bool {
        self.overtaken
    }

    /// As [`PagedWeights::is_overtaken`], and takes note of it.
    pub fn take_overtaken(&mut self) -> bool {
        std::mem::take(&mut self.overtaken)
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
    pub fn submit(&mut self, input: &StepInput) -> Result<Ticket> {
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
    pub fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<()> {
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

    fn begin_epoch(&mut self) -> Result<Epoch> {
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

    fn submit_in(&mut self, epoch: &mut Epoch, input: &StepInput) -> Result<Ticket> {
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
    pub(crate) fn record_small(&mut self, program: StepProgram) -> Result<ProgramId> {
        self.provider.record_small(program)
    }

    fn count_step(&mut self, input: &StepInput) {
        let embedding = self.model.tensor(self.model.embedding);
        self.counters.host_mapped_bytes += (embedding.bytes() / embedding.rows.max(1) * input.rows.len()) as u64;
        self.counters.steps += 1;
    }
}
