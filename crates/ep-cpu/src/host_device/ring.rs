//! The host's side of the staging ring: what was started, what each slot holds, and the events of one run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headrace_provider::Segment;

use super::copier::{Copier, Job, Ring};
use crate::exec::RingEvents;

/// The ring as the host sees it.
pub struct HostRing {
    /// Events, and the ring's shape.
    pub events: Arc<Ring>,
    /// Copies into each slot that were ever started.
    pub started: Vec<u64>,
    /// The same before the running step's.
    pub before: Vec<u64>,
    /// What each slot holds when all of them are done.
    pub contents: Vec<Option<Arc<[Segment]>>>,
}

impl HostRing {
    /// A ring in which nothing was ever copied.
    pub fn new(slots: u32, slot_bytes: u64) -> HostRing {
        HostRing {
            events: Arc::new(Ring::new(slots, slot_bytes)),
            started: vec![0; slots as usize],
            before: vec![0; slots as usize],
            contents: vec![None; slots as usize],
        }
    }
}

/// The events of one run.
pub struct Running<'a> {
    /// The copy thread.
    pub copier: &'a Copier,
    /// The ring.
    pub ring: &'a HostRing,
    /// Set when the copies are started.
    pub started: &'a AtomicBool,
    /// Nanoseconds that the first worker waited for copies.
    pub waited: &'a AtomicU64,
    /// The copies.
    pub job: Mutex<Option<Job>>,
}

impl RingEvents for Running<'_> {
    fn start(&self) {
        self.started.store(true, Ordering::Relaxed);
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(job) = job.filter(|j| !j.list.is_empty()) {
            self.copier.start(job);
        }
    }

    fn free(&self, slot: u32) {
        self.copier.free(&self.ring.events, slot);
    }

    fn copied(&self, slot: u32, copies: u64) -> Result<bool, String> {
        let before = self.ring.before.get(slot as usize).copied().unwrap_or(0);
        if self.ring.events.copied(slot) >= before + copies {
            return Ok(true);
        }
        match self.ring.events.is_stopped() {
            true => Err(self.ring.events.failure().unwrap_or_else(|| "the ring was abandoned".to_string())),
            false => Ok(false),
        }
    }

    fn waited(&self, time: Duration) {
        self.waited.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
