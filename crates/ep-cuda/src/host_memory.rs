//! Host memory that the copy engine and the kernels can reach: pinned buffers, registered file mappings.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check, log_failure};
use crate::faults::FaultPoint;

/// Page-locked memory that the device can read and write in place.
#[derive(Debug)]
pub struct PinnedBuffer {
    base: NonNull<u8>,
    bytes: usize,
    device: u64,
    context: Arc<Context>,
}

// SAFETY: the buffer owns its memory as a `Vec` does; the device's accesses are ordered by streams.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Takes `bytes` bytes (at least one) of page-locked memory, all zero.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        context.bind()?;
        let bytes = bytes.max(1);
        context.faults().check(FaultPoint::Pin, bytes as u64)?;
        let mut base: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the call writes one pointer.
        let result = unsafe { sys::cuMemHostAlloc(&mut base, bytes, flags) };
        check(result, format_args!("{bytes} bytes of pinned memory"))?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(CudaError { call: "cuMemHostAlloc".into(), code: 0, text: "no address".into() });
        };
        // SAFETY: the driver gave `bytes` writable bytes. Zeroing makes all of them initialised.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        let mut buffer = PinnedBuffer { base, bytes, device: 0, context: context.clone() };
        // SAFETY: the memory was allocated with a device mapping.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut buffer.device, base.as_ptr().cast(), 0) };
        check(result, "cuMemHostGetDevicePointer")?;
        Ok(buffer)
    }

    /// Its address for the device.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a buffer has a byte at least.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The bytes. Nothing on the device may be writing them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: all bytes are initialised; the provider reads them only after the stream that writes them is done.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    /// The bytes. Nothing on the device may be using them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and the buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.context.bind() {
            log::error!("{error}");
            return;
        }
        // SAFETY: allocated once, freed once; the provider has waited for every stream that uses it.
        log_failure(unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) }, "cuMemFreeHost");
    }
}

/// A read-only file mapping that the copy engine and the kernels may read. The owner keeps the mapping alive for longer.
#[derive(Debug)]
pub struct Registration {
    base: *mut c_void,
    device: u64,
    context: Arc<Context>,
}

// SAFETY: a registration is a fact about the process's memory; it may be ended from any thread.
unsafe impl Send for Registration {}

impl Registration {
    /// Registers `bytes`, which must be a mapping of a file.
    ///
    /// # Safety
    /// The bytes stay mapped for as long as the registration lives.
    pub unsafe fn new(context: &Arc<Context>, bytes: &[u8]) -> Result<Registration, CudaError> {
        context.bind()?;
        context.faults().check(FaultPoint::Register, bytes.len() as u64)?;
        let base = bytes.as_ptr().cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise; read-only registration never writes.
        let result = unsafe { sys::cuMemHostRegister_v2(base, bytes.len(), flags) };
        check(result, format_args!("registration of {} mapped bytes", bytes.len()))?;
        let mut registration = Registration { base, device: 0, context: context.clone() };
        // SAFETY: the memory was registered with a device mapping.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut registration.device, base, 0) };
        check(result, "cuMemHostGetDevicePointer")?;
        Ok(registration)
    }

    /// The device's address of `bytes`, which are within what was registered.
    pub fn device(&self, bytes: &[u8]) -> u64 {
        self.device + (bytes.as_ptr().addr() - self.base.addr()) as u64
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Err(error) = self.context.bind() {
            log::error!("{error}");
            return;
        }
        // SAFETY: registered once, ended once; the provider has waited for every copy out of it.
        log_failure(unsafe { sys::cuMemHostUnregister(self.base) }, "cuMemHostUnregister");
    }
}
