//! The greedy choice over a row of logits.

use super::per_level;

per_level! {
    /// As [`headrace_numerics::argmax::argmax`]: the lowest index of the largest logit, or `Err` with the first
    /// non-finite index (`Err(0)` for an empty row).
    pub fn argmax(logits: &[f32]) -> Result<usize, usize> {
        const LANES: usize = 64;
        const EXPONENT: u32 = 0x7f80_0000;
        if logits.is_empty() {
            return Err(0);
        }
        // The maximum of finite floats doesn't depend on the order in which it is taken, and of the two zeros, which
        // compare equal, the search below takes whichever comes first.
        let mut best = [f32::NEG_INFINITY; LANES];
        let mut bad = [0u32; LANES];
        for chunk in logits.chunks(LANES) {
            for ((b, n), &x) in best.iter_mut().zip(bad.iter_mut()).zip(chunk) {
                *n |= u32::from(x.to_bits() & EXPONENT == EXPONENT);
                *b = if x > *b { x } else { *b };
            }
        }
        if bad.iter().any(|&n| n != 0) {
            return Err(logits.iter().position(|x| !x.is_finite()).unwrap_or(0));
        }
        let max = best.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
        logits.iter().position(|&x| x == max).ok_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::SimdLevel;
    use headrace_numerics::argmax::argmax as oracle;
    use headrace_testing::random_floats;

    #[test]
    fn ties_zeros_and_non_finite_logits() {
        let mut rows: Vec<Vec<f32>> = vec![
            vec![],
            vec![0.0],
            vec![-0.0, 0.0, -1.0],
            vec![-1.0, 3.0, 3.0],
            vec![-5.0; 200],
            vec![1.0, f32::NEG_INFINITY, f32::NAN],
        ];
        for n in [63, 64, 65, 1000, 49152] {
            let x: Vec<f32> = random_floats(n as u64, n, 8.0).iter().map(|v| v.round()).collect();
            rows.push(x.clone());
            let mut y = x;
            y[n - 1] = f32::INFINITY;
            rows.push(y);
        }
        for row in rows {
            for level in SimdLevel::available() {
                assert_eq!(argmax(level, &row), oracle(&row), "{level:?} {}", row.len());
            }
        }
    }
}
