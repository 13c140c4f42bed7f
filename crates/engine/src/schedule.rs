//! A placement as a step program: resident pieces read where they are, cold ones through the staging ring, copied ahead.
//!
//! Cold piece `k` of a step always goes through slot `k mod slots`. As soon as the last reader of a slot is done, the next
//! piece of that slot is copied; after the last one of a step that is the first one of the next step, so that the head of a
//! step finds its pieces there. Before the first step of an epoch, the prologue fills the ring once.

use headrace_model::ModelSpec;
use headrace_provider::{Instr, Op, Place, Segment, StepProgram};

use crate::layout::{Piece, PieceLayout};
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::program::operations;

/// The staging ring's shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// Number of slots; 0 if nothing is cold.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

/// The programs of one epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Copies that fill the ring before the first step; empty if nothing is cold.
    pub prologue: StepProgram,
    /// One step.
    pub step: StepProgram,
    /// Bytes of weights that the prologue copies.
    pub prologue_bytes: u64,
    /// Bytes of weights that a step copies.
    pub streamed_bytes: u64,
    /// Bytes of weights that a step reads where they stay.
    pub resident_bytes: u64,
}

impl Schedule {
    /// Writes the programs for `placement`. `ring` must have a slot if anything is cold, and slots for the largest cold slab.
    pub fn new(
        model: &ModelSpec,
        options: &EngineOptions,
        layout: &PieceLayout,
        placement: &Placement,
        ring: Ring,
    ) -> Schedule {
        let cold: Vec<usize> = placement.cold().collect();
        let slots = (ring.slots as usize).min(cold.len());
        let program = |instrs| StepProgram {
            instrs,
            activations: options.activations,
            max_rows: options.max_rows(),
            max_wanted: options.max_wanted(model.config.vocab),
            slot_bytes: if slots == 0 { 0 } else { ring.slot_bytes },
            slots: slots as u32,
        };
        let copy = |k: usize| Instr::Copy {
            segments: segments(&layout.pieces[cold[k]], |offset| Place::Slot { slot: (k % slots) as u32, offset }),
            slot: (k % slots) as u32,
        };
        let bytes = |k: usize| layout.pieces[cold[k]].weight_bytes;
        let mut writer = Writer { layout, placement, cold: &cold, slots, instrs: Vec::new(), waited: 0, at: (0, 0) };
        for op in operations(model) {
            match op {
                Op::Linear { segments, bias, out, column, accumulate } => {
                    let rows = segments[0].rows;
                    writer.linear(rows, &|segments| Op::Linear { segments, bias, out, column, accumulate }, &copy);
                }
                other => writer.instrs.push(Instr::Op(other)),
            }
        }
        let instrs = writer.instrs;
        let streamed_bytes = (0..cold.len()).map(bytes).sum();
        Schedule {
            prologue: program((0..slots).map(copy).collect()),
            step: program(instrs),
            prologue_bytes: (0..slots).map(bytes).sum(),
            streamed_bytes,
            resident_bytes: layout.weight_bytes - streamed_bytes,
        }
    }
}

/// The runs of a piece as segments.
pub fn segments(piece: &Piece, place: impl Fn(u64) -> Place) -> Vec<Segment> {
    let segment = |run: &crate::layout::Run| Segment {
        tensor: run.tensor,
        row: run.row,
        rows: run.rows,
        place: place(run.offset),
    };
    piece.runs.iter().map(segment).collect()
}

struct Writer<'a> {
    layout: &'a PieceLayout,
    placement: &'a Placement,
    cold: &'a [usize],
    slots: usize,
    instrs: Vec<Instr>,
    /// Cold pieces whose copy has been waited for.
    waited: usize,
    /// The next run to be read: piece, run in it. Operations come in the order of the layout.
    at: (usize, usize),
}

impl Writer<'_> {
    /// One linear layer of `rows` rows: the runs from `self.at` on. Resident runs that follow one another are one operation.
    fn linear(&mut self, rows: usize, op: &dyn Fn(Vec<Segment>) -> Op, copy: &dyn Fn(usize) -> Instr) {
        let mut resident: Vec<Segment> = Vec::new();
        let mut done = 0;
        while done < rows {
            let (index, run_index) = self.at;
            let piece = &self.layout.pieces[index];
            let run = piece.runs[run_index];
            let last = run_index + 1 == piece.runs.len();
            done += run.rows;
            let segment = |place| Segment { tensor: run.tensor, row: run.row, rows: run.rows, place };
            if self.placement.resident[index] {
                resident.push(segment(Place::Resident { offset: piece.address + run.offset }));
            } else {
                self.flush(&mut resident, op);
                let k = match run_index {
                    0 => self.waited,
                    _ => self.waited - 1,
                };
                let slot = (k % self.slots) as u32;
                if run_index == 0 {
                    self.instrs.push(Instr::WaitCopy { slot });
                    self.waited += 1;
                }
                self.instrs.push(Instr::Op(op(vec![segment(Place::Slot { slot, offset: run.offset })])));
                if last {
                    self.instrs.push(Instr::Free { slot });
                    let next = k + self.slots;
                    self.instrs.push(copy(if next < self.cold.len() { next } else { k % self.slots }));
                }
            }
            self.at = if last { (index + 1, 0) } else { (index, run_index + 1) };
        }
        self.flush(&mut resident, op);
    }

    fn flush(&mut self, resident: &mut Vec<Segment>, op: &dyn Fn(Vec<Segment>) -> Op) {
        if !resident.is_empty() {
            self.instrs.push(Instr::Op(op(std::mem::take(resident))));
        }
    }
}
