//! The driver's calls that outlive a step: which context is current and how large its stacks are, and host memory that is locked for
//! the card. Behind a trait, so that their order, and that everything is put back, is tested without a card.

use std::ffi::c_void;
use std::fmt::Debug;
use std::ptr::NonNull;

use cudarc::driver::sys;

use crate::driver::{CudaError, check};

/// What a context asks of the driver for itself.
pub(crate) trait Calls: Debug + Send + Sync {
    /// The context that is current on this thread; null if none is.
    fn current(&self) -> Result<sys::CUcontext, CudaError>;

    /// Makes a context current on this thread until [`Calls::pop`].
    fn push(&self, context: sys::CUcontext) -> Result<(), CudaError>;

    /// Makes current what was current before the last push.
    fn pop(&self) -> Result<(), CudaError>;

    /// Bytes of stack that the current context sets aside for each of the card's threads.
    fn stack_bytes(&self) -> Result<usize, CudaError>;

    /// Changes them.
    fn set_stack_bytes(&self, bytes: usize) -> Result<(), CudaError>;

    /// Free and total bytes of the current context's card.
    fn memory_info(&self) -> Result<(u64, u64), CudaError>;

    /// Gives up a retained primary context.
    fn release(&self, device: sys::CUdevice) -> Result<(), CudaError>;

    /// Takes page-locked memory of the host: its first byte, and the device's address of that.
    fn pin(&self, bytes: usize) -> Result<(NonNull<u8>, u64), CudaError>;

    /// Frees what [`Calls::pin`] gave.
    ///
    /// # Safety
    /// It was given by `pin` and is freed once; nothing uses it any more.
    unsafe fn unpin(&self, base: NonNull<u8>) -> Result<(), CudaError>;

    /// Locks the pages of a read-only mapping, and returns the device's address of its first byte.
    ///
    /// # Safety
    /// The bytes stay mapped until [`Calls::unregister`].
    unsafe fn register(&self, base: *const u8, bytes: usize) -> Result<u64, CudaError>;

    /// Ends a registration.
    ///
    /// # Safety
    /// `base` was registered, is still mapped, and nothing reads it through the card any more.
    unsafe fn unregister(&self, base: *const u8) -> Result<(), CudaError>;
}

/// The driver itself.
#[derive(Debug)]
pub(crate) struct DriverCalls;

impl Calls for DriverCalls {
    fn current(&self) -> Result<sys::CUcontext, CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        check(unsafe { sys::cuCtxGetCurrent(&mut context) }, "cuCtxGetCurrent")?;
        Ok(context)
    }

    fn push(&self, context: sys::CUcontext) -> Result<(), CudaError> {
        // SAFETY: the caller's context is retained.
        check(unsafe { sys::cuCtxPushCurrent_v2(context) }, "cuCtxPushCurrent")
    }

    fn pop(&self) -> Result<(), CudaError> {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        check(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }, "cuCtxPopCurrent")
    }

    fn stack_bytes(&self) -> Result<usize, CudaError> {
        let mut bytes = 0;
        // SAFETY: a context is current; the call writes one integer.
        check(unsafe { sys::cuCtxGetLimit(&mut bytes, sys::CUlimit::CU_LIMIT_STACK_SIZE) }, "cuCtxGetLimit")?;
        Ok(bytes)
    }

    fn set_stack_bytes(&self, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: a context is current; the call changes a limit of it.
        check(unsafe { sys::cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, bytes) }, "cuCtxSetLimit")
    }

    fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the call writes two integers.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    fn release(&self, device: sys::CUdevice) -> Result<(), CudaError> {
        // SAFETY: the context was retained once for this release.
        check(unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) }, "cuDevicePrimaryCtxRelease")
    }

    fn pin(&self, bytes: usize) -> Result<(NonNull<u8>, u64), CudaError> {
        let mut base: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current; the call writes one pointer.
        let result = unsafe { sys::cuMemHostAlloc(&mut base, bytes, flags) };
        check(result, format_args!("{bytes} bytes of pinned memory"))?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(CudaError { call: "cuMemHostAlloc".into(), code: 0, text: "no address".into() });
        };
        let device = device_address(base.as_ptr()).inspect_err(|_| {
            // SAFETY: allocated above, and nobody knows of it. Its failure would be news of the same kind.
            let _ = unsafe { sys::cuMemFreeHost(base.as_ptr().cast()) };
        })?;
        Ok((base, device))
    }

    unsafe fn unpin(&self, base: NonNull<u8>) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check(unsafe { sys::cuMemFreeHost(base.as_ptr().cast()) }, "cuMemFreeHost")
    }

    unsafe fn register(&self, base: *const u8, bytes: usize) -> Result<u64, CudaError> {
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise; read-only registration never writes.
        let result = unsafe { sys::cuMemHostRegister_v2(base.cast_mut().cast(), bytes, flags) };
        check(result, format_args!("registration of {bytes} mapped bytes"))?;
        device_address(base).inspect_err(|_| {
            // SAFETY: registered above, and nothing reads it yet. Its failure would be news of the same kind.
            let _ = unsafe { sys::cuMemHostUnregister(base.cast_mut().cast()) };
        })
    }

    unsafe fn unregister(&self, base: *const u8) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check(unsafe { sys::cuMemHostUnregister(base.cast_mut().cast()) }, "cuMemHostUnregister")
    }
}

/// The device's address of host memory that is locked and mapped for it.
fn device_address(base: *const u8) -> Result<u64, CudaError> {
    let mut device = 0;
    // SAFETY: the memory was locked with a device mapping; the call writes one address.
    let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, base.cast_mut().cast(), 0) };
    check(result, "cuMemHostGetDevicePointer")?;
    Ok(device)
}
