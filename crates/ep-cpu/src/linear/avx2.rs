//! The linear layers for AVX2: panels unpacked row by row, byte products in 16-bit lanes, four bits of code at a time.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use headrace_numerics::format::{Format, WeightView};
use headrace_numerics::linear::DENSE_LANES;

use super::DenseRows;
use super::panel::{Natural, Panel, has_halves, has_min, has_nibbles, unpack};
use super::sink::{Columns, Epilogue};
use crate::activations::{Activations, CodeGroup, GROUP_CODES, StepGroup};

thread_local! {
    /// The panels of one weight row. Grows to the largest layer's need and is kept.
    static PANELS: RefCell<Vec<Panel>> = const { RefCell::new(Vec::new()) };
}

/// The quantised linear layer.
///
/// # Safety
/// The processor must have `SimdLevel::Avx2`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn linear(
    w: &WeightView<'_>,
    acts: &Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    let groups = acts.groups();
    let mut natural: Natural = [0; GROUP_CODES];
    PANELS.with_borrow_mut(|panels| {
        if panels.len() < groups {
            panels.resize(groups, Panel::EMPTY);
        }
        let panels = &mut panels[..groups];
        for i in 0..w.rows {
            for (g, panel) in panels.iter_mut().enumerate() {
                unpack(w, i, g, &mut natural, panel);
                // SAFETY: AVX2 is enabled here.
                unsafe { interleave(&natural, &mut panel.codes) };
            }
            for r in rows.clone() {
                let row = acts.row(r);
                // SAFETY: AVX2 and FMA are enabled here.
                let y = unsafe {
                    match (has_halves(w.format), has_min(w.format), has_nibbles(w.format)) {
                        (true, _, true) => product::<true, false, true>(panels, row),
                        (true, _, false) => product::<true, false, false>(panels, row),
                        (_, true, true) => product::<false, true, true>(panels, row),
                        (_, true, false) => product::<false, true, false>(panels, row),
                        (_, _, true) => product::<false, false, true>(panels, row),
                        (_, _, false) => product::<false, false, false>(panels, row),
                    }
                };
                epilogue.store(y, i, &mut out.row_mut(r)[i]);
            }
        }
    });
}

/// One weight row times one activation row.
#[inline(always)]
unsafe fn product<const HALVES: bool, const MIN: bool, const NIBBLES: bool>(
    panels: &[Panel],
    (low, high, steps): (&[CodeGroup], &[CodeGroup], &[StepGroup]),
) -> f32 {
    // SAFETY: panels, groups and steps are aligned arrays of the lengths that are read; the caller's processor has AVX2
    // and FMA.
    unsafe {
        let mut lanes = _mm256_setzero_ps();
        for (g, panel) in panels.iter().enumerate() {
            let steps = &steps[g];
            let mut dots = [_mm256_setzero_si256(); 2];
            for (h, dot) in dots.iter_mut().enumerate() {
                *dot = half_dots::<NIBBLES>(&panel.codes, &low[g], h);
                if let Some(high) = high.get(g) {
                    let of_high = half_dots::<NIBBLES>(&panel.codes, high, h);
                    *dot = _mm256_add_epi32(*dot, _mm256_slli_epi32(of_high, 8));
                }
            }
            let d = _mm256_load_ps(steps.d.as_ptr());
            let sum = _mm256_load_si256(steps.sum.as_ptr().cast());
            let (scale, other) = (_mm256_load_ps(panel.scale.as_ptr()), _mm256_load_ps(panel.other.as_ptr()));
            let add = |lanes: __m256, x: __m256i, t: __m256| {
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), _mm256_mul_ps(t, d), lanes)
            };
            let less = |dot: __m256i, h: usize, sum: __m256i| {
                let zero = _mm256_load_si256(panel.zero[h].as_ptr().cast());
                _mm256_sub_epi32(dot, _mm256_mullo_epi32(zero, sum))
            };
            if HALVES {
                let first = _mm256_load_si256(steps.first.as_ptr().cast());
                lanes = add(lanes, less(dots[0], 0, first), scale);
                lanes = add(lanes, less(dots[1], 1, _mm256_sub_epi32(sum, first)), other);
            } else {
                lanes = add(lanes, less(_mm256_add_epi32(dots[0], dots[1]), 0, sum), scale);
            }
            if MIN {
                lanes = add(lanes, sum, other);
            }
        }
        tree(lanes)
    }
}

/// The dots of half `h` of eight blocks with one plane of activation bytes. A product of a nibble and a byte, twice,
/// is at most 3840, and four of them stay within 16 bits.
#[inline(always)]
unsafe fn half_dots<const NIBBLES: bool>(codes: &[u8; GROUP_CODES], q: &CodeGroup, h: usize) -> __m256i {
    // SAFETY: both arrays are 256 aligned bytes; the caller's processor has AVX2.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let (mut of_low, mut of_high) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for w in 4 * h..4 * h + 4 {
            let code = _mm256_load_si256(codes.as_ptr().add(32 * w).cast());
            let q = _mm256_load_si256(q.0.as_ptr().add(32 * w).cast());
            if NIBBLES {
                of_low = _mm256_add_epi16(of_low, _mm256_maddubs_epi16(code, q));
            } else {
                let upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), mask);
                of_low = _mm256_add_epi16(of_low, _mm256_maddubs_epi16(_mm256_and_si256(code, mask), q));
                of_high = _mm256_add_epi16(of_high, _mm256_maddubs_epi16(upper, q));
            }
        }
        let ones = _mm256_set1_epi16(1);
        let low = _mm256_madd_epi16(of_low, ones);
        if NIBBLES { low } else { _mm256_add_epi32(low, _mm256_slli_epi32(_mm256_madd_epi16(of_high, ones), 4)) }
    }
}

/// Reorders a group's codes as the activations are: a shuffle within each half of a block, then a transposition.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(crate) unsafe fn interleave(natural: &Natural, codes: &mut [u8; GROUP_CODES]) {
    // SAFETY: both arrays are 256 bytes; the caller's processor has AVX2.
    unsafe {
        let order = _mm256_setr_epi8(
            0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
        );
        let row = |l: usize| _mm256_shuffle_epi8(_mm256_loadu_si256(natural.as_ptr().add(32 * l).cast()), order);
        // Rows i and i + 4 share a register of four dwords each, for the first and the second half of the blocks.
        for h in 0..2 {
            let pair = |i: usize| {
                if h == 0 {
                    _mm256_permute2x128_si256(row(i), row(i + 4), 0x20)
                } else {
                    _mm256_permute2x128_si256(row(i), row(i + 4), 0x31)
                }
            };
            let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
            let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (ab2, cd2) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            let dwords = [
                _mm256_unpacklo_epi64(ab, cd),
                _mm256_unpackhi_epi64(ab, cd),
                _mm256_unpacklo_epi64(ab2, cd2),
                _mm256_unpackhi_epi64(ab2, cd2),
            ];
            for (w, dword) in dwords.into_iter().enumerate() {
                _mm256_storeu_si256(codes.as_mut_ptr().add(32 * (4 * h + w)).cast(), dword);
            }
        }
    }
}

/// The contract's tree over eight lanes.
#[inline(always)]
unsafe fn tree(lanes: __m256) -> f32 {
    // SAFETY: the caller's processor has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// The unquantised linear layer.
///
/// # Safety
/// The processor must have `SimdLevel::Avx2`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dense(
    w: &WeightView<'_>,
    x: DenseRows<'_>,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    let full = w.cols / DENSE_LANES * DENSE_LANES;
    for i in 0..w.rows {
        let bytes = w.row(0, i);
        for r in rows.clone() {
            let x = x.row(r);
            // SAFETY: the loads lie below `full` elements of slices that are longer; the features are enabled here.
            let y = unsafe {
                let mut lanes = [_mm256_setzero_ps(); 8];
                for k in (0..full).step_by(DENSE_LANES) {
                    for (v, lanes) in lanes.iter_mut().enumerate() {
                        let at = k + 8 * v;
                        let weight = eight(w.format, bytes.as_ptr(), at);
                        *lanes = _mm256_fmadd_ps(weight, _mm256_loadu_ps(x.as_ptr().add(at)), *lanes);
                    }
                }
                let mut each = [0f32; DENSE_LANES];
                for (v, &lanes) in lanes.iter().enumerate() {
                    _mm256_storeu_ps(each.as_mut_ptr().add(8 * v), lanes);
                }
                for (k, lane) in (full..w.cols).zip(&mut each) {
                    let weight = headrace_numerics::block::float_element(w.format, bytes, k);
                    *lane = weight.mul_add(x[k], *lane);
                }
                headrace_numerics::reduce::tree(&mut each)
            };
            epilogue.store(y, i, &mut out.row_mut(r)[i]);
        }
    }
}

/// Elements `at .. at + 8` of a float row.
#[inline(always)]
unsafe fn eight(format: Format, row: *const u8, at: usize) -> __m256 {
    // SAFETY: the caller vouches for the elements and the processor.
    unsafe {
        match format {
            Format::F32 => _mm256_loadu_ps(row.add(4 * at).cast()),
            Format::F16 => _mm256_cvtph_ps(_mm_loadu_si128(row.add(2 * at).cast())),
            _ => {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(row.add(2 * at).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16))
            }
        }
    }
}
