//! Drawing a token from logits: temperature, top-k, top-p, a seeded generator.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::options::GenerationOptions;

/// Draws tokens by one generation's options; the same seed and logits give the same tokens on every machine.
#[derive(Clone, Debug)]
pub struct Sampler {
    rng: ChaCha8Rng,
    temperature: f64,
    top_k: usize,
    top_p: f64,
}

impl Sampler {
    /// `None` for greedy options: the device's own arg-maximum serves.
    pub fn new(options: &GenerationOptions) -> Option<Sampler> {
        (options.temperature > 0.0).then(|| Sampler {
            rng: ChaCha8Rng::seed_from_u64(options.seed),
            temperature: f64::from(options.temperature),
            top_k: options.top_k,
            top_p: f64::from(options.top_p),
        })
    }

    /// Draws from finite `logits`, `[vocab]`, not empty.
    ///
    /// Candidates are ordered by logit, then by lower id; `top_k` cuts first, then `top_p` (the candidate that crosses
    /// the threshold stays). Probabilities are binary64.
    pub fn draw(&mut self, logits: &[f32]) -> u32 {
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let keep = if self.top_k == 0 { ids.len() } else { self.top_k.min(ids.len()) };
        if keep < ids.len() {
            ids.select_nth_unstable_by(keep - 1, order);
            ids.truncate(keep);
        }
        ids.sort_unstable_by(order);
        let max = f64::from(logits[ids[0] as usize]);
        let mut weights: Vec<f64> =
            ids.iter().map(|&i| libm::exp((f64::from(logits[i as usize]) - max) / self.temperature)).collect();
        let total: f64 = weights.iter().sum();
        let mut cumulative = 0.0;
        let cut = weights.iter().position(|w| {
            cumulative += w;
            cumulative >= self.top_p * total
        });
        weights.truncate(cut.map_or(weights.len(), |c| c + 1));
        let kept: f64 = weights.iter().sum();
        let mut left = self.rng.random::<f64>() * kept;
        for (&id, &w) in ids.iter().zip(&weights) {
            if left < w {
                return id;
            }
            left -= w;
        }
        ids[weights.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Sampler {
        let options = GenerationOptions { temperature, top_k, top_p, seed, ..GenerationOptions::default() };
        Sampler::new(&options).unwrap()
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [1.0f32, 2.0, 0.0, -1.0];
        let weights: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut s = sampler(1.0, 0, 1.0, 7);
        let mut counts = [0usize; 4];
        for _ in 0..40_000 {
            counts[s.draw(&logits) as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let (got, want) = (*count as f64 / 40_000.0, weight / total);
            assert!((got - want).abs() < 0.01, "{got} against {want}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [3.0f32, 5.0, 4.0, 4.0];
        let mut k = sampler(1.0, 2, 1.0, 1);
        let mut p = sampler(1.0, 0, 0.6, 1);
        for _ in 0..500 {
            // Of the two tokens with equal logits, the lower id is in the first two.
            assert!([1, 2].contains(&k.draw(&logits)));
            assert!([1, 2].contains(&p.draw(&logits)));
        }
    }

    #[test]
    fn same_seed_same_draws_and_other_seed_other_draws() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let draws = |seed| {
            let mut s = sampler(1.0, 0, 1.0, seed);
            (0..50).map(|_| s.draw(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draws(3), draws(3));
        assert_ne!(draws(3), draws(4));
    }
}
