//! Shapes of the kernels of four-wide dot products: linear.cu for any format, linear_stream.cu for one row of planar codes.

use headrace_numerics::format::Format;

use super::formats::{is_piped, scale_bytes};
use crate::abi::{Activation, LinearArgs};
use crate::launch::{Kernels, LaunchError, Shape};

/// One instance of `GEMV` in linear.cu.
pub(super) struct Gemv {
    pub rows: u32,
    pub per_thread: u32,
    pub depth: u32,
    /// Blocks on a multiprocessor by their registers.
    blocks: usize,
    pub hot: bool,
}

const fn gemv(rows: u32, per_thread: u32, depth: u32, blocks: usize, hot: bool) -> Gemv {
    Gemv { rows, per_thread, depth, blocks, hot }
}

/// The instances of linear.cu.
pub(super) const GEMV: [Gemv; 8] = [
    gemv(1, 1, 2, 3, false),
    gemv(4, 1, 1, 2, false),
    gemv(1, 1, 4, 3, true),
    gemv(1, 1, 8, 2, true),
    gemv(1, 2, 2, 3, true),
    gemv(1, 2, 4, 2, true),
    gemv(2, 2, 2, 2, true),
    gemv(4, 2, 2, 2, true),
];

/// The instances of linear_stream.cu: weight rows a thread, steps in the ring.
pub(super) const STREAM: [(u32, u32); 4] = [(1, 8), (1, 12), (2, 6), (2, 10)];

/// Most warps of linear_stream.cu on a multiprocessor: two such kernels and a small one between them fit its registers.
pub(super) const STREAM_WARPS: u32 = 14;
/// Shared memory of a multiprocessor that one such kernel takes, if it can, for the same reason.
const STREAM_SHARED: usize = 108 << 10;
/// Bytes of weights that a launch asks for ahead of what its rings hold: well below the second-level cache.
const STREAM_AHEAD: usize = 16 << 20;

/// Bytes in flight that keep a multiprocessor's share of the memory busy.
const IN_FLIGHT: usize = 32 << 10;

impl Kernels {
    /// Shape of linear.cu: `(token rows a block, weight rows a thread, blocks in flight)`, `units` of weight rows.
    pub(super) fn gemv_shape(
        &self,
        format: Format,
        args: &LinearArgs,
        (rows, per_thread, depth): (u32, u32, u32),
        max_rows: usize,
        units: usize,
    ) -> Result<Shape, LaunchError> {
        let shared = self.gemv_shared(&args.x, rows);
        if shared > self.shared_most {
            return Err(LaunchError::Unsupported(format!(
                "{} columns need {shared} bytes of shared memory, the device has {}",
                args.x.cols, self.shared_most
            )));
        }
        let by_registers =
            GEMV.iter().find(|g| (g.rows, g.per_thread, g.depth) == (rows, per_thread, depth)).map_or(1, |g| g.blocks);
        // A block also reserves 1 KiB.
        let most = by_registers.min(self.shared_all / (shared + 1024)).max(1);
        let block_bytes = format.total_row_bytes(args.x.cols as usize) / args.x.cols.div_ceil(32).max(1) as usize;
        let warp_units = units.div_ceil(4);
        let per_warp = 32 * (depth * per_thread) as usize * block_bytes;
        let blocks = blocks_per_processor(warp_units, self.processors, most, IN_FLIGHT / per_warp.max(1));
        let grid = (self.processors * blocks).min(warp_units);
        Ok(Shape { grid: (grid, max_rows.div_ceil(rows as usize), 1), block: 256, shared })
    }

    /// Shape of linear_stream.cu: `(weight rows a thread, steps of the ring, most warps)`, `units` of weight rows; says in `args`
    /// how much is asked for ahead.
    pub(super) fn stream_shape(
        &self,
        format: Format,
        args: &mut LinearArgs,
        (per_thread, depth, warps): (u32, u32, u32),
        max_rows: usize,
        units: usize,
    ) -> Result<Shape, LaunchError> {
        let cols = args.x.cols as usize;
        let unsupported = || LaunchError::Unsupported(format!("no streaming kernel for {} x {cols}", format.name()));
        if !is_piped(format) || !cols.is_multiple_of(512) {
            return Err(unsupported());
        }
        let most = self.stream_warps(format, cols, per_thread, depth).min(warps as usize);
        if most == 0 {
            return Err(unsupported());
        }
        // As many rounds as `most` warps need, shared out evenly.
        let share = units.div_ceil(self.processors);
        let warps = share.div_ceil(share.div_ceil(most));
        let shared = self.stream_row(cols) + warps * self.stream_ring(format, per_thread, depth);
        let rows = (self.processors * warps).min(units) * 4 * per_thread as usize;
        // Whole pieces of 128 bytes; a row's codes at most.
        args.ahead = u32::try_from(STREAM_AHEAD / rows / 128 * 128).unwrap_or(0);
        Ok(Shape { grid: (self.processors.min(units), max_rows, 1), block: 32 * warps as u32, shared })
    }

    /// Shared memory of linear.cu.
    pub(super) fn gemv_shared(&self, x: &Activation, rows: u32) -> usize {
        rows as usize * (x.cols as usize).div_ceil(32) * (self.block_bytes() + 8)
    }

    /// Shared memory of linear_stream.cu for the activation.
    fn stream_row(&self, cols: usize) -> usize {
        cols / 32 * (self.block_bytes() + 8)
    }

    /// Shared memory of linear_stream.cu for one warp.
    fn stream_ring(&self, format: Format, per_thread: u32, depth: u32) -> usize {
        let scale = scale_bytes(format);
        per_thread as usize * (depth as usize * 512 + (depth as usize / 2 + 1) * 64 * scale)
    }

    /// Most warps of linear_stream.cu in a block, by shared memory: two kernels on a multiprocessor if that leaves four.
    pub(super) fn stream_warps(&self, format: Format, cols: usize, per_thread: u32, depth: u32) -> usize {
        let warps =
            |limit: usize| limit.saturating_sub(self.stream_row(cols)) / self.stream_ring(format, per_thread, depth);
        let two = warps(STREAM_SHARED.min(self.shared_most));
        let most = if two >= 4 { two } else { warps(self.shared_most) };
        most.min(STREAM_WARPS as usize)
    }
}

/// Blocks of eight warps for each multiprocessor, at most `most`, so that `units` of work end together: a round in which
/// fewer than `busy` warps work takes as long as if `busy` did.
fn blocks_per_processor(units: usize, processors: usize, most: usize, busy: usize) -> usize {
    let share = units.div_ceil(processors.max(1));
    let cost = |blocks: usize| {
        let warps = blocks * 8;
        let rest = share % warps;
        share / warps * warps.max(busy) + if rest > 0 { rest.max(busy) } else { 0 }
    };
    let enough = share.div_ceil(8).min(most);
    (1..=enough.max(1)).min_by_key(|&blocks| (cost(blocks), std::cmp::Reverse(blocks))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_shared_out_evenly() {
        // 27 units a processor: two blocks leave 11 warps for the second round, three would leave 3.
        assert_eq!(blocks_per_processor(132 * 27, 132, 3, 8), 2);
        assert_eq!(blocks_per_processor(132 * 144, 132, 3, 8), 3);
        assert_eq!(blocks_per_processor(640, 132, 3, 8), 1);
        assert_eq!(blocks_per_processor(1, 132, 3, 8), 1);
    }
}
