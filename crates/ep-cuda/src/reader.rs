//! The kernel that reads memory, the card's or the host's, and does nothing else: what ceilings are measured with.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::abi::ProbeArgs;
use crate::context::Context;
use crate::driver::{CudaError, check, log_failure};
use crate::ptx;
use crate::stream::Stream;

/// The kernel of one card.
pub struct Reader {
    module: sys::CUmodule,
    function: sys::CUfunction,
    blocks: u32,
    context: Arc<Context>,
}

// SAFETY: handles of the driver, valid in any thread that binds the context.
unsafe impl Send for Reader {}

impl Reader {
    /// Loads it; `None` if there is no kernel for the card.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Arc<Context>) -> Result<Option<Reader>, CudaError> {
        let (major, minor) = context.card().capability;
        let target = ptx::target_for(major.unsigned_abs(), minor.unsigned_abs());
        let Some(source) = target.and_then(|t| t.modules.iter().find(|m| m.name == "probe")) else { return Ok(None) };
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is PTX text that ends in zero; a context is current.
        check(unsafe { sys::cuModuleLoadData(&mut module, source.ptx.as_ptr().cast()) }, "the probe's device code")?;
        let blocks = context.card().multiprocessors * 8;
        let mut reader = Reader { module, function: std::ptr::null_mut(), blocks, context: context.clone() };
        // SAFETY: the module is loaded; the name ends in zero.
        let found = unsafe { sys::cuModuleGetFunction(&mut reader.function, module, c"read_all".as_ptr()) };
        check(found, "the probe's kernel")?;
        Ok(Some(reader))
    }

    /// Queues a read of `bytes` bytes from `source`, both multiples of 16. Four bytes at `sink` may be written.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The device can read them, and write four bytes at `sink`, until the stream is done.
    pub unsafe fn read(&self, stream: &Stream, source: u64, bytes: u64, sink: u64) -> Result<(), CudaError> {
        let mut args = ProbeArgs { source, count: bytes / 16, sink };
        let mut pointers = [std::ptr::from_mut(&mut args).cast::<c_void>()];
        // SAFETY: the kernel takes one `ProbeArgs`; the rest is the caller's promise.
        let launched = unsafe {
            sys::cuLaunchKernel(
                self.function,
                self.blocks,
                1,
                1,
                256,
                1,
                1,
                0,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(launched, "the probe's kernel")
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _current = match self.context.bind() {
            Ok(current) => current,
            Err(error) => return log::error!("{error}"),
        };
        // SAFETY: loaded once, unloaded once; every launch has been waited for.
        log_failure(unsafe { sys::cuModuleUnload(self.module) }, "cuModuleUnload");
    }
}
