//! The exponential, SiLU, tanh and the KV rounding: one polynomial, the same constants everywhere.

use half::f16;

/// `log2(e)`, rounded to f32.
pub const LOG2E: f32 = std::f32::consts::LOG2_E;
/// `ln 2`, high part: its last 9 bits are zero, so that `n * LN2_HI` is exact for every exponent.
pub const LN2_HI: f32 = 0.693_359_4;
/// `ln 2 - LN2_HI`.
pub const LN2_LO: f32 = -2.121_944_4e-4;
/// Coefficients of `(e^r - 1 - r) / r^2` on `|r| <= ln(2)/2`, highest power first. Source: Cephes, `expf.c`.
pub const EXP_POLY: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// Below this the result is 0.
pub const EXP_MIN: f32 = -104.0;
/// Above this the result is infinity.
pub const EXP_MAX: f32 = 89.0;

/// `2^k` for `-126 <= k <= 127`.
fn pow2(k: i32) -> f32 {
    f32::from_bits(((k + 127) as u32) << 23)
}

/// `e^x`, within 2 ulp; 0 below [`EXP_MIN`], infinity above [`EXP_MAX`], NaN for NaN.
///
/// `n = rint(x * LOG2E)`, `r = fma(n, -LN2_LO, fma(n, -LN2_HI, x))`, the polynomial in Horner form with `fma`,
/// `y = fma(p, r * r, r) + 1`, then two exact powers of two, so that denormal results are rounded once.
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        return f32::NAN;
    }
    let x = x.clamp(EXP_MIN, EXP_MAX);
    let n = (x * LOG2E).round_ties_even();
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = EXP_POLY[0];
    for &c in &EXP_POLY[1..] {
        p = p.mul_add(r, c);
    }
    let y = p.mul_add(r * r, r) + 1.0;
    let n = n as i32;
    let half = n >> 1;
    y * pow2(half) * pow2(n - half)
}

/// SwiGLU: `(gate / (1 + exp(-gate))) * up`. Source: Shazeer, 2020, "GLU Variants Improve Transformer".
pub fn swiglu(gate: f32, up: f32) -> f32 {
    (gate / (1.0 + exp(-gate))) * up
}

/// `tanh(x) = 1 - 2 / (exp(2 x) + 1)`; used for the soft cap of attention scores.
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(x + x) + 1.0)
}

/// How KV entries are stored. The default is [`KvDtype::F16`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE binary16, rounded to nearest even.
    #[default]
    F16,
    /// IEEE binary32, as computed; for audits.
    F32,
}

impl KvDtype {
    /// Bytes of one entry.
    pub const fn bytes(self) -> usize {
        match self {
            KvDtype::F16 => 2,
            KvDtype::F32 => 4,
        }
    }

    /// What a value reads back as after it was stored.
    pub fn round(self, x: f32) -> f32 {
        match self {
            KvDtype::F16 => f16::from_f32(x).to_f32(),
            KvDtype::F32 => x,
        }
    }
}
