//! The linear layers in portable code.

use std::cell::RefCell;
use std::ops::Range;

use headrace_numerics::block::float_element;
use headrace_numerics::format::WeightView;
use headrace_numerics::linear::{DENSE_LANES, LINEAR_LANES};
use headrace_numerics::reduce::tree;

use super::DenseRows;
use super::panel::{Panel, has_halves, has_min, interleave, unpack};
use super::sink::{Columns, Epilogue};
use crate::activations::{Activations, CodeGroup, GROUP_BLOCKS, GROUP_CODES};

thread_local! {
    /// The panels of one weight row. Grows to the largest layer's need and is kept.
    static PANELS: RefCell<Vec<Panel>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn linear(
    w: &WeightView<'_>,
    acts: &Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    let (halves, min) = (has_halves(w.format), has_min(w.format));
    let groups = acts.groups();
    let mut natural = [0; GROUP_CODES];
    PANELS.with_borrow_mut(|panels| {
        if panels.len() < groups {
            panels.resize(groups, Panel::EMPTY);
        }
        let panels = &mut panels[..groups];
        for i in 0..w.rows {
            for (g, panel) in panels.iter_mut().enumerate() {
                unpack(w, i, g, &mut natural, panel);
                interleave(&natural, &mut panel.codes);
            }
            for r in rows.clone() {
                let (low, high, steps) = acts.row(r);
                let mut lanes = [0f32; LINEAR_LANES];
                for (g, panel) in panels.iter().enumerate() {
                    let steps = &steps[g];
                    let mut dots = halves_of(&panel.codes, &low[g]);
                    if let Some(high) = high.get(g) {
                        let of_high = halves_of(&panel.codes, high);
                        for (dot, high) in dots.iter_mut().flatten().zip(of_high.iter().flatten()) {
                            *dot += 256 * high;
                        }
                    }
                    for lane in 0..LINEAR_LANES {
                        let (d, sum, first) = (steps.d[lane], steps.sum[lane], steps.first[lane]);
                        let mut add = |x: i32, t: f32| lanes[lane] = (x as f32).mul_add(t, lanes[lane]);
                        if halves {
                            add(dots[0][lane] - panel.zero[0][lane] * first, panel.scale[lane] * d);
                            add(dots[1][lane] - panel.zero[1][lane] * (sum - first), panel.other[lane] * d);
                        } else {
                            add(dots[0][lane] + dots[1][lane] - panel.zero[0][lane] * sum, panel.scale[lane] * d);
                        }
                        if min {
                            add(sum, panel.other[lane] * d);
                        }
                    }
                }
                epilogue.store(tree(&mut lanes), i, &mut out.row_mut(r)[i]);
            }
        }
    });
}

/// The dots of both halves of eight blocks with one plane of activation bytes.
#[inline(always)]
fn halves_of(codes: &[u8; GROUP_CODES], q: &CodeGroup) -> [[i32; GROUP_BLOCKS]; 2] {
    let mut dots = [[0; GROUP_BLOCKS]; 2];
    for (w, (codes, q)) in codes.chunks_exact(32).zip(q.0.chunks_exact(32)).enumerate() {
        for (dot, (codes, q)) in dots[w / 4].iter_mut().zip(codes.chunks_exact(4).zip(q.chunks_exact(4))) {
            for (&code, &q) in codes.iter().zip(q) {
                *dot += i32::from(code) * i32::from(q as i8);
            }
        }
    }
    dots
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
