//! The barrier between the phases of a step: spin for a moment, then yield, and never hang on a worker that died.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Turns of the busy wait before a waiting worker starts to give its time slice away. About 10 microseconds: longer
/// than the spread of the workers at a barrier, shorter than what another program on the core would notice.
const SPINS: u32 = 1 << 11;

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
    poisoned: AtomicBool,
}

impl Barrier {
    /// A barrier for `workers` workers.
    pub fn new(workers: usize) -> Barrier {
        Barrier {
            workers: workers.max(1) as u32,
            arrived: AtomicU32::new(0),
            generation: AtomicU32::new(0),
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
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
        } else {
            let mut turns = 0u32;
            while self.generation.load(Ordering::Acquire) == generation {
                if self.poisoned.load(Ordering::Relaxed) {
                    return Err(Poisoned);
                }
                if turns < SPINS {
                    turns += 1;
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
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
