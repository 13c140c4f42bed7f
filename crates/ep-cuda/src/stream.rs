//! The three streams of a device, and the fence that waits for all of them.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check, log_failure};
use crate::events::Event;

/// A stream that doesn't synchronise with the default stream.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: streams may be used from any thread that has their context current.
unsafe impl Send for Stream {}

impl Stream {
    /// A new stream.
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let _current = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the handle is destroyed in `Drop`.
        let result = unsafe { sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
        check(result, "cuStreamCreate")?;
        Ok(Stream { raw, context: context.clone() })
    }

    /// The raw handle.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until everything in the stream is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, "cuStreamSynchronize")
    }

    /// Marks this point of the stream.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live and belong to one context.
        check(unsafe { sys::cuEventRecord(event.raw(), self.raw) }, "cuEventRecord")
    }

    /// Marks this point of a stream that is being captured, so that every replay of the graph writes the event's time.
    pub fn record_in_graph(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both live and belong to one context; the graph is dropped before the event.
        check(unsafe { sys::cuEventRecordWithFlags(event.raw(), self.raw, flags) }, "cuEventRecordWithFlags")
    }

    /// What comes later in this stream waits for the event.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live and belong to one context.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw(), 0) }, "cuStreamWaitEvent")
    }

    /// Queues a copy of `bytes` host bytes to the device.
    ///
    /// # Safety
    /// `from` is readable and `to` mapped, for `bytes` bytes, until the stream has done the copy (for a copy that is being
    /// captured: as long as its graph is launched).
    pub unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, self.raw) };
        check(result, format_args!("copy of {bytes} bytes to the device"))
    }

    /// Queues a copy of `bytes` device bytes to the host.
    ///
    /// # Safety
    /// As [`Stream::copy_in`], the other way round.
    pub unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, self.raw) };
        check(result, format_args!("copy of {bytes} bytes from the device"))
    }

    /// Queues a copy within the device.
    ///
    /// # Safety
    /// Both are mapped for `bytes` bytes until the stream has done the copy, and don't overlap.
    pub unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) };
        check(result, format_args!("copy of {bytes} bytes on the device"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let current = self.context.bind();
        if let Err(error) = current.as_ref().map_err(Clone::clone).and_then(|_| self.wait()) {
            log::error!("{error}");
        }
        // SAFETY: created once, destroyed once.
        log_failure(unsafe { sys::cuStreamDestroy_v2(self.raw) }, "cuStreamDestroy");
    }
}

/// Every stream that can touch device memory.
#[derive(Debug)]
pub struct Streams {
    /// Kernels, and the graphs of steps.
    pub compute: Stream,
    /// Copies into the staging ring.
    pub copy: Stream,
    /// Loads of resident weights.
    pub load: Stream,
}

impl Streams {
    /// The streams of a device.
    pub fn new(context: &Arc<Context>) -> Result<Streams, CudaError> {
        Ok(Streams { compute: Stream::new(context)?, copy: Stream::new(context)?, load: Stream::new(context)? })
    }

    /// The one fence of the device: waits for everything that is queued on any stream. What it returns is the proof that
    /// unmapping asks for; while it lives, nothing can be queued, since it borrows the streams mutably. No option skips it.
    pub fn fence(&mut self) -> Result<Fenced<'_>, CudaError> {
        for stream in [&self.compute, &self.copy, &self.load] {
            stream.wait()?;
        }
        Ok(Fenced(PhantomData))
    }
}

/// Proof that no stream has anything left to do. Only [`Streams::fence`] makes one.
#[derive(Debug)]
pub struct Fenced<'a>(PhantomData<&'a mut Streams>);

#[cfg(test)]
impl Fenced<'_> {
    /// For tests of what needs the proof, on devices that have no streams.
    pub(crate) fn without_streams() -> Fenced<'static> {
        Fenced(PhantomData)
    }
}
