//! Linear layers: which kernel, how many blocks.

use cudarc::driver::sys::CUfunction;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};

use super::module::Loader;
use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::{Activation, EmbedArgs, LinearArgs, LinearSegment, MAX_SEGMENTS};

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
            if is_piped(format) {
                all.extend(PIPE.map(|p| LinearVariant::Pipe { weights: p.weights, tiles: p.tiles }));
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

impl LinearVariant {
    /// The variant without what is chosen at the launch.
    fn kernel(self) -> Self {
        match self {
            LinearVariant::Stream { per_thread, depth, .. } => LinearVariant::Stream { per_thread, depth, warps: 0 },
            other => other,
        }
    }
}

/// One instance of `GEMV` in linear.cu.
struct Gemv {
    rows: u32,
    per_thread: u32,
    depth: u32,
    /// Blocks on a multiprocessor by their registers.
    blocks: usize,
    hot: bool,
}

const fn gemv(rows: u32, per_thread: u32, depth: u32, blocks: usize, hot: bool) -> Gemv {
    Gemv { rows, per_thread, depth, blocks, hot }
}

/// The instances of linear.cu.
const GEMV: [Gemv; 8] = [
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
const STREAM: [(u32, u32); 4] = [(1, 8), (1, 12), (2, 6), (2, 10)];

/// Most warps of linear_stream.cu on a multiprocessor: two such kernels and a small one between them fit its registers.
const STREAM_WARPS: u32 = 14;
/// Shared memory of a multiprocessor that one such kernel takes, if it can, for the same reason.
const STREAM_SHARED: usize = 108 << 10;
/// Bytes of weights that a launch asks for ahead of what its rings hold: well below the second-level cache.
const STREAM_AHEAD: usize = 16 << 20;

/// One instance of linear_pipe.cu.
struct Pipe {
    /// Tiles of 16 weight rows.
    weights: u32,
    /// Tiles of eight token rows.
    tiles: u32,
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
const PIPE: [Pipe; 7] = [
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

/// Bytes in flight that keep a multiprocessor's share of the memory busy.
const IN_FLIGHT: usize = 32 << 10;

/// Name of a format's class in kernels/formats.txt.
pub(super) fn class_of(format: Format) -> &'static str {
    match format {
        Format::F32 => "f32",
        Format::F16 => "f16",
        Format::BF16 => "bf16",
        Format::Q4_0 => "q4_0",
        Format::Q4_1 => "q4_1",
        Format::Q5_0 => "q5_0",
        Format::Q5_1 => "q5_1",
        Format::Q8_0 => "q8_0",
        Format::Q4_K => "q4_k",
        Format::Q5_K => "q5_k",
        Format::Q6_K => "q6_k",
        Format::Nbits(Nbits { bits: 4, block: 16, .. }) => "p4s",
        Format::Nbits(Nbits { block: 16, .. }) => "p8s",
        Format::Nbits(Nbits { bits: 4, scale, zero, .. }) => match (scale, zero) {
            (ScaleType::F16, ZeroPoint::PerBlock) => "p4hz",
            (ScaleType::F16, _) => "p4h",
            (ScaleType::F32, ZeroPoint::PerBlock) => "p4fz",
            (ScaleType::F32, _) => "p4f",
        },
        Format::Nbits(_) => "p8",
    }
}

fn is_hot(format: Format) -> bool {
    matches!(class_of(format), "p4h" | "p4hz" | "p4f" | "p4fz" | "q4_0" | "q4_1" | "q8_0")
}

/// True if linear_pipe.cu serves the format.
fn is_piped(format: Format) -> bool {
    matches!(format, Format::Nbits(Nbits { bits: 4, block: 32, zero, .. }) if zero != ZeroPoint::PerBlock)
}

/// What the planar kernels need to know beyond their class: `(group_shift, flip, scale_half)`.
pub fn format_params(format: Format) -> (u32, u32, u32) {
    match format {
        Format::Nbits(n) => {
            let flip = match (n.bits, n.zero) {
                (4, ZeroPoint::TwosComplement) => 0x8888_8888,
                (4, _) | (_, ZeroPoint::TwosComplement) => 0,
                _ => 0x8080_8080,
            };
            (u32::from(n.block).trailing_zeros(), flip, u32::from(n.scale == ScaleType::F16))
        }
        _ => (0, 0, 0),
    }
}

/// The kernels of one format class.
#[derive(Debug)]
pub(super) struct FormatKernels {
    linear: Vec<(LinearVariant, CUfunction)>,
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
            if capability >= 80 && matches!(class, "p4h" | "p4f") && !is_piped(format) {
                // The class is loaded once, for all its block sizes.
                variants.extend(PIPE.map(|p| LinearVariant::Pipe { weights: p.weights, tiles: p.tiles }));
            }
            if capability >= 80 && matches!(class, "p4h" | "p4f") {
                variants.extend(STREAM.map(|(per_thread, depth)| LinearVariant::Stream {
                    per_thread,
                    depth,
                    warps: 0,
                }));
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
        Ok(FormatKernels { linear, embed })
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
        let segments = &args.segment[..args.segments as usize];
        let units = |per: u32| segments.iter().map(|s| s.rows.div_ceil(per) as usize).sum::<usize>();
        let shape = match variant {
            LinearVariant::Gemv { rows, per_thread, depth } => {
                let shared = self.gemv_shared(&args.x, rows);
                if shared > self.shared_most {
                    return Err(LaunchError::Unsupported(format!(
                        "{} columns need {shared} bytes of shared memory, the device has {}",
                        args.x.cols, self.shared_most
                    )));
                }
                let by_registers = GEMV
                    .iter()
                    .find(|g| (g.rows, g.per_thread, g.depth) == (rows, per_thread, depth))
                    .map_or(1, |g| g.blocks);
                // A block also reserves 1 KiB.
                let most = by_registers.min(self.shared_all / (shared + 1024)).max(1);
                let block_bytes =
                    format.total_row_bytes(args.x.cols as usize) / args.x.cols.div_ceil(32).max(1) as usize;
                let warp_units = units(per_thread).div_ceil(4);
                let per_warp = 32 * (depth * per_thread) as usize * block_bytes;
                let blocks = blocks_per_processor(warp_units, self.processors, most, IN_FLIGHT / per_warp.max(1));
                let grid = (self.processors * blocks).min(warp_units);
                Shape { grid: (grid, max_rows.div_ceil(rows as usize), 1), block: 256, shared }
            }
            LinearVariant::Stream { per_thread, depth, warps } => {
                let cols = args.x.cols as usize;
                let unsupported = || LaunchError::Unsupported(format!("no {variant:?} for {} x {cols}", format.name()));
                if !is_piped(format) || !cols.is_multiple_of(512) {
                    return Err(unsupported());
                }
                let units = units(4 * per_thread);
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
                Shape { grid: (self.processors.min(units), max_rows, 1), block: 32 * warps as u32, shared }
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
                if !args.x.ld.is_multiple_of(8) || !is_piped(format) {
                    return Err(LaunchError::Unsupported(format!("no pipelined kernel for {}", format.name())));
                }
                let scale = if args.scale_half == 1 { 2 } else { 4 };
                let form = PIPE
                    .iter()
                    .find(|p| (p.weights, p.tiles) == (weights, tiles))
                    .ok_or_else(|| LaunchError::Unsupported(format!("no kernel {variant:?}")))?;
                let shared = pipe_shared(form, scale, self.block_bytes());
                if shared > self.shared_most {
                    return Err(LaunchError::Unsupported(format!("{shared} bytes of shared memory for {variant:?}")));
                }
                Shape {
                    grid: (units(weights * 16), max_rows.div_ceil(tiles as usize * 8), 1),
                    block: 256 * form.sets,
                    shared,
                }
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

    fn gemv_shared(&self, x: &Activation, rows: u32) -> usize {
        rows as usize * (x.cols as usize).div_ceil(32) * (self.block_bytes() + 8)
    }

    /// Shared memory of linear_stream.cu for the activation.
    fn stream_row(&self, cols: usize) -> usize {
        cols / 32 * (self.block_bytes() + 8)
    }

    /// Shared memory of linear_stream.cu for one warp.
    fn stream_ring(&self, format: Format, per_thread: u32, depth: u32) -> usize {
        let scale = if format_params(format).2 == 1 { 2 } else { 4 };
        per_thread as usize * (depth as usize * 512 + (depth as usize / 2 + 1) * 64 * scale)
    }

    /// Most warps of linear_stream.cu in a block, by shared memory: two kernels on a multiprocessor if that leaves four.
    fn stream_warps(&self, format: Format, cols: usize, per_thread: u32, depth: u32) -> usize {
        let warps =
            |limit: usize| limit.saturating_sub(self.stream_row(cols)) / self.stream_ring(format, per_thread, depth);
        let two = warps(STREAM_SHARED.min(self.shared_most));
        let most = if two >= 4 { two } else { warps(self.shared_most) };
        most.min(STREAM_WARPS as usize)
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
