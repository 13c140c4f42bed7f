//! Shapes of the kernels whose clusters share out lanes: linear_tile.cu, linear_wide.cu.

use headrace_numerics::format::Format;

use super::formats::{has_minimum, is_piped, is_six, scale_bytes};
use crate::abi::Activation;
use crate::launch::{Kernels, LaunchError};

/// One instance of linear_tile.cu.
pub(super) struct Tile {
    /// Weight rows of a cluster.
    pub rows: u32,
    /// Token rows of a cluster.
    pub tokens: u32,
    /// Lanes of a block.
    lanes: u32,
    /// Warps of a lane.
    warps: u32,
    /// True if a block's lanes are neighbours.
    side: bool,
    /// Stages of eight blocks of 32 columns.
    stages: usize,
}

/// The instances of linear_tile.cu.
pub(super) const TILE: [Tile; 3] = [
    Tile { rows: 128, tokens: 64, lanes: 4, warps: 2, side: false, stages: 6 },
    Tile { rows: 128, tokens: 32, lanes: 2, warps: 4, side: true, stages: 5 },
    Tile { rows: 128, tokens: 16, lanes: 2, warps: 4, side: true, stages: 6 },
];

/// Dynamic shared memory of linear_tile.cu: its ring, or the sums at the end. `block` is the bytes of an activation block's
/// codes, `scale` those of a weight scale; `six` for six bits.
fn tile_shared(form: &Tile, scale: usize, block: usize, six: bool) -> usize {
    let (rows, tokens, lanes) = (form.rows as usize, form.tokens as usize, form.lanes as usize);
    let stage = lanes * rows * 16 + rows * 8 * scale + lanes * tokens * (block + 8);
    let stage = if six { stage + lanes * rows * 8 + rows * 4 } else { stage };
    let sums = if form.side { lanes } else { lanes / 2 } * tokens * (rows + 4) * 4;
    (form.stages * stage).max(sums)
}

/// True if linear_tile.cu serves the format, the columns and the activation.
pub(super) fn is_tiled(format: Format, capability: u32, cols: usize, ld: usize) -> bool {
    capability >= 90 && (is_piped(format) || is_six(format)) && cols.is_multiple_of(256) && ld.is_multiple_of(8)
}

/// Weight rows and token rows of a cluster of linear_wide.cu, and its stages.
pub(super) const WIDE: (u32, u32, usize) = (128, 64, 6);

/// True if linear_wide.cu serves the format, the columns and the activation: no other compute capability has its instructions.
pub(super) fn is_wide(format: Format, capability: u32, cols: usize, ld: usize) -> bool {
    capability == 90 && is_piped(format) && is_tiled(format, capability, cols, ld)
}

impl Kernels {
    /// Shared memory of linear_wide.cu.
    pub(super) fn wide_shared(&self, format: Format, x: &Activation) -> Result<usize, LaunchError> {
        if !is_wide(format, self.capability, x.cols as usize, x.ld as usize) {
            return Err(LaunchError::Unsupported(format!("no wide kernel for {} x {}", format.name(), x.cols)));
        }
        let (rows, tokens, stages) = (WIDE.0 as usize, WIDE.1 as usize, WIDE.2);
        let scale = scale_bytes(format);
        // Steps, and sums where there is a minimum.
        let steps = if has_minimum(format) { 8 } else { 4 };
        let stage = 4 * tokens * (self.block_bytes() + steps) + 4 * rows * 16 + rows * 8 * scale;
        Ok((stages * stage.next_multiple_of(1024)).max(2 * tokens * (rows + 4) * 4))
    }

    /// Blocks of a cluster, threads and shared memory of a block of linear_tile.cu: `(weight rows, token rows)`.
    pub(super) fn tile_block(
        &self,
        format: Format,
        x: &Activation,
        (rows, tokens): (u32, u32),
    ) -> Result<(usize, u32, usize), LaunchError> {
        let unsupported = || {
            LaunchError::Unsupported(format!("no kernel of {rows} x {tokens} tiles for {} x {}", format.name(), x.cols))
        };
        if !is_tiled(format, self.capability, x.cols as usize, x.ld as usize) {
            return Err(unsupported());
        }
        let form = TILE.iter().find(|f| (f.rows, f.tokens) == (rows, tokens)).ok_or_else(unsupported)?;
        let shared = tile_shared(form, scale_bytes(format), self.block_bytes(), is_six(format));
        if shared > self.shared_most {
            return Err(unsupported());
        }
        Ok(((8 / form.lanes) as usize, form.lanes * form.warps * 32, shared))
    }
}
