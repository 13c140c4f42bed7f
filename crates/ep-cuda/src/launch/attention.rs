//! Attention: how many heads a block, and whether chunks are shared out.

use cudarc::driver::sys::CUfunction;

use super::module::Loader;
use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::AttentionArgs;

/// Query heads of a block, as the kernels were compiled.
const GROUPS: [u32; 4] = [1, 2, 4, 8];
/// Warps of a block.
const WARPS: usize = 4;

/// How a launch walks the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionForm {
    /// One block a row and head group; needs no workspace.
    Direct,
    /// Several; needs partials and tickets for the bucket.
    Split,
}

#[derive(Debug)]
pub(super) struct AttentionKernels {
    /// `[half][group]`: direct, split.
    functions: [[[CUfunction; 2]; GROUPS.len()]; 2],
}

// SAFETY: function handles may be used from any thread that has bound the context.
unsafe impl Send for AttentionKernels {}

impl AttentionKernels {
    pub(super) fn load(loader: &mut Loader) -> Result<Self, LaunchError> {
        let mut functions = [[[std::ptr::null_mut(); 2]; GROUPS.len()]; 2];
        for (half, name) in ["f32", "f16"].into_iter().enumerate() {
            for (g, group) in GROUPS.into_iter().enumerate() {
                for (f, form) in ["direct", "split"].into_iter().enumerate() {
                    functions[half][g][f] =
                        loader.function("attention", &format!("attention_{form}_{name}_h{group}"))?;
                }
            }
        }
        Ok(AttentionKernels { functions })
    }
}

impl Kernels {
    /// The form for a bucket: chunks are shared out while the rows alone don't fill the device.
    pub fn attention_form(&self, args: &AttentionArgs, max_rows: usize) -> AttentionForm {
        let blocks = max_rows * args.kv_heads as usize;
        if args.partials != 0 && args.chunks > WARPS as u32 && blocks < self.processors * 2 {
            AttentionForm::Split
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
        let g = GROUPS.iter().position(|&g| g >= share.min(most)).unwrap_or(GROUPS.len() - 1);
        let group = GROUPS[g] as usize;
        let y = kv_heads as usize * (share as usize).div_ceil(group);
        let (f, z, floats) = match form {
            AttentionForm::Direct => {
                let parts = WARPS * group * (dim + 2) + group * dim + 2 * group + 2 * WARPS * group;
                (0, 1, group * dim + WARPS * 32 * group + parts)
            }
            AttentionForm::Split => {
                let wanted = (self.processors * 2).div_ceil((max_rows * y).max(1));
                let z = (args.chunks as usize).div_ceil(WARPS).min(wanted).max(1);
                (1, z, group * dim + WARPS * 32 * group + 2 * 32 * group + group)
            }
        };
        let function = self.attention.functions[usize::from(args.kv.half != 0)][g][f];
        let shape = Shape { grid: (max_rows, y, z), block: 128, shared: floats * 4 };
        // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
        unsafe { launch(function, shape, queue, args) }
    }
}
