//! Linear layers: which kernel, how many blocks.

mod dots;
mod formats;
mod pipe;
mod tile;

use cudarc::driver::sys::CUfunction;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;

use self::dots::{GEMV, STREAM, STREAM_WARPS};
use self::formats::is_hot;
use self::pipe::PIPE;
use self::tile::{TILE, WIDE, is_tiled, is_wide};
use super::chain::ChainKernels;
use super::module::Loader;
use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::{Activation, EmbedArgs, LinearArgs, LinearSegment, MAX_SEGMENTS};

pub(super) use self::formats::{class_of, is_piped_class};
pub use self::formats::{format_params, is_piped, is_six, scale_bytes, wanted_format};

/// A form of a linear kernel. The defaults of [`Kernels::linear`] come from measurements; tests and benches ask for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearVariant {
    /// Dot products of four, for a few token rows.
    Gemv {
        /// Token rows a block.
        rows: u32,
        /// Weight rows a thread.
        per_thread: u32,
        /// Blocks of 32 in flight for each of them.
        depth: u32,
    },
    /// Dot products of four behind a ring of asynchronous copies for each warp, one token row a block: planar 4-bit codes
    /// in blocks of 32 without zero points, columns a multiple of 512.
    Stream {
        /// Weight rows a thread.
        per_thread: u32,
        /// Steps of eight blocks in the ring.
        depth: u32,
        /// Most warps of a block; 0 where the kernel is meant, not a launch.
        warps: u32,
    },
    /// Tensor cores.
    Gemm {
        /// Tiles of eight token rows a block.
        tiles: u32,
    },
    /// Tensor cores behind a pipeline of asynchronous copies: planar 4-bit codes in blocks of 32 without zero points.
    Pipe {
        /// Tiles of 16 weight rows a block.
        weights: u32,
        /// Tiles of eight token rows a block.
        tiles: u32,
    },
    /// Tensor cores in clusters that share the lanes out, for many rows: planar 4-bit codes in blocks of 32 without zero points,
    /// columns a multiple of 256, compute capability 9.0.
    Tile {
        /// Weight rows of a cluster.
        rows: u32,
        /// Token rows of a cluster.
        tokens: u32,
    },
    /// The same with the tensor cores' asynchronous form, for prompts, compute capability 9.0 alone.
    Wide,
    /// Unquantised.
    Dense {
        /// Token rows a block.
        rows: u32,
        /// True where the columns are not a multiple of 8.
        odd: bool,
    },
}

impl LinearVariant {
    /// Every form that serves a format on a device of this compute capability, for `cols` columns.
    pub fn all(format: Format, capability: u32, cols: usize) -> Vec<LinearVariant> {
        if !format.is_quantised() {
            let odd = !cols.is_multiple_of(8);
            return vec![LinearVariant::Dense { rows: 1, odd }, LinearVariant::Dense { rows: 4, odd }];
        }
        let mut all: Vec<LinearVariant> = GEMV
            .iter()
            .filter(|g| is_hot(format) || !g.hot)
            .map(|g| LinearVariant::Gemv { rows: g.rows, per_thread: g.per_thread, depth: g.depth })
            .collect();
        if capability >= 80 {
            all.extend([LinearVariant::Gemm { tiles: 1 }, LinearVariant::Gemm { tiles: 4 }]);
            if is_six(format) && is_tiled(format, capability, cols, 8) {
                all.extend(tiles());
            }
            if is_piped(format) {
                all.extend(PIPE.map(|p| LinearVariant::Pipe { weights: p.weights, tiles: p.tiles }));
                if is_tiled(format, capability, cols, 8) {
                    all.extend(tiles());
                }
                if is_wide(format, capability, cols, 8) {
                    all.push(LinearVariant::Wide);
                }
                if cols.is_multiple_of(512) {
                    all.extend(STREAM.map(|(per_thread, depth)| LinearVariant::Stream {
                        per_thread,
                        depth,
                        warps: STREAM_WARPS,
                    }));
                }
            }
        }
        all
    }
}

/// Every instance of linear_tile.cu.
fn tiles() -> impl Iterator<Item = LinearVariant> {
    TILE.iter().map(|f| LinearVariant::Tile { rows: f.rows, tokens: f.tokens })
}

impl LinearVariant {
    /// The variant without what is chosen at the launch.
    fn kernel(self) -> Self {
        match self {
            LinearVariant::Stream { per_thread, depth, .. } => LinearVariant::Stream { per_thread, depth, warps: 0 },
            other => other,
        }
    }
}

/// The kernels of one format class.
#[derive(Debug)]
pub(super) struct FormatKernels {
    linear: Vec<(LinearVariant, CUfunction)>,
    pub(super) chain: ChainKernels,
    embed: CUfunction,
}

// SAFETY: function handles may be used from any thread that has bound the context.
unsafe impl Send for FormatKernels {}

impl FormatKernels {
    pub(super) fn load(
        loader: &mut Loader,
        format: Format,
        width: ActivationWidth,
        capability: u32,
    ) -> Result<Self, LaunchError> {
        let class = class_of(format);
        let w = match width {
            ActivationWidth::Int16 => "w16",
            ActivationWidth::Int8 => "w8",
        };
        let mut linear = Vec::new();
        // Unquantised layers have forms of their own for odd widths.
        let widths: &[usize] = if format.is_quantised() { &[8] } else { &[8, 1] };
        for &cols in widths {
            let mut variants = LinearVariant::all(format, capability, cols);
            if capability >= 80 && is_piped_class(class) && !is_piped(format) {
                // The class is loaded once, for all its block sizes.
                variants.extend(PIPE.map(|p| LinearVariant::Pipe { weights: p.weights, tiles: p.tiles }));
            }
            if capability >= 90 && is_six(format) {
                variants.extend(tiles());
            }
            if capability >= 80 && is_piped_class(class) {
                variants.extend(STREAM.map(|(per_thread, depth)| LinearVariant::Stream {
                    per_thread,
                    depth,
                    warps: 0,
                }));
                if capability >= 90 {
                    variants.extend(tiles());
                }
                if capability == 90 {
                    variants.push(LinearVariant::Wide);
                }
            }
            for variant in variants {
                let function = match variant {
                    LinearVariant::Gemv { rows, per_thread, depth } => loader
                        .function(&format!("linear.{class}"), &format!("gemv_{w}_r{rows}_p{per_thread}_u{depth}"))?,
                    LinearVariant::Stream { per_thread, depth, .. } => loader
                        .function(&format!("linear_stream.{class}"), &format!("stream_{w}_p{per_thread}_d{depth}"))?,
                    LinearVariant::Gemm { tiles } => {
                        loader.function(&format!("linear_mma.{class}"), &format!("gemm_{w}_n{tiles}"))?
                    }
                    LinearVariant::Pipe { weights, tiles } => {
                        loader.function(&format!("linear_pipe.{class}"), &format!("pipe_{w}_m{weights}_n{tiles}"))?
                    }
                    LinearVariant::Tile { rows, tokens } => {
                        loader.function(&format!("linear_tile.{class}"), &format!("tile_{w}_r{rows}_t{tokens}"))?
                    }
                    LinearVariant::Wide => loader.function(&format!("linear_wide.{class}"), &format!("wide_{w}"))?,
                    LinearVariant::Dense { rows, odd } => {
                        let odd = if odd { "_odd" } else { "" };
                        loader.function("dense", &format!("dense_{class}{odd}_r{rows}"))?
                    }
                };
                linear.push((variant.kernel(), function));
            }
        }
        let embed = if format.is_quantised() {
            loader.function(&format!("embed.{class}"), "embed_rows")?
        } else {
            loader.function("embed_dense", &format!("embed_{class}"))?
        };
        Ok(FormatKernels { linear, chain: super::chain::load(loader, format, width, capability)?, embed })
    }
}

impl Kernels {
    /// Linear layers over the same activation: `args.segment` is filled from `segments`, in as many launches as they
    /// need; the other fields are the caller's, except those of [`format_params`]. `max_rows` is the bucket: the most
    /// token rows that the descriptor may hold when the kernel runs.
    ///
    /// # Safety
    /// Every address is valid when the kernel runs, with the sizes that `args` and `abi` state; the context is bound.
    pub unsafe fn linear(
        &self,
        queue: Queue,
        format: Format,
        args: &LinearArgs,
        segments: &[LinearSegment],
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        for segments in segments.chunks(MAX_SEGMENTS) {
            let variant = self.choose(format, &args.x, segments, max_rows);
            // SAFETY: by this function's contract.
            unsafe { self.linear_as(queue, format, variant, args, segments, max_rows) }?;
        }
        Ok(())
    }

    /// [`Kernels::linear`] by one kernel, for at most [`MAX_SEGMENTS`] segments.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn linear_as(
        &self,
        queue: Queue,
        format: Format,
        variant: LinearVariant,
        args: &LinearArgs,
        segments: &[LinearSegment],
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        let kernels = self.format(format)?;
        let key = variant.kernel();
        let function = kernels.linear.iter().find(|(v, _)| *v == key).map(|&(_, f)| f).ok_or_else(|| {
            LaunchError::Unsupported(format!("no kernel {variant:?} for {} on this device", format.name()))
        })?;
        if segments.len() > MAX_SEGMENTS {
            return Err(LaunchError::Unsupported(format!("{} segments, at most {MAX_SEGMENTS}", segments.len())));
        }
        let mut args = *args;
        (args.group_shift, args.flip, args.scale_half) = format_params(format);
        args.segments = 0;
        for segment in segments.iter().filter(|s| s.rows > 0) {
            args.segment[args.segments as usize] = *segment;
            args.segments += 1;
        }
        if args.segments == 0 || max_rows == 0 {
            return Ok(());
        }
        let present = args.segment;
        let segments = &present[..args.segments as usize];
        let units = |per: u32| segments.iter().map(|s| s.rows.div_ceil(per) as usize).sum::<usize>();
        let shape = match variant {
            LinearVariant::Gemv { rows, per_thread, depth } => {
                self.gemv_shape(format, &args, (rows, per_thread, depth), max_rows, units(per_thread))?
            }
            LinearVariant::Stream { per_thread, depth, warps } => {
                let units = units(4 * per_thread);
                let shape = self.stream_shape(format, &mut args, (per_thread, depth, warps), max_rows, units)?;
                args.ahead = if queue.ask_ahead { args.ahead } else { 0 };
                shape
            }
            LinearVariant::Gemm { tiles } => {
                if !args.x.ld.is_multiple_of(8) {
                    return Err(LaunchError::Unsupported(format!(
                        "{} activation rows, not a multiple of 8",
                        args.x.ld
                    )));
                }
                let columns = tiles as usize * 8;
                let shared = (8 * 32 * (12 + 4) * 4).max(8 * 32 * (columns + 1) * 4);
                Shape { grid: (units(32), max_rows.div_ceil(columns), 1), block: 256, shared }
            }
            LinearVariant::Pipe { weights, tiles } => {
                let (rows, block, shared) = self.pipe_block(format, &args.x, weights, tiles)?;
                Shape { grid: (units(rows), max_rows.div_ceil(tiles as usize * 8), 1), block, shared }
            }
            LinearVariant::Tile { rows, tokens } => {
                let (cluster, block, shared) = self.tile_block(format, &args.x, (rows, tokens))?;
                Shape { grid: (cluster * max_rows.div_ceil(tokens as usize), units(rows), 1), block, shared }
            }
            LinearVariant::Wide => {
                let (rows, tokens, _) = WIDE;
                let shared = self.wide_shared(format, &args.x)?;
                Shape { grid: (2 * max_rows.div_ceil(tokens as usize), units(rows), 1), block: 512, shared }
            }
            LinearVariant::Dense { rows, .. } => {
                let grid = units(1).div_ceil(32).min(self.processors * 8);
                Shape { grid: (grid, max_rows.div_ceil(rows as usize), 1), block: 256, shared: 0 }
            }
        };
        // SAFETY: by this function's contract; the kernel takes `LinearArgs`.
        unsafe { launch(function, shape, queue, &args) }
    }

    /// Bytes of the codes of an activation block.
    fn block_bytes(&self) -> usize {
        match self.width {
            ActivationWidth::Int16 => 64,
            ActivationWidth::Int8 => 32,
        }
    }

    /// The form for a launch.
    pub fn choose(&self, format: Format, x: &Activation, segments: &[LinearSegment], max_rows: usize) -> LinearVariant {
        if !format.is_quantised() {
            let odd = !x.cols.is_multiple_of(8);
            return LinearVariant::Dense { rows: if max_rows == 1 { 1 } else { 4 }, odd };
        }
        let tensor_cores = self.capability >= 80 && x.ld.is_multiple_of(8);
        let rows: usize = segments.iter().map(|s| s.rows as usize).sum();
        if self.capability >= 80 && max_rows == 1 && is_piped(format) && x.cols.is_multiple_of(512) {
            let large = rows >= self.processors * 128;
            let (per_thread, depth) = if large && self.width == ActivationWidth::Int16 { (2, 6) } else { (1, 12) };
            if self.stream_warps(format, x.cols as usize, per_thread, depth) >= 4 {
                return LinearVariant::Stream { per_thread, depth, warps: STREAM_WARPS };
            }
        }
        if max_rows > 32 && is_wide(format, self.capability, x.cols as usize, x.ld as usize) {
            return LinearVariant::Wide;
        }
        if max_rows > 1 && is_six(format) && is_tiled(format, self.capability, x.cols as usize, x.ld as usize) {
            let tokens = (max_rows.next_power_of_two() as u32).clamp(16, 64);
            return LinearVariant::Tile { rows: 128, tokens };
        }
        // Narrow codes of up to 16 rows are better off with the pipeline.
        let tiled = if self.width == ActivationWidth::Int16 { 8 } else { 16 };
        if max_rows > tiled && is_tiled(format, self.capability, x.cols as usize, x.ld as usize) {
            let tokens = (max_rows.next_power_of_two() as u32).min(64);
            return LinearVariant::Tile { rows: 128, tokens };
        }
        // Two rows of wide codes are still better off with dot products.
        let few = if self.width == ActivationWidth::Int16 { 2 } else { 1 };
        if tensor_cores && max_rows > few && is_piped(format) {
            let tiles = if max_rows <= 8 {
                1
            } else if max_rows <= 16 {
                2
            } else {
                4
            };
            let large = rows >= self.processors * 128;
            let weights = if max_rows > 16 || self.width == ActivationWidth::Int16 && !large { 4 } else { 2 };
            return LinearVariant::Pipe { weights, tiles };
        }
        if tensor_cores && max_rows > 4 {
            return LinearVariant::Gemm { tiles: if max_rows <= 8 { 1 } else { 4 } };
        }
        let hot = is_hot(format);
        let fits = |rows: u32| self.gemv_shared(x, rows) <= self.shared_most.min(100 << 10);
        if hot && max_rows == 2 && fits(2) {
            return LinearVariant::Gemv { rows: 2, per_thread: 2, depth: 2 };
        }
        if max_rows > 1 && fits(4) {
            return if hot {
                LinearVariant::Gemv { rows: 4, per_thread: 2, depth: 2 }
            } else {
                LinearVariant::Gemv { rows: 4, per_thread: 1, depth: 1 }
            };
        }
        if max_rows > 1 && tensor_cores {
            return LinearVariant::Gemm { tiles: 1 };
        }
        if !hot {
            return LinearVariant::Gemv { rows: 1, per_thread: 1, depth: 2 };
        }
        // A small matrix has few rows for each multiprocessor: every one of them then needs depth.
        if rows < self.processors * 128 {
            LinearVariant::Gemv { rows: 1, per_thread: 1, depth: 8 }
        } else {
            LinearVariant::Gemv { rows: 1, per_thread: 2, depth: 4 }
        }
    }

    /// Embedding rows, `max_rows` token rows at most.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn embed(
        &self,
        queue: Queue,
        format: Format,
        args: &EmbedArgs,
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        let kernels = self.format(format)?;
        let mut args = *args;
        (args.group_shift, args.flip, args.scale_half) = format_params(format);
        let shape =
            Shape { grid: ((args.cols as usize).div_ceil(32).div_ceil(128), max_rows, 1), block: 128, shared: 0 };
        // SAFETY: by this function's contract; the kernel takes `EmbedArgs`.
        unsafe { launch(kernels.embed, shape, queue, &args) }
    }
}
