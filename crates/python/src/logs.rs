//! The core's messages (`log::warn!` and others) in Python's `logging`, under the logger `headrace`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyString;
use pyo3_log::{Caching, Logger, ResetHandle};

use crate::guard::Inside;

/// Forgets which levels are listened to. Empty if somebody else's logger was there first.
static LEVELS: OnceLock<ResetHandle> = OnceLock::new();
/// True once the interpreter is about to end: from then on nothing is passed on, and nobody waits for the GIL.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Messages that are being passed on.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
/// How long the interpreter's end is put off for them at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Passes on the messages of our own crates, and no others.
struct Bridge(Logger);

/// The target that becomes the logger's name: `headrace_engine::setup` is `headrace.engine.setup` in Python. `None` for crates
/// that aren't ours.
fn renamed(target: &str) -> Option<String> {
    target.strip_prefix("headrace_").map(|rest| format!("headrace::{rest}"))
}

impl Log for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        renamed(metadata.target())
            .is_some_and(|target| self.0.enabled(&Metadata::builder().level(metadata.level()).target(&target).build()))
    }

    fn log(&self, record: &Record<'_>) {
        let Some(target) = renamed(record.target()) else { return };
        let metadata = Metadata::builder().level(record.level()).target(&target).build();
        // Without the GIL: the levels that are listened to were looked up before.
        if !self.0.enabled(&metadata) {
            return;
        }
        let record = Record::builder()
            .metadata(metadata)
            .args(*record.args())
            .module_path(record.module_path())
            .file(record.file())
            .line(record.line())
            .build();
        let _under_way = UnderWay::new();
        if ENDED.load(Ordering::SeqCst) {
            return;
        }
        // Fails while the interpreter goes away: there is nobody to tell.
        Python::try_attach(|py| {
            // A handler is Python code: whatever lock the one who logs may hold, it must not wait for it.
            let _inside = Inside::new();
            let before = PyErr::take(py);
            self.0.log(&record);
            if let Some(error) = PyErr::take(py) {
                unheard(py, error);
            }
            if let Some(error) = before {
                error.restore(py);
            }
        });
    }

    fn flush(&self) {}
}

/// Counted while it lives.
struct UnderWay(());

impl UnderWay {
    fn new() -> UnderWay {
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        UnderWay(())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a handler or a filter raised. Whoever logs can't raise it: it goes where exceptions go that nobody can catch. Only Ctrl-C
/// is kept for the next one who looks for signals.
fn unheard(py: Python<'_>, error: PyErr) {
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // SAFETY: this thread has the GIL.
        unsafe { pyo3::ffi::PyErr_SetInterrupt() };
    } else {
        error.write_unraisable(py, Some(PyString::new(py, "a logging handler of headrace").as_any()));
    }
}

/// Passes messages on from now until the interpreter ends. Changes nothing if a logger is installed already.
pub fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let logger = Logger::new(py, Caching::LoggersAndLevels)?.filter(LevelFilter::Debug);
    let levels = logger.reset_handle();
    if log::set_boxed_logger(Box::new(Bridge(logger))).is_ok() {
        log::set_max_level(LevelFilter::Debug);
        let _ = LEVELS.set(levels);
        py.import("atexit")?.call_method1("register", (wrap_pyfunction!(end, module)?,))?;
    }
    Ok(())
}

/// Before the interpreter ends: a thread that comes back to Python later never returns, and whoever joins it doesn't either.
#[pyfunction]
fn end(py: Python<'_>) {
    ENDED.store(true, Ordering::SeqCst);
    py.detach(|| {
        let deadline = Instant::now() + PATIENCE;
        while UNDER_WAY.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    // Holds no logger any more, so that handlers and what they hold can go.
    look_again(py);
}

/// Has the next message of each logger ask Python which levels are listened to. Called at the start of every call that may take
/// long, so that a change of `logging`'s settings counts from the next one on.
pub fn look_again(_: Python<'_>) {
    if let Some(levels) = LEVELS.get() {
        levels.reset();
    }
}
