//! Root-mean-square normalisation (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization").

use crate::reduce::dot_lanes;

/// Lanes of the sum of squares.
pub const NORM_LANES: usize = 256;

/// `out[i] = (x[i] * inv) * weight[i]` with `inv = 1 / sqrt(sum / n + eps)`; the sum of squares in [`NORM_LANES`]
/// lanes of `fma` and the tree. All slices have the same length.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let sum = dot_lanes::<NORM_LANES>(x.iter().copied(), x.iter().copied());
    let inv = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = (v * inv) * w;
    }
}
