//! The primary context of a card, retained while anything uses it, and what it costs.

use std::sync::Arc;

use cudarc::driver::sys;
use headrace_provider::DeviceError;

use crate::calls::{Calls, DriverCalls};
use crate::current::Current;
use crate::driver::{Card, CudaError, Driver, DriverProblem, check, log_error};
use crate::faults::Faults;
use crate::host_charge::HostCharges;
use crate::stacks::STACKS;

/// A card's primary context. Dropped last: everything that lives in it holds an [`Arc`] of it.
#[derive(Debug)]
pub struct Context {
    card: Card,
    driver: Driver,
    raw: sys::CUcontext,
    name: String,
    faults: Faults,
    calls: Arc<dyn Calls>,
    host: HostCharges,
}

// SAFETY: a context may be made current on any thread, and the driver locks what threads share.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of card `ordinal`. What is current on this thread stays current.
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
        let context = Context::assemble(card, driver, raw, faults, Arc::new(DriverCalls));
        let current = context.bind()?;
        // A context that somebody else in the process has opened keeps its stacks.
        if let Err(error) = STACKS.opened(context.calls(), context.card.device, active == 0) {
            log::info!("{}: stacks stay as large as they are: {error}", context.name);
        }
        drop(current);
        Ok(context)
    }

    /// A context that is retained.
    pub(crate) fn assemble(
        card: Card,
        driver: Driver,
        raw: sys::CUcontext,
        faults: Faults,
        calls: Arc<dyn Calls>,
    ) -> Arc<Context> {
        let name = format!("cuda:{}", card.ordinal);
        Arc::new(Context { name, card, driver, raw, faults, calls, host: HostCharges::default() })
    }

    /// Makes the context current on this thread for as long as the result lives. Every public entry of the provider does so
    /// first: it may be called from any thread, and whatever its caller had current is current again afterwards.
    ///
    /// # Errors
    /// The driver's.
    pub fn bind(self: &Arc<Context>) -> Result<Current, CudaError> {
        Current::enter(self, || self.clone())
    }

    /// The driver's calls.
    pub(crate) fn calls(&self) -> &dyn Calls {
        self.calls.as_ref()
    }

    /// Host memory that is locked through this context.
    pub fn host(&self) -> &HostCharges {
        &self.host
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
        let _current = Current::enter(self, || self)?;
        self.calls.memory_info()
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
        let context = &*self;
        let closed = Current::enter(context, || context)
            .and_then(|_current| STACKS.closes(context.calls(), context.card.device))
            // Nothing that lives in it is left.
            .and(context.calls().release(context.card.device));
        if let Err(error) = closed {
            log_error(&error);
        }
    }
}
