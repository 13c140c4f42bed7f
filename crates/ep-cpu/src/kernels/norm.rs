//! Root-mean-square normalisation in the contract's 256 lanes.

use headrace_numerics::norm::NORM_LANES;

use super::per_level;

per_level! {
    /// `out[i] = (x[i] * inv) * weight[i]`, bit-equal to [`headrace_numerics::norm::rms_norm`]. All slices have the
    /// same length.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let inv = inverse_rms(x, eps);
        for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
            *o = (v * inv) * w;
        }
    }
}

per_level! {
    /// As [`rms_norm`], in place.
    pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
        let inv = inverse_rms(x, eps);
        for (v, &w) in x.iter_mut().zip(weight) {
            *v = (*v * inv) * w;
        }
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0f32; NORM_LANES];
    let (whole, rest) = x.as_chunks::<NORM_LANES>();
    for chunk in whole {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = v.mul_add(v, *lane);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane = v.mul_add(v, *lane);
    }
    let mut n = NORM_LANES;
    while n > 1 {
        n /= 2;
        let (low, high) = lanes.split_at_mut(n);
        for (a, &b) in low.iter_mut().zip(high.iter()) {
            *a += b;
        }
    }
    1.0 / (lanes[0] / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::SimdLevel;
    use headrace_testing::{bits, random_floats};

    #[test]
    fn same_bits_as_the_contract() {
        for n in [1, 7, 8, 64, 100, 255, 256, 257, 576, 896, 1000, 2048] {
            for seed in 0..4 {
                let (x, w) = (random_floats(seed * 2 + n as u64, n, 10.0), random_floats(seed * 2 + 1, n, 1.0));
                let mut want = vec![0.0; n];
                headrace_numerics::norm::rms_norm(&x, &w, 1e-5, &mut want);
                for level in SimdLevel::available() {
                    let mut got = vec![0.0; n];
                    rms_norm(level, &x, &w, 1e-5, &mut got);
                    assert_eq!(bits(&got), bits(&want), "{level:?} {n}");
                    let mut got = x.clone();
                    rms_norm_in_place(level, &mut got, &w, 1e-5);
                    assert_eq!(bits(&got), bits(&want), "{level:?} {n} in place");
                }
            }
        }
    }
}
