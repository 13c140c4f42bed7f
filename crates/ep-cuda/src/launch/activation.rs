//! Norm, quantisation, SwiGLU, RoPE, arg-maximum, the step's report and the read probe.

use cudarc::driver::sys::CUfunction;
use headrace_numerics::activation::ActivationWidth;

use super::module::Loader;
use super::{Kernels, LaunchError, Queue, Shape, launch};
use crate::abi::{ArgmaxArgs, ProbeArgs, QuantiseArgs, RopeArgs};

/// What an activation is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Norm of the source.
    Norm,
    /// The source as it is.
    Plain,
    /// SwiGLU of the source's two halves.
    Swiglu,
}

#[derive(Debug)]
pub(super) struct ActivationKernels {
    norm: CUfunction,
    quantise: CUfunction,
    swiglu: CUfunction,
    rope: CUfunction,
    argmax: CUfunction,
    report: CUfunction,
    read_all: CUfunction,
}

// SAFETY: function handles may be used from any thread that has bound the context.
unsafe impl Send for ActivationKernels {}

impl ActivationKernels {
    pub(super) fn load(loader: &mut Loader, width: ActivationWidth) -> Result<Self, LaunchError> {
        let [norm, quantise, swiglu] = match width {
            ActivationWidth::Int16 => ["norm_w16", "quantise_w16", "swiglu_w16"],
            ActivationWidth::Int8 => ["norm_w8", "quantise_w8", "swiglu_w8"],
        };
        Ok(ActivationKernels {
            norm: loader.function("quantise", norm)?,
            quantise: loader.function("quantise", quantise)?,
            swiglu: loader.function("quantise", swiglu)?,
            rope: loader.function("rope", "rope_append")?,
            argmax: loader.function("argmax", "argmax")?,
            report: loader.function("argmax", "report")?,
            read_all: loader.function("probe", "read_all")?,
        })
    }
}

impl Kernels {
    /// Makes an activation of at most `max_rows` rows.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn activation(
        &self,
        queue: Queue,
        kind: Source,
        args: &QuantiseArgs,
        max_rows: usize,
    ) -> Result<(), LaunchError> {
        let function = match kind {
            Source::Norm => self.activation.norm,
            Source::Plain => self.activation.quantise,
            Source::Swiglu => self.activation.swiglu,
        };
        // One block of 32 a warp for few rows; for many, enough blocks in all.
        let warps = (args.out.cols as usize).div_ceil(32);
        let few = (self.processors * 4).div_ceil(max_rows.max(1));
        let parts = warps.div_ceil(8).min(few).max(1);
        // SAFETY: by this function's contract; the kernel takes `QuantiseArgs`.
        unsafe { launch(function, Shape { grid: (parts, max_rows, 1), block: 256, shared: 0 }, queue, args) }
    }

    /// Norms over heads, RoPE, keys and values into their pages.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn rope_append(&self, queue: Queue, args: &RopeArgs, max_rows: usize) -> Result<(), LaunchError> {
        let heads = args.heads as usize + 2 * args.kv_heads as usize;
        let shape = Shape { grid: (heads.div_ceil(4), max_rows, 1), block: 128, shared: 0 };
        // SAFETY: by this function's contract; the kernel takes `RopeArgs`.
        unsafe { launch(self.activation.rope, shape, queue, args) }
    }

    /// Arg-maximum of at most `max_wanted` rows of logits.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn argmax(&self, queue: Queue, args: &ArgmaxArgs, max_wanted: usize) -> Result<(), LaunchError> {
        let parts = (args.vocab as usize).div_ceil(256 * 8).min(self.processors).max(1);
        let shape = Shape { grid: (parts, max_wanted, 1), block: 256, shared: 0 };
        // SAFETY: by this function's contract; the kernel takes `ArgmaxArgs`.
        unsafe { launch(self.activation.argmax, shape, queue, args) }
    }

    /// Copies the results to the host and raises the step's flag.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn report(&self, queue: Queue, args: &ArgmaxArgs) -> Result<(), LaunchError> {
        let shape = Shape { grid: (1, 1, 1), block: 256, shared: 0 };
        // SAFETY: by this function's contract; the kernel takes `ArgmaxArgs`.
        unsafe { launch(self.activation.report, shape, queue, args) }
    }

    /// Reads memory and nothing else.
    ///
    /// # Safety
    /// As for [`Kernels::linear`].
    pub unsafe fn read_all(&self, queue: Queue, args: &ProbeArgs) -> Result<(), LaunchError> {
        let shape = Shape { grid: (self.processors * 8, 1, 1), block: 256, shared: 0 };
        // SAFETY: by this function's contract; the kernel takes `ProbeArgs`.
        unsafe { launch(self.activation.read_all, shape, queue, args) }
    }
}
