//! Host memory that the copy engine and the kernels can reach: pinned buffers, registered file mappings.

use std::ptr::NonNull;
use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_provider::HostUse;

use crate::context::Context;
use crate::driver::{CudaError, log_error};
use crate::faults::FaultPoint;
use crate::host_charge::HostCharge;

/// Page-locked memory that the device can read and write in place.
#[derive(Debug)]
pub struct PinnedBuffer {
    base: NonNull<u8>,
    bytes: usize,
    device: u64,
    context: Arc<Context>,
    _charge: HostCharge,
}

// SAFETY: the buffer owns its memory as a `Vec` does; the device's accesses are ordered by streams.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Takes `bytes` bytes (at least one) of page-locked memory, all zero.
    ///
    /// # Errors
    /// The ledger's refusal, or the driver's.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        PinnedBuffer::for_use(context, bytes, HostUse::Buffer)
    }

    /// As [`PinnedBuffer::new`], charged as what it is for.
    ///
    /// # Errors
    /// As [`PinnedBuffer::new`].
    pub fn for_use(context: &Arc<Context>, bytes: usize, of: HostUse) -> Result<PinnedBuffer, CudaError> {
        let _current = context.bind()?;
        let bytes = bytes.max(1);
        let charge = context.host().charge(of, bytes as u64, &format!("{bytes} bytes of pinned memory"))?;
        context.faults().check(FaultPoint::Pin, bytes as u64)?;
        let (base, device) = context.calls().pin(bytes)?;
        // SAFETY: the driver gave `bytes` writable bytes. Zeroing makes all of them initialised.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(PinnedBuffer { base, bytes, device, context: context.clone(), _charge: charge })
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
        // SAFETY: allocated once, freed once; the provider has waited for every stream that uses it.
        let freed = self.context.bind().and_then(|_current| unsafe { self.context.calls().unpin(self.base) });
        if let Err(error) = freed {
            log_error(&error);
        }
    }
}

/// A model file's read-only mapping that the copy engine and the kernels may read. It keeps the model, and so the mapping, for as
/// long as it lives.
#[derive(Debug)]
pub struct Registration {
    base: *const u8,
    device: u64,
    context: Arc<Context>,
    /// Whose file it is. Let go once the registration has ended: fields are dropped after `drop` has run.
    _model: Arc<ModelSpec>,
    _charge: HostCharge,
}

// SAFETY: a registration is a fact about the process's memory; it may be ended from any thread.
unsafe impl Send for Registration {}

impl Registration {
    /// Registers the mapping of file `file` of `model`.
    ///
    /// # Errors
    /// The ledger's refusal, or the driver's; an error without a call for a file that isn't there, or isn't mapped.
    pub fn new(context: &Arc<Context>, model: &Arc<ModelSpec>, file: usize) -> Result<Registration, CudaError> {
        let mapped = model.files.get(file).filter(|f| f.mapped).map(|f| &f.bytes[..]);
        let absent = || CudaError { call: format!("file {file}"), code: 0, text: "not a mapping".to_string() };
        let bytes = mapped.ok_or_else(absent)?;
        let _current = context.bind()?;
        let what = format!("registration of {} mapped bytes", bytes.len());
        let charge = context.host().charge(HostUse::Registration, bytes.len() as u64, &what)?;
        context.faults().check(FaultPoint::Register, bytes.len() as u64)?;
        let base = bytes.as_ptr();
        // SAFETY: the mapping belongs to the model, which lives in the registration until that has ended. A mapping is never
        // replaced while its model lives: a `ModelSpec` behind an `Arc` isn't changed.
        let device = unsafe { context.calls().register(base, bytes.len()) }?;
        Ok(Registration { base, device, context: context.clone(), _model: model.clone(), _charge: charge })
    }

    /// The device's address of `bytes`, which are within what was registered.
    pub fn device(&self, bytes: &[u8]) -> u64 {
        self.device + (bytes.as_ptr().addr() - self.base.addr()) as u64
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered once, ended once; the model keeps the mapping until after this; the provider has waited for every
        // copy out of it.
        let ended = self.context.bind().and_then(|_current| unsafe { self.context.calls().unregister(self.base) });
        if let Err(error) = ended {
            log_error(&error);
        }
    }
}
