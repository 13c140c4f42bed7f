//! Attention: how many heads a block, and whether chunks are shared out.

use cudarc::driver::sys::CUfunction;

use super::module::Loader;
use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::AttentionArgs;

/// Query heads of a block of attention.cu, as it was compiled.
const GROUPS: [u32; 4] = [1, 2, 4, 8];
/// Elements of a head for which attention_rows.cu was compiled, and its most query heads of a block.
const STAGED_DIMS: [usize; 2] = [64, 128];
const STAGED_HEADS: usize = 8;
/// Most query heads of a block of attention_tile.cu, and the rows that it takes together.
const TILE_HEADS: usize = 5;
const TILE_ROWS: usize = 8;
/// From this many rows on, rows of one sequence are looked for.
const TILE_FROM: usize = 64;
/// Warps of a block.
const WARPS: usize = 4;

/// How a launch walks the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionForm {
    /// One block a row and head group; needs no workspace.
    Direct,
    /// Several; needs partials and tickets for the bucket.
    Split,
    /// One block for several rows where they are of one sequence, one block a row elsewhere; needs no workspace. For the heads that
    /// attention_rows.cu serves; [`AttentionForm::Direct`] for others.
    Tiled,
}

#[derive(Debug)]
pub(super) struct AttentionKernels {
    /// `[half][group]`: direct, split.
    functions: [[[CUfunction; 2]; GROUPS.len()]; 2],
    /// `[dim][heads - 1]`: direct, split. `None` before compute capability 8.0.
    staged: Option<[[[CUfunction; 2]; STAGED_HEADS]; STAGED_DIMS.len()]>,
    /// `[dim][heads - 1]`, where there are the ones above.
    tiles: [[CUfunction; TILE_HEADS]; STAGED_DIMS.len()],
}

// SAFETY: function handles may be used from any thread that has bound the context.
unsafe impl Send for AttentionKernels {}

impl AttentionKernels {
    pub(super) fn load(loader: &mut Loader, capability: u32) -> Result<Self, LaunchError> {
        let mut functions = [[[std::ptr::null_mut(); 2]; GROUPS.len()]; 2];
        for (half, name) in ["f32", "f16"].into_iter().enumerate() {
            for (g, group) in GROUPS.into_iter().enumerate() {
                for (f, form) in ["direct", "split"].into_iter().enumerate() {
                    functions[half][g][f] =
                        loader.function("attention", &format!("attention_{form}_{name}_h{group}"))?;
                }
            }
        }
        let mut tiles = [[std::ptr::null_mut(); TILE_HEADS]; STAGED_DIMS.len()];
        let mut staged = [[[std::ptr::null_mut(); 2]; STAGED_HEADS]; STAGED_DIMS.len()];
        if capability >= 80 {
            for (d, dim) in STAGED_DIMS.into_iter().enumerate() {
                for heads in 1..=TILE_HEADS {
                    tiles[d][heads - 1] = loader.function("attention_tile", &format!("tile_d{dim}_h{heads}"))?;
                }
                for heads in 1..=STAGED_HEADS {
                    for (f, form) in ["direct", "split"].into_iter().enumerate() {
                        staged[d][heads - 1][f] =
                            loader.function("attention_rows", &format!("rows_{form}_d{dim}_h{heads}"))?;
                    }
                }
            }
        }
        Ok(AttentionKernels { functions, staged: (capability >= 80).then_some(staged), tiles })
    }
}

impl Kernels {
    /// The form for a bucket: chunks are shared out while the rows alone don't fill the device.
    pub fn attention_form(&self, args: &AttentionArgs, max_rows: usize) -> AttentionForm {
        let blocks = max_rows * args.kv_heads as usize;
        if args.partials != 0 && args.chunks > WARPS as u32 && blocks < self.processors * 2 {
            AttentionForm::Split
        } else if max_rows >= TILE_FROM {
            AttentionForm::Tiled
        } else {
            AttentionForm::Direct
        }
    }

    /// Attention of at most `max_rows` rows. For [`AttentionForm::Split`] `args.chunks` is at least the number of chunks
    /// that any row sees when the kernel runs.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn attention(
        &self,
        queue: Queue,
        form: AttentionForm,
        args: &AttentionArgs,
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        let (heads, kv_heads, dim) = (args.heads, args.kv_heads, args.head_dim as usize);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || dim == 0 || dim > AttentionArgs::MAX_HEAD_DIM {
            return Err(LaunchError::Unsupported(format!("attention of {heads} / {kv_heads} heads of {dim}")));
        }
        let share = heads / kv_heads;
        // Few rows leave most of the device idle: then smaller groups end sooner, though they read keys more than once.
        let most = if max_rows <= 2 { 2 } else { 8 };
        let f = usize::from(form == AttentionForm::Split);
        let wide_group = share.div_ceil(share.div_ceil(most)) as usize;
        let staged = match (&self.attention.staged, STAGED_DIMS.iter().position(|&d| d == dim)) {
            (Some(staged), Some(d)) if args.kv.half != 0 && staged_bytes(form, dim, wide_group) <= self.shared_most => {
                Some((&staged[d], &self.attention.tiles[d]))
            }
            _ => None,
        };
        let mut args = *args;
        args.chunks = args.chunks.max(1);
        let mut form = form;
        if form == AttentionForm::Tiled {
            form = AttentionForm::Direct;
            if let Some((_, tiles)) = staged {
                let group = share.div_ceil(share.div_ceil(TILE_HEADS as u32)) as usize;
                let grid = (max_rows.div_ceil(TILE_ROWS), kv_heads as usize * (share as usize).div_ceil(group), 1);
                let shape = Shape { grid, block: 128, shared: tile_bytes(dim, group) };
                // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
                unsafe { launch(tiles[group - 1], shape, queue, &args) }?;
                args.chunks = 0; // the rest of the rows
            }
        }
        let (function, group, shared) = if let Some((staged, _)) = staged {
            (staged[wide_group - 1][f], wide_group, staged_bytes(form, dim, wide_group))
        } else {
            let g = GROUPS.iter().position(|&g| g >= share.min(most)).unwrap_or(GROUPS.len() - 1);
            let group = GROUPS[g] as usize;
            (self.attention.functions[usize::from(args.kv.half != 0)][g][f], group, simple_bytes(form, dim, group))
        };
        let y = kv_heads as usize * (share as usize).div_ceil(group);
        let z = match form {
            AttentionForm::Direct | AttentionForm::Tiled => 1,
            AttentionForm::Split => {
                let wanted = (self.processors * 2).div_ceil((max_rows * y).max(1));
                (args.chunks as usize).div_ceil(WARPS).min(wanted).max(1)
            }
        };
        // What is left beside tiles is mostly nothing: then each block looks at several rows.
        let x = if args.chunks == 0 { max_rows.min((self.processors * 4).div_ceil(y)) } else { max_rows };
        let shape = Shape { grid: (x, y, z), block: 128, shared };
        // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
        unsafe { launch(function, shape, queue, &args) }
    }
}

/// Dynamic shared memory of attention.cu.
fn simple_bytes(form: AttentionForm, dim: usize, group: usize) -> usize {
    let floats = match form {
        AttentionForm::Split => 2 * 32 * group + group,
        _ => WARPS * group * (dim + 2) + group * dim + 2 * group + 2 * WARPS * group,
    };
    (group * dim + WARPS * 32 * group + floats) * 4
}

/// Dynamic shared memory of attention_tile.cu.
fn tile_bytes(dim: usize, group: usize) -> usize {
    // Queries, keys, values, weights, values on their way, maxima and sums.
    let floats = TILE_ROWS * (group * dim + 8) + 32 * (dim + 8) + 32 * dim + TILE_ROWS * (group * 32 + 8 + 2 * group);
    4 * floats + 32 * dim * 2
}

/// Dynamic shared memory of attention_rows.cu.
fn staged_bytes(form: AttentionForm, dim: usize, group: usize) -> usize {
    let chunks = WARPS * 32 * (2 * dim * 2 + 16);
    let floats = group * dim + WARPS * 32 * group.next_multiple_of(4) + 2 * 32 * group + 8;
    let parts = if form != AttentionForm::Split { 2 * WARPS * group * (dim + 2) } else { 0 };
    chunks + (floats + parts) * 4
}
