//! One function a kernel: chooses variant, grid and block, and launches on a stream.
//!
//! Functions are loaded beforehand ([`Kernels::new`], [`Kernels::prepare`]); launching allocates nothing and asks the
//! driver nothing, so that it can be captured.

mod activation;
mod attention;
mod chain;
mod linear;
mod module;

use std::ffi::c_void;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUfunction, CUstream};

pub use activation::Source;
pub use attention::{AttentionForm, HeadShape, StagedChoice};
pub use chain::ChainShape;
pub use linear::{LinearVariant, format_params, is_piped, is_six, scale_bytes, wanted_format};
pub use module::Kernels;

/// Why a kernel was not loaded or launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The driver refused.
    #[error("CUDA driver: {0}")]
    Driver(#[from] DriverError),
    /// No kernel serves the request.
    #[error("{0}")]
    Unsupported(String),
}

/// What a launch is put on, and how it follows the launch before it.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    /// Stream, captured or not.
    pub stream: CUstream,
    /// True if the kernel may start while the kernel launched just before it on this stream still runs. It then reads
    /// weights early, and nothing else: not for weights that a copy on this stream has only just brought. Needs compute
    /// capability 9.0; ignored below.
    pub overlap: bool,
    /// False where weights lie on the host: bytes that are asked for early could cross the link twice.
    pub ask_ahead: bool,
}

impl Queue {
    /// A queue whose kernels start one after the other.
    pub fn plain(stream: CUstream) -> Self {
        Queue { stream, overlap: false, ask_ahead: true }
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    grid: (usize, usize, usize),
    block: u32,
    shared: usize,
}

/// How a launch follows the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follow {
    /// After its end.
    After,
    /// It may start before its end ([`Queue::overlap`]).
    Overlap,
    /// After its end, and all its blocks run at once.
    Together,
}

/// Launches `f` with one argument struct.
///
/// # Safety
/// `f` takes an `A` by value, and every device address in it stays valid until the kernel has run.
unsafe fn launch<A: Copy>(f: CUfunction, shape: Shape, queue: Queue, args: &A) -> Result<(), LaunchError> {
    let follow = if queue.overlap { Follow::Overlap } else { Follow::After };
    // SAFETY: by this function's contract.
    unsafe { launch_as(f, shape, queue.stream, follow, args) }
}

/// [`launch`], with every way to follow.
///
/// # Safety
/// As for [`launch`].
unsafe fn launch_as<A: Copy>(
    f: CUfunction,
    shape: Shape,
    stream: CUstream,
    follow: Follow,
    args: &A,
) -> Result<(), LaunchError> {
    let Shape { grid, block, shared } = shape;
    if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
        return Ok(());
    }
    let dim = |n: usize, most: usize| match u32::try_from(n) {
        Ok(d) if n <= most => Ok(d),
        _ => Err(LaunchError::Unsupported(format!("a grid of {n} blocks, at most {most}"))),
    };
    let (x, y, z) = (dim(grid.0, 0x7fff_ffff)?, dim(grid.1, 65535)?, dim(grid.2, 65535)?);
    let shared = dim(shared, 1 << 20)?;
    let mut copy = *args;
    let mut params = [(&raw mut copy).cast::<c_void>()];
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    attribute.value.programmaticStreamSerializationAllowed = 1;
    if follow == Follow::Together {
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attribute.value.cooperative = 1;
    }
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: &mut attribute,
        numAttrs: u32::from(follow != Follow::After),
    };
    // SAFETY: by this function's contract; the attribute outlives the call, and the driver copies the argument before it
    // returns.
    unsafe { sys::cuLaunchKernelEx(&config, f, params.as_mut_ptr(), std::ptr::null_mut()) }.result()?;
    Ok(())
}
