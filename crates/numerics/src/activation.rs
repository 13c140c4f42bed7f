//! Quantisation of an activation row in blocks of 32, to 16-bit or 8-bit integers.

use crate::format::BLOCK;

/// Width of quantised activations. The default is [`ActivationWidth::Int16`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationWidth {
    /// `d = amax / 32512`; codes in `-32512 ..= 32512`, that is two signed bytes `256 * hi + lo`.
    #[default]
    Int16,
    /// `d = amax / 127`; codes in `-127 ..= 127`. Faster and coarser.
    Int8,
}

impl ActivationWidth {
    /// The code that the largest magnitude of a block maps to.
    pub const fn max_code(self) -> f32 {
        match self {
            ActivationWidth::Int16 => 32512.0,
            ActivationWidth::Int8 => 127.0,
        }
    }
}

/// A quantised activation row: `x[i]` is about `d[i / 32] * codes[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantRow {
    /// Codes, padded with zeros to a multiple of 32.
    pub codes: Vec<i16>,
    /// One step size a block.
    pub d: Vec<f32>,
}

/// The largest magnitude of a block, as the maximum of the bit patterns without sign: the order of finite magnitudes,
/// then infinity, then NaN, so that nothing non-finite is lost.
pub fn amax(block: &[f32]) -> f32 {
    f32::from_bits(block.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

/// Quantises `x` (any length; the last block is padded with zeros).
///
/// For each block: `d = amax / max_code`, `inv = max_code / amax`, `code = rint(x * inv)`. If `amax` is 0 or `inv`
/// overflows, the block is zero: `d = 0`, all codes 0. If `amax` is not finite, the codes are 0 and `d` is not
/// finite either, so that every output that reads the block becomes NaN.
pub fn quantise(x: &[f32], width: ActivationWidth) -> QuantRow {
    let blocks = x.len().div_ceil(BLOCK);
    let mut row = QuantRow { codes: vec![0; blocks * BLOCK], d: vec![0.0; blocks] };
    for (b, block) in x.chunks(BLOCK).enumerate() {
        let amax = amax(block);
        let inv = width.max_code() / amax;
        if !amax.is_finite() {
            row.d[b] = amax;
        } else if inv.is_finite() {
            row.d[b] = amax / width.max_code();
            for (i, &v) in block.iter().enumerate() {
                row.codes[b * BLOCK + i] = (v * inv).round_ties_even() as i16;
            }
        }
    }
    row
}

/// Splits a 16-bit code into `(hi, lo)` with `code = 256 * hi + lo` and `lo` in `-128 ..= 127`.
pub fn split(code: i16) -> (i8, i8) {
    let hi = (i32::from(code) + 128) >> 8;
    (hi as i8, (i32::from(code) - 256 * hi) as i8)
}
