//! Attention: how many heads a block, and whether chunks are shared out.

use std::collections::HashMap;

use cudarc::driver::sys::CUfunction;

use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::AttentionArgs;

/// Query heads of a block of attention.cu, as it was compiled.
const GROUPS: [u32; 4] = [1, 2, 4, 8];
/// Elements of a head for which attention_rows.cu was compiled, each for 1 to STAGED_HEADS query heads of a block: a thread's registers hold
/// its part of the queries.
const STAGED_DIMS: [usize; 2] = [64, 128];
const STAGED_HEADS: u32 = 6;
/// Most query heads of a block of attention_tile.cu, and the rows that it takes together.
const TILE_HEADS: usize = 5;
const TILE_ROWS: usize = 8;
/// From this many rows on, rows of one sequence are looked for.
const TILE_FROM: usize = 64;
/// Up to this many rows, groups of heads are small.
const FEW_ROWS: usize = 2;
/// Warps of a block of attention.cu.
const WARPS: usize = 4;
/// Registers allow two blocks of this many warps of attention_rows.cu on a multiprocessor: as it was compiled.
const fn most_warps(form: AttentionForm, dim: usize, group: usize) -> usize {
    match (form, dim, group) {
        (_, _, 6..) => 4,
        (AttentionForm::Split, ..) => 6,
        (_, 128, 3) => 4,
        _ => 5,
    }
}

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

/// How attention_rows.cu is launched, where it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedChoice {
    /// Query heads of a block, at most.
    pub heads: u32,
    /// Warps of a block that take chunks.
    pub workers: usize,
    /// Blocks that share out a row's chunks; 1 unless [`AttentionForm::Split`].
    pub spread: usize,
}

/// Query heads of a block where there are so few chunks that most of the device is idle: such blocks end sooner, though keys are read more
/// than once. One row at 512 positions 6.7 us a layer; at 4,096 all heads together 15.5, two at a time 19.3.
const FEW_HEADS: u32 = 2;
/// Most warps of a split's block: one row at 32,768 positions 70 us a layer with four, 92 with six; eight rows at 4,096 the same.
const SPLIT_WORKERS: usize = 4;

/// Most warps with chunks of a block that combines: 32 rows at 512 positions 27.9 us a layer with four, 29.3 with five; the same at 4,096.
const DIRECT_WORKERS: usize = 4;

impl StagedChoice {
    /// The choice for a launch of at most `rows` rows of at most `chunks` chunks: two blocks on every multiprocessor, in one go.
    fn of(shape: &HeadShape, form: AttentionForm, kv_heads: usize, rows: usize, chunks: usize, device: Device) -> Self {
        if form != AttentionForm::Split {
            // The last warp combines.
            let workers = DIRECT_WORKERS.min(most_warps(form, shape.dim, staged_group(shape, STAGED_HEADS)) - 1);
            return StagedChoice { heads: STAGED_HEADS, workers, spread: 1 };
        }
        let heads = if rows * kv_heads * chunks <= device.processors * 2 { FEW_HEADS } else { STAGED_HEADS };
        let groups = (shape.share as usize).div_ceil(staged_group(shape, heads));
        let most = (device.processors * 2 / (rows * kv_heads * groups).max(1)).max(1);
        let workers = chunks.div_ceil(most).clamp(1, SPLIT_WORKERS);
        StagedChoice { heads, workers, spread: chunks.div_ceil(workers).min(most).max(1) }
    }
}

/// Query heads of a block when it has at most `heads`.
fn staged_group(shape: &HeadShape, heads: u32) -> usize {
    shape.share.div_ceil(shape.share.div_ceil(heads)) as usize
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

impl HeadShape {
    fn of(args: &AttentionArgs) -> HeadShape {
        let share = args.heads.checked_div(args.kv_heads).unwrap_or(0);
        HeadShape { share, dim: args.head_dim as usize, half: args.kv.half != 0 }
    }
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
    /// attention_combine.cu.
    Combine { dim: usize },
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
            Kind::Combine { dim } => ("attention_combine", format!("combine_d{dim}")),
        }
    }

    /// The kernel of attention.cu for a launch over at most `rows` rows, with its bytes of shared memory.
    fn simple(shape: &HeadShape, form: AttentionForm, rows: usize) -> (Kind, usize) {
        let HeadShape { share, dim, half } = *shape;
        let most = if rows <= FEW_ROWS { 2 } else { GROUPS[GROUPS.len() - 1] };
        let group = GROUPS.into_iter().find(|&g| g >= share.min(most)).unwrap_or(GROUPS[GROUPS.len() - 1]) as usize;
        (Kind::Simple { half, group }, simple_bytes(form, dim, group))
    }

    /// The kernel of attention_rows.cu for blocks of at most `heads` query heads.
    fn staged(shape: &HeadShape, heads: u32) -> Kind {
        Kind::Staged { dim: shape.dim, group: staged_group(shape, heads) }
    }

    /// The kernel for rows of one sequence, where there is one.
    fn tile(shape: &HeadShape, device: Device) -> Option<(Kind, usize)> {
        let group = shape.share.div_ceil(shape.share.div_ceil(TILE_HEADS as u32)) as usize;
        device.stages(shape).then(|| (Kind::Tile { dim: shape.dim, group }, tile_bytes(shape.dim, group)))
    }
}

/// What the choice of a kernel depends on in a device.
#[derive(Clone, Copy, Debug)]
struct Device {
    capability: u32,
    shared_most: usize,
    processors: usize,
}

impl Device {
    fn stages(self, shape: &HeadShape) -> bool {
        // The largest block that is ever launched.
        let fits = || {
            let group = staged_group(shape, STAGED_HEADS);
            staged_bytes(
                AttentionForm::Direct,
                shape.dim,
                group,
                most_warps(AttentionForm::Direct, shape.dim, group) - 1,
            ) <= self.shared_most
        };
        self.capability >= 80 && shape.half && STAGED_DIMS.contains(&shape.dim) && fits()
    }
}

/// Every kernel that attention of a model may launch, each once.
fn needed(shape: &HeadShape, device: Device) -> Vec<(Kind, AttentionForm)> {
    let mut all = Vec::new();
    for form in [AttentionForm::Direct, AttentionForm::Split] {
        let kinds = match device.stages(shape) {
            true => [FEW_HEADS, STAGED_HEADS].map(|heads| Kind::staged(shape, heads)),
            false => [FEW_ROWS, FEW_ROWS + 1].map(|rows| Kind::simple(shape, form, rows).0),
        };
        for kind in kinds {
            if !all.contains(&(kind, form)) {
                all.push((kind, form));
            }
        }
    }
    if device.stages(shape) {
        all.push((Kind::Combine { dim: shape.dim }, AttentionForm::Direct));
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
        Device { capability: self.capability, shared_most: self.shared_most, processors: self.processors }
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
        // Partial results in memory cost more than idle multiprocessors where half of them are busy: 16 rows at 4,096 positions 120 us a
        // layer against 100, 8 rows 65 against 99.
        let full =
            if self.device().stages(&HeadShape::of(args)) { self.processors * 3 / 4 } else { self.processors * 2 };
        if args.partials != 0 && args.chunks > WARPS as u32 && blocks < full {
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
        // SAFETY: by this function's contract.
        unsafe { self.attention_as(queue, form, None, args, max_rows) }
    }

    /// [`Kernels::attention`], with a choice other than its own for attention_rows.cu.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn attention_as(
        &self,
        queue: Queue,
        form: AttentionForm,
        choice: Option<StagedChoice>,
        args: &AttentionArgs,
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        let (heads, kv_heads, dim) = (args.heads, args.kv_heads, args.head_dim as usize);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || dim == 0 || dim > AttentionArgs::MAX_HEAD_DIM {
            return Err(LaunchError::Unsupported(format!("attention of {heads} / {kv_heads} heads of {dim}")));
        }
        let (shape, device) = (HeadShape::of(args), self.device());
        let (kv_heads, share) = (kv_heads as usize, shape.share as usize);
        let mut args = *args;
        args.chunks = args.chunks.max(1);
        let mut form = form;
        if form == AttentionForm::Tiled {
            form = AttentionForm::Direct;
            if let Some((kind @ Kind::Tile { group, .. }, shared)) = Kind::tile(&shape, device) {
                let grid = (max_rows.div_ceil(TILE_ROWS), kv_heads * share.div_ceil(group), 1);
                let function = self.attention_function(kind, form)?;
                // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
                unsafe { launch(function, Shape { grid, block: 128, shared }, queue, &args) }?;
                args.chunks = 0; // the rest of the rows
            }
        }
        // What is left beside tiles is mostly nothing: then each block looks at several rows.
        let rows = |y: usize| if args.chunks == 0 { max_rows.min((self.processors * 4).div_ceil(y)) } else { max_rows };
        if !device.stages(&shape) {
            let (kind, shared) = Kind::simple(&shape, form, max_rows);
            let Kind::Simple { group, .. } = kind else { return Ok(()) };
            let y = kv_heads * share.div_ceil(group);
            let wanted = (self.processors * 2).div_ceil((max_rows * y).max(1));
            let z = (args.chunks as usize).div_ceil(WARPS).min(wanted).max(1);
            let grid = (rows(y), y, if form == AttentionForm::Split { z } else { 1 });
            let function = self.attention_function(kind, form)?;
            // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
            return unsafe { launch(function, Shape { grid, block: 32 * WARPS as u32, shared }, queue, &args) };
        }
        let chunks = args.chunks as usize;
        let own = || StagedChoice::of(&shape, form, kv_heads, max_rows, chunks, device);
        let StagedChoice { heads: most, workers, spread } = choice.unwrap_or_else(own);
        let kind = Kind::staged(&shape, most);
        let Kind::Staged { group, .. } = kind else { return Ok(()) };
        let y = kv_heads * share.div_ceil(group);
        let function = self.attention_function(kind, form)?;
        // The combining warp takes the results of two workers at a time.
        let least = if form == AttentionForm::Split { 1 } else { 2 };
        if workers < least || workers > most_warps(form, dim, group) + 1 - least || spread == 0 {
            return Err(LaunchError::Unsupported(format!("attention with {workers} warps, {spread} blocks a row")));
        }
        if form == AttentionForm::Split {
            let shared = staged_bytes(form, dim, group, workers);
            let shape = Shape { grid: (max_rows, y, spread), block: 32 * workers as u32, shared };
            // SAFETY: by this function's contract; the kernel takes `AttentionArgs`.
            unsafe { launch(function, shape, queue, &args) }?;
            let function = self.attention_function(Kind::Combine { dim }, AttentionForm::Direct)?;
            let shape = Shape { grid: (max_rows, heads as usize, dim / 32), block: 128, shared: 0 };
            // It waits for the kernel before it, which waits for all before: it may always start early.
            let queue = Queue { overlap: device.capability >= 90, ..queue };
            // SAFETY: as above.
            return unsafe { launch(function, shape, queue, &args) };
        }
        let shared = staged_bytes(form, dim, group, workers);
        let shape = Shape { grid: (rows(y), y, 1), block: 32 * (workers as u32 + 1), shared };
        // SAFETY: as above.
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

/// Dynamic shared memory of attention_rows.cu for `workers` warps that take chunks: their own, and, where the block combines, slots and
/// barriers.
fn staged_bytes(form: AttentionForm, dim: usize, group: usize, workers: usize) -> usize {
    let own = 32 * (2 * dim * 2 + 16) + group * 128 + 32;
    let slot = if form == AttentionForm::Split { 0 } else { (group * dim + 16) * 4 + 16 };
    workers * (own + slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::TARGETS;

    #[test]
    fn every_kernel_that_a_model_may_need_was_compiled() {
        for target in TARGETS {
            let device = Device { capability: target.capability, shared_most: 101_376, processors: 80 };
            for (share, dim, half) in
                (1..=40).flat_map(|s| [32, 64, 96, 128, 256].map(|d| [(s, d, true), (s, d, false)])).flatten()
            {
                let all = needed(&HeadShape { share, dim, half }, device);
                assert!((2..=8).contains(&all.len()), "{all:?}");
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
        let device = Device { capability: 90, shared_most: 232_448, processors: 132 };
        for share in 1..=40 {
            for (dim, half) in [(64, true), (128, true), (128, false), (96, true)] {
                let shape = HeadShape { share, dim, half };
                let all = needed(&shape, device);
                for (rows, form) in [1, 2, 3, 8, 64, 512]
                    .into_iter()
                    .flat_map(|r| [(r, AttentionForm::Direct), (r, AttentionForm::Split)])
                {
                    if !device.stages(&shape) {
                        assert!(all.contains(&(Kind::simple(&shape, form, rows).0, form)), "{shape:?} {rows}");
                        continue;
                    }
                    for chunks in [1, 16, 128, 4096] {
                        let choice = StagedChoice::of(&shape, form, 8, rows, chunks, device);
                        let kind = Kind::staged(&shape, choice.heads);
                        assert!(all.contains(&(kind, form)), "{shape:?} {rows}");
                        let Kind::Staged { group, .. } = kind else { panic!() };
                        let warps = choice.workers + usize::from(form == AttentionForm::Direct);
                        assert!(choice.workers > 0 && warps <= most_warps(form, dim, group), "{choice:?}");
                        // Two blocks a multiprocessor, with the kilobyte that each takes for itself.
                        let bytes = staged_bytes(form, dim, group, choice.workers);
                        assert!(2 * (bytes + 1024) <= 228 << 10, "{choice:?}: {bytes}");
                    }
                }
                let tile = Kind::tile(&shape, device).map(|(kind, _)| (kind, AttentionForm::Direct));
                assert!(tile.is_none_or(|tile| all.contains(&tile)));
                assert_eq!(tile.is_some(), half && dim != 96);
            }
        }
        // A 14B shape: five query heads a key head.
        let shape = HeadShape { share: 5, dim: 128, half: true };
        let choice = |form, rows, chunks| StagedChoice::of(&shape, form, 8, rows, chunks, device);
        assert_eq!(choice(AttentionForm::Direct, 32, 1), StagedChoice { heads: 6, workers: 4, spread: 1 });
        assert_eq!(choice(AttentionForm::Split, 8, 128), StagedChoice { heads: 6, workers: 4, spread: 4 });
        assert_eq!(choice(AttentionForm::Split, 1, 128), StagedChoice { heads: 6, workers: 4, spread: 32 });
        assert_eq!(choice(AttentionForm::Split, 1, 16), StagedChoice { heads: 2, workers: 2, spread: 8 });
        assert_eq!(Kind::staged(&shape, 6), Kind::Staged { dim: 128, group: 5 });
        assert_eq!(Kind::staged(&shape, 2), Kind::Staged { dim: 128, group: 2 });
        let old = Device { capability: 75, ..device };
        assert!(!old.stages(&shape));
        assert_eq!(Kind::simple(&shape, AttentionForm::Direct, 8).0, Kind::Simple { half: true, group: 8 });
    }
}
