//! Eight blocks of a weight row in registers, and the arithmetic of one group.

use std::arch::x86_64::*;

use headrace_numerics::format::{MAX_PLANES, WeightView};

use crate::activations::{CodeGroup, StepGroup};

/// A constant table, aligned for whole-register loads.
#[repr(C, align(64))]
pub(crate) struct Table<T>(pub(crate) T);

/// Eight blocks of a row. Unsigned codes in the byte order of the activations; one lane a block for the rest. A format
/// leaves what it lacks at zero, and the compiler drops it.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Codes: `z[0..2]` the first 16 elements of each block, `z[2..4]` the others.
    pub(super) z: [__m512i; 4],
    /// Scales of each half, or of the block in `scale[0]`. Zero in lanes without a block.
    pub(super) scale: [__m256; 2],
    /// Float minimum. Zero in lanes without a block.
    pub(super) min: __m256,
    /// Zero points, where they come one a block: of each half, or of the block in `zero[0]`.
    pub(super) zero: [__m256i; 2],
}

impl Tile {
    #[inline(always)]
    pub(super) unsafe fn new(z: [__m512i; 4], scale: __m256) -> Tile {
        // SAFETY: the caller's processor has AVX-512.
        let (f, i) = unsafe { (_mm256_setzero_ps(), _mm256_setzero_si256()) };
        Tile { z, scale: [scale, f], min: f, zero: [i; 2] }
    }
}

/// Where a row's bytes are, by plane.
#[derive(Clone, Copy)]
pub(super) struct RowBytes<'a>(pub(super) [&'a [u8]; MAX_PLANES]);

/// All rows of a matrix, with the bytes of a row counted once.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    planes: [&'a [u8]; MAX_PLANES],
    bytes: [usize; MAX_PLANES],
}

impl<'a> Rows<'a> {
    pub(super) fn new(w: &WeightView<'a>) -> Self {
        let bytes = std::array::from_fn(|plane| w.format.row_bytes(plane, w.cols));
        Rows { planes: w.planes, bytes }
    }

    /// Where row `row` is.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> RowBytes<'a> {
        let plane = |p: usize| &self.planes[p][row * self.bytes[p]..(row + 1) * self.bytes[p]];
        RowBytes([plane(0), plane(1), plane(2)])
    }
}

/// How a format's bytes become tiles.
///
/// # Safety
/// `tile` must read inside the row's slices only, provided that the slices are a row of the format.
pub(super) unsafe trait Unpack: Copy {
    /// True where each half of a block has a scale of its own.
    const HALVES: bool;
    /// True for formats with a float minimum.
    const MIN: bool;
    /// Binary logarithm of a zero point that all codes share; 0 for none.
    const ZERO_SHIFT: u32;
    /// True where zero points come one a block (or half).
    const ZERO_EACH: bool;
    /// Bytes of plane 0 that eight blocks take.
    const GROUP_BYTES: usize;

    /// The blocks `8 g .. 8 g + count`. `TAIL` is true if `count` may be less than 8.
    ///
    /// # Safety
    /// The row must be of the format and hold these blocks; the processor must have `SimdLevel::Avx512Vnni`.
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, count: usize) -> Tile;

    /// True for formats that have [`Unpack::shared_tile`].
    const SHARED: bool = false;

    /// The `LANES` blocks `8 g .. 8 g + LANES` of each of `8 / LANES` rows, side by side.
    ///
    /// # Safety
    /// As [`Unpack::tile`], for each of the rows.
    #[inline(always)]
    unsafe fn shared_tile<const LANES: usize>(&self, rows: &[RowBytes<'_>], g: usize) -> Tile {
        // SAFETY: passed on to the caller. Only formats that have a form of their own are asked for one.
        unsafe { self.tile::<true>(rows[0], g, LANES) }
    }
}

/// A mask of the first `n` bytes of a register (all of them from 64 on).
#[inline(always)]
pub(super) fn first_bytes(n: usize) -> __mmask64 {
    if n >= 64 { !0 } else { (1u64 << n) - 1 }
}

/// 64 bytes at `at`, of which, if `TAIL`, only those below `end` exist and the others read as zero.
///
/// # Safety
/// The bytes must be readable: all 64, or those below `end` if `TAIL`.
#[inline(always)]
pub(super) unsafe fn load<const TAIL: bool>(base: *const u8, at: usize, end: usize) -> __m512i {
    // SAFETY: the caller vouches for the bytes; a masked load does not touch bytes that the mask leaves out.
    unsafe {
        if TAIL {
            _mm512_maskz_loadu_epi8(first_bytes(end.saturating_sub(at)), base.wrapping_add(at).cast())
        } else {
            _mm512_loadu_si512(base.add(at).cast())
        }
    }
}

/// A table as a register.
#[inline(always)]
pub(crate) unsafe fn table(t: &Table<[u8; 64]>) -> __m512i {
    // SAFETY: 64 aligned bytes; the caller's processor has AVX-512.
    unsafe { _mm512_load_si512(t.0.as_ptr().cast()) }
}

/// The integer dots of the eight blocks, not yet freed of zero points: of both halves, or of the block in `[0]`.
#[inline(always)]
pub(super) unsafe fn dots<F: Unpack, const WIDE: bool>(
    z: &[__m512i; 4],
    low: &CodeGroup,
    high: Option<&CodeGroup>,
) -> [__m256i; 2] {
    // SAFETY: the groups are 256 aligned bytes; the caller's processor has AVX-512 with VNNI.
    unsafe {
        let none = _mm256_setzero_si256();
        if F::HALVES {
            [chain::<WIDE, 0, 2>(z, low, high), chain::<WIDE, 2, 4>(z, low, high)]
        } else {
            [chain::<WIDE, 0, 4>(z, low, high), none]
        }
    }
}

/// The integer dots of registers `FROM .. TO`.
#[inline(always)]
unsafe fn chain<const WIDE: bool, const FROM: usize, const TO: usize>(
    z: &[__m512i; 4],
    low: &CodeGroup,
    high: Option<&CodeGroup>,
) -> __m256i {
    // SAFETY: the groups are 256 aligned bytes; the caller's processor has AVX-512 with VNNI.
    unsafe {
        let mut acc = _mm512_setzero_si512();
        if WIDE && let Some(high) = high {
            for v in FROM..TO {
                acc = _mm512_dpbusd_epi32(acc, z[v], _mm512_load_si512(high.0.as_ptr().add(64 * v).cast()));
            }
            acc = _mm512_slli_epi32(acc, 8);
        }
        for v in FROM..TO {
            acc = _mm512_dpbusd_epi32(acc, z[v], _mm512_load_si512(low.0.as_ptr().add(64 * v).cast()));
        }
        _mm256_add_epi32(_mm512_castsi512_si256(acc), _mm512_extracti64x4_epi64(acc, 1))
    }
}

/// Adds eight blocks' dots to the eight lanes, in the contract's order: dot (of each half), then minimum.
#[inline(always)]
pub(super) unsafe fn accumulate<F: Unpack>(
    dots: [__m256i; 2],
    scale: [__m256; 2],
    min: __m256,
    zero: [__m256i; 2],
    steps: &StepGroup,
    lanes: __m256,
) -> __m256 {
    // SAFETY: the arrays of `steps` are 32 aligned bytes each; the caller's processor has AVX-512.
    unsafe {
        let d = _mm256_load_ps(steps.d.as_ptr());
        let sum = _mm256_load_si256(steps.sum.as_ptr().cast());
        let parts = if F::HALVES {
            let first = _mm256_load_si256(steps.first.as_ptr().cast());
            [first, _mm256_sub_epi32(sum, first)]
        } else {
            [sum, sum]
        };
        let mut lanes = lanes;
        for h in 0..if F::HALVES { 2 } else { 1 } {
            let mut dot = dots[h];
            if F::ZERO_EACH {
                dot = _mm256_sub_epi32(dot, _mm256_mullo_epi32(zero[h], parts[h]));
            } else if F::ZERO_SHIFT > 0 {
                dot = _mm256_sub_epi32(dot, _mm256_sllv_epi32(parts[h], _mm256_set1_epi32(F::ZERO_SHIFT as i32)));
            }
            lanes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale[h], d), lanes);
        }
        if F::MIN {
            lanes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(min, d), lanes);
        }
        lanes
    }
}

/// The contract's tree over eight lanes.
#[inline(always)]
pub(super) unsafe fn tree(lanes: __m256) -> f32 {
    // SAFETY: the caller's processor has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}
