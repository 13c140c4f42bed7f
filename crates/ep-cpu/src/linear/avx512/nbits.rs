//! Unpacking of planar codes, scales and zero points (ONNX): 4 and 8 bits, blocks of 16 to 256.

use std::arch::x86_64::*;

use headrace_numerics::format::{Nbits, ScaleType, ZeroPoint};

use super::legacy::{nibbles, transpose};
use super::tile::{RowBytes, Table, Tile, Unpack, first_bytes, load};
use crate::activations::{GROUP_BLOCKS, GROUP_CODES};

/// What both code widths share: where scales and zero points are.
#[derive(Clone, Copy)]
struct Planes {
    scale: ScaleType,
    /// Scales of a group: 16, 8, 4, 2 or 1.
    per_group: usize,
    /// The scale of each lane among them (blocks of 32 and more).
    of_lane: [i32; GROUP_BLOCKS],
    /// What turns signed codes into unsigned ones with the zero point in the middle; 0 where they are unsigned.
    flip: i8,
}

impl Planes {
    fn new(n: Nbits) -> Planes {
        let block = usize::from(n.block);
        let mut of_lane = [0; GROUP_BLOCKS];
        for (lane, of) in of_lane.iter_mut().enumerate() {
            *of = (lane * 32 / block) as i32;
        }
        let flip = match (n.zero, n.bits) {
            (ZeroPoint::TwosComplement, 4) => 0x88u8 as i8,
            (ZeroPoint::TwosComplement, _) => 0x80u8 as i8,
            _ => 0,
        };
        Planes { scale: n.scale, per_group: GROUP_CODES / block, of_lane, flip }
    }

    /// Up to 16 bytes of `bytes` from `at` on; those past the end read as zero.
    ///
    /// # Safety
    /// The processor must have AVX-512 with BW and VL.
    #[inline(always)]
    unsafe fn near(bytes: &[u8], at: usize) -> __m128i {
        let mask = first_bytes(bytes.len().saturating_sub(at).min(16)) as __mmask16;
        // SAFETY: the mask ends with the slice.
        unsafe { _mm_maskz_loadu_epi8(mask, bytes.as_ptr().wrapping_add(at).cast()) }
    }

    /// Eight scales from scale `first` of the row on; those past the end read as zero.
    ///
    /// # Safety
    /// As [`Planes::near`].
    #[inline(always)]
    unsafe fn eight<const TAIL: bool>(&self, row: &[u8], first: usize) -> __m256 {
        // SAFETY: without `TAIL` the eight scales exist; with it, the mask ends with the slice.
        unsafe {
            match self.scale {
                ScaleType::F16 if !TAIL => _mm256_cvtph_ps(_mm_loadu_si128(row.as_ptr().add(2 * first).cast())),
                ScaleType::F32 if !TAIL => _mm256_loadu_ps(row.as_ptr().add(4 * first).cast()),
                ScaleType::F16 => _mm256_cvtph_ps(Self::near(row, 2 * first)),
                ScaleType::F32 => {
                    let left = (row.len() / 4).saturating_sub(first);
                    _mm256_maskz_loadu_ps(first_bytes(left) as u8, row.as_ptr().wrapping_add(4 * first).cast())
                }
            }
        }
    }

    /// Scales of the halves, or of the blocks in `[0]`.
    ///
    /// # Safety
    /// As [`Unpack::tile`].
    #[inline(always)]
    unsafe fn scales<const HALVES: bool, const TAIL: bool>(&self, row: &[u8], g: usize, count: usize) -> [__m256; 2] {
        // SAFETY: passed on to the caller.
        unsafe {
            let none = _mm256_setzero_ps();
            let mut scales = if HALVES {
                let (a, b) = (self.eight::<TAIL>(row, g * 16), self.eight::<TAIL>(row, g * 16 + 8));
                let even = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
                let odd = _mm256_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15);
                [_mm256_permutex2var_ps(a, even, b), _mm256_permutex2var_ps(a, odd, b)]
            } else if self.per_group == GROUP_BLOCKS {
                [self.eight::<TAIL>(row, g * GROUP_BLOCKS), none]
            } else {
                let few = self.eight::<true>(row, g * self.per_group);
                [_mm256_permutexvar_ps(_mm256_loadu_si256(self.of_lane.as_ptr().cast()), few), none]
            };
            if TAIL {
                let exist = first_bytes(count) as u8;
                scales = [_mm256_maskz_mov_ps(exist, scales[0]), _mm256_maskz_mov_ps(exist, scales[1])];
            }
            scales
        }
    }

    /// Zero points of the halves, or of the blocks in `[0]`.
    ///
    /// # Safety
    /// As [`Unpack::tile`].
    #[inline(always)]
    unsafe fn zeros<const HALVES: bool, const BITS: usize>(&self, row: &[u8], g: usize) -> [__m256i; 2] {
        let first = g * self.per_group;
        // SAFETY: passed on to the caller.
        unsafe {
            let bytes = Self::near(row, first * BITS / 8);
            let of_lane = _mm256_loadu_si256(self.of_lane.as_ptr().cast());
            match (HALVES, BITS) {
                (true, 4) => {
                    let both = _mm256_cvtepu8_epi32(bytes);
                    [_mm256_and_si256(both, _mm256_set1_epi32(15)), _mm256_srli_epi32(both, 4)]
                }
                (true, _) => {
                    let both = _mm256_cvtepu16_epi32(bytes);
                    [_mm256_and_si256(both, _mm256_set1_epi32(255)), _mm256_srli_epi32(both, 8)]
                }
                (false, 4) => {
                    // A group's first nibble is a high one where groups have an odd number of them: one.
                    let skip = _mm256_set1_epi32((4 * (first % 2)) as i32);
                    let shift = _mm256_add_epi32(_mm256_slli_epi32(of_lane, 2), skip);
                    let all = _mm256_srlv_epi32(_mm256_broadcastd_epi32(bytes), shift);
                    [_mm256_and_si256(all, _mm256_set1_epi32(15)), _mm256_setzero_si256()]
                }
                (false, _) => [_mm256_permutexvar_epi32(of_lane, _mm256_cvtepu8_epi32(bytes)), _mm256_setzero_si256()],
            }
        }
    }

    /// A register of codes, made unsigned.
    #[inline(always)]
    unsafe fn unsigned(&self, codes: __m512i) -> __m512i {
        // SAFETY: the caller's processor has AVX-512.
        if self.flip == 0 { codes } else { unsafe { _mm512_xor_si512(codes, _mm512_set1_epi8(self.flip)) } }
    }

    /// The tile of `codes`.
    ///
    /// # Safety
    /// As [`Unpack::tile`].
    #[inline(always)]
    unsafe fn tile<const EACH: bool, const HALVES: bool, const BITS: usize, const TAIL: bool>(
        &self,
        codes: [__m512i; 4],
        row: RowBytes<'_>,
        g: usize,
        count: usize,
    ) -> Tile {
        // SAFETY: passed on to the caller.
        unsafe {
            let scale = self.scales::<HALVES, TAIL>(row.0[1], g, count);
            let mut tile = Tile::new(codes, scale[0]);
            tile.scale[1] = scale[1];
            if EACH {
                tile.zero = self.zeros::<HALVES, BITS>(row.0[2], g);
            }
            tile
        }
    }
}

/// Packed dwords `j` and `j + 1` of eight blocks of 16 bytes.
const fn packed_sources(j: usize) -> Table<[u32; 16]> {
    let mut to = [0; 16];
    let mut x = 0;
    while x < 16 {
        to[x] = (x % 8 * 4 + j + x / 8) as u32;
        x += 1;
    }
    Table(to)
}
static PACKED: [Table<[u32; 16]>; 2] = [packed_sources(0), packed_sources(2)];

/// 4-bit codes, low nibble first; `EACH` block with a zero point of its own, `HALVES` for blocks of 16.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<const EACH: bool, const HALVES: bool>(Planes);

impl<const EACH: bool, const HALVES: bool> Nibbles<EACH, HALVES> {
    pub(super) fn new(n: Nbits) -> Self {
        Nibbles(Planes::new(n))
    }
}

// SAFETY: full groups have 128 bytes of codes; what may lie past the end of a row is loaded through masks.
unsafe impl<const EACH: bool, const HALVES: bool> Unpack for Nibbles<EACH, HALVES> {
    const HALVES: bool = HALVES;
    const MIN: bool = false;
    const ZERO_SHIFT: u32 = if EACH { 0 } else { 3 };
    const ZERO_EACH: bool = EACH;
    const GROUP_BYTES: usize = GROUP_CODES / 2;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor.
        unsafe {
            let (base, at) = (row.0[0].as_ptr(), g * Self::GROUP_BYTES);
            let a = load::<TAIL>(base, at, row.0[0].len());
            let b = load::<TAIL>(base, at + 64, row.0[0].len());
            let gather = |t: &Table<[u32; 16]>| {
                let idx = _mm512_load_si512(t.0.as_ptr().cast());
                self.0.unsigned(_mm512_permutex2var_epi32(a, idx, b))
            };
            let (z0, z1) = nibbles(gather(&PACKED[0]));
            let (z2, z3) = nibbles(gather(&PACKED[1]));
            self.0.tile::<EACH, HALVES, 4, TAIL>([z0, z1, z2, z3], row, g, count)
        }
    }
}

/// 8-bit codes.
#[derive(Clone, Copy)]
pub(super) struct Bytes<const EACH: bool, const HALVES: bool>(Planes);

impl<const EACH: bool, const HALVES: bool> Bytes<EACH, HALVES> {
    pub(super) fn new(n: Nbits) -> Self {
        Bytes(Planes::new(n))
    }
}

// SAFETY: full groups have 256 bytes of codes; what may lie past the end of a row is loaded through masks.
unsafe impl<const EACH: bool, const HALVES: bool> Unpack for Bytes<EACH, HALVES> {
    const HALVES: bool = HALVES;
    const MIN: bool = false;
    const ZERO_SHIFT: u32 = if EACH { 0 } else { 7 };
    const ZERO_EACH: bool = EACH;
    const GROUP_BYTES: usize = GROUP_CODES;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor.
        unsafe {
            let pair = |i: usize| {
                let at = g * Self::GROUP_BYTES + 64 * i;
                self.0.unsigned(load::<TAIL>(row.0[0].as_ptr(), at, row.0[0].len()))
            };
            let z = transpose([pair(0), pair(1), pair(2), pair(3)], false);
            self.0.tile::<EACH, HALVES, 8, TAIL>(z, row, g, count)
        }
    }
}
