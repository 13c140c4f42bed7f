//! The linear layer: one output of a quantised or unquantised weight row and an activation row.

use crate::activation::QuantRow;
use crate::block::{blocks, float_element, weight_block};
use crate::format::WeightView;
use crate::reduce::{dot_lanes, tree};

/// Lanes of the quantised dot product; block `b` goes to lane `b % LINEAR_LANES`.
pub const LINEAR_LANES: usize = 8;

/// Lanes of the unquantised dot product; element `k` goes to lane `k % DENSE_LANES`. One 128-byte line of fp16: four
/// AVX-512 registers of floats, eight AVX registers, or eight GPU threads with 16-byte loads.
pub const DENSE_LANES: usize = 64;

/// Output `row` of a quantised matrix.
///
/// For each 32-wide block in increasing order, with `t = scale * d`: `lane = fma(float(dot), t, lane)`, where `dot` is
/// the exact integer dot of weight codes and activation codes. A block whose halves have scales of their own does
/// this once a half, in order. A format with a float minimum adds `lane = fma(float(sum of codes), min * d, lane)`.
///
/// # Panics
/// If the activation row is shorter than the matrix is wide, or `row` is out of range.
pub fn quantised_dot(w: &WeightView<'_>, row: usize, x: &QuantRow) -> f32 {
    let mut lanes = [0f32; LINEAR_LANES];
    for b in 0..blocks(w.cols) {
        let blk = weight_block(w, row, b);
        let q = &x.codes[b * 32..(b + 1) * 32];
        let d = x.d[b];
        let lane = &mut lanes[b % LINEAR_LANES];
        let dot =
            |from: usize, to: usize| -> i32 { (from..to).map(|i| i32::from(blk.codes[i]) * i32::from(q[i])).sum() };
        if blk.halves {
            *lane = (dot(0, 16) as f32).mul_add(blk.scale[0] * d, *lane);
            *lane = (dot(16, 32) as f32).mul_add(blk.scale[1] * d, *lane);
        } else {
            *lane = (dot(0, 32) as f32).mul_add(blk.scale[0] * d, *lane);
        }
        if let Some(min) = blk.min {
            let sum: i32 = q.iter().map(|&c| i32::from(c)).sum();
            *lane = (sum as f32).mul_add(min * d, *lane);
        }
    }
    tree(&mut lanes)
}

/// Output `row` of an F32, F16 or BF16 matrix: [`DENSE_LANES`] lanes of `fma(w, x, lane)`, then the tree.
///
/// # Panics
/// If `row` is out of range or `x` is not `cols` long.
pub fn dense_dot(w: &WeightView<'_>, row: usize, x: &[f32]) -> f32 {
    assert_eq!(x.len(), w.cols);
    let bytes = w.row(0, row);
    dot_lanes::<DENSE_LANES>((0..w.cols).map(|k| float_element(w.format, bytes, k)), x.iter().copied())
}

/// What is added to a linear layer's output: first the bias, then the residual, each where there is one.
pub fn epilogue(y: f32, bias: Option<f32>, residual: Option<f32>) -> f32 {
    let y = bias.map_or(y, |b| y + b);
    residual.map_or(y, |r| y + r)
}
