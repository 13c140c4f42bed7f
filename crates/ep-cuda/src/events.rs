//! Events: what one stream waits for in another, and the device's own clock.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check, log_failure};

/// An event of the driver.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    // After `raw`: the context outlives the event.
    context: Arc<Context>,
}

// SAFETY: events may be used from any thread that has their context current.
unsafe impl Send for Event {}
// SAFETY: as for `Send`; the driver locks what threads share.
unsafe impl Sync for Event {}

impl Event {
    /// An event that orders streams and keeps no time.
    pub fn ordering(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::new(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// An event that keeps the time at which the stream reached it.
    pub fn timing(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::new(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn new(context: &Arc<Context>, flags: u32) -> Result<Event, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the caller has the context current; the handle is destroyed in `Drop`.
        check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "cuEventCreate")?;
        Ok(Event { raw, context: context.clone() })
    }

    /// Waits until the stream has reached the event.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        check(unsafe { sys::cuEventSynchronize(self.raw) }, "cuEventSynchronize")
    }

    /// True if the stream has reached the event. A failure is one of everything, and is found elsewhere.
    pub fn has_happened(&self) -> bool {
        // SAFETY: the event lives.
        unsafe { sys::cuEventQuery(self.raw) != sys::CUresult::CUDA_ERROR_NOT_READY }
    }

    /// The raw handle.
    pub(crate) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Seconds from `start` to this event; both are timing events that have happened.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; the call writes one float.
        let result = unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) };
        check(result, "cuEventElapsedTime")?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = match self.context.bind() {
            Ok(current) => current,
            Err(error) => return log::error!("{error}"),
        };
        // SAFETY: created once, destroyed once; the driver keeps what a recorded wait still needs.
        log_failure(unsafe { sys::cuEventDestroy_v2(self.raw) }, "cuEventDestroy");
    }
}
