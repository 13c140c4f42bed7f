//! What lies between Python and the engine: the GIL released, panics turned into errors, Ctrl-C noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use headrace_engine::EngineError;
use pyo3::prelude::*;

use crate::errors::to_py;

/// How often a running call looks for signals. Looking takes the GIL, which another thread may hold for milliseconds.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Why a call without the GIL stopped: the engine's error, or an exception raised by a signal handler or a callback.
pub enum Stop {
    /// The engine's.
    Engine(EngineError),
    /// Python's.
    Python(PyErr),
}

impl From<EngineError> for Stop {
    fn from(error: EngineError) -> Stop {
        Stop::Engine(error)
    }
}

/// Runs `work` without the GIL. A panic becomes a `HeadraceError`.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Stop> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(Stop::Engine(error))) => Err(to_py(&error)),
        Ok(Err(Stop::Python(error))) => Err(error),
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(to_py(&EngineError::Internal(what.to_string())))
        }
    }
}

/// Calls Python's signal handlers now and then.
pub struct Signals {
    next: Instant,
    error: Option<PyErr>,
}

impl Signals {
    /// Looks for the first time after one interval.
    pub fn new() -> Signals {
        Signals { next: Instant::now() + SIGNAL_INTERVAL, error: None }
    }

    /// `Err(Interrupted)` if a handler raised, which Ctrl-C's does, or `also` did. `also` is called with the GIL at the
    /// same times.
    pub fn check(&mut self, also: impl FnOnce(Python<'_>) -> PyResult<()>) -> Result<(), EngineError> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + SIGNAL_INTERVAL;
        Python::attach(|py| py.check_signals().and_then(|()| also(py))).map_err(|e| {
            self.error = Some(e);
            EngineError::Interrupted
        })
    }

    /// The result of work that used [`Signals::check`], with the handler's exception in place of `Interrupted`.
    pub fn settle<T>(&mut self, result: Result<T, EngineError>) -> Result<T, Stop> {
        result.map_err(|error| match (&error, self.error.take()) {
            (EngineError::Interrupted, Some(python)) => Stop::Python(python),
            _ => Stop::Engine(error),
        })
    }
}
