//! The linear layers in portable code.

use std::ops::Range;

use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::block::{blocks, float_element, weight_block};
use headrace_numerics::format::WeightView;
use headrace_numerics::linear::{DENSE_LANES, LINEAR_LANES};
use headrace_numerics::reduce::tree;

use super::DenseRows;
use super::sink::{Columns, Epilogue};
use crate::activations::{Activations, code_at};

pub(super) fn linear(
    w: &WeightView<'_>,
    acts: &Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    for i in 0..w.rows {
        for r in rows.clone() {
            let (low, high, steps) = acts.row(r);
            let mut lanes = [0f32; LINEAR_LANES];
            for b in 0..blocks(w.cols) {
                let blk = weight_block(w, i, b);
                let (g, l) = (b / 8, b % 8);
                let q = |k: usize| -> i32 {
                    let lo = i32::from(low[g].0[code_at(l, k)]);
                    match acts.width() {
                        ActivationWidth::Int8 => lo,
                        ActivationWidth::Int16 => 256 * i32::from(high[g].0[code_at(l, k)]) + lo,
                    }
                };
                let dot = |from: usize, to: usize| -> i32 { (from..to).map(|k| i32::from(blk.codes[k]) * q(k)).sum() };
                let d = steps[g].d[l];
                let lane = &mut lanes[l];
                if blk.halves {
                    *lane = (dot(0, 16) as f32).mul_add(blk.scale[0] * d, *lane);
                    *lane = (dot(16, 32) as f32).mul_add(blk.scale[1] * d, *lane);
                } else {
                    *lane = (dot(0, 32) as f32).mul_add(blk.scale[0] * d, *lane);
                }
                if let Some(min) = blk.min {
                    *lane = (steps[g].sum[l] as f32).mul_add(min * d, *lane);
                }
            }
            epilogue.store(tree(&mut lanes), i, &mut out.row_mut(r)[i]);
        }
    }
}

pub(super) fn dense(
    w: &WeightView<'_>,
    x: DenseRows<'_>,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    for i in 0..w.rows {
        let bytes = w.row(0, i);
        for r in rows.clone() {
            let mut lanes = [0f32; DENSE_LANES];
            for (k, &v) in x.row(r).iter().enumerate() {
                let lane = &mut lanes[k % DENSE_LANES];
                *lane = float_element(w.format, bytes, k).mul_add(v, *lane);
            }
            epilogue.store(tree(&mut lanes), i, &mut out.row_mut(r)[i]);
        }
    }
}
