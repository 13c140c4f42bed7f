//! Linear layers: products of weight rows with activation rows, bit-equal to `headrace_numerics::linear`.
//!
//! Weights are read from where they lie (the file's mapping, an arena) in the file's own layout.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod panel;
mod scalar;
mod sink;

use std::ops::Range;

use headrace_numerics::format::WeightView;

use crate::activations::Activations;
use crate::simd::SimdLevel;

pub use sink::{Columns, Epilogue, Sink};

/// `out[r][i] = w[i] . acts[r]`, then the epilogue, for the activation rows `r` in `rows` and every weight row `i`.
///
/// `w` is a quantised matrix or a run of its rows, `[out.width(), acts.cols()]`.
///
/// # Panics
/// If the shapes don't fit, `w` is not quantised, or this processor lacks `level`.
pub fn linear(
    level: SimdLevel,
    w: &WeightView<'_>,
    acts: &Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    assert!(w.format.is_quantised(), "{} is not quantised", w.format.name());
    assert_eq!(w.cols, acts.cols(), "columns of the weights and of the activations");
    assert!(rows.end <= acts.rows() && rows.end <= out.rows(), "rows {rows:?}");
    check(level, w, &epilogue, out);
    match level {
        // SAFETY: `check` has seen that this processor has the level.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512Vnni => unsafe { avx512::linear(w, acts, rows, epilogue, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { avx2::linear(w, acts, rows, epilogue, out) },
        _ => scalar::linear(w, acts, rows, epilogue, out),
    }
}

/// A float matrix `[rows, cols]` with a row stride, as dense layers read it.
#[derive(Clone, Copy, Debug)]
pub struct DenseRows<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> DenseRows<'a> {
    /// Rows of `cols` floats, each `stride` after the one before.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || data.len() >= (rows - 1) * stride + cols, "{} floats are too few", data.len());
        DenseRows { data, rows, cols, stride }
    }

    /// Row `row`.
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.cols]
    }
}

/// `out[r][i] = w[i] . x[r]`, then the epilogue, for the rows `r` in `rows` and every weight row `i` of an F32, F16 or
/// BF16 matrix `[out.width(), cols]`.
///
/// # Panics
/// If the shapes don't fit, `w` is quantised, or this processor lacks `level`.
pub fn dense(
    level: SimdLevel,
    w: &WeightView<'_>,
    x: DenseRows<'_>,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    assert!(!w.format.is_quantised(), "{} is quantised", w.format.name());
    assert_eq!(w.cols, x.cols, "columns of the weights and of the activations");
    assert!(rows.end <= x.rows && rows.end <= out.rows(), "rows {rows:?}");
    check(level, w, &epilogue, out);
    match level {
        // SAFETY: `check` has seen that this processor has the level.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512Vnni => unsafe { avx512::dense(w, x, rows, epilogue, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { avx2::dense(w, x, rows, epilogue, out) },
        _ => scalar::dense(w, x, rows, epilogue, out),
    }
}

/// The checks that both kinds of layer share.
fn check(level: SimdLevel, w: &WeightView<'_>, epilogue: &Epilogue<'_>, out: &Columns<'_>) {
    assert_eq!(w.rows, out.width(), "weight rows and output columns");
    assert!(epilogue.bias.is_none_or(|b| b.len() == w.rows), "length of the bias");
    assert!(level.is_available(), "this processor lacks {level}");
}
