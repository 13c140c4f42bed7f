//! One activation row: each tile is multiplied while it is in registers, so that the weights' bytes are the bound.

use std::arch::x86_64::*;

use headrace_numerics::block::blocks;

use super::Call;
use super::tile::{RowBytes, Unpack, accumulate, dots, tree};
use crate::activations::{GROUP_BLOCKS, GROUP_CODES};

/// How far ahead of the group in work its line is fetched, in bytes.
const AHEAD: usize = 2048;

/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`; `format` must be the unpacker of `call.w.format`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn decode<F: Unpack, const WIDE: bool>(format: F, call: Call<'_, '_>) {
    let Call { w, acts, rows, epilogue, out } = call;
    let (low, high, steps) = acts.row(rows.start);
    let full = w.cols / GROUP_CODES;
    let rest = blocks(w.cols) - full * GROUP_BLOCKS;
    let (low, steps) = (&low[..acts.groups()], &steps[..acts.groups()]);
    let out = out.row_mut(rows.start);
    for (i, out) in out.iter_mut().enumerate() {
        let row = RowBytes::new(w, i);
        let base = row.0[0].as_ptr();
        let mut lanes = _mm256_setzero_ps();
        for g in 0..full + usize::from(rest > 0) {
            for line in 0..F::GROUP_BYTES.div_ceil(64) {
                // A prefetch may name any address: it never faults.
                _mm_prefetch::<_MM_HINT_T0>(base.wrapping_add(g * F::GROUP_BYTES + line * 64 + AHEAD).cast());
            }
            // SAFETY: the group is one of the row's; `rest` blocks of the last one exist; the caller vouches for the
            // format and the processor.
            lanes = unsafe {
                let tile = if g < full {
                    format.tile::<false>(row, g, GROUP_BLOCKS)
                } else {
                    format.tile::<true>(row, g, rest)
                };
                let dots = dots::<F, WIDE>(&tile.z, &low[g], high.get(g));
                accumulate::<F>(dots, tile.scale, tile.min, tile.zero, &steps[g], lanes)
            };
        }
        // SAFETY: AVX is enabled here.
        epilogue.store(unsafe { tree(lanes) }, i, out);
    }
}
