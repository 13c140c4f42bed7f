//! A placement as a step program: resident pieces read where they are, cold ones in place on the host where that is wanted,
//! else through the staging ring, copied ahead.
//!
//! Streamed piece `k` of a step always goes through slot `k mod slots`. As soon as the last reader of a slot is done, the next
//! piece of that slot is copied; after the last one of a step that is the first one of the next step, so that the head of a
//! step finds its pieces there. Before the first step of an epoch, the prologue fills the ring once.

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_provider::{Instr, Op, Place, Segment, StepProgram};

use crate::layout::{Piece, PieceLayout};
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::program::operations;

/// The staging ring's shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// Number of slots; 0 if nothing is streamed.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

/// The programs of one epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Copies that fill the ring before the first step; empty if nothing is streamed.
    pub prologue: StepProgram,
    /// One step.
    pub step: StepProgram,
    /// Bytes of weights that the prologue copies.
    pub prologue_bytes: u64,
    /// Bytes of weights that a step copies.
    pub streamed_bytes: u64,
    /// Bytes of weights that a step reads in place on the host.
    pub host_mapped_bytes: u64,
    /// Bytes of weights that a step reads in device memory, where they stay.
    pub resident_bytes: u64,
}

impl Schedule {
    /// Writes the programs for `placement`, of whose cold pieces up to `mapped_budget` bytes are read in place. `ring` must have
    /// a slot if any other is cold, and slots for the largest of those slabs.
    pub fn new(
        model: &ModelSpec,
        options: &EngineOptions,
        layout: &PieceLayout,
        placement: &Placement,
        ring: Ring,
        mapped_budget: u64,
    ) -> Schedule {
        let mapped = placement.host_mapped(layout, mapped_budget);
        let cold: Vec<usize> = placement.cold().filter(|&i| !mapped[i]).collect();
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
        let (instrs, mapped_flags) = (Vec::new(), &mapped);
        let mut writer =
            Writer { layout, placement, mapped: mapped_flags, cold: &cold, slots, instrs, waited: 0, at: (0, 0) };
        for op in operations(model) {
            match op {
                Op::Linear { segments, bias, out, column, accumulate } => {
                    let read = (segments[0].tensor, segments[0].rows);
                    writer.linear(read, &|segments| Op::Linear { segments, bias, out, column, accumulate }, &copy);
                }
                other => writer.instrs.push(Instr::Op(other)),
            }
        }
        let instrs = writer.instrs;
        let streamed_bytes: u64 = (0..cold.len()).map(bytes).sum();
        let host_mapped_bytes = placement.cold_bytes(layout) - streamed_bytes;
        Schedule {
            prologue: program((0..slots).map(copy).collect()),
            step: program(instrs),
            prologue_bytes: (0..slots).map(bytes).sum(),
            streamed_bytes,
            host_mapped_bytes,
            resident_bytes: layout.weight_bytes - streamed_bytes - host_mapped_bytes,
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
    /// Pieces that are read in place on the host.
    mapped: &'a [bool],
    /// Pieces that are streamed.
    cold: &'a [usize],
    slots: usize,
    instrs: Vec<Instr>,
    /// Streamed pieces whose copy has been waited for.
    waited: usize,
    /// The next run to be read: piece, run in it. Operations come in the order of the layout.
    at: (usize, usize),
}

impl Writer<'_> {
    /// One linear layer that reads `rows` rows of `tensor`: the runs from `self.at` on, which are its own. Runs that follow one
    /// another and aren't streamed are one operation.
    fn linear(
        &mut self,
        (tensor, rows): (TensorId, usize),
        op: &dyn Fn(Vec<Segment>) -> Op,
        copy: &dyn Fn(usize) -> Instr,
    ) {
        let mut standing: Vec<Segment> = Vec::new();
        let mut done = 0;
        while done < rows {
            let (index, run_index) = self.at;
            let piece = &self.layout.pieces[index];
            let run = piece.runs[run_index];
            let last = run_index + 1 == piece.runs.len();
            debug_assert_eq!(run.tensor, tensor, "pieces follow the reads of a step");
            done += run.rows;
            let segment = |place| Segment { tensor: run.tensor, row: run.row, rows: run.rows, place };
            if self.placement.resident[index] {
                standing.push(segment(Place::Resident { offset: piece.address + run.offset }));
            } else if self.mapped[index] {
                standing.push(segment(Place::HostMapped));
            } else {
                self.flush(&mut standing, op);
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
        self.flush(&mut standing, op);
    }

    fn flush(&mut self, standing: &mut Vec<Segment>, op: &dyn Fn(Vec<Segment>) -> Op) {
        if !standing.is_empty() {
            self.instrs.push(Instr::Op(op(std::mem::take(standing))));
        }
    }
}
