//! The few primitives the governor synchronises with: the standard library's, or loom's when the models are checked.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Condvar, Mutex, MutexGuard},
    thread::{ThreadId, current},
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread::{ThreadId, current},
};

use std::sync::PoisonError;
use std::time::Instant;

/// A mutex and the condition variable of everybody who waits for what it guards.
pub(crate) struct Monitor<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks. No foreign code runs under this lock, so a poisoned one still guards consistent state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lock up until somebody notifies or `until` has passed. May return early without a reason.
    pub(crate) fn wait<'a>(&self, guard: MutexGuard<'a, T>, until: Option<Instant>) -> MutexGuard<'a, T> {
        #[cfg(not(loom))]
        if let Some(until) = until {
            let left = until.saturating_duration_since(Instant::now());
            return self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        #[cfg(loom)]
        let _ = until; // loom models no clock: a wait with a deadline is a wait
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes everybody who waits.
    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}
