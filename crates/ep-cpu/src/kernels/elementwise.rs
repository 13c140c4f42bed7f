//! The exponential, the soft cap and SwiGLU, in a form that a compiler turns into vectors.

use headrace_numerics::elementwise::{EXP_MAX, EXP_MIN, EXP_POLY, LN2_HI, LN2_LO, LOG2E};

use super::per_level;

/// `1.5 * 2^23`: adding it rounds a small float to an integer, to nearest even, and leaves that integer in the low
/// bits of the sum.
pub(super) const ROUND: f32 = 12_582_912.0;

/// `e^x`, bit-equal to [`headrace_numerics::elementwise::exp`], without a branch and without a conversion.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons written so that NaN stays NaN.
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let shifted = x * LOG2E + ROUND;
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = EXP_POLY[0];
    for &c in &EXP_POLY[1..] {
        p = p.mul_add(r, c);
    }
    let y = p.mul_add(r * r, r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    y * pow2(half) * pow2(n.wrapping_sub(half))
}

/// `2^k` for `-126 <= k <= 127`; some float for any other `k`.
#[inline(always)]
fn pow2(k: i32) -> f32 {
    f32::from_bits((k.wrapping_add(127) as u32) << 23)
}

/// `cap * tanh(s / cap)`, bit-equal to what [`headrace_numerics::attention::score`] does.
#[inline(always)]
pub fn softcap(s: f32, cap: f32) -> f32 {
    let x = s / cap;
    cap * (1.0 - 2.0 / (exp(x + x) + 1.0))
}

per_level! {
    /// `out[i] = swiglu(gate[i], up[i])`, bit-equal to [`headrace_numerics::elementwise::swiglu`].
    pub fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = (g / (1.0 + exp(-g))) * u;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::SimdLevel;
    use headrace_numerics::elementwise as oracle;
    use headrace_testing::{bits, random_floats};

    per_level! {
        fn exps(x: &[f32], out: &mut [f32]) {
            for (o, &v) in out.iter_mut().zip(x) {
                *o = exp(v);
            }
        }
    }

    #[test]
    fn exp_has_the_contract_s_bits() {
        // Every 1021st float, both signs, all exponents, infinities and NaN.
        let x: Vec<f32> = (0..=u32::MAX).step_by(1021).map(f32::from_bits).collect();
        let want: Vec<f32> = x.iter().map(|&v| oracle::exp(v)).collect();
        for level in SimdLevel::available() {
            let mut got = vec![0.0; x.len()];
            exps(level, &x, &mut got);
            for ((g, w), x) in got.iter().zip(&want).zip(&x) {
                assert!(g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()), "{level:?} exp({x:e}): {g:e} {w:e}");
            }
        }
    }

    #[test]
    fn swiglu_and_softcap_have_the_contract_s_bits() {
        for n in [1, 8, 31, 1536] {
            let (g, u) = (random_floats(n as u64, n, 60.0), random_floats(9, n, 3.0));
            let want: Vec<f32> = g.iter().zip(&u).map(|(&g, &u)| oracle::swiglu(g, u)).collect();
            for level in SimdLevel::available() {
                let mut got = vec![0.0; n];
                swiglu(level, &g, &u, &mut got);
                assert_eq!(bits(&got), bits(&want), "{level:?}");
            }
            for &s in &g {
                assert_eq!(softcap(s, 30.0).to_bits(), (30.0 * oracle::tanh(s / 30.0)).to_bits());
            }
        }
    }
}
