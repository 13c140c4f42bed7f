//! The primary context of a card, retained while anything uses it, and what it costs.

use std::sync::Arc;

use cudarc::driver::sys;
use headrace_provider::DeviceError;

use crate::driver::{Card, CudaError, Driver, DriverProblem, check, log_failure};
use crate::faults::Faults;

/// Bytes of stack of a thread on the card: the least that drivers take.
const STACK_BYTES: usize = 16;

/// A card's primary context. Dropped last: everything that lives in it holds an [`Arc`] of it.
#[derive(Debug)]
pub struct Context {
    card: Card,
    driver: Driver,
    raw: sys::CUcontext,
    name: String,
    faults: Faults,
}

// SAFETY: a context may be made current on any thread, and the driver locks what threads share.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of card `ordinal` and makes it current on this thread.
    ///
    /// # Errors
    /// [`DriverProblem`], in every variant.
    pub fn open(ordinal: usize) -> Result<Arc<Context>, DriverProblem> {
        Context::open_with(ordinal, Faults::default())
    }

    /// As [`Context::open`], with calls that are refused on demand.
    ///
    /// # Errors
    /// As [`Context::open`].
    pub fn open_with(ordinal: usize, faults: Faults) -> Result<Arc<Context>, DriverProblem> {
        let driver = Driver::load()?;
        let card = driver.usable_card(ordinal)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the device is valid; the call writes two integers.
        let state = unsafe { sys::cuDevicePrimaryCtxGetState(card.device, &mut flags, &mut active) };
        check(state, "cuDevicePrimaryCtxGetState")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is valid; the call writes a handle that `Drop` gives back.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, card.device) }, "cuDevicePrimaryCtxRetain")?;
        let context = Arc::new(Context { name: format!("cuda:{ordinal}"), card, driver, raw, faults });
        context.bind()?;
        if active == 0 {
            context.shrink_stacks();
        }
        Ok(context)
    }

    /// Takes the stacks of the card's threads back: a context sets 1 KiB aside for every thread that could ever run at once,
    /// which is half of what a context costs on a large card. The crate's kernels have none, and the driver gives a kernel
    /// what it was compiled with in any case. A context that somebody else in the process has opened keeps its own.
    fn shrink_stacks(&self) {
        // SAFETY: the context is current; the call changes a limit of it.
        let set = unsafe { sys::cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, STACK_BYTES) };
        if let Err(error) = check(set, "cuCtxSetLimit") {
            log::info!("{}: stacks stay as large as they are: {error}", self.name);
        }
    }

    /// Makes the context current on this thread. Every public entry of the provider does so first: it may be called from
    /// any thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        check(unsafe { sys::cuCtxSetCurrent(self.raw) }, "cuCtxSetCurrent")
    }

    /// Refusals for tests.
    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// The card.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The driver.
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// `cuda:N`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Free and total bytes of the card, all processes together, as the driver counts.
    pub fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the call writes two integers.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// The raw handle.
    pub fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// A device's refusal of an argument.
    pub(crate) fn invalid(&self, what: impl Into<String>) -> DeviceError {
        DeviceError::Invalid { device: self.name.clone(), what: what.into() }
    }

    /// A device's failure.
    pub(crate) fn failed(&self, what: impl ToString) -> DeviceError {
        DeviceError::Failed { device: self.name.clone(), what: what.to_string() }
    }

    /// A failure while `bytes` of `what` were asked for.
    pub(crate) fn no_memory(&self, what: impl Into<String>, bytes: u64, reason: impl ToString) -> DeviceError {
        DeviceError::OutOfMemory { device: self.name.clone(), what: what.into(), bytes, reason: reason.to_string() }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`, released once here; nothing that lives in it is left.
        log_failure(unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.card.device) }, "cuDevicePrimaryCtxRelease");
    }
}
