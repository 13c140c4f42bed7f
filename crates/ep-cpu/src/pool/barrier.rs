//! The barrier between the phases of a step: spin for a moment, then yield, then sleep, and never hang on a worker that
//! died.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Turns of the busy wait before a waiting worker starts to give its time slice away. Some 10 microseconds: longer
/// than the spread of the workers at a barrier, shorter than what another program on the core would notice.
const SPINS: u32 = 1 << 10;

/// Turns, busy ones included, before a waiting worker sleeps: by then the others must have lost their cores to another
/// program, and a worker that sleeps leaves them its own and keeps its claim to it.
const TURNS: u32 = SPINS + 16;

/// The longest that a worker sleeps before it looks whether the step was given up, in nanoseconds. Only a failure can
/// take so long; the last worker to arrive wakes the sleepers.
const NAP: i64 = 2_000_000;

/// A worker of the same step panicked; nothing that the step computed may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Poisoned;

/// A barrier for a fixed number of workers, made anew for each step, so that nothing of a failed step lives on.
///
/// The last worker to arrive resets the count and then raises the generation; the others wait for the generation to
/// change. Arriving is a release, leaving an acquire, so that everything that any worker wrote before the barrier is
/// seen by every worker behind it.
#[derive(Debug)]
pub struct Barrier {
    workers: u32,
    arrived: AtomicU32,
    generation: AtomicU32,
    sleepers: AtomicU32,
    poisoned: AtomicBool,
}

impl Barrier {
    /// A barrier for `workers` workers.
    pub fn new(workers: usize) -> Barrier {
        Barrier {
            workers: workers.max(1) as u32,
            arrived: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Waits until every worker is here. With one worker it returns at once.
    pub fn wait(&self) -> Result<(), Poisoned> {
        if self.workers == 1 {
            return Ok(());
        }
        let generation = self.generation.load(Ordering::Acquire);
        // AcqRel: the last arrival must have seen what the others wrote, and passes it on by the store below.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.workers {
            self.arrived.store(0, Ordering::Relaxed);
            // SeqCst here and in `sleep`: either this worker sees the sleeper, or the sleeper the new generation.
            self.generation.store(generation.wrapping_add(1), Ordering::SeqCst);
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                wake(&self.generation);
            }
        } else {
            let mut turns = 0u32;
            while self.generation.load(Ordering::Acquire) == generation {
                if self.poisoned.load(Ordering::Relaxed) {
                    return Err(Poisoned);
                }
                if turns < SPINS {
                    turns += 1;
                    std::hint::spin_loop();
                } else if turns < TURNS {
                    turns += 1;
                    std::thread::yield_now();
                } else {
                    self.sleepers.fetch_add(1, Ordering::SeqCst);
                    sleep(&self.generation, generation);
                    self.sleepers.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        if self.poisoned.load(Ordering::Relaxed) { Err(Poisoned) } else { Ok(()) }
    }

    /// True once a worker failed.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// Makes every present and future [`Barrier::wait`] fail.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }
}

/// Sleeps for [`NAP`] at most, unless `word` isn't `expected` any more.
#[cfg(target_os = "linux")]
fn sleep(word: &AtomicU32, expected: u32) {
    let nap = libc::timespec { tv_sec: 0, tv_nsec: NAP };
    // SAFETY: the call reads the word and the time, both of which outlive it; it writes nothing.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, expected, &nap);
    }
}

/// Wakes everybody who sleeps on `word`.
#[cfg(target_os = "linux")]
fn wake(word: &AtomicU32) {
    // SAFETY: the call takes the word's address for a name and touches no memory of ours.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}

/// Without a futex: gives the time slice away.
#[cfg(not(target_os = "linux"))]
fn sleep(_: &AtomicU32, _: u32) {
    std::thread::yield_now();
}

/// Without a futex nobody sleeps.
#[cfg(not(target_os = "linux"))]
fn wake(_: &AtomicU32) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn no_worker_passes_before_all_have_arrived() {
        let (workers, rounds) = (5, 2000);
        let (barrier, count) = (Barrier::new(workers), AtomicUsize::new(0));
        std::thread::scope(|s| {
            for _ in 0..workers {
                s.spawn(|| {
                    for round in 1..=rounds {
                        count.fetch_add(1, Ordering::Relaxed);
                        barrier.wait().unwrap();
                        assert_eq!(count.load(Ordering::Relaxed), workers * round);
                        barrier.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_poisoned_barrier_lets_everybody_go() {
        let barrier = Barrier::new(3);
        std::thread::scope(|s| {
            let waiting: Vec<_> = (0..2).map(|_| s.spawn(|| barrier.wait())).collect();
            std::thread::sleep(std::time::Duration::from_millis(5));
            barrier.poison();
            for w in waiting {
                assert_eq!(w.join().unwrap(), Err(Poisoned));
            }
        });
    }
}
