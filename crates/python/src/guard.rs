//! What lies between Python and the engine: the GIL released, also to end things; panics turned into errors; Ctrl-C noticed.
//!
//! The engine's threads take the GIL: to pass a message to a handler of Python's `logging`, and to look for signals. So nobody
//! may wait for one of them, or for a lock that it may hold, and keep the GIL; and what Python runs for such a thread (a handler,
//! or the end of an object that it happens to collect) must not wait for what that very thread holds.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use headrace_engine::EngineError;
use headrace_engine::process::Process;
use headrace_engine::serve::SharedEngine;
use parking_lot::MutexGuard;
use pyo3::prelude::*;

use crate::errors::{HeadraceError, to_py};

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
    let done = py.detach(|| {
        let done = catch_unwind(AssertUnwindSafe(work));
        if !Inside::is() {
            // Mostly nothing: what ended inside has a thread of its own.
            ENDS.run();
        }
        done
    });
    match done {
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

thread_local! {
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// While one lives, Python code that this thread runs is inside of work of the engine, and must wait for nothing.
pub struct Inside(());

impl Inside {
    /// From now on.
    pub fn new() -> Inside {
        INSIDE.set(INSIDE.get() + 1);
        Inside(())
    }

    /// True inside.
    pub fn is() -> bool {
        INSIDE.get() > 0
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

/// Refuses what would wait, inside.
pub fn may_wait() -> Result<(), Stop> {
    let what = "this call waits for another one on the same thread, which called it: from a logging handler or a signal handler, \
                the engine at work can't be used";
    if Inside::is() { Err(Stop::Python(HeadraceError::new_err(what))) } else { Ok(()) }
}

/// The engine, for this thread alone. To be waited for without the GIL.
pub struct Turn<'a> {
    engine: MutexGuard<'a, headrace_engine::Engine>,
    _inside: Inside,
}

impl<'a> Turn<'a> {
    /// Waits for the engine; refused where this thread may be the one that has it.
    pub fn wait(shared: &'a Waiting<SharedEngine>) -> Result<Turn<'a>, Stop> {
        Turn::wait_for(shared.get()?)
    }

    /// As [`Turn::wait`], of an engine that was loaded in this process.
    pub fn wait_for(shared: &'a SharedEngine) -> Result<Turn<'a>, Stop> {
        may_wait()?;
        Ok(Turn { engine: shared.lock(), _inside: Inside::new() })
    }
}

impl Deref for Turn<'_> {
    type Target = headrace_engine::Engine;

    fn deref(&self) -> &headrace_engine::Engine {
        &self.engine
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut headrace_engine::Engine {
        &mut self.engine
    }
}

/// Something whose end waits for threads or locks: it ends without the GIL, and inside (where Python's collector may find it) on
/// a thread of its own. In a fork of the process that made it, it can't be used, and doesn't end.
pub struct Waiting<T: Send + 'static> {
    value: ManuallyDrop<T>,
    process: Process,
}

impl<T: Send + 'static> Waiting<T> {
    /// Keeps `value`.
    pub fn new(value: T) -> Waiting<T> {
        Waiting { value: ManuallyDrop::new(value), process: Process::current() }
    }

    /// The value.
    ///
    /// # Errors
    /// In a fork: a lock of it that another thread held stays locked there, and its threads are gone.
    pub fn get(&self) -> Result<&T, EngineError> {
        self.process.check().map(|()| &*self.value)
    }

    /// As [`Waiting::get`].
    pub fn get_mut(&mut self) -> Result<&mut T, EngineError> {
        self.process.check().map(|()| &mut *self.value)
    }

    /// The value, for a look at what needs no lock and no thread.
    pub fn peek(&self) -> &T {
        &self.value
    }
}

impl<T: Send + 'static> Drop for Waiting<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        // SAFETY: this is the only place that takes it, and nobody looks at it afterwards.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        let end = move || drop(catch_unwind(AssertUnwindSafe(|| drop(value))));
        if Inside::is() {
            ENDS.later(Box::new(end));
        } else {
            Python::attach(|py| py.detach(end));
        }
    }
}

/// What is to end, found where this thread must not wait: on a thread of its own, or as soon as this one may.
static ENDS: Ends = Ends(Mutex::new(Vec::new()));

struct Ends(Mutex<Vec<Box<dyn FnOnce() + Send>>>);

impl Ends {
    /// Has `end` called by another thread. Where none can be had, this one does it once it is outside: here it may hold the very
    /// lock that `end` waits for.
    fn later(&'static self, end: Box<dyn FnOnce() + Send>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(end);
        // The closure takes nothing along that would end here if the thread isn't made.
        if let Err(error) = std::thread::Builder::new().name("headrace-end".into()).spawn(|| self.run()) {
            log::warn!(target: "headrace_python::guard", "no thread for what is to end, which this one does later: {error}");
        }
    }

    fn run(&self) {
        loop {
            // The lock isn't held while something ends.
            let Some(end) = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop() else { return };
            end();
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
