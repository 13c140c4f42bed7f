//! The unquantised linear layer: 64 lanes in four registers; weights are converted once for up to four rows.

use std::arch::x86_64::*;
use std::ops::Range;

use headrace_numerics::format::{Format, WeightView};
use headrace_numerics::linear::DENSE_LANES;

use super::tile::tree;
use crate::linear::DenseRows;
use crate::linear::sink::{Columns, Epilogue};

/// How far ahead of the elements in work their line is fetched, in bytes.
const AHEAD: usize = 2048;

/// Element types, as constants for the kernel's type parameter.
const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// The unquantised linear layer.
///
/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(in crate::linear) unsafe fn dense(
    w: &WeightView<'_>,
    x: DenseRows<'_>,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller vouches for the processor.
    unsafe {
        match w.format {
            Format::F32 => all_rows::<F32>(w, x, rows, epilogue, out),
            Format::F16 => all_rows::<F16>(w, x, rows, epilogue, out),
            _ => all_rows::<BF16>(w, x, rows, epilogue, out),
        }
    }
}

#[inline(always)]
unsafe fn all_rows<const TYPE: u8>(
    w: &WeightView<'_>,
    x: DenseRows<'_>,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    for i in 0..w.rows {
        let bytes = w.row(0, i);
        let mut r = rows.start;
        while r < rows.end {
            // SAFETY: passed on to the caller.
            unsafe {
                r += match rows.end - r {
                    1 => some_rows::<TYPE, 1>(bytes, x, r, i, &epilogue, out),
                    2 | 3 => some_rows::<TYPE, 2>(bytes, x, r, i, &epilogue, out),
                    _ => some_rows::<TYPE, 4>(bytes, x, r, i, &epilogue, out),
                };
            }
        }
    }
}

/// The products of one weight row with `N` activation rows from `r` on; returns `N`.
#[inline(always)]
unsafe fn some_rows<const TYPE: u8, const N: usize>(
    bytes: &[u8],
    x: DenseRows<'_>,
    r: usize,
    i: usize,
    epilogue: &Epilogue<'_>,
    out: &mut Columns<'_>,
) -> usize {
    let mut from: [&[f32]; N] = [&[]; N];
    for (a, from) in from.iter_mut().enumerate() {
        *from = x.row(r + a);
    }
    let cols = x.cols;
    let size = if TYPE == F32 { 4 } else { 2 };
    // SAFETY: all loads lie below `cols` elements of slices of that length, those of the tail by their masks; the
    // caller's processor has AVX-512.
    unsafe {
        let mut lanes = [[_mm512_setzero_ps(); 4]; N];
        let full = cols / DENSE_LANES * DENSE_LANES;
        let mut k = 0;
        while k < full {
            for line in 0..DENSE_LANES * size / 64 {
                // A prefetch may name any address: it never faults.
                _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(k * size + line * 64 + AHEAD).cast());
            }
            for v in 0..4 {
                let at = k + 16 * v;
                let weight = sixteen::<TYPE>(bytes.as_ptr().add(at * size), !0);
                for a in 0..N {
                    lanes[a][v] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(from[a].as_ptr().add(at)), lanes[a][v]);
                }
            }
            k += DENSE_LANES;
        }
        if k < cols {
            for v in 0..4 {
                let at = k + 16 * v;
                let mask = ((1u32 << cols.saturating_sub(at).min(16)) - 1) as __mmask16;
                let weight = sixteen::<TYPE>(bytes.as_ptr().wrapping_add(at * size), mask);
                for a in 0..N {
                    // Lanes without an element keep their sign of zero: no multiplication there.
                    let x = _mm512_maskz_loadu_ps(mask, from[a].as_ptr().wrapping_add(at));
                    lanes[a][v] = _mm512_mask3_fmadd_ps(weight, x, lanes[a][v], mask);
                }
            }
        }
        for a in 0..N {
            let l = lanes[a];
            let sixteen = _mm512_add_ps(_mm512_add_ps(l[0], l[2]), _mm512_add_ps(l[1], l[3]));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps(sixteen, 1));
            epilogue.store(tree(eight), i, &mut out.row_mut(r + a)[i]);
        }
    }
    N
}

/// Sixteen elements as floats; those outside the mask read as zero and are not touched.
#[inline(always)]
unsafe fn sixteen<const TYPE: u8>(at: *const u8, mask: __mmask16) -> __m512 {
    // SAFETY: the caller vouches for the bytes that the mask names, and for the processor.
    unsafe {
        match TYPE {
            F32 => _mm512_maskz_loadu_ps(mask, at.cast()),
            F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())),
            _ => {
                let halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16))
            }
        }
    }
}
