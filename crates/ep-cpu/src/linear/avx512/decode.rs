//! One activation row: each tile is multiplied while it is in registers, so that the weights' bytes are the bound.
//!
//! Four weight rows go together, and their last groups share a register where they are small enough (see
//! `crate::activations::shared_lanes`).

use std::arch::x86_64::*;

use headrace_numerics::block::blocks;

use super::Call;
use super::gemm::{QUAD, join_pairs, part_pairs, store, trees};
use super::tile::{RowBytes, Rows, Unpack, accumulate, dots};
use crate::activations::{CodeGroup, GROUP_BLOCKS, GROUP_CODES, StepGroup, shared_lanes};

/// How far ahead of the group in work its line is fetched, in bytes.
const AHEAD: usize = 2048;

/// The one activation row, and how the groups of a weight row divide.
#[derive(Clone, Copy)]
struct Row<'a> {
    low: &'a [CodeGroup],
    high: &'a [CodeGroup],
    steps: &'a [StepGroup],
    /// Groups that are full.
    full: usize,
    /// Blocks of the group behind them.
    rest: usize,
}

impl Row<'_> {
    /// Adds group `g` of a weight row to its lanes.
    ///
    /// # Safety
    /// As [`decode`]; the group must be one of the row's.
    #[inline(always)]
    unsafe fn add<F: Unpack, const WIDE: bool>(&self, format: F, row: RowBytes<'_>, g: usize, lanes: __m256) -> __m256 {
        let base = row.0[0].as_ptr();
        for line in 0..F::GROUP_BYTES.div_ceil(64) {
            // SAFETY: a prefetch may name any address: it never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(base.wrapping_add(g * F::GROUP_BYTES + line * 64 + AHEAD).cast()) };
        }
        // SAFETY: the caller vouches for the group, the format and the processor; `rest` blocks of the last group exist.
        unsafe {
            let tile = if g < self.full {
                format.tile::<false>(row, g, GROUP_BLOCKS)
            } else {
                format.tile::<true>(row, g, self.rest)
            };
            let dots = dots::<F, WIDE>(&tile.z, &self.low[g], self.high.get(g));
            accumulate::<F>(dots, tile.scale, tile.min, tile.zero, &self.steps[g], lanes)
        }
    }

    /// Adds the last groups of `8 / LANES` weight rows, side by side in `lanes`.
    ///
    /// # Safety
    /// As [`decode`]; `LANES` must be the row's `shared_lanes`, and as many blocks as its last group has.
    #[inline(always)]
    unsafe fn add_shared<F: Unpack, const WIDE: bool, const LANES: usize>(
        &self,
        format: F,
        rows: &[RowBytes<'_>],
        lanes: __m256,
    ) -> __m256 {
        // SAFETY: the caller vouches for the format and the processor; the
        // repeated copy of the last group lies behind all groups.
        unsafe {
            let tile = format.shared_tile::<LANES>(rows, self.full);
            let g = self.full + 1;
            let dots = dots::<F, WIDE>(&tile.z, &self.low[g], self.high.get(g));
            accumulate::<F>(dots, tile.scale, tile.min, tile.zero, &self.steps[g], lanes)
        }
    }
}

/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`; `format` must be the unpacker of `call.w.format`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn decode<F: Unpack, const WIDE: bool>(format: F, call: Call<'_, '_>) {
    let Call { w, acts, rows, epilogue, out } = call;
    let (low, high, steps) = acts.row_and_shared(rows.start);
    let full = w.cols / GROUP_CODES;
    let rest = blocks(w.cols) - full * GROUP_BLOCKS;
    let row = Row { low, high, steps, full, rest };
    let lines = Rows::new(w);
    let shared = if F::SHARED && rest == shared_lanes(w.cols) { rest } else { 0 };
    let own = full + usize::from(rest > 0 && shared == 0);
    for top in (0..w.rows).step_by(QUAD) {
        // The last rows are taken again where there are fewer than four.
        let mut four = [lines.row(top); QUAD];
        for i in 1..QUAD {
            four[i] = lines.row((top + i).min(w.rows - 1));
        }
        // SAFETY: the groups are the rows'; the caller vouches for the format and the processor.
        unsafe {
            let mut lanes = [_mm256_setzero_ps(); QUAD];
            for i in 0..QUAD {
                for g in 0..own {
                    lanes[i] = row.add::<F, WIDE>(format, four[i], g, lanes[i]);
                }
            }
            if shared == 2 {
                let joined = row.add_shared::<F, WIDE, 2>(format, &four, join_pairs(lanes));
                part_pairs(joined, &mut lanes);
            } else if shared == 4 {
                for t in 0..2 {
                    let (x, y) = (lanes[2 * t], lanes[2 * t + 1]);
                    let both = _mm256_insertf128_ps(x, _mm256_castps256_ps128(y), 1);
                    let sums = row.add_shared::<F, WIDE, 4>(format, &four[2 * t..2 * t + 2], both);
                    lanes[2 * t] = _mm256_insertf128_ps(x, _mm256_castps256_ps128(sums), 0);
                    lanes[2 * t + 1] = _mm256_insertf128_ps(y, _mm256_extractf128_ps(sums, 1), 0);
                }
            }
            store(trees(lanes), &epilogue, top..(top + QUAD).min(w.rows), rows.start, out);
        }
    }
}
