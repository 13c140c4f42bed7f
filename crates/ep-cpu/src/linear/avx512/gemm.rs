//! Several activation rows: tiles are unpacked once into a panel in the cache, which all activation rows multiply.

use std::arch::x86_64::*;
use std::cell::RefCell;

use headrace_numerics::block::blocks;

use super::Call;
use super::tile::{Rows, Tile, Unpack, accumulate, dots};
use crate::activations::{Activations, CodeGroup, GROUP_BLOCKS, GROUP_CODES, StepGroup, shared_lanes};
use crate::linear::panel::Panel;
use crate::linear::sink::{Columns, Epilogue};

/// Weight rows that one pass of the inner kernel takes.
pub(super) const QUAD: usize = 4;

/// Bytes of panels that are unpacked before the activation rows pass over them: most of a first-level cache.
const PANEL_BYTES: usize = 24 << 10;

/// How far ahead of the row that is unpacked its line is fetched, in bytes.
const AHEAD: usize = 4096;

thread_local! {
    /// Grows to the largest layer's need and is kept, so that a steady step allocates nothing.
    static PANELS: RefCell<Vec<Panel>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a tile in a panel.
#[inline(always)]
unsafe fn keep<F: Unpack>(tile: &Tile, panel: &mut Panel) {
    // SAFETY: the arrays are aligned and as long as what is stored; the caller's processor has AVX-512.
    unsafe {
        for v in 0..4 {
            _mm512_store_si512(panel.codes.as_mut_ptr().add(64 * v).cast(), tile.z[v]);
        }
        _mm256_store_ps(panel.scale.as_mut_ptr(), tile.scale[0]);
        if F::HALVES || F::MIN {
            _mm256_store_ps(panel.other.as_mut_ptr(), if F::MIN { tile.min } else { tile.scale[1] });
        }
        if F::ZERO_EACH {
            _mm256_store_si256(panel.zero[0].as_mut_ptr().cast(), tile.zero[0]);
            _mm256_store_si256(panel.zero[1].as_mut_ptr().cast(), tile.zero[1]);
        }
    }
}

/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`; `format` must be the unpacker of `call.w.format`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn gemm<F: Unpack, const WIDE: bool>(format: F, call: Call<'_, '_>) {
    let Call { w, acts, rows, epilogue, out } = call;
    let full = w.cols / GROUP_CODES;
    let rest = blocks(w.cols) - full * GROUP_BLOCKS;
    let (lines, shape) = (Rows::new(w), Quad::new(w.cols));
    let quads = (PANEL_BYTES / (shape.panels().max(1) * size_of::<Panel>())).clamp(1, 8);
    PANELS.with_borrow_mut(|panels| {
        let need = quads * shape.panels();
        if panels.len() < need {
            panels.resize(need, Panel::EMPTY);
        }
        // What a format doesn't keep stays empty.
        let mut last = Panel::EMPTY;
        for top in (0..w.rows).step_by(quads * QUAD) {
            let count = (w.rows - top).min(quads * QUAD);
            let used = count.div_ceil(QUAD) * QUAD;
            for i in 0..used {
                let quad = &mut panels[i / QUAD * shape.panels()..][..shape.panels()];
                let row = (i < count).then(|| lines.row(top + i));
                if let Some(row) = row {
                    let bytes = row.0[0];
                    for at in (0..bytes.len()).step_by(64) {
                        // A prefetch may name any address: it never faults.
                        _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at + AHEAD).cast());
                    }
                }
                for g in 0..full {
                    let panel = &mut quad[g * QUAD + i % QUAD];
                    let Some(row) = row else {
                        *panel = Panel::EMPTY;
                        continue;
                    };
                    // SAFETY: the group is one of the row's; the caller vouches for the format and the processor.
                    unsafe { keep::<F>(&format.tile::<false>(row, g, GROUP_BLOCKS), panel) };
                }
                if rest > 0 {
                    if let Some(row) = row {
                        // SAFETY: `rest` blocks of the last group exist; otherwise as above.
                        unsafe { keep::<F>(&format.tile::<true>(row, full, rest), &mut last) };
                    }
                    shape.put_last(quad, i % QUAD, if row.is_some() { &last } else { &Panel::EMPTY });
                }
            }
            let mut r = rows.start;
            while r < rows.end {
                let pair = r + 1 < rows.end;
                for q in 0..used / QUAD {
                    let panels = &panels[q * shape.panels()..][..shape.panels()];
                    let columns = top + q * QUAD..(top + q * QUAD + QUAD).min(w.rows);
                    // SAFETY: the caller vouches for the processor.
                    unsafe {
                        if pair {
                            let y = kernel::<F, WIDE, 2>(shape, panels, acts, r);
                            store(y[0], &epilogue, columns.clone(), r, out);
                            store(y[1], &epilogue, columns, r + 1, out);
                        } else {
                            let y = kernel::<F, WIDE, 1>(shape, panels, acts, r);
                            store(y[0], &epilogue, columns, r, out);
                        }
                    }
                }
                r += if pair { 2 } else { 1 };
            }
        }
    });
}

/// How the panels of four weight rows lie: four for each group that is not shared, then those that rows share.
#[derive(Clone, Copy)]
struct Quad {
    /// Groups of which every row has a panel of its own.
    own: usize,
    /// Lanes of a row in a shared panel; 0 if none is shared.
    lanes: usize,
}

impl Quad {
    fn new(cols: usize) -> Quad {
        let lanes = shared_lanes(cols);
        Quad { own: cols.div_ceil(GROUP_CODES) - usize::from(lanes > 0), lanes }
    }

    /// Panels that four rows share.
    fn shared(self) -> usize {
        QUAD * self.lanes / GROUP_BLOCKS
    }

    /// All panels of four rows.
    fn panels(self) -> usize {
        self.own * QUAD + self.shared()
    }

    /// Puts the last group of row `i` in its place.
    #[inline(always)]
    fn put_last(self, panels: &mut [Panel], i: usize, last: &Panel) {
        match self.lanes {
            2 => put_lanes::<2>(&mut panels[self.own * QUAD], i, last),
            4 => put_lanes::<4>(&mut panels[self.own * QUAD + i / 2], i % 2, last),
            _ => panels[(self.own - 1) * QUAD + i] = *last,
        }
    }
}

/// Copies the first `N` lanes of `from` to the `N` lanes of row `i` in a shared panel.
#[inline(always)]
fn put_lanes<const N: usize>(to: &mut Panel, i: usize, from: &Panel) {
    assert!((i + 1) * N <= GROUP_BLOCKS, "row {i} of a shared panel");
    // SAFETY: `N` dwords from lane `i * N` on lie within the eight lanes of every array; no alignment is assumed.
    unsafe {
        let put = |to: *mut u8, from: *const u8| {
            to.add(4 * N * i).cast::<[u32; N]>().write_unaligned(from.cast::<[u32; N]>().read_unaligned());
        };
        for w in (0..GROUP_CODES).step_by(4 * GROUP_BLOCKS) {
            put(to.codes.as_mut_ptr().add(w), from.codes.as_ptr().add(w));
        }
        put(to.scale.as_mut_ptr().cast(), from.scale.as_ptr().cast());
        put(to.other.as_mut_ptr().cast(), from.other.as_ptr().cast());
        put(to.zero[0].as_mut_ptr().cast(), from.zero[0].as_ptr().cast());
        put(to.zero[1].as_mut_ptr().cast(), from.zero[1].as_ptr().cast());
    }
}

/// The products of four weight rows with `N` activation rows from `r` on.
#[inline(always)]
unsafe fn kernel<F: Unpack, const WIDE: bool, const N: usize>(
    shape: Quad,
    panels: &[Panel],
    acts: &Activations,
    r: usize,
) -> [__m128; N] {
    let mut low: [&[CodeGroup]; N] = [&[]; N];
    let mut high: [&[CodeGroup]; N] = [&[]; N];
    let mut steps: [&[StepGroup]; N] = [&[]; N];
    for a in 0..N {
        (low[a], high[a], steps[a]) = acts.row_and_shared(r + a);
    }
    // SAFETY: a row of the batch has `shape.own` groups, and the repeated last one behind its last group if any is shared; codes are 256 aligned
    // bytes a group; the caller's processor has AVX-512 with VNNI.
    unsafe {
        let mut lanes = [[_mm256_setzero_ps(); N]; QUAD];
        let (own, shared) = panels.split_at(shape.own * QUAD);
        for (g, four) in own.chunks_exact(QUAD).enumerate() {
            let code = |group: &CodeGroup, v: usize| _mm512_load_si512(group.0.as_ptr().add(64 * v).cast());
            let mut dots = [[[_mm256_setzero_si256(); 2]; N]; QUAD];
            for h in 0..if F::HALVES { 2 } else { 1 } {
                let range = if F::HALVES { 2 * h..2 * h + 2 } else { 0..4 };
                let mut acc = [[_mm512_setzero_si512(); N]; QUAD];
                if WIDE {
                    for v in range.clone() {
                        for i in 0..QUAD {
                            let z = _mm512_load_si512(four[i].codes.as_ptr().add(64 * v).cast());
                            for a in 0..N {
                                acc[i][a] = _mm512_dpbusd_epi32(acc[i][a], z, code(high[a].get_unchecked(g), v));
                            }
                        }
                    }
                    for i in 0..QUAD {
                        for a in 0..N {
                            acc[i][a] = _mm512_slli_epi32(acc[i][a], 8);
                        }
                    }
                }
                for v in range {
                    for i in 0..QUAD {
                        let z = _mm512_load_si512(four[i].codes.as_ptr().add(64 * v).cast());
                        for a in 0..N {
                            acc[i][a] = _mm512_dpbusd_epi32(acc[i][a], z, code(low[a].get_unchecked(g), v));
                        }
                    }
                }
                for i in 0..QUAD {
                    for a in 0..N {
                        let (x, y) = (_mm512_castsi512_si256(acc[i][a]), _mm512_extracti64x4_epi64(acc[i][a], 1));
                        dots[i][a][h] = _mm256_add_epi32(x, y);
                    }
                }
            }
            for i in 0..QUAD {
                let scale = _mm256_load_ps(four[i].scale.as_ptr());
                let other = _mm256_load_ps(four[i].other.as_ptr());
                let zero = [
                    _mm256_load_si256(four[i].zero[0].as_ptr().cast()),
                    _mm256_load_si256(four[i].zero[1].as_ptr().cast()),
                ];
                for a in 0..N {
                    let steps = steps[a].get_unchecked(g);
                    lanes[i][a] = accumulate::<F>(dots[i][a], [scale, other], other, zero, steps, lanes[i][a]);
                }
            }
        }
        // The repeated copy of the last group lies behind all groups.
        let g = shape.own + 1;
        if let (2, [panel]) = (shape.lanes, shared) {
            for a in 0..N {
                let mut four = [lanes[0][a], lanes[1][a], lanes[2][a], lanes[3][a]];
                let steps = steps[a].get_unchecked(g);
                let sums =
                    shared_group::<F, WIDE>(panel, low[a].get_unchecked(g), high[a].get(g), steps, join_pairs(four));
                part_pairs(sums, &mut four);
                for i in 0..QUAD {
                    lanes[i][a] = four[i];
                }
            }
        } else if let (4, [one, two]) = (shape.lanes, shared) {
            for a in 0..N {
                let steps = steps[a].get_unchecked(g);
                for t in 0..2 {
                    let panel = if t == 0 { one } else { two };
                    let (x, y) = (lanes[2 * t][a], lanes[2 * t + 1][a]);
                    let both = _mm256_insertf128_ps(x, _mm256_castps256_ps128(y), 1);
                    let sums = shared_group::<F, WIDE>(panel, low[a].get_unchecked(g), high[a].get(g), steps, both);
                    lanes[2 * t][a] = _mm256_insertf128_ps(x, _mm256_castps256_ps128(sums), 0);
                    lanes[2 * t + 1][a] = _mm256_insertf128_ps(y, _mm256_extractf128_ps(sums, 1), 0);
                }
            }
        }
        let mut out = [_mm_setzero_ps(); N];
        for a in 0..N {
            out[a] = trees([lanes[0][a], lanes[1][a], lanes[2][a], lanes[3][a]]);
        }
        out
    }
}

/// Adds the dots of a shared panel to `lanes`.
#[inline(always)]
unsafe fn shared_group<F: Unpack, const WIDE: bool>(
    panel: &Panel,
    low: &CodeGroup,
    high: Option<&CodeGroup>,
    steps: &StepGroup,
    lanes: __m256,
) -> __m256 {
    // SAFETY: the arrays are aligned and as long as what is loaded; the caller's processor has AVX-512 with VNNI.
    unsafe {
        let mut z = [_mm512_setzero_si512(); 4];
        for v in 0..4 {
            z[v] = _mm512_load_si512(panel.codes.as_ptr().add(64 * v).cast());
        }
        let (scale, other) = (_mm256_load_ps(panel.scale.as_ptr()), _mm256_load_ps(panel.other.as_ptr()));
        let zero = [_mm256_load_si256(panel.zero[0].as_ptr().cast()), _mm256_load_si256(panel.zero[1].as_ptr().cast())];
        accumulate::<F>(dots::<F, WIDE>(&z, low, high), [scale, other], other, zero, steps, lanes)
    }
}

/// The first two lanes of four rows, side by side.
#[inline(always)]
pub(super) unsafe fn join_pairs(rows: [__m256; QUAD]) -> __m256 {
    // SAFETY: the caller's processor has AVX.
    unsafe {
        let low = |i: usize| _mm256_castps256_ps128(rows[i]);
        let (x, y) = (_mm_movelh_ps(low(0), low(1)), _mm_movelh_ps(low(2), low(3)));
        _mm256_insertf128_ps(_mm256_castps128_ps256(x), y, 1)
    }
}

/// Puts pairs of lanes back where [`join_pairs`] took them.
#[inline(always)]
pub(super) unsafe fn part_pairs(joined: __m256, rows: &mut [__m256; QUAD]) {
    // SAFETY: the caller's processor has AVX.
    unsafe {
        let (x, y) = (_mm256_castps256_ps128(joined), _mm256_extractf128_ps(joined, 1));
        for (row, pair) in rows.iter_mut().zip([x, _mm_movehl_ps(x, x), y, _mm_movehl_ps(y, y)]) {
            let low = _mm_castpd_ps(_mm_move_sd(_mm_castps_pd(_mm256_castps256_ps128(*row)), _mm_castps_pd(pair)));
            *row = _mm256_insertf128_ps(*row, low, 0);
        }
    }
}

/// The contract's tree over eight lanes, four times.
#[inline(always)]
pub(super) unsafe fn trees(lanes: [__m256; 4]) -> __m128 {
    // SAFETY: the caller's processor has AVX.
    unsafe {
        let four = |l: __m256| _mm_add_ps(_mm256_castps256_ps128(l), _mm256_extractf128_ps(l, 1));
        let two = |a: __m128, b: __m128| _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let (ab, cd) = (two(four(lanes[0]), four(lanes[1])), two(four(lanes[2]), four(lanes[3])));
        _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd))
    }
}

/// Adds the epilogue to four products, or as many as there are columns, and stores them.
#[inline(always)]
pub(super) unsafe fn store(
    y: __m128,
    epilogue: &Epilogue<'_>,
    columns: std::ops::Range<usize>,
    r: usize,
    out: &mut Columns<'_>,
) {
    let to = &mut out.row_mut(r)[columns.clone()];
    // SAFETY: the vector accesses are of four floats of slices that are four long; the caller's processor has AVX.
    unsafe {
        if to.len() == QUAD {
            let mut y = y;
            if let Some(bias) = epilogue.bias {
                y = _mm_add_ps(y, _mm_loadu_ps(bias[columns].as_ptr()));
            }
            if epilogue.accumulate {
                y = _mm_add_ps(y, _mm_loadu_ps(to.as_ptr()));
            }
            _mm_storeu_ps(to.as_mut_ptr(), y);
        } else {
            let mut four = [0f32; QUAD];
            _mm_storeu_ps(four.as_mut_ptr(), y);
            for ((to, y), i) in to.iter_mut().zip(four).zip(columns) {
                epilogue.store(y, i, to);
            }
        }
    }
}
