//! Is a stored rotary table the plain `base^(-2 i / dims)` one, and how coarsely is it rounded?

use headrace_numerics::block::float_element;
use headrace_numerics::rope::{inv_freq, table_row};

use crate::spec::{ModelSpec, RopeTables, TensorId};

/// What a stored rotary table is close to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeFit {
    /// The base whose table is nearest, rounded to a whole number where that changes nothing.
    pub base: f64,
    /// Largest distance of a stored cosine or sine from the table that Headrace would compute from `base`.
    pub max_error: f32,
}

/// Fits a plain table to the stored one of `spec`; `None` for computed tables, or tables too small or odd to fit.
/// Reads the whole table.
pub fn rope_fit(spec: &ModelSpec) -> Option<RopeFit> {
    let RopeTables::Stored { cos, sin } = spec.config.rope.tables else { return None };
    let (rows, half) = (spec.tensor(cos).rows, spec.tensor(cos).cols);
    if rows < 2 || half < 2 {
        return None;
    }
    let view = |id: TensorId| spec.view(id).map(|v| (v.format, v));
    let ((format, cosines), (_, sines)) = (view(cos)?, view(sin)?);
    let at = |row: usize, i: usize| {
        (float_element(format, cosines.row(0, row), i), float_element(format, sines.row(0, row), i))
    };
    // Pair 1 at position 1 has the angle base^(-2 / dims). A later position gives the same with less rounding, as long
    // as the turns before it are counted, which the estimate so far can do.
    let dims = 2 * half;
    let angle = |row: usize| {
        let (c, s) = at(row, 1);
        f64::from(s).atan2(f64::from(c))
    };
    let mut freq = angle(1);
    let mut row = 2;
    while row < rows {
        let turns = ((row as f64 * freq - angle(row)) / std::f64::consts::TAU).round();
        freq = (angle(row) + turns * std::f64::consts::TAU) / row as f64;
        row *= 2;
    }
    let estimate = freq.powf(-(dims as f64) / 2.0);
    if !estimate.is_finite() || estimate <= 1.0 {
        return None;
    }
    // Bases are whole numbers, mostly of few digits: the one of fewest digits within what the estimate can tell.
    let mut base = estimate;
    for digits in [1, 2, 3, 4, 6] {
        let unit = 10f64.powf(estimate.log10().floor() + 1.0 - f64::from(digits)).max(1.0);
        let candidate = (estimate / unit).round() * unit;
        if (candidate / estimate - 1.0).abs() < 1e-3 {
            base = candidate;
            break;
        }
    }
    let freqs: Vec<f64> = (0..half).map(|i| inv_freq(base, dims, None, i)).collect();
    let (mut c, mut s) = (vec![0f32; half], vec![0f32; half]);
    let mut max_error = 0f32;
    for row in 0..rows {
        table_row(&freqs, row, &mut c, &mut s);
        for i in 0..half {
            let (x, y) = at(row, i);
            max_error = max_error.max((x - c[i]).abs()).max((y - s[i]).abs());
        }
    }
    Some(RopeFit { base, max_error })
}
