//! Unpacking of GGUF's 32-wide blocks: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

use std::arch::x86_64::*;

use super::tile::{RowBytes, Table, Tile, Unpack, first_bytes, load, table};
use crate::activations::{GROUP_BLOCKS, code_at};

/// Where each byte of a gathered register comes from in the bytes of a group; `NOWHERE` for a byte of no meaning.
type Sources = [usize; 64];
const NOWHERE: usize = usize::MAX;

/// Bytes of eight blocks that hold two 4-bit codes each: the even bytes of every block (`odd` 0), or the odd ones.
const fn nibble_sources(size: usize, head: usize, odd: usize) -> Sources {
    let mut from = [NOWHERE; 64];
    let mut x = 0;
    while x < 64 {
        let (half, lane, byte) = (x / 32, x % 32 / 4, x % 4);
        from[x] = lane * size + head + 2 * (4 * half + byte) + odd;
        x += 1;
    }
    from
}

/// The heads of eight blocks: scales in bytes 0 to 15, minima in 16 to 31 (`min`), fifth bits in 32 to 63 (`high`).
const fn head_sources(size: usize, min: bool, high: bool) -> Sources {
    let mut from = [NOWHERE; 64];
    let mut lane = 0;
    while lane < GROUP_BLOCKS {
        let mut i = 0;
        while i < 2 {
            from[2 * lane + i] = lane * size + i;
            if min {
                from[16 + 2 * lane + i] = lane * size + 2 + i;
            }
            i += 1;
        }
        i = 0;
        while high && i < 4 {
            from[32 + 4 * lane + i] = lane * size + if min { 4 } else { 2 } + i;
            i += 1;
        }
        lane += 1;
    }
    from
}

/// Positions within a register (or a pair of them) as the byte shuffles take them.
const fn indices(from: Sources) -> Table<[u8; 64]> {
    let mut to = [0u8; 64];
    let mut x = 0;
    while x < 64 {
        if from[x] != NOWHERE {
            to[x] = (from[x] % 128) as u8;
        }
        x += 1;
    }
    Table(to)
}

/// Which bytes come from the third register of a group.
const fn third(from: Sources) -> u64 {
    let (mut mask, mut x) = (0, 0);
    while x < 64 {
        if from[x] != NOWHERE && from[x] >= 128 {
            mask |= 1 << x;
        }
        x += 1;
    }
    mask
}

/// The bytes of eight blocks, up to 192 of them.
struct Group([__m512i; 3]);

impl Group {
    /// # Safety
    /// `count * size` bytes must be readable at `base` (`8 * size` unless `TAIL`).
    #[inline(always)]
    unsafe fn load<const TAIL: bool, const SIZE: usize>(base: *const u8, count: usize) -> Group {
        let end = if TAIL { count * SIZE } else { GROUP_BLOCKS * SIZE };
        // SAFETY: the loads stop at `end`.
        unsafe {
            let third = match GROUP_BLOCKS * SIZE - 128 {
                16 if !TAIL => _mm512_zextsi128_si512(_mm_loadu_si128(base.add(128).cast())),
                32 if !TAIL => _mm512_zextsi256_si512(_mm256_loadu_si256(base.add(128).cast())),
                64 if !TAIL => load::<false>(base, 128, end),
                _ => load::<true>(base, 128, end),
            };
            Group([load::<TAIL>(base, 0, end), load::<TAIL>(base, 64, end), third])
        }
    }

    /// The bytes of `LANES` blocks, each of several rows: as if they were eight blocks of one row.
    ///
    /// # Safety
    /// `LANES * SIZE` bytes must be readable `at` bytes into each of the `8 / LANES` rows.
    #[inline(always)]
    unsafe fn load_shared<const LANES: usize, const SIZE: usize>(rows: &[RowBytes<'_>], at: usize) -> Group {
        let run = LANES * SIZE;
        // SAFETY: a mask leaves out what isn't the row's run; a masked load does not touch what its mask leaves out.
        unsafe {
            let mut group = [_mm512_setzero_si512(); 3];
            for i in 0..GROUP_BLOCKS / LANES {
                let base = rows[i].0[0].as_ptr().wrapping_add(at).wrapping_sub(i * run);
                for (v, register) in group.iter_mut().enumerate() {
                    let (from, to) = ((i * run).max(64 * v), ((i + 1) * run).min(64 * v + 64));
                    if from < to {
                        let mask = first_bytes(to - 64 * v) & !first_bytes(from - 64 * v);
                        *register = _mm512_mask_loadu_epi8(*register, mask, base.wrapping_add(64 * v).cast());
                    }
                }
            }
            Group(group)
        }
    }

    /// The bytes that a table names.
    #[inline(always)]
    unsafe fn gather(&self, idx: &Table<[u8; 64]>, third: u64) -> __m512i {
        // SAFETY: the caller's processor has AVX-512 with VBMI.
        unsafe {
            let idx = table(idx);
            let two = _mm512_permutex2var_epi8(self.0[0], idx, self.0[1]);
            if third == 0 { two } else { _mm512_mask_permutexvar_epi8(two, third, idx, self.0[2]) }
        }
    }
}

/// Low and high nibbles of every byte.
#[inline(always)]
pub(super) unsafe fn nibbles(packed: __m512i) -> (__m512i, __m512i) {
    // SAFETY: the caller's processor has AVX-512.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        (_mm512_and_si512(packed, mask), _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask))
    }
}

/// For each byte of `z[v]`, the byte of the gathered heads that holds its fifth bit.
const fn fifth_bytes(second_half: bool) -> Table<[u8; 64]> {
    let mut to = [0u8; 64];
    let mut x = 0;
    while x < 64 {
        to[x] = (32 + x % 32 / 4 * 4 + x / 32 + if second_half { 2 } else { 0 }) as u8;
        x += 1;
    }
    Table(to)
}
static FIFTH: [Table<[u8; 64]>; 2] = [fifth_bytes(false), fifth_bytes(true)];

macro_rules! packed_format {
    ($name:ident, $size:literal, min: $min:literal, high: $high:literal, zero: $zero:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl $name {
            const HEAD: usize = 2 + if $min { 2 } else { 0 } + if $high { 4 } else { 0 };
            const EVEN: Sources = nibble_sources($size, Self::HEAD, 0);
            const ODD: Sources = nibble_sources($size, Self::HEAD, 1);
            const HEADS: Sources = head_sources($size, $min, $high);
        }

        // SAFETY: `tile` loads the bytes of the blocks that exist, and no others.
        unsafe impl Unpack for $name {
            const HALVES: bool = false;
            const MIN: bool = $min;
            const ZERO_SHIFT: u32 = $zero;
            const ZERO_EACH: bool = false;
            const GROUP_BYTES: usize = GROUP_BLOCKS * $size;
            const SHARED: bool = true;

            #[inline(always)]
            unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, count: usize) -> Tile {
                // SAFETY: the caller vouches for the group and the processor.
                unsafe { Self::unpack(Group::load::<TAIL, $size>(row.0[0].as_ptr().add(g * Self::GROUP_BYTES), count)) }
            }

            #[inline(always)]
            unsafe fn shared_tile<const LANES: usize>(&self, rows: &[RowBytes<'_>], g: usize) -> Tile {
                // SAFETY: as above.
                unsafe { Self::unpack(Group::load_shared::<LANES, $size>(rows, g * Self::GROUP_BYTES)) }
            }
        }

        impl $name {
            /// The tile of eight blocks' bytes.
            ///
            /// # Safety
            /// The processor must have `SimdLevel::Avx512Vnni`.
            #[inline(always)]
            unsafe fn unpack(group: Group) -> Tile {
                static EVEN: Table<[u8; 64]> = indices($name::EVEN);
                static ODD: Table<[u8; 64]> = indices($name::ODD);
                static HEADS: Table<[u8; 64]> = indices($name::HEADS);
                // SAFETY: the caller vouches for the processor.
                unsafe {
                    let (z0, z2) = nibbles(group.gather(&EVEN, const { third($name::EVEN) }));
                    let (z1, z3) = nibbles(group.gather(&ODD, const { third($name::ODD) }));
                    let heads = group.gather(&HEADS, const { third($name::HEADS) });
                    let mut z = [z0, z1, z2, z3];
                    if $high {
                        let bytes = [
                            _mm512_permutexvar_epi8(table(&FIFTH[0]), heads),
                            _mm512_permutexvar_epi8(table(&FIFTH[1]), heads),
                        ];
                        let bits = [_mm512_set1_epi32(0x4010_0401), _mm512_set1_epi32(0x8020_0802u32 as i32)];
                        for (v, z) in z.iter_mut().enumerate() {
                            let set = _mm512_test_epi8_mask(bytes[v / 2], bits[v % 2]);
                            *z = _mm512_mask_add_epi8(*z, set, *z, _mm512_set1_epi8(16));
                        }
                    }
                    let mut tile = Tile::new(z, _mm256_cvtph_ps(_mm512_castsi512_si128(heads)));
                    if $min {
                        tile.min = _mm256_cvtph_ps(_mm512_extracti32x4_epi32(heads, 1));
                    }
                    tile
                }
            }
        }
    };
}

packed_format!(Q4_0, 18, min: false, high: false, zero: 3, "Scale, 16 bytes of nibbles; zero point 8.");
packed_format!(Q4_1, 20, min: true, high: false, zero: 0, "Scale, minimum, 16 bytes of nibbles.");
packed_format!(Q5_0, 22, min: false, high: true, zero: 4, "Scale, 32 fifth bits, 16 bytes of nibbles; zero point 16.");
packed_format!(Q5_1, 24, min: true, high: true, zero: 0, "Scale, minimum, 32 fifth bits, 16 bytes of nibbles.");

/// First step of the transposition of eight blocks of bytes: from the pair of registers `[block a | block b]`,
/// `[block c | block d]`, a half (16 elements in activation order) of each of the four blocks, one after the other.
const fn half_sources(second: bool) -> Table<[u8; 64]> {
    let mut to = [0u8; 64];
    let mut i = 0;
    while i < 16 {
        let element = if second { 16 + i } else { i };
        // Position of the element among the 16 of its half: dword and byte in the activations' order.
        let at = code_at(0, element);
        let position = (at / 32 % 4) * 4 + at % 4;
        let mut block = 0;
        while block < 4 {
            to[block * 16 + position] = (block * 32 + element) as u8;
            block += 1;
        }
        i += 1;
    }
    Table(to)
}
static HALVES: [Table<[u8; 64]>; 2] = [half_sources(false), half_sources(true)];

/// Second step: dwords `2 v` and `2 v + 1` of the eight blocks' halves, in lane order, where the two registers hold the
/// blocks `lanes[0..4]` and `lanes[4..8]`.
const fn lane_sources(lanes: [usize; 8], v: usize) -> Table<[u32; 16]> {
    let mut to = [0u32; 16];
    let mut slot = 0;
    while slot < 8 {
        let mut half = 0;
        while half < 2 {
            to[half * 8 + lanes[slot]] = (slot * 4 + 2 * v + half) as u32;
            half += 1;
        }
        slot += 1;
    }
    Table(to)
}

/// Order of blocks where a register holds block `i` and block `i + 4`.
const APART: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Order of blocks where a register holds neighbours.
const NEXT: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
static LANES_APART: [Table<[u32; 16]>; 2] = [lane_sources(APART, 0), lane_sources(APART, 1)];
static LANES_NEXT: [Table<[u32; 16]>; 2] = [lane_sources(NEXT, 0), lane_sources(NEXT, 1)];

/// Transposes eight blocks of bytes, two a register (neighbours, or `apart` by four), into a tile's codes.
#[inline(always)]
pub(crate) unsafe fn transpose(pairs: [__m512i; 4], apart: bool) -> [__m512i; 4] {
    let lanes = if apart { &LANES_APART } else { &LANES_NEXT };
    // SAFETY: the tables are 64 aligned bytes; the caller's processor has AVX-512 with VBMI.
    unsafe {
        let lane = [_mm512_load_si512(lanes[0].0.as_ptr().cast()), _mm512_load_si512(lanes[1].0.as_ptr().cast())];
        let mut z = [_mm512_setzero_si512(); 4];
        for half in 0..2 {
            let idx = table(&HALVES[half]);
            let a = _mm512_permutex2var_epi8(pairs[0], idx, pairs[1]);
            let b = _mm512_permutex2var_epi8(pairs[2], idx, pairs[3]);
            z[2 * half] = _mm512_permutex2var_epi32(a, lane[0], b);
            z[2 * half + 1] = _mm512_permutex2var_epi32(a, lane[1], b);
        }
        z
    }
}

/// Scale, 32 signed bytes.
#[derive(Clone, Copy)]
pub(super) struct Q8_0;

// SAFETY: `tile` loads the bytes of the blocks that exist, and no others.
unsafe impl Unpack for Q8_0 {
    const HALVES: bool = false;
    const MIN: bool = false;
    const ZERO_SHIFT: u32 = 7;
    const ZERO_EACH: bool = false;
    const GROUP_BYTES: usize = GROUP_BLOCKS * 34;
    const SHARED: bool = true;

    #[inline(always)]
    unsafe fn tile<const TAIL: bool>(&self, row: RowBytes<'_>, g: usize, count: usize) -> Tile {
        // SAFETY: the caller vouches for the group and the processor; blocks from `count` on are not read.
        unsafe {
            let base = row.0[0].as_ptr().add(g * Self::GROUP_BYTES);
            let mut at = [std::ptr::null(); GROUP_BLOCKS];
            for (i, at) in at.iter_mut().enumerate() {
                if !TAIL || i < count {
                    *at = base.add(34 * i);
                }
            }
            Self::unpack::<TAIL>(at)
        }
    }

    #[inline(always)]
    unsafe fn shared_tile<const LANES: usize>(&self, rows: &[RowBytes<'_>], g: usize) -> Tile {
        // SAFETY: as above, for each row.
        unsafe {
            let mut at = [std::ptr::null(); GROUP_BLOCKS];
            for (i, at) in at.iter_mut().enumerate() {
                *at = rows[i / LANES].0[0].as_ptr().add(g * Self::GROUP_BYTES + 34 * (i % LANES));
            }
            Self::unpack::<false>(at)
        }
    }
}

impl Q8_0 {
    /// The tile of eight blocks, wherever they are; if `TAIL`, null for a block that doesn't exist.
    ///
    /// # Safety
    /// 34 bytes must be readable at each address; the processor must have `SimdLevel::Avx512Vnni`.
    #[inline(always)]
    unsafe fn unpack<const TAIL: bool>(at: [*const u8; GROUP_BLOCKS]) -> Tile {
        // SAFETY: the caller vouches for the addresses and the processor.
        unsafe {
            let mut codes = [_mm256_setzero_si256(); GROUP_BLOCKS];
            let mut scales = [0u16; GROUP_BLOCKS];
            for i in 0..GROUP_BLOCKS {
                if !TAIL || !at[i].is_null() {
                    codes[i] = _mm256_loadu_si256(at[i].add(2).cast());
                    scales[i] = at[i].cast::<u16>().read_unaligned();
                }
            }
            let mut pairs = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                let both = _mm512_inserti64x4(_mm512_castsi256_si512(codes[i]), codes[i + 4], 1);
                pairs[i] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
            }
            let [a, b, c, d, e, f, g, h] = scales;
            let scales = _mm_set_epi16(h as i16, g as i16, f as i16, e as i16, d as i16, c as i16, b as i16, a as i16);
            Tile::new(transpose(pairs, true), _mm256_cvtph_ps(scales))
        }
    }
}
