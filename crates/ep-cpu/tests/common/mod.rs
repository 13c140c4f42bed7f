//! Random weights of every format, activations of every kind, and the comparison with the contract.
#![allow(dead_code, clippy::unwrap_used)]

use headrace_ep_cpu::activations::Activations;
use headrace_ep_cpu::linear::{DenseRows, Epilogue, Sink, dense, linear};
use headrace_ep_cpu::simd::SimdLevel;
use headrace_numerics::activation::{ActivationWidth, quantise};
use headrace_numerics::format::{Format, MAX_PLANES, Nbits, Planes, ScaleType, WeightView, ZeroPoint};
use headrace_numerics::linear::{dense_dot, epilogue, quantised_dot};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Widths of activations.
pub const WIDTHS: [ActivationWidth; 2] = [ActivationWidth::Int16, ActivationWidth::Int8];

/// Every quantised format.
pub fn quantised_formats() -> Vec<Format> {
    use Format::*;
    let mut all = vec![
        Q4_0,
        Q4_1,
        Q5_0,
        Q5_1,
        Q8_0,
        Q4_K,
        Q5_K,
        Q6_K,
        Planes(self::Planes::Q4_1),
        Planes(self::Planes::Q4_K),
        Planes(self::Planes::Q6_K),
    ];
    for bits in [4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for scale in [ScaleType::F32, ScaleType::F16] {
                for zero in [ZeroPoint::Midpoint, ZeroPoint::PerBlock, ZeroPoint::TwosComplement] {
                    all.push(Nbits(headrace_numerics::format::Nbits { bits, block, scale, zero }));
                }
            }
        }
    }
    all
}

/// What the scales of a matrix, or the values of an activation row, look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Random codes, scales about 0.01 of either sign.
    Plain,
    /// All code bytes 0xff, scales up to the format's largest finite.
    Huge,
    /// Scales zero, denormal or tiny.
    Tiny,
    /// Any bits at all: NaN and infinity among them.
    Any,
}

/// Kinds of weights and of activations.
pub const KINDS: [Kind; 4] = [Kind::Plain, Kind::Huge, Kind::Tiny, Kind::Any];

fn half_bits(kind: Kind, rng: &mut ChaCha8Rng) -> u16 {
    let sign = rng.random::<u16>() & 0x8000;
    sign | match kind {
        Kind::Plain => 0x1c00 + (rng.random::<u16>() & 0x0fff),
        Kind::Huge => 0x7bff - (rng.random::<u16>() & 0xff),
        Kind::Tiny => [0, 1, rng.random::<u16>() & 0x03ff][rng.random_range(0..3)],
        Kind::Any => rng.random::<u16>() & 0x7fff,
    }
}

fn float_bits(kind: Kind, rng: &mut ChaCha8Rng) -> u32 {
    let sign = rng.random::<u32>() & 0x8000_0000;
    sign | match kind {
        Kind::Plain => 0x3b80_0000 + (rng.random::<u32>() & 0x00ff_ffff),
        Kind::Huge => 0x7f7f_ffff - (rng.random::<u32>() & 0xff_ffff),
        Kind::Tiny => [0, 1, rng.random::<u32>() & 0x007f_ffff, 0x0080_0000][rng.random_range(0..4)],
        Kind::Any => rng.random::<u32>() & 0x7fff_ffff,
    }
}

/// Bytes of a matrix, one vector a plane.
pub struct Matrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub planes: [Vec<u8>; MAX_PLANES],
}

impl Matrix {
    pub fn random(format: Format, rows: usize, cols: usize, kind: Kind, rng: &mut ChaCha8Rng) -> Matrix {
        let mut planes: [Vec<u8>; MAX_PLANES] = Default::default();
        for (p, plane) in planes.iter_mut().enumerate() {
            plane.resize(format.row_bytes(p, cols) * rows, 0xff);
            if kind != Kind::Huge {
                rng.fill(plane.as_mut_slice());
            }
        }
        let mut half =
            |plane: &mut [u8], at: usize| plane[at..at + 2].copy_from_slice(&half_bits(kind, rng).to_le_bytes());
        let plane = &mut planes[0];
        match format {
            Format::Q4_0 => (0..plane.len()).step_by(18).for_each(|at| half(plane, at)),
            Format::Q5_0 => (0..plane.len()).step_by(22).for_each(|at| half(plane, at)),
            Format::Q8_0 => (0..plane.len()).step_by(34).for_each(|at| half(plane, at)),
            Format::Q6_K => (0..plane.len()).step_by(210).for_each(|at| half(plane, at + 208)),
            Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => {
                let size = match format {
                    Format::Q4_1 => 20,
                    Format::Q5_1 => 24,
                    Format::Q4_K => 144,
                    _ => 176,
                };
                for at in (0..plane.len()).step_by(size) {
                    half(plane, at);
                    half(plane, at + 2);
                }
            }
            Format::F16 => (0..plane.len()).step_by(2).for_each(|at| half(plane, at)),
            Format::Nbits(Nbits { scale: ScaleType::F16, .. }) => {
                (0..planes[1].len()).step_by(2).for_each(|at| half(&mut planes[1], at));
            }
            Format::Planes(Planes::Q6_K) => {
                for row in plane.chunks_exact_mut(format.row_bytes(0, cols)) {
                    for d in row[cols / 16 * 13..].chunks_exact_mut(4) {
                        let half = half::f16::from_bits(half_bits(kind, rng));
                        d.copy_from_slice(&half.to_f32().to_le_bytes());
                    }
                }
            }
            Format::Planes(p) => {
                let size = if p == Planes::Q4_1 { 4 } else { 16 };
                for at in (0..planes[1].len()).step_by(size) {
                    half(&mut planes[1], at);
                    half(&mut planes[1], at + 2);
                }
            }
            Format::Nbits(_) => {
                for to in planes[1].chunks_exact_mut(4) {
                    to.copy_from_slice(&float_bits(kind, rng).to_le_bytes());
                }
            }
            Format::F32 => {
                for to in plane.chunks_exact_mut(4) {
                    to.copy_from_slice(&float_bits(kind, rng).to_le_bytes());
                }
            }
            Format::BF16 => {
                for to in plane.chunks_exact_mut(2) {
                    to.copy_from_slice(&float_bits(kind, rng).to_le_bytes()[2..]);
                }
            }
        }
        Matrix { format, rows, cols, planes }
    }

    pub fn view(&self) -> WeightView<'_> {
        let planes = [&self.planes[0][..], &self.planes[1][..], &self.planes[2][..]];
        WeightView::new(self.format, self.rows, self.cols, planes).unwrap()
    }
}

/// `[rows, cols]` activations.
pub fn activations(rows: usize, cols: usize, kind: Kind, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * cols).map(|_| f32::from_bits(float_bits(kind, rng))).collect();
    if kind == Kind::Any {
        // Mostly finite rows with single bad values, so that not everything is NaN.
        for v in &mut x {
            if !v.is_finite() || rng.random_bool(0.98) {
                *v = rng.random_range(-3.0..3.0);
            }
        }
    }
    if kind == Kind::Plain {
        // Zero blocks, negative zeros.
        for block in x.chunks_mut(32) {
            if rng.random_bool(0.1) {
                block.fill(if rng.random() { 0.0 } else { -0.0 });
            }
        }
    }
    x
}

/// Asserts that two floats are the same bits, or both not finite.
#[track_caller]
pub fn same(got: f32, want: f32, what: impl Fn() -> String) {
    let equal = got.to_bits() == want.to_bits() || (!got.is_finite() && !want.is_finite());
    assert!(equal, "{got:?} ({:08x}) for {want:?} ({:08x}): {}", got.to_bits(), want.to_bits(), what());
}

/// One layer through the kernels, `[rows, w.rows]`: rows `take` of the batch, in a wider matrix, with an epilogue.
pub fn run(level: SimdLevel, m: &Matrix, x: &[f32], rows: usize, width: ActivationWidth, seed: u64) {
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    let view = m.view();
    let (first, count) = if m.rows > 1 && rng.random() { (1, m.rows - 1) } else { (0, m.rows) };
    let w = view.slice_rows(first, count);
    let stride = count + rng.random_range(0..7);
    let column = rng.random_range(0..=stride - count);
    let before: Vec<f32> = (0..rows * stride).map(|_| rng.random_range(-1.0..1.0)).collect();
    let bias: Option<Vec<f32>> = rng.random::<bool>().then(|| (0..count).map(|_| rng.random()).collect());
    let accumulate: bool = rng.random();
    let take = if rows > 1 && rng.random() { 1..rows } else { 0..rows };
    let mut after = before.clone();
    {
        let sink = Sink::new(&mut after, rows, stride, stride);
        // SAFETY: the only columns of this sink.
        let mut out = unsafe { sink.columns(column..column + count) };
        let epilogue = Epilogue { bias: bias.as_deref(), accumulate };
        if m.format.is_quantised() {
            let mut acts = Activations::new();
            acts.prepare(rows, m.cols, width);
            for (r, x) in x.chunks_exact(m.cols).enumerate() {
                acts.quantise_row(level, r, x);
            }
            linear(level, &w, &acts, take.clone(), epilogue, &mut out);
        } else {
            dense(level, &w, DenseRows::new(x, rows, m.cols, m.cols), take.clone(), epilogue, &mut out);
        }
    }
    for r in 0..rows {
        let x = &x[r * m.cols..(r + 1) * m.cols];
        let q = quantise(x, width);
        for c in 0..stride {
            let at = r * stride + c;
            let mut want = before[at];
            if take.contains(&r) && (column..column + count).contains(&c) {
                let i = c - column;
                let y = if m.format.is_quantised() {
                    quantised_dot(&view, first + i, &q)
                } else {
                    dense_dot(&view, first + i, x)
                };
                want = epilogue(y, bias.as_ref().map(|b| b[i]), accumulate.then_some(want));
            }
            same(after[at], want, || {
                format!("{} {level} {width:?} [{}, {}] x {rows}, row {r} column {c}", m.format.name(), m.rows, m.cols)
            });
        }
    }
}

/// A generator for a test.
pub fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}
