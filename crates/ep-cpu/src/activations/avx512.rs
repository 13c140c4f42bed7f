//! Quantisation of an activation row with AVX-512: eight blocks at a time.

use std::arch::x86_64::*;

use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::BLOCK;

use super::{CodeGroup, GROUP_BLOCKS, GROUP_CODES, StepGroup};
use crate::linear::avx512::{Table, table, transpose};

/// Byte 0 of 32 dwords, then byte 1 of each.
const fn byte_planes() -> Table<[u8; 64]> {
    let mut to = [0; 64];
    let mut x = 0;
    while x < 64 {
        to[x] = (x % 32 * 4 + x / 32) as u8;
        x += 1;
    }
    Table(to)
}
static BYTE_PLANES: Table<[u8; 64]> = byte_planes();

/// One row. `high` is as long as `low` for 16-bit codes, and empty for 8-bit ones.
///
/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`; `low` and `steps` must have a group for every 256 elements begun.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn quantise(
    x: &[f32],
    width: ActivationWidth,
    low: &mut [CodeGroup],
    high: &mut [CodeGroup],
    steps: &mut [StepGroup],
) {
    let mut lasts = [0f32; GROUP_CODES];
    for (g, (low, steps)) in low.iter_mut().zip(steps).enumerate() {
        let mut chunk = &x[g * GROUP_CODES..];
        if chunk.len() < GROUP_CODES {
            lasts[..chunk.len()].copy_from_slice(chunk);
            chunk = &lasts;
        }
        // SAFETY: `chunk` has at least 256 elements; the groups are 256 aligned bytes; the features are enabled here.
        unsafe {
            let half = |lane: usize, h: usize| _mm512_loadu_ps(chunk.as_ptr().add(lane * BLOCK + 16 * h));
            let magnitude = |v: __m512| _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff));
            let mut amax = [0u32; GROUP_BLOCKS];
            for lane in 0..GROUP_BLOCKS {
                let most = _mm512_max_epu32(magnitude(half(lane, 0)), magnitude(half(lane, 1)));
                amax[lane] = _mm512_reduce_max_epu32(most);
            }
            let amax = _mm256_castsi256_ps(_mm256_loadu_si256(amax.as_ptr().cast()));
            let max_code = _mm256_set1_ps(width.max_code());
            let inv = _mm256_div_ps(max_code, amax);
            let infinity = _mm256_set1_ps(f32::INFINITY);
            let finite = _mm256_cmp_ps_mask(amax, infinity, _CMP_LT_OQ);
            let used = finite & _mm256_cmp_ps_mask(inv, infinity, _CMP_LT_OQ);
            // A block that is not finite keeps its magnitude as the step; one without a usable quotient has none.
            let d = _mm256_mask_mov_ps(_mm256_maskz_div_ps(used, amax, max_code), !finite, amax);
            _mm256_store_ps(steps.d.as_mut_ptr(), d);

            let mut inverse = [0f32; GROUP_BLOCKS];
            _mm256_storeu_ps(inverse.as_mut_ptr(), inv);
            let mut planes = [_mm512_setzero_si512(); GROUP_BLOCKS];
            for lane in 0..GROUP_BLOCKS {
                let mask = if used >> lane & 1 == 1 { !0 } else { 0 };
                let inv = _mm512_set1_ps(inverse[lane]);
                // With 128 added, byte 1 is the high byte of a code and byte 0 the low one, its top bit flipped.
                let code = |h: usize| {
                    let code = _mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(half(lane, h), inv));
                    _mm512_add_epi32(code, _mm512_set1_epi32(128))
                };
                planes[lane] = _mm512_permutex2var_epi8(code(0), table(&BYTE_PLANES), code(1));
            }
            let flip = _mm512_set1_epi8(-128);
            let pair = |i: usize| _mm512_xor_si512(_mm512_shuffle_i64x2(planes[2 * i], planes[2 * i + 1], 0x44), flip);
            let z = transpose([pair(0), pair(1), pair(2), pair(3)], false);
            let mut sums = put(z, low);
            if width == ActivationWidth::Int16 {
                let pair = |i: usize| _mm512_shuffle_i64x2(planes[2 * i], planes[2 * i + 1], 0xee);
                let of_high = put(transpose([pair(0), pair(1), pair(2), pair(3)], false), &mut high[g]);
                for h in 0..2 {
                    sums[h] = _mm256_add_epi32(sums[h], _mm256_slli_epi32(of_high[h], 8));
                }
            }
            _mm256_store_si256(steps.first.as_mut_ptr().cast(), sums[0]);
            _mm256_store_si256(steps.sum.as_mut_ptr().cast(), _mm256_add_epi32(sums[0], sums[1]));
        }
    }
}

/// Stores a group of codes and returns the sums of both halves of each block.
#[inline(always)]
unsafe fn put(z: [__m512i; 4], group: &mut CodeGroup) -> [__m256i; 2] {
    // SAFETY: a group is 256 aligned bytes; the caller's processor has AVX-512 with VNNI.
    unsafe {
        for v in 0..4 {
            _mm512_store_si512(group.0.as_mut_ptr().add(64 * v).cast(), z[v]);
        }
        let ones = _mm512_set1_epi8(1);
        let sum = |a: __m512i, b: __m512i| {
            let both = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, a), ones, b);
            _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1))
        };
        [sum(z[0], z[1]), sum(z[2], z[3])]
    }
}
