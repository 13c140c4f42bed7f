//! A step under a residency policy: small recorded programs, one a piece, with whatever the policy evicts and retains moved
//! between them.
//!
//! Every piece has a fixed address, so a program that reads it there is recorded once and stays right however often the
//! piece leaves and comes back. Between two programs nothing is in flight: that is when victims are unmapped.

use std::sync::Arc;
use std::time::Instant;

use headrace_model::ModelSpec;
use headrace_provider::{
    ClockReport, DeviceError, Instr, Op, Place, ProgramId, Provider, Segment, StepInput, StepOutput, StepProgram,
};

use crate::error::Result;
use crate::layout::PieceLayout;
use crate::options::EngineOptions;
use crate::paged::PagedWeights;
use crate::placement::Placement;
use crate::program::operations;
use crate::residency::pins::pinned_pieces;
use crate::residency::{Access, Limits, PolicyKind, ResidencyCache, TensorTrace};
use crate::schedule::{Ring, segments};

/// What a policy may take where the static schedule's pieces are those of `schedule` and the device grants `capacity` bytes
/// of granules: in weights, as much as the static schedule would keep there, so that the two compare; or `budget` if that is
/// less.
pub fn policy_limits(schedule: &PieceLayout, granule: u64, capacity: u64, budget: Option<u64>) -> Limits {
    let kept = schedule.weight_bytes - Placement::within(schedule, granule, capacity).cold_bytes(schedule);
    Limits { capacity, budget: budget.map_or(kept, |b| b.min(kept)) }
}

/// The operations up to and with the read of one piece.
struct Chunk {
    piece: usize,
    before: Vec<Op>,
    /// The linear layer, without its segment.
    linear: Linear,
    after: Vec<Op>,
    /// Programs that read the piece at its own address, and in the ring.
    recorded: [Option<ProgramId>; 2],
}

struct Linear {
    segment: Segment,
    op: Op,
}

/// Time of whole steps under a policy, which the device sees as many small programs with loads between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PolicyClock {
    steps: u64,
    step_seconds: f64,
    page_in_bytes: u64,
    page_in_seconds: f64,
}

impl PolicyClock {
    /// Turns the device's figures of programs into those of steps, and adds the page-ins that it made between them, by the host's
    /// clock: a load is over when it returns.
    pub(crate) fn complete(&self, clock: &mut ClockReport) {
        // A device that knows each program in all parts knows each step so.
        if clock.sampled_steps == clock.steps {
            (clock.sampled_steps, clock.sampled_seconds) = (self.steps, self.step_seconds);
        }
        (clock.steps, clock.step_seconds) = (self.steps, self.step_seconds);
        clock.copied_bytes += self.page_in_bytes;
        clock.sampled_bytes += self.page_in_bytes;
        clock.copy_seconds += self.page_in_seconds;
    }
}

/// Weights under a policy.
pub(crate) struct Dynamic {
    clock: PolicyClock,
    cache: ResidencyCache,
    chunks: Vec<Chunk>,
    schedule: Arc<PieceLayout>,
    budget: Option<u64>,
    capacity: u64,
    /// The step's input without the wish for logits, for all programs but the last.
    quiet: StepInput,
}

impl Dynamic {
    /// Nothing resident and nothing allowed yet. `layout` has pieces of one tensor each, `schedule` those of the static
    /// schedule.
    ///
    /// # Errors
    /// A pin that matches nothing.
    pub(crate) fn new(
        model: &ModelSpec,
        options: &EngineOptions,
        kind: PolicyKind,
        layout: Arc<PieceLayout>,
        schedule: PieceLayout,
        granule: u64,
    ) -> Result<Dynamic> {
        let pinned = pinned_pieces(model, &layout, &options.pinned, options.pin_threshold)?;
        let schedule = Arc::new(schedule);
        Ok(Dynamic {
            chunks: chunks(model, &layout),
            cache: ResidencyCache::new(layout, granule, kind, pinned, Some(schedule.clone())),
            schedule,
            budget: options.policy_budget,
            capacity: 0,
            quiet: StepInput::default(),
            clock: PolicyClock::default(),
        })
    }

    /// The cache.
    pub(crate) fn cache(&self) -> &ResidencyCache {
        &self.cache
    }

    /// Time of the steps so far.
    pub(crate) fn clock(&self) -> PolicyClock {
        self.clock
    }

    /// The static schedule's pieces.
    pub(crate) fn schedule(&self) -> &PieceLayout {
        &self.schedule
    }

    /// Bytes of granules that the device grants.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    fn limits(&self, capacity: u64) -> Limits {
        policy_limits(&self.schedule, self.cache.set().granule(), capacity, self.budget)
    }

    /// True if a policy may have to bypass something when `capacity` bytes are granted.
    pub(crate) fn may_bypass(&self, capacity: u64) -> bool {
        self.limits(capacity).budget < self.schedule.weight_bytes
    }

    /// What would be resident with `capacity` bytes.
    pub(crate) fn within(&self, capacity: u64) -> Placement {
        self.cache.within(self.limits(capacity))
    }

    /// `capacity` bytes are granted from now on, and `placement` is what is resident.
    pub(crate) fn granted(&mut self, capacity: u64, placement: &Placement) {
        self.sync(placement);
        self.capacity = capacity;
        self.cache.set_limits(self.limits(capacity));
    }

    /// Takes over what is resident in truth.
    pub(crate) fn sync(&mut self, placement: &Placement) {
        self.cache.sync(placement);
    }

    /// Drops the programs that read the ring, because it changes.
    pub(crate) fn forget_ring(&mut self, provider: &mut dyn Provider) {
        self.chunks.iter_mut().filter_map(|c| c.recorded[1].take()).for_each(|id| provider.discard(id));
    }

    /// What became of the reads of each tensor.
    pub(crate) fn trace(&self, model: &ModelSpec) -> Vec<TensorTrace> {
        self.cache.trace(|id| {
            let t = model.tensor(id);
            (t.name.clone(), t.bytes() as u64)
        })
    }

    /// Begins the trace anew.
    pub(crate) fn reset_trace(&mut self) {
        self.cache.reset_trace();
    }

    /// Runs one step.
    ///
    /// # Errors
    /// The device's. What is resident then is what the books say; the next step computes everything anew.
    pub(crate) fn run(
        &mut self,
        weights: &mut PagedWeights,
        input: &StepInput,
        output: &mut StepOutput,
    ) -> std::result::Result<(), DeviceError> {
        let (since, (bytes, nanos)) = (Instant::now(), weights.loaded());
        self.quiet.clone_from(input);
        self.quiet.want_logits = false;
        for index in 0..self.chunks.len() {
            let piece = self.chunks[index].piece;
            let access = self.cache.look(piece);
            if let Access::Retain { victims } = &access {
                for &victim in victims {
                    weights.demote(victim)?;
                    self.cache.evicted(victim);
                }
                weights.promote(piece)?;
                self.cache.retained(piece);
            }
            let id = self.program(index, access == Access::Bypass, weights)?;
            let last = index + 1 == self.chunks.len();
            weights.provider_mut().run(id, if last { input } else { &self.quiet }, output)?;
            match access {
                Access::Hit => self.cache.hit(piece),
                Access::Retain { .. } => {}
                Access::Bypass => self.cache.bypassed(piece),
            }
        }
        let (now_bytes, now_nanos) = weights.loaded();
        self.clock.steps += 1;
        self.clock.step_seconds += since.elapsed().as_secs_f64();
        self.clock.page_in_bytes += now_bytes - bytes;
        self.clock.page_in_seconds += (now_nanos - nanos) as f64 / 1e9;
        Ok(())
    }

    fn program(
        &mut self,
        index: usize,
        staged: bool,
        weights: &mut PagedWeights,
    ) -> std::result::Result<ProgramId, DeviceError> {
        let chunk = &mut self.chunks[index];
        if let Some(id) = chunk.recorded[usize::from(staged)] {
            return Ok(id);
        }
        let program = match staged {
            true => chunk.staged(&self.cache, weights.program(Vec::new(), weights.ring())),
            false => chunk.in_place(&self.cache, weights.program(Vec::new(), Ring::default())),
        };
        let id = weights.record_small(program)?;
        chunk.recorded[usize::from(staged)] = Some(id);
        Ok(id)
    }
}

impl Chunk {
    fn linear(&self, place: Place) -> Op {
        let mut op = self.linear.op.clone();
        if let Op::Linear { segments, .. } = &mut op {
            *segments = vec![Segment { place, ..self.linear.segment }];
        }
        op
    }

    fn in_place(&self, cache: &ResidencyCache, empty: StepProgram) -> StepProgram {
        let offset = cache.set().layout().pieces[self.piece].address;
        let ops = self.before.iter().cloned().chain([self.linear(Place::Resident { offset })]);
        StepProgram { instrs: ops.chain(self.after.iter().cloned()).map(Instr::Op).collect(), ..empty }
    }

    /// The piece is copied while the operations before it run.
    fn staged(&self, cache: &ResidencyCache, empty: StepProgram) -> StepProgram {
        let (slot, piece) = (0, &cache.set().layout().pieces[self.piece]);
        let mut instrs = vec![Instr::Copy { segments: segments(piece, |offset| Place::Slot { slot, offset }), slot }];
        instrs.extend(self.before.iter().cloned().map(Instr::Op));
        instrs.push(Instr::WaitCopy { slot });
        instrs.push(Instr::Op(self.linear(Place::Slot { slot, offset: 0 })));
        instrs.push(Instr::Free { slot });
        instrs.extend(self.after.iter().cloned().map(Instr::Op));
        StepProgram { instrs, ..empty }
    }
}

/// Splits the operations of a step at the reads of pieces. Each piece holds rows of one tensor.
///
/// An activation does not outlive the program that makes it, so the operation that makes it is repeated in every program
/// that reads it: its source is not written until all of them have run.
fn chunks(model: &ModelSpec, layout: &PieceLayout) -> Vec<Chunk> {
    // Pieces come in the order of the reads, also where layers share a matrix.
    let mut next = 0;
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut before: Vec<Op> = Vec::new();
    let mut activation: Option<Op> = None;
    for op in operations(model) {
        match &op {
            Op::Linear { segments, .. } => {
                let rows: usize = segments.iter().map(|s| s.rows).sum();
                let mut done = 0;
                while done < rows {
                    let piece = next;
                    next += 1;
                    done += layout.pieces[piece].runs[0].rows;
                    if before.is_empty() {
                        before.extend(activation.clone());
                    }
                    let run = layout.pieces[piece].runs[0];
                    let segment = Segment { tensor: run.tensor, row: run.row, rows: run.rows, place: Place::File };
                    let linear = Linear { segment, op: op.clone() };
                    let before = std::mem::take(&mut before);
                    chunks.push(Chunk { piece, before, linear, after: Vec::new(), recorded: [None; 2] });
                }
            }
            Op::Norm { .. } | Op::Quantise | Op::Swiglu => {
                activation = Some(op.clone());
                before.push(op);
            }
            Op::Embed { .. } | Op::RopeAppend { .. } | Op::Attention { .. } | Op::Argmax => before.push(op),
        }
    }
    if let Some(last) = chunks.last_mut() {
        last.after = before;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use headrace_testing::model::{ModelShape, random_model};

    use super::*;

    #[test]
    fn chunks_hold_every_operation_in_order_and_every_row_once() {
        for target in [500, 5_000, 1 << 20] {
            let model = random_model(7, &ModelShape { layers: 3, ..ModelShape::default() });
            let layout = PieceLayout::by_tensor(&model, target);
            assert!(layout.pieces.iter().all(|p| p.runs.len() == 1));
            let mut seen: Vec<Op> = Vec::new();
            let mut next_row = vec![0; model.tensors.len()];
            for (index, chunk) in chunks(&model, &layout).iter().enumerate() {
                assert_eq!(chunk.piece, index);
                let segment = chunk.linear.segment;
                assert_eq!(segment.row, next_row[segment.tensor.0]);
                next_row[segment.tensor.0] += segment.rows;
                let makes = |op: &&Op| matches!(op, Op::Norm { .. } | Op::Quantise | Op::Swiglu);
                assert!(chunk.before.iter().any(|op| makes(&op)), "a linear layer without an activation");
                for op in chunk.before.iter().chain([&chunk.linear.op]).chain(&chunk.after) {
                    // Repeated: an activation that was made last, or the layer whose next rows these are.
                    let made = seen.iter().rev().find(makes) == Some(op);
                    if !made && seen.last() != Some(op) {
                        seen.push(op.clone());
                    }
                }
            }
            assert_eq!(seen, operations(&model));
            for (id, tensor) in model.tensors.iter().enumerate().filter(|(id, _)| next_row[*id] > 0) {
                assert_eq!(next_row[id], tensor.rows);
            }
        }
    }
}
