//! Rounding to fp16 and back, for stored keys and values.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::simd::SimdLevel;

/// `out[i] = f16(x[i])`, rounded to nearest even. Slices have the same length.
pub fn to_f16(x: &[f32], out: &mut [f16]) {
    out.convert_from_f32_slice(x);
}

/// `out[i] = x[i]`, exact. Slices have the same length.
pub fn from_f16(level: SimdLevel, x: &[f16], out: &mut [f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `CpuProvider::new` refuses a level that the processor lacks; these two have F16C.
        SimdLevel::Avx2 | SimdLevel::Avx512Vnni => unsafe { from_f16_f16c(x, out) },
        _ => x.convert_to_f32_slice(out),
    }
}

/// [`from_f16`], eight at a time, without asking for every eight what the processor has.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn from_f16_f16c(x: &[f16], out: &mut [f32]) {
    use std::arch::x86_64::*;
    assert_eq!(x.len(), out.len());
    let (eights, rest) = x.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (x, out) in eights.iter().zip(outs) {
        // SAFETY: both arrays are eight elements, 16 and 32 bytes.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast()))) };
    }
    for (x, out) in rest.iter().zip(out_rest) {
        *out = x.to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp16_comes_back_exactly_at_every_level() {
        let x: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| !x.is_nan()).collect();
        let want: Vec<u32> = x.iter().map(|x| x.to_f32().to_bits()).collect();
        for level in SimdLevel::available() {
            for len in [0, 1, 7, 8, 13, x.len()] {
                let mut got = vec![0.0; len];
                from_f16(level, &x[..len], &mut got);
                assert_eq!(got.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), want[..len], "{level:?}");
            }
        }
    }
}
