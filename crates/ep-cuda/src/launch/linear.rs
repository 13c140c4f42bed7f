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
                all.extend(PIPE.map(|(weights, tiles, _)| LinearVariant::Pipe { weights, tiles }));
            }
        }
        all
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

/// The instances of linear_pipe.cu: tiles of 16 weight rows, tiles of eight token rows, stages.
const PIPE: [(u32, u32, usize); 5] = [(1, 1, 6), (2, 1, 4), (1, 4, 6), (2, 4, 4), (4, 4, 4)];

/// Dynamic shared memory of linear_pipe.cu: its ring, or the lanes at the end.
fn pipe_shared(weights: u32, tiles: u32, scale: usize) -> usize {
    let stages = PIPE.iter().find(|p| (p.0, p.1) == (weights, tiles)).map_or(0, |p| p.2);
    let rows = weights as usize * 16;
    let stage = rows * ((16 * 16 + 16) + (16 * scale / 16 + 1) * 16);
    (stages * stage).max(8 * rows * (tiles as usize * 8 + 1) * 4)
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
                variants.extend(PIPE.map(|(weights, tiles, _)| LinearVariant::Pipe { weights, tiles }));
            }
            for variant in variants {
                let function = match variant {
                    LinearVariant::Gemv { rows, per_thread, depth } => loader
                        .function(&format!("linear.{class}"), &format!("gemv_{w}_r{rows}_p{per_thread}_u{depth}"))?,
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
                linear.push((variant, function));
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
        let function = kernels.linear.iter().find(|(v, _)| *v == variant).map(|&(_, f)| f).ok_or_else(|| {
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
                let shared = pipe_shared(weights, tiles, scale);
                Shape { grid: (units(weights * 16), max_rows.div_ceil(tiles as usize * 8), 1), block: 256, shared }
            }
            LinearVariant::Dense { rows, .. } => {
                let grid = units(1).div_ceil(32).min(self.processors * 8);
                Shape { grid: (grid, max_rows.div_ceil(rows as usize), 1), block: 256, shared: 0 }
            }
        };
        // SAFETY: by this function's contract; the kernel takes `LinearArgs`.
        unsafe { launch(function, shape, queue, &args) }
    }

    fn gemv_shared(&self, x: &Activation, rows: u32) -> usize {
        let bytes = match self.width {
            ActivationWidth::Int16 => 72,
            ActivationWidth::Int8 => 40,
        };
        rows as usize * (x.cols as usize).div_ceil(32) * bytes
    }

    /// The form for a launch.
    pub fn choose(&self, format: Format, x: &Activation, segments: &[LinearSegment], max_rows: usize) -> LinearVariant {
        if !format.is_quantised() {
            let odd = !x.cols.is_multiple_of(8);
            return LinearVariant::Dense { rows: if max_rows == 1 { 1 } else { 4 }, odd };
        }
        let tensor_cores = self.capability >= 80 && x.ld.is_multiple_of(8);
        if tensor_cores && max_rows > 4 && is_piped(format) {
            let rows: usize = segments.iter().map(|s| s.rows as usize).sum();
            let weights = if rows < self.processors * 64 { 1 } else { 2 };
            return LinearVariant::Pipe { weights, tiles: if max_rows <= 8 { 1 } else { 4 } };
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
        let rows: usize = segments.iter().map(|s| s.rows as usize).sum();
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
