//! Unpacking of GGUF's 256-wide super-blocks: Q4_K, Q5_K, Q6_K. A super-block is one group.

use std::arch::x86_64::*;

use super::tile::{RowBytes, Table, Tile, Unpack, table};
use crate::activations::{GROUP_BLOCKS, element_at};

/// Which byte of up to 128 goes to each byte of `z[v]`: that of the element, in the part of `stride` bytes that belongs
/// to the lane.
const fn element_sources(v: usize, part_of_lane: [usize; GROUP_BLOCKS]) -> Table<[u8; 64]> {
    let mut to = [0u8; 64];
    let mut x = 0;
    while x < 64 {
        let (half, lane, byte) = (x / 32, x % 32 / 4, x % 4);
        to[x] = (part_of_lane[lane] * 32 + element_at(4 * (2 * v + half) + byte)) as u8;
        x += 1;
    }
    Table(to)
}

const fn four_tables(part_of_lane: [usize; GROUP_BLOCKS]) -> [Table<[u8; 64]>; 4] {
    [
        element_sources(0, part_of_lane),
        element_sources(1, part_of_lane),
        element_sources(2, part_of_lane),
        element_sources(3, part_of_lane),
    ]
}

/// Q4_K and Q5_K: 32 bytes hold the blocks `2 m` (low nibbles) and `2 m + 1` (high nibbles).
static PAIRED: [Table<[u8; 64]>; 4] = four_tables([0, 0, 1, 1, 2, 2, 3, 3]);
/// Q5_K: bit `l` of 32 bytes belongs to block `l`.
static SHARED: [Table<[u8; 64]>; 4] = four_tables([0; 8]);
/// Q6_K: 64 bytes hold the blocks `4 m`, `4 m + 1` (low nibbles), `4 m + 2`, `4 m + 3` (high nibbles).
static CROSSED: [Table<[u8; 64]>; 4] = four_tables([0, 1, 0, 1, 2, 3, 2, 3]);
/// Q6_K: 32 bytes hold two more bits of four blocks.
static QUADS: [Table<[u8; 64]>; 4] = four_tables([0, 0, 0, 0, 1, 1, 1, 1]);

/// One value a lane, in both halves of a register.
#[inline(always)]
unsafe fn each_lane(v: [i32; GROUP_BLOCKS]) -> __m512i {
    // SAFETY: the caller's processor has AVX-512.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(v.as_ptr().cast())) }
}

/// Scales and minima of the eight blocks of a Q4_K or Q5_K super-block, from its first 16 bytes.
/// Source of the packing: ggml, `ggml-quants.c`, `get_scale_min_k4`.
#[inline(always)]
unsafe fn scales_minima(base: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller vouches for 16 readable bytes and the processor.
    unsafe {
        let word = |at: usize| base.add(at).cast::<u32>().read_unaligned();
        let (a, b, c) = (word(4), word(8), word(12));
        let high = |w: u32| ((w >> 6) & 0x0303_0303) << 4;
        let expand = |first: u32, second: u32| {
            let bytes = _mm_cvtsi64_si128((u64::from(first) | u64::from(second) << 32) as i64);
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
        };
        let scales = expand(a & 0x3f3f_3f3f, (c & 0x0f0f_0f0f) | high(a));
        let minima = expand(b & 0x3f3f_3f3f, ((c >> 4) & 0x0f0f_0f0f) | high(b));
        let d = _mm_cvtph_ps(_mm_cvtsi32_si128(word(0) as i32));
        let d_min = _mm256_broadcastss_ps(_mm_movehdup_ps(d));
        (
            _mm256_mul_ps(_mm256_broadcastss_ps(d), scales),
            _mm256_xor_ps(_mm256_mul_ps(d_min, minima), _mm256_set1_ps(-0.0)),
        )
    }
}

/// The 4-bit part of Q4_K and Q5_K, from 128 bytes.
#[inline(always)]
unsafe fn paired_nibbles(qs: *const u8) -> [__m512i; 4] {
    // SAFETY: the caller vouches for 128 readable bytes and the processor.
    unsafe {
        let (a, b) = (_mm512_loadu_si512(qs.cast()), _mm512_loadu_si512(qs.add(64).cast()));
        let shift = each_lane([0, 4, 0, 4, 0, 4, 0, 4]);
        let mut z = [_mm512_setzero_si512(); 4];
        for v in 0..4 {
            let both = _mm512_permutex2var_epi8(a, table(&PAIRED[v]), b);
            z[v] = _mm512_and_si512(_mm512_srlv_epi32(both, shift), _mm512_set1_epi8(15));
        }
        z
    }
}

/// 4-bit codes, 6-bit scales and minima.
#[derive(Clone, Copy)]
pub(super) struct Q4K;

// SAFETY: `tile` reads the 144 bytes of super-block `g`; a row has whole super-blocks only.
unsafe impl Unpack for Q4K {
    const HALVES: bool = false;
    const MIN: bool = true;
    const ZERO_SHIFT: u32 = 0;
    const ZERO_EACH: bool = false;
    const GROUP_BYTES: usize = 144;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, _count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor.
        unsafe {
            let base = row.0[0].as_ptr().add(g * Self::GROUP_BYTES);
            let (scale, min) = scales_minima(base);
            let mut tile = Tile::new(paired_nibbles(base.add(16)), scale);
            tile.min = min;
            tile
        }
    }
}

/// 5-bit codes, 6-bit scales and minima.
#[derive(Clone, Copy)]
pub(super) struct Q5K;

// SAFETY: `tile` reads the 176 bytes of super-block `g`; a row has whole super-blocks only.
unsafe impl Unpack for Q5K {
    const HALVES: bool = false;
    const MIN: bool = true;
    const ZERO_SHIFT: u32 = 0;
    const ZERO_EACH: bool = false;
    const GROUP_BYTES: usize = 176;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, _count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor.
        unsafe {
            let base = row.0[0].as_ptr().add(g * Self::GROUP_BYTES);
            let (scale, min) = scales_minima(base);
            let mut z = paired_nibbles(base.add(48));
            let fifth = _mm512_zextsi256_si512(_mm256_loadu_si256(base.add(16).cast()));
            let bit = each_lane([
                0x0101_0101,
                0x0202_0202,
                0x0404_0404,
                0x0808_0808,
                0x1010_1010,
                0x2020_2020,
                0x4040_4040,
                0x8080_8080u32 as i32,
            ]);
            for (v, z) in z.iter_mut().enumerate() {
                let set = _mm512_test_epi8_mask(_mm512_permutexvar_epi8(table(&SHARED[v]), fifth), bit);
                *z = _mm512_mask_add_epi8(*z, set, *z, _mm512_set1_epi8(16));
            }
            let mut tile = Tile::new(z, scale);
            tile.min = min;
            tile
        }
    }
}

/// 6-bit codes with zero point 32, signed 8-bit scales for every 16.
#[derive(Clone, Copy)]
pub(super) struct Q6K;

// SAFETY: `tile` reads the 210 bytes of super-block `g`; a row has whole super-blocks only.
unsafe impl Unpack for Q6K {
    const HALVES: bool = true;
    const MIN: bool = false;
    const ZERO_SHIFT: u32 = 5;
    const ZERO_EACH: bool = false;
    const GROUP_BYTES: usize = 210;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, _count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor.
        unsafe {
            let base = row.0[0].as_ptr().add(g * Self::GROUP_BYTES);
            let (a, b) = (_mm512_loadu_si512(base.cast()), _mm512_loadu_si512(base.add(64).cast()));
            let upper = _mm512_loadu_si512(base.add(128).cast());
            let shift = each_lane([0, 0, 4, 4, 0, 0, 4, 4]);
            // Turns bits 2 j and 2 j + 1 into bits 4 and 5.
            let turn = each_lane([4, 2, 0, 30, 4, 2, 0, 30]);
            let mut z = [_mm512_setzero_si512(); 4];
            for v in 0..4 {
                let low = _mm512_srlv_epi32(_mm512_permutex2var_epi8(a, table(&CROSSED[v]), b), shift);
                let high = _mm512_rolv_epi32(_mm512_permutexvar_epi8(table(&QUADS[v]), upper), turn);
                // Low nibble from `low`, the rest from `high`; then six bits.
                let both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
                z[v] = _mm512_and_si512(both, _mm512_set1_epi8(63));
            }
            let d = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(
                base.add(208).cast::<u16>().read_unaligned(),
            ))));
            // Each dword: the scales of a block's first half (low byte) and second half (high byte).
            let scales = _mm256_cvtepi16_epi32(_mm_loadu_si128(base.add(192).cast()));
            let first = _mm256_srai_epi32(_mm256_slli_epi32(scales, 24), 24);
            let second = _mm256_srai_epi32(scales, 8);
            let mut tile = Tile::new(z, _mm256_mul_ps(d, _mm256_cvtepi32_ps(first)));
            tile.scale[1] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(second));
            tile
        }
    }
}
