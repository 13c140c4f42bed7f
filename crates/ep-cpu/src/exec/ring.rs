//! The compute side of the staging ring: slots released after their last reader, waits for copies before the first one.

use std::time::{Duration, Instant};

use crate::compile::Stage;
use crate::exec::Step;
use crate::pool::Barrier;

/// Turns of the busy wait for a copy before a worker starts to give its time slice away.
const SPINS: u32 = 1 << 9;

/// The events between the workers of a step and the copies into the ring.
pub trait RingEvents: Sync {
    /// Starts the program's copies. Called once, when nothing can refuse the step any more.
    fn start(&self);

    /// Everything before has read `slot` for the last time. Called by one worker.
    fn free(&self, slot: u32);

    /// True once `copies` copies into `slot`, counted from the start of the step, are done. The error says why there
    /// will be none.
    fn copied(&self, slot: u32, copies: u64) -> Result<bool, String>;

    /// The first worker waited so long for a copy.
    fn waited(&self, time: Duration);
}

impl Step<'_> {
    /// What worker `index` owes the ring before `stage`. Every worker has passed the barrier behind the last linear layer.
    pub(super) fn enter(&self, stage: &Stage, index: usize, barrier: &Barrier) -> Result<(), String> {
        let Some(ring) = self.ring else { return Ok(()) };
        if index == 0 {
            stage.sync.frees.iter().for_each(|&slot| ring.free(slot));
        }
        for &(slot, copies) in &stage.sync.waits {
            let mut turns = 0;
            let mut since = None;
            while !ring.copied(slot, copies)? {
                if barrier.is_poisoned() {
                    return Err("another worker failed".to_string());
                }
                since.get_or_insert_with(Instant::now);
                if turns < SPINS {
                    turns += 1;
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
            if let Some(since) = since.filter(|_| index == 0) {
                ring.waited(since.elapsed());
            }
        }
        Ok(())
    }
}
