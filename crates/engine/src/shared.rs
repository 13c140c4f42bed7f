//! A lock that is handed on fairly and remembers a panic: for what two engines' threads take turns with.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// A value behind a fair lock.
#[derive(Debug, Default)]
pub struct Shared<T> {
    value: Mutex<T>,
    broken: AtomicBool,
}

/// The value, for one thread.
pub struct Held<'a, T> {
    value: MutexGuard<'a, T>,
    broken: &'a AtomicBool,
    panicking: bool,
}

impl<T> Shared<T> {
    /// Keeps `value`.
    pub fn new(value: T) -> Shared<T> {
        Shared { value: Mutex::new(value), broken: AtomicBool::new(false) }
    }

    /// Waits for the value. Whoever waits gets it within a turn or so, even if its present holder comes again at once.
    pub fn lock(&self) -> Held<'_, T> {
        Held { value: self.value.lock(), broken: &self.broken, panicking: std::thread::panicking() }
    }

    /// True once a thread has panicked with the lock held: the value may be half changed, and only its end is certain to be sound.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        if !self.panicking && std::thread::panicking() {
            self.broken.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_panic_with_the_lock_held_is_remembered_and_the_lock_is_free() {
        let shared = Shared::new(1);
        *shared.lock() += 1;
        assert!(!shared.is_broken());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = shared.lock();
            unreachable!("on purpose");
        }));
        assert!(panicked.is_err() && shared.is_broken() && *shared.lock() == 2);
    }

    #[test]
    fn whoever_waits_gets_a_turn_beside_a_holder_that_always_comes_again() {
        let shared = Shared::new(false);
        std::thread::scope(|scope| {
            let greedy = scope.spawn(|| {
                let since = Instant::now();
                loop {
                    let done = shared.lock();
                    if *done || since.elapsed() > Duration::from_secs(20) {
                        return since.elapsed();
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            *shared.lock() = true;
            assert!(greedy.join().unwrap() < Duration::from_secs(10));
        });
    }
}
