//! Random floats and comparison by bits.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A generator whose numbers depend on the seed alone.
pub fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// `n` floats in `-amplitude ..= amplitude`, of many magnitudes.
pub fn random_floats(seed: u64, n: usize, amplitude: f32) -> Vec<f32> {
    let mut rng = generator(seed);
    (0..n).map(|_| rng.random_range(-1.0f32..=1.0) * rng.random_range(0.0f32..=1.0).powi(3) * amplitude).collect()
}

/// The bit patterns of floats: equal where nothing differs, not even the sign of a zero.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
