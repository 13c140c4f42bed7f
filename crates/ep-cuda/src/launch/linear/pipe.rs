//! Shapes of linear_pipe.cu.

use headrace_numerics::format::Format;

use super::formats::{is_piped, scale_bytes};
use crate::abi::Activation;
use crate::launch::{Kernels, LaunchError};

/// One instance of linear_pipe.cu.
pub(super) struct Pipe {
    /// Tiles of 16 weight rows.
    pub weights: u32,
    /// Tiles of eight token rows.
    pub tiles: u32,
    /// Sets of eight warps.
    sets: u32,
    /// Blocks of 32 columns in a stage.
    chunk: usize,
    stages: usize,
}

const fn pipe(weights: u32, tiles: u32, sets: u32, chunk: usize, stages: usize) -> Pipe {
    Pipe { weights, tiles, sets, chunk, stages }
}

/// The instances of linear_pipe.cu.
pub(super) const PIPE: [Pipe; 7] = [
    pipe(1, 1, 1, 16, 4),
    pipe(2, 1, 1, 16, 4),
    pipe(4, 1, 2, 16, 4),
    pipe(2, 2, 1, 8, 4),
    pipe(4, 2, 2, 8, 4),
    pipe(2, 4, 1, 8, 4),
    pipe(4, 4, 1, 8, 3),
];

/// Dynamic shared memory of linear_pipe.cu: its ring, or the lanes at the end. `block` is the bytes of an activation
/// block's codes, `scale` those of a weight scale.
fn pipe_shared(form: &Pipe, scale: usize, block: usize) -> usize {
    let (chunk, stages) = (form.chunk, form.stages);
    let (rows, tokens) = (form.weights as usize * 16, form.tiles as usize * 8);
    let stage = rows * ((chunk * 16 + 16) + (chunk * scale / 16 + 1) * 16) + chunk * tokens * (block + 8);
    (stages * stage).max(8 * rows * (tokens + 1) * 4)
}

impl Kernels {
    /// Weight rows, threads and shared memory of a block of linear_pipe.cu.
    pub(super) fn pipe_block(
        &self,
        format: Format,
        x: &Activation,
        weights: u32,
        tiles: u32,
    ) -> Result<(u32, u32, usize), LaunchError> {
        if !x.ld.is_multiple_of(8) || !is_piped(format) {
            return Err(LaunchError::Unsupported(format!("no pipelined kernel for {}", format.name())));
        }
        let scale = scale_bytes(format);
        let form = PIPE
            .iter()
            .find(|p| (p.weights, p.tiles) == (weights, tiles))
            .ok_or_else(|| LaunchError::Unsupported(format!("no pipelined kernel of {weights} x {tiles} tiles")))?;
        let shared = pipe_shared(form, scale, self.block_bytes());
        if shared > self.shared_most {
            return Err(LaunchError::Unsupported(format!("{shared} bytes of shared memory for a pipelined kernel")));
        }
        Ok((weights * 16, 256 * form.sets, shared))
    }
}
