//! Rotary position embedding (Su et al., 2021, "RoFormer"): tables made with a pure-Rust libm, and the rotation.

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// `(i, i + dims / 2)`: Hugging Face and GPT-NeoX order.
    Half,
    /// `(2 i, 2 i + 1)`: the row order of `llama` GGUF files, and ONNX's `rotary_interleaved`.
    Interleaved,
}

/// The angular step of pair `i`: `base^(-2 i / dims)`, over `factors[i]` where there are factors.
pub fn inv_freq(base: f64, dims: usize, factors: Option<&[f32]>, i: usize) -> f64 {
    let freq = libm::pow(base, -2.0 * i as f64 / dims as f64);
    factors.map_or(freq, |f| freq / f64::from(f[i]))
}

/// Cosines and sines of position `pos`, `inv_freqs.len()` each: computed in binary64, rounded to binary32 once.
pub fn table_row(inv_freqs: &[f64], pos: usize, cos: &mut [f32], sin: &mut [f32]) {
    for (i, &f) in inv_freqs.iter().enumerate() {
        let angle = pos as f64 * f;
        cos[i] = libm::cos(angle) as f32;
        sin[i] = libm::sin(angle) as f32;
    }
}

/// Rotates one head in place. `cos` and `sin` hold `dims / 2` values; elements from `dims` on are left alone.
///
/// For a pair `(a, b)`: `a' = fma(a, c, -(b * s))`, `b' = fma(b, c, a * s)`.
pub fn rotate(head: &mut [f32], style: RopeStyle, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for i in 0..half {
        let (ia, ib) = match style {
            RopeStyle::Half => (i, i + half),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[ia], head[ib]);
        head[ia] = a.mul_add(cos[i], -(b * sin[i]));
        head[ib] = b.mul_add(cos[i], a * sin[i]);
    }
}

/// The angular steps of all `dims / 2` pairs, with the factor of every position folded in:
/// `inv_freq(i) * position_scale`, in binary64. [`table_row`] of these is the table of a model that scales positions.
pub fn scaled_inv_freqs(base: f64, dims: usize, factors: Option<&[f32]>, position_scale: f64) -> Vec<f64> {
    (0..dims / 2).map(|i| inv_freq(base, dims, factors, i) * position_scale).collect()
}
