//! One step, as every worker runs it: stage by stage, pieces drawn from shared counters, a barrier after each stage.

mod activate;
mod attend;
#[cfg(target_arch = "x86_64")]
mod attend_block;
mod ring;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::block::dequantise_row;
use headrace_provider::{Buffer, RowSet, StepInput};

use crate::activations::{ActivationWriter, Activations};
use crate::buffers::StepBuffers;
use crate::compile::{Activation, Compiled, Part, Piece, Stage, Work};
use crate::kernels::argmax::argmax;
use crate::kv_pages::KvPages;
use crate::linear::{DenseRows, Epilogue, dense, linear};
use crate::pool::Barrier;
use crate::profile::{Profile, kind};
use crate::rope_table::RopeTable;
use crate::rows::RowPlan;
use crate::simd::SimdLevel;
use crate::weights::WeightSource;

pub use attend::AttendScratch;
pub use ring::RingEvents;

/// An activation that the workers fill together, a row each, and read after the barrier.
pub struct SharedActivation<'a> {
    /// Fills rows of codes.
    codes: ActivationWriter<'a>,
    /// The codes, to read.
    read: *const Activations,
    /// The floats, `[float_rows, width]`.
    floats: *mut f32,
    /// Rows of floats: 0 where nothing reads them.
    float_rows: usize,
    /// Elements of a row.
    width: usize,
}

impl SharedActivation<'_> {
    /// Row `row` of the floats, to write.
    ///
    /// # Safety
    /// No other worker reads or writes the row before the next barrier.
    #[allow(clippy::mut_from_ref)]
    unsafe fn float_row(&self, row: usize) -> &mut [f32] {
        assert!(row < self.float_rows);
        // SAFETY: in bounds; this worker's alone, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.floats.add(row * self.width), self.width) }
    }

    /// The codes and all floats, to read.
    ///
    /// # Safety
    /// No worker writes any row before the next barrier.
    unsafe fn read(&self) -> (&Activations, &[f32]) {
        // SAFETY: both outlive the step; not written meanwhile, by the caller's promise.
        unsafe { (&*self.read, std::slice::from_raw_parts(self.floats, self.float_rows * self.width)) }
    }
}

// SAFETY: rows are written by one worker each and read by others only after a barrier; see `exec::activate`.
unsafe impl Send for SharedActivation<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedActivation<'_> {}

/// What a worker keeps from step to step.
#[derive(Default)]
pub struct Scratch {
    /// A private activation's codes.
    codes: Activations,
    /// A private activation's floats, `[rows, width]`; also one row on its way into a shared activation.
    floats: Vec<f32>,
    attend: AttendScratch,
}

/// Everything that the workers of one step share.
pub struct Step<'a> {
    /// Model.
    pub model: &'a ModelSpec,
    /// Where weights are.
    pub weights: &'a dyn WeightSource,
    /// Program.
    pub compiled: &'a Compiled,
    /// Input, checked by [`RowPlan::plan`].
    pub input: &'a StepInput,
    /// Its rows by sequence.
    pub plan: &'a RowPlan,
    /// Float buffers.
    pub buffers: &'a StepBuffers<'a>,
    /// Pages.
    pub kv: &'a KvPages<'a>,
    /// Cosines and sines up to the last position.
    pub rope: &'a RopeTable,
    /// One a shape of the program.
    pub shared: &'a [SharedActivation<'a>],
    /// Arg-maxima: index, or index + [`NON_FINITE`].
    pub choices: &'a [AtomicUsize],
    /// Instruction set.
    pub level: SimdLevel,
    /// Number of workers.
    pub workers: usize,
    /// Where the first worker's time is added up, if at all.
    pub profile: Option<&'a Profile>,
    /// The staging ring, where there is one.
    pub ring: Option<&'a dyn RingEvents>,
    /// The stage at which every worker fails, if a test asked for it.
    pub fault: Option<usize>,
}

/// Marks a choice as the index of a non-finite logit.
pub const NON_FINITE: usize = 1 << (usize::BITS - 1);

impl Step<'_> {
    /// Runs the whole program as worker `index`.
    pub fn work(&self, index: usize, scratch: &mut Scratch, barrier: &Barrier) -> Result<(), String> {
        // True while the current activation is in this worker's scratch.
        let mut private = false;
        let profile = self.profile.filter(|_| index == 0);
        let mut clock = profile.map(|_| Instant::now());
        let mut lap = |work: &Work| {
            if let (Some(profile), Some(clock)) = (profile, &mut clock) {
                profile.lap(kind(work), clock);
            }
        };
        for (number, stage) in self.compiled.stages.iter().enumerate() {
            if self.fault == Some(number) {
                return Err(format!("stage {number}: a fault that was asked for"));
            }
            self.enter(stage, index, barrier)?;
            match &stage.work {
                Work::Embed(table) => {
                    let table = self.weights.matrix(*table)?;
                    self.draw(&stage.next[0], self.input.rows.len(), |row| {
                        // SAFETY: a row is drawn once, and nothing reads the residual before the barrier.
                        let out = unsafe { self.buffers.row_mut(Buffer::Residual, row, 0..table.cols) };
                        dequantise_row(&table, self.plan.tokens[row] as usize, out);
                        Ok(())
                    })?;
                }
                Work::Activate(activation) => {
                    private = self.activate(stage, activation, scratch)?;
                    if private {
                        lap(&stage.work);
                        continue;
                    }
                }
                Work::Linear { activation, parts, pieces } => {
                    self.linear(stage, activation, parts, pieces, scratch, private)?;
                }
                Work::Rope(layer) => self.rope_all(stage, *layer)?,
                Work::Attention(layer) => self.attend_all(&stage.next[0], *layer, &mut scratch.attend)?,
                Work::RopeAttention(layer) if self.plan.single => {
                    self.rope_and_attend(stage, *layer, &mut scratch.attend)?;
                }
                Work::RopeAttention(layer) => {
                    self.rope_all(stage, *layer)?;
                    barrier.wait().map_err(poisoned)?;
                    self.attend_all(&stage.next[1], *layer, &mut scratch.attend)?;
                }
                Work::Argmax => {
                    let vocab = self.buffers.width(Buffer::Logits);
                    self.draw(&stage.next[0], self.choices.len(), |row| {
                        // SAFETY: the logits were written before the last barrier.
                        let logits = unsafe { self.buffers.row(Buffer::Logits, row, 0..vocab) };
                        let choice = argmax(self.level, logits).unwrap_or_else(|bad| bad | NON_FINITE);
                        self.choices[row].store(choice, Ordering::Relaxed);
                        Ok(())
                    })?;
                }
            }
            barrier.wait().map_err(poisoned)?;
            lap(&stage.work);
        }
        Ok(())
    }

    /// Number of rows of a set in this step.
    fn rows(&self, set: RowSet) -> usize {
        match set {
            RowSet::All => self.input.rows.len(),
            RowSet::Wanted => self.input.wanted.len(),
        }
    }

    /// Draws numbers below `count` from a counter and does `work` for each.
    fn draw(
        &self,
        next: &AtomicUsize,
        count: usize,
        mut work: impl FnMut(usize) -> Result<(), String>,
    ) -> Result<(), String> {
        // Relaxed: the counter hands out numbers; the barrier orders what is done with them.
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return Ok(());
            }
            work(i)?;
        }
    }

    fn linear(
        &self,
        stage: &Stage,
        activation: &Activation,
        parts: &[Part],
        pieces: &[Piece],
        scratch: &Scratch,
        private: bool,
    ) -> Result<(), String> {
        let rows = self.rows(activation.rows);
        if rows == 0 {
            return Ok(());
        }
        let shared = &self.shared[activation.shape];
        let (codes, floats) = if private {
            (&scratch.codes, &scratch.floats[..])
        } else {
            // SAFETY: the activation was filled before the last barrier; no worker writes it before the next one.
            unsafe { shared.read() }
        };
        self.draw(&stage.next[0], pieces.len(), |i| {
            let piece = pieces[i];
            let part = &parts[piece.part];
            let view = self.weights.segment(&part.segment)?.slice_rows(piece.row, piece.rows);
            let first = part.segment.row + piece.row;
            let bias = match part.bias {
                Some(id) => Some(&self.weights.vector(id, part.tensor_rows)?[first..first + piece.rows]),
                None => None,
            };
            let epilogue = Epilogue { bias, accumulate: part.accumulate };
            let column = part.column + piece.row;
            // SAFETY: a piece is drawn once, the pieces of a stage write different columns (`compile` checks it), and
            // nobody reads this buffer before the barrier.
            let mut out = unsafe { self.buffers.sink(part.out).columns(column..column + piece.rows) };
            if part.quantised {
                linear(self.level, &view, codes, 0..rows, epilogue, &mut out);
            } else {
                let x = DenseRows::new(floats, rows, activation.width, activation.width);
                dense(self.level, &view, x, 0..rows, epilogue, &mut out);
            }
            Ok(())
        })
    }
}

fn poisoned(_: crate::pool::Poisoned) -> String {
    "another worker failed".to_string()
}

/// Makes room in the workers' shared activations. Called by the leader before the workers start.
pub fn prepare<'a>(
    compiled: &Compiled,
    input: &StepInput,
    width: ActivationWidth,
    codes: &'a mut [Activations],
    floats: &'a mut [Vec<f32>],
    shared: &mut Vec<SharedActivation<'a>>,
) {
    for ((shape, codes), floats) in compiled.shapes.iter().zip(codes).zip(floats) {
        let rows = match shape.rows {
            RowSet::All => input.rows.len(),
            RowSet::Wanted => input.wanted.len(),
        };
        codes.prepare(rows, shape.width, width);
        let need = if shape.float { rows * shape.width } else { 0 };
        if floats.len() < need {
            floats.resize(need, 0.0);
        }
        let float_rows = if shape.float { rows } else { 0 };
        let (read, floats) = (std::ptr::from_ref(codes), floats.as_mut_ptr());
        shared.push(SharedActivation { codes: codes.writer(), read, floats, float_rows, width: shape.width });
    }
}
