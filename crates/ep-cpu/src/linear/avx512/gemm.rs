//! Several activation rows: tiles are unpacked once into a panel in the cache, which all activation rows multiply.

use std::arch::x86_64::*;
use std::cell::RefCell;

use headrace_numerics::block::blocks;

use super::Call;
use super::tile::{RowBytes, Tile, Unpack, accumulate};
use crate::activations::{Activations, CodeGroup, GROUP_BLOCKS, GROUP_CODES, StepGroup};
use crate::linear::panel::Panel;
use crate::linear::sink::{Columns, Epilogue};

/// Weight rows that one pass of the inner kernel takes.
const QUAD: usize = 4;

/// Bytes of panels that are unpacked before the activation rows pass over them: most of a first-level cache.
const PANEL_BYTES: usize = 24 << 10;

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
    let groups = acts.groups();
    let full = w.cols / GROUP_CODES;
    let rest = blocks(w.cols) - full * GROUP_BLOCKS;
    let quads = (PANEL_BYTES / (QUAD * groups.max(1) * size_of::<Panel>())).clamp(1, 8);
    PANELS.with_borrow_mut(|panels| {
        let need = quads * QUAD * groups;
        if panels.len() < need {
            panels.resize(need, Panel::EMPTY);
        }
        for top in (0..w.rows).step_by(quads * QUAD) {
            let count = (w.rows - top).min(quads * QUAD);
            let used = count.div_ceil(QUAD) * QUAD;
            for i in 0..used {
                let quad = &mut panels[i / QUAD * QUAD * groups..][..QUAD * groups];
                for (g, four) in quad.chunks_exact_mut(QUAD).enumerate() {
                    if i >= count {
                        four[i % QUAD] = Panel::EMPTY;
                        continue;
                    }
                    let row = RowBytes::new(w, top + i);
                    // SAFETY: the group is one of the row's; `rest` blocks of the last one exist; the caller vouches
                    // for the format and the processor.
                    unsafe {
                        let tile = if g < full {
                            format.tile::<false>(row, g, GROUP_BLOCKS)
                        } else {
                            format.tile::<true>(row, g, rest)
                        };
                        keep::<F>(&tile, &mut four[i % QUAD]);
                    }
                }
            }
            let mut r = rows.start;
            while r < rows.end {
                let pair = r + 1 < rows.end;
                for q in 0..used / QUAD {
                    let panels = &panels[q * QUAD * groups..][..QUAD * groups];
                    let columns = top + q * QUAD..(top + q * QUAD + QUAD).min(w.rows);
                    // SAFETY: the caller vouches for the processor.
                    unsafe {
                        if pair {
                            let y = kernel::<F, WIDE, 2>(panels, acts, r);
                            store(y[0], &epilogue, columns.clone(), r, out);
                            store(y[1], &epilogue, columns, r + 1, out);
                        } else {
                            let y = kernel::<F, WIDE, 1>(panels, acts, r);
                            store(y[0], &epilogue, columns, r, out);
                        }
                    }
                }
                r += if pair { 2 } else { 1 };
            }
        }
    });
}

/// The products of four weight rows with `N` activation rows from `r` on.
#[inline(always)]
unsafe fn kernel<F: Unpack, const WIDE: bool, const N: usize>(
    panels: &[Panel],
    acts: &Activations,
    r: usize,
) -> [__m128; N] {
    let mut low: [&[CodeGroup]; N] = [&[]; N];
    let mut high: [&[CodeGroup]; N] = [&[]; N];
    let mut steps: [&[StepGroup]; N] = [&[]; N];
    for a in 0..N {
        (low[a], high[a], steps[a]) = acts.row(r + a);
        debug_assert_eq!(low[a].len() * QUAD, panels.len());
    }
    // SAFETY: every row of the batch has as many groups as a row of panels (`groups` in `gemm`); codes are 256 aligned
    // bytes a group; the caller's processor has AVX-512 with VNNI.
    unsafe {
        let mut lanes = [[_mm256_setzero_ps(); N]; QUAD];
        for (g, four) in panels.chunks_exact(QUAD).enumerate() {
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
        let mut out = [_mm_setzero_ps(); N];
        for a in 0..N {
            out[a] = trees([lanes[0][a], lanes[1][a], lanes[2][a], lanes[3][a]]);
        }
        out
    }
}

/// The contract's tree over eight lanes, four times.
#[inline(always)]
unsafe fn trees(lanes: [__m256; 4]) -> __m128 {
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
unsafe fn store(y: __m128, epilogue: &Epilogue<'_>, columns: std::ops::Range<usize>, r: usize, out: &mut Columns<'_>) {
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
