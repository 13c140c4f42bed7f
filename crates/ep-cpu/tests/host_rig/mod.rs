//! A model on a host device with a schedule made by hand: pieces, a placement, a ring, epochs, and the oracle beside it.
#![allow(dead_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

use std::sync::Arc;

use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_kv::KvGeometry;
use headrace_kv::geometry::KvLayout;
use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{
    DeviceError, Instr, Op, Place, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram,
    TokenRow,
};
use headrace_testing::{ModelShape, Oracle, file_program, generator, random_model};
use rand::Rng;

pub const MAX_ROWS: usize = 40;
pub const PAGES: usize = 4;
pub const GRANULE: u64 = 4096;

/// Some rows of some tensors, side by side.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Segments at their offsets within the piece; the place is filled in later.
    pub runs: Vec<(Segment, u64)>,
    pub address: u64,
    pub bytes: u64,
}

pub fn slab_bytes(model: &ModelSpec, s: &Segment) -> u64 {
    let t = model.tensor(s.tensor);
    let plane = |p| ((t.format.row_bytes(p, t.cols) * s.rows) as u64).next_multiple_of(PLANE_ALIGN as u64);
    (0..3).map(plane).sum()
}

/// The linear layers of `model`, each in `cuts` segments, put together in pieces of one to three segments at random.
pub fn pieces(model: &ModelSpec, cuts: usize, seed: u64) -> Vec<Piece> {
    let mut rng = generator(seed);
    let mut pieces: Vec<Piece> = Vec::new();
    let mut left = 0;
    let mut address = 0;
    for instr in file_program(model, MAX_ROWS, MAX_ROWS, ActivationWidth::Int16, cuts).instrs {
        let Instr::Op(Op::Linear { segments, .. }) = instr else { continue };
        for segment in segments {
            if left == 0 {
                left = rng.random_range(1..=3);
                pieces.push(Piece { runs: vec![], address, bytes: 0 });
            }
            let piece = pieces.last_mut().unwrap();
            piece.runs.push((segment, piece.bytes));
            piece.bytes += slab_bytes(model, &segment);
            address += slab_bytes(model, &segment);
            left -= 1;
        }
    }
    pieces
}

pub fn place(runs: &[(Segment, u64)], to: impl Fn(u64) -> Place) -> Vec<Segment> {
    runs.iter().map(|(s, offset)| Segment { place: to(*offset), ..*s }).collect()
}

/// The prologue and the step of a placement: cold piece `k` goes through slot `k mod slots`.
pub fn schedule(
    model: &ModelSpec,
    cuts: usize,
    pieces: &[Piece],
    resident: &[bool],
    slots: u32,
) -> (StepProgram, StepProgram) {
    let cold: Vec<usize> = (0..pieces.len()).filter(|&i| !resident[i]).collect();
    let slots = slots.min(cold.len() as u32);
    let slot_bytes = pieces.iter().map(|p| p.bytes).max().unwrap();
    let copy = |k: usize| {
        let slot = k as u32 % slots;
        Instr::Copy { segments: place(&pieces[cold[k]].runs, |offset| Place::Slot { slot, offset }), slot }
    };
    let base = file_program(model, MAX_ROWS, MAX_ROWS, ActivationWidth::Int16, cuts);
    let mut instrs = Vec::new();
    let (mut piece, mut run, mut k) = (0, 0, 0);
    for instr in &base.instrs {
        let Instr::Op(Op::Linear { segments, bias, out, column, accumulate }) = instr else {
            instrs.push(instr.clone());
            continue;
        };
        let op = |segment| {
            let segments = vec![segment];
            Instr::Op(Op::Linear { segments, bias: *bias, out: *out, column: *column, accumulate: *accumulate })
        };
        for _ in segments {
            let p = &pieces[piece];
            let (segment, offset) = p.runs[run];
            let last = run + 1 == p.runs.len();
            if resident[piece] {
                instrs.push(op(Segment { place: Place::Resident { offset: p.address + offset }, ..segment }));
            } else {
                let slot = k as u32 % slots;
                if run == 0 {
                    instrs.push(Instr::WaitCopy { slot });
                }
                instrs.push(op(Segment { place: Place::Slot { slot, offset }, ..segment }));
                if last {
                    let next = k + slots as usize;
                    instrs.extend([
                        Instr::Free { slot },
                        copy(if next < cold.len() { next } else { k % slots as usize }),
                    ]);
                    k += 1;
                }
            }
            (piece, run) = if last { (piece + 1, 0) } else { (piece, run + 1) };
        }
    }
    let slot_bytes = if slots == 0 { 0 } else { slot_bytes };
    let step = StepProgram { instrs, slots, slot_bytes, ..base };
    let prologue = StepProgram { instrs: (0..slots as usize).map(copy).collect(), ..step.clone() };
    (prologue, step)
}

pub fn geometry(model: &ModelSpec) -> KvGeometry {
    KvGeometry {
        layers: model.layers.len(),
        kv_heads: model.config.kv_heads,
        head_dim: model.config.head_dim,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: 32,
    }
}

/// Options of the tests: small granules.
pub fn options(threads: usize) -> HostOptions {
    HostOptions { threads: Some(threads), granule: GRANULE, positions: Some(128), ..HostOptions::default() }
}

/// A model on a device.
pub struct Rig {
    pub device: HostDevice,
    pub model: Arc<ModelSpec>,
    pub cuts: usize,
    pub pieces: Vec<Piece>,
    pub resident: Vec<bool>,
    pub output: StepOutput,
}

impl Rig {
    /// Nothing resident, workspace and pages mapped.
    pub fn new(mut device: HostDevice, shape: &ModelShape, cuts: usize, seed: u64) -> Rig {
        let model = Arc::new(random_model(seed, shape));
        device.attach(model.clone(), geometry(&model)).unwrap();
        let plain = file_program(&model, MAX_ROWS, MAX_ROWS, ActivationWidth::Int16, 1);
        device.resize(RangeKind::Workspace, plain.workspace_bytes(&model.config)).unwrap();
        device.resize(RangeKind::Kv, (PAGES * geometry(&model).page_bytes()) as u64).unwrap();
        let pieces = pieces(&model, cuts, seed);
        Rig { device, cuts, resident: vec![false; pieces.len()], pieces, model, output: StepOutput::default() }
    }

    /// The granules that resident pieces touch.
    pub fn granules(&self, resident: &[bool]) -> Vec<u64> {
        let mut all: Vec<u64> = (self.pieces.iter().zip(resident).filter(|(_, r)| **r))
            .flat_map(|(p, _)| p.address / GRANULE..(p.address + p.bytes).div_ceil(GRANULE))
            .collect();
        all.sort();
        all.dedup();
        all
    }

    /// Unmaps, maps and loads what the new placement needs.
    pub fn place(&mut self, resident: Vec<bool>) -> Result<(), DeviceError> {
        let (before, after) = (self.granules(&self.resident), self.granules(&resident));
        // What stays must have been resident and must be so again.
        let kept: Vec<bool> = self.resident.iter().zip(&resident).map(|(a, b)| *a && *b).collect();
        for g in before.iter().filter(|g| !after.contains(g)) {
            self.device.unmap(RangeKind::Weights, g * GRANULE, GRANULE)?;
        }
        for g in after.iter().filter(|g| !before.contains(g)) {
            self.device.map(RangeKind::Weights, g * GRANULE, GRANULE)?;
        }
        for (i, p) in self.pieces.iter().enumerate().filter(|(i, _)| resident[*i] && !kept[*i]) {
            let address = p.address;
            let segments = place(&self.pieces[i].runs, |offset| Place::Resident { offset: address + offset });
            self.device.load(&segments)?;
        }
        self.resident = resident;
        Ok(())
    }

    /// The programs of the present placement, not recorded.
    pub fn schedule(&self, slots: u32) -> (StepProgram, StepProgram) {
        schedule(&self.model, self.cuts, &self.pieces, &self.resident, slots)
    }

    /// Maps the ring, records the programs and fills the ring: the step's id.
    pub fn begin(&mut self, slots: u32) -> Result<ProgramId, DeviceError> {
        let (prologue, step) = self.schedule(slots);
        self.begin_with(prologue, step)
    }

    pub fn begin_with(&mut self, prologue: StepProgram, step: StepProgram) -> Result<ProgramId, DeviceError> {
        self.device.resize(RangeKind::Staging, u64::from(step.slots) * step.slot_bytes)?;
        let prologue = self.device.record(prologue)?;
        let step = self.device.record(step)?;
        self.device.run(prologue, &StepInput::default(), &mut self.output)?;
        Ok(step)
    }

    /// One step of `tokens` from `position` on of one sequence; the logits of all rows.
    pub fn step(&mut self, id: ProgramId, position: usize, tokens: &[u32]) -> Result<Vec<u32>, DeviceError> {
        let row = |(i, &token): (usize, &u32)| TokenRow { sequence: 0, position: position + i, token: token.into() };
        let input = StepInput {
            rows: tokens.iter().enumerate().map(row).collect(),
            page_tables: vec![(0..PAGES as u32).rev().collect()],
            wanted: (0..tokens.len()).collect(),
            want_logits: true,
        };
        self.device.run(id, &input, &mut self.output)?;
        Ok(headrace_testing::bits(&self.output.logits))
    }

    /// The oracle's logits for the sequence, a row a token.
    pub fn expected(&self, tokens: &[u32]) -> Vec<Vec<u32>> {
        let oracle = Oracle::new(&self.model, ActivationWidth::Int16, KvDtype::F16);
        let mut sequence = oracle.sequence();
        tokens.iter().map(|&t| headrace_testing::bits(&oracle.token(&mut sequence, t))).collect()
    }

    /// The resident pieces' bytes as the device holds them, and as the file has them, planes in order.
    pub fn resident_bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let (mut device, mut file) = (Vec::new(), Vec::new());
        for (p, _) in self.pieces.iter().zip(&self.resident).filter(|(_, r)| **r) {
            for (s, offset) in &p.runs {
                let mut at = p.address + offset;
                let view = self.model.view(s.tensor).unwrap().slice_rows(s.row, s.rows);
                for plane in view.planes {
                    let mut bytes = vec![0; plane.len()];
                    self.device.read(RangeKind::Weights, at, &mut bytes).unwrap();
                    device.extend(bytes);
                    file.extend_from_slice(plane);
                    at += (plane.len() as u64).next_multiple_of(PLANE_ALIGN as u64);
                }
            }
        }
        (device, file)
    }
}

pub fn tokens(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    let mut rng = generator(seed);
    (0..n).map(|_| rng.random_range(0..vocab as u32)).collect()
}
