//! The rotation of one head.

use headrace_numerics::rope::RopeStyle;

use super::per_level;

per_level! {
    /// Rotates one head in place, bit-equal to [`headrace_numerics::rope::rotate`]. `cos` and `sin` are `dims / 2`
    /// long, `head` at least `dims`.
    pub fn rotate(head: &mut [f32], style: RopeStyle, cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        match style {
            RopeStyle::Half => {
                let (low, high) = head[..2 * half].split_at_mut(half);
                for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (x, y) = (*a, *b);
                    *a = x.mul_add(c, -(y * s));
                    *b = y.mul_add(c, x * s);
                }
            }
            RopeStyle::Interleaved => {
                let (pairs, _) = head[..2 * half].as_chunks_mut::<2>();
                for ((pair, &c), &s) in pairs.iter_mut().zip(cos).zip(sin) {
                    let [x, y] = *pair;
                    *pair = [x.mul_add(c, -(y * s)), y.mul_add(c, x * s)];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::SimdLevel;
    use headrace_testing::{bits, random_floats};

    #[test]
    fn same_bits_as_the_contract() {
        for dims in [2, 8, 20, 64, 128] {
            for style in [RopeStyle::Half, RopeStyle::Interleaved] {
                let x = random_floats(dims as u64, dims + 4, 5.0);
                let (cos, sin) = (random_floats(1, dims / 2, 1.0), random_floats(2, dims / 2, 1.0));
                let mut want = x.clone();
                headrace_numerics::rope::rotate(&mut want, style, &cos, &sin);
                for level in SimdLevel::available() {
                    let mut got = x.clone();
                    rotate(level, &mut got, style, &cos, &sin);
                    assert_eq!(bits(&got), bits(&want), "{level:?} {style:?} {dims}");
                }
            }
        }
    }
}
