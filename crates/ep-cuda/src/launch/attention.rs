//! Attention: how many heads a block, and whether chunks are shared out.

use std::collections::HashMap;

use cudarc::driver::sys::CUfunction;

use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::AttentionArgs;

/// Query heads of a block of attention.cu, as it was compiled.
const GROUPS: [u32; 4] = [1, 2, 4, 8];
/// Elements of a head for which attention_rows.cu was compiled, each for 1 to 8 query heads of a block.
const STAGED_DIMS: [usize; 2] = [64, 128];
/// Most query heads of a block of attention_tile.cu, and the rows that it takes together.
const TILE_HEADS: usize = 5;
const TILE_ROWS: usize = 8;
/// From this many rows on, rows of one sequence are looked for.
const TILE_FROM: usize = 64;
/// Up to this many rows, groups of heads are small.
const FEW_ROWS: usize = 2;
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

/// What attention's kernels depend on in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads of a key head.
    pub share: u32,
    /// Elements of a head.
    pub dim: usize,
    /// True if pages hold binary16.
    pub half: bool,
}

/// A kernel of one of the files: its query heads of a block, and the elements of a head it was compiled for, if it was for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// attention.cu, for pages of binary16 or not.
    Simple { half: bool, group: usize },
    /// attention_rows.cu.
    Staged { dim: usize, group: usize },
    /// attention_tile.cu.
    Tile { dim: usize, group: usize },
}

impl Kind {
    /// Names of its module and of its kernel in a form.
    fn names(self, form: AttentionForm) -> (&'static str, String) {
        let form = if form == AttentionForm::Split { "split" } else { "direct" };
        match self {
            Kind::Simple { half, group } => {
                ("attention", format!("attention_{form}_{}_h{group}", if half { "f16" } else { "f32" }))
            }
            Kind::Staged { dim, group } => ("attention_rows", format!("rows_{form}_d{dim}_h{group}")),
            Kind::Tile { dim, group } => ("attention_tile", format!("tile_d{dim}_h{group}")),
        }
    }

    /// The kernel for a launch of `form` over at most `max_rows` rows, with its bytes of shared memory.
    fn of(shape: &HeadShape, form: AttentionForm, max_rows: usize, device: Device) -> (Kind, usize) {
        let HeadShape { share, dim, half } = *shape;
        // Few rows leave most of the device idle: then smaller groups end sooner, though they read keys more than once.
        let most = if max_rows <= FEW_ROWS { 2 } else { 8 };
        let group = share.div_ceil(share.div_ceil(most)) as usize;
        let bytes = staged_bytes(form, dim, group);
        if device.stages(shape) && bytes <= device.shared_most {
            return (Kind::Staged { dim, group }, bytes);
        }
        let group = GROUPS.into_iter().find(|&g| g >= share.min(most)).unwrap_or(GROUPS[GROUPS.len() - 1]) as usize;
        (Kind::Simple { half, group }, simple_bytes(form, dim, group))
    }

    /// The kernel for rows of one sequence, where there is one.
    fn tile(shape: &HeadShape, device: Device) -> Option<(Kind, usize)> {
        let group = shape.share.div_ceil(shape.share.div_ceil(TILE_HEADS as u32)) as usize;
        // Where the kernel for single rows stages, the tile's does.
        let single = Kind::of(shape, AttentionForm::Direct, TILE_FROM, device).0;
        matches!(single, Kind::Staged { .. })
            .then(|| (Kind::Tile { dim: shape.dim, group }, tile_bytes(shape.dim, group)))
    }
}

/// What the choice of a kernel depends on in a device.
#[derive(Clone, Copy, Debug)]
struct Device {
    capability: u32,
    shared_most: usize,
}

impl Device {
    fn stages(self, shape: &HeadShape) -> bool {
        self.capability >= 80 && shape.half && STAGED_DIMS.contains(&shape.dim)
    }
}

/// Every kernel that attention of a model may launch, each once.
fn needed(shape: &HeadShape, device: Device) -> Vec<(Kind, AttentionForm)> {
    let mut all = Vec::new();
    for form in [AttentionForm::Direct, AttentionForm::Split] {
        for rows in [FEW_ROWS, FEW_ROWS + 1] {
            let kernel = (Kind::of(shape, form, rows, device).0, form);
            if !all.contains(&kernel) {
                all.push(kernel);
            }
        }
    }
    all.extend(Kind::tile(shape, device).map(|(kind, _)| (kind, AttentionForm::Direct)));
    all
}

/// What is loaded: the kernels of the models that were prepared for.
#[derive(Debug, Default)]
pub(super) struct AttentionKernels {
    functions: HashMap<(Kind, bool), CUfunction>,
}

// SAFETY: function handles may be used from any thread that has bound the context.
unsafe impl Send for AttentionKernels {}

impl Kernels {
    fn device(&self) -> Device {
        Device { capability: self.capability, shared_most: self.shared_most }
    }

    /// Loads what attention of such heads needs, if it is not loaded yet.
    ///
    /// # Errors
    /// The driver's; [`LaunchError::Unsupported`] for heads that no kernel serves.
    pub fn prepare_attention(&mut self, shape: &HeadShape) -> Result<(), LaunchError> {
        if shape.share == 0 || shape.dim == 0 || shape.dim > AttentionArgs::MAX_HEAD_DIM {
            return Err(LaunchError::Unsupported(format!("attention of {} heads of {}", shape.share, shape.dim)));
        }
        for (kind, form) in needed(shape, self.device()) {
            let key = (kind, form == AttentionForm::Split);
            if !self.attention.functions.contains_key(&key) {
                let (module, name) = kind.names(form);
                let function = self.loader.function(module, &name)?;
                self.attention.functions.insert(key, function);
            }
        }
        Ok(())
    }

    fn attention_function(&self, kind: Kind, form: AttentionForm) -> Result<CUfunction, LaunchError> {
        let loaded = self.attention.functions.get(&(kind, form == AttentionForm::Split)).copied();
        loaded.ok_or_else(|| LaunchError::Unsupported(format!("{} was not loaded", kind.names(form).1)))
    }

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
        let (shape, device) = (HeadShape { share, dim, half: args.kv.half != 0 }, self.device());
        let mut args = *args;
        args.chunks = args.chunks.max(1);
        let mut form = form;
        if form == AttentionForm::Tiled {
            form = AttentionForm::Direct;
            if let Some((kind @ Kind::Tile { group, .. }, shared)) = Kind::tile(&shape, device) {
                let grid = (max_rows.div_ceil(TILE_ROWS), kv_heads as usize * (share as usize).div_ceil(group), 1);
                let function = self.attention_function(kind, form)?;
                // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
                unsafe { launch(function, Shape { grid, block: 128, shared }, queue, &args) }?;
                args.chunks = 0; // the rest of the rows
            }
        }
        let (kind, shared) = Kind::of(&shape, form, max_rows, device);
        let function = self.attention_function(kind, form)?;
        let (Kind::Simple { group, .. } | Kind::Staged { group, .. } | Kind::Tile { group, .. }) = kind;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::TARGETS;

    #[test]
    fn every_kernel_that_a_model_may_need_was_compiled() {
        for target in TARGETS {
            let device = Device { capability: target.capability, shared_most: 101_376 };
            for (share, dim, half) in
                (1..=40).flat_map(|s| [32, 64, 96, 128, 256].map(|d| [(s, d, true), (s, d, false)])).flatten()
            {
                let all = needed(&HeadShape { share, dim, half }, device);
                assert!((2..=7).contains(&all.len()), "{all:?}");
                for (kind, form) in all {
                    let (module, name) = kind.names(form);
                    let module = target.modules.iter().find(|m| m.name == module).unwrap();
                    assert!(module.entry(&name).is_some(), "{name}");
                }
            }
        }
    }

    #[test]
    fn a_launch_takes_only_what_was_needed() {
        let device = Device { capability: 90, shared_most: 232_448 };
        for share in 1..=40 {
            for (dim, half) in [(64, true), (128, true), (128, false), (96, true)] {
                let shape = HeadShape { share, dim, half };
                let all = needed(&shape, device);
                for rows in [1, 2, 3, 8, 64, 512] {
                    for form in [AttentionForm::Direct, AttentionForm::Split] {
                        assert!(all.contains(&(Kind::of(&shape, form, rows, device).0, form)), "{shape:?} {rows}");
                    }
                    let tile = Kind::tile(&shape, device).map(|(kind, _)| (kind, AttentionForm::Direct));
                    assert!(tile.is_none_or(|tile| all.contains(&tile)));
                }
                assert_eq!(Kind::tile(&shape, device).is_some(), half && dim != 96);
            }
        }
        // A 14B shape: five query heads a key head.
        let shape = HeadShape { share: 5, dim: 128, half: true };
        assert_eq!(Kind::of(&shape, AttentionForm::Direct, 2, device).0, Kind::Staged { dim: 128, group: 2 });
        assert_eq!(Kind::of(&shape, AttentionForm::Split, 3, device).0, Kind::Staged { dim: 128, group: 5 });
        assert_eq!(needed(&shape, device).len(), 5);
        let old = Device { capability: 75, ..device };
        assert_eq!(Kind::of(&shape, AttentionForm::Direct, 8, old).0, Kind::Simple { half: true, group: 8 });
    }
}
