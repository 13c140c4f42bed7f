//! Instruments for tests: faults on demand, and what a device counted, from outside of whoever owns it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headrace_provider::RangeKind;

/// An operation that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultPoint {
    /// `map`: no memory.
    Map,
    /// `unmap`: the granules stay.
    Unmap,
    /// `resize`, in either direction: no memory.
    Resize,
    /// `load`.
    Load,
    /// One copy into a slot, on the copy thread; the step that waits for it fails, or the next one.
    Copy,
    /// `record`.
    Record,
    /// `run`, in the middle of the step, with its copies on their way; a program of copies alone before it starts them.
    Run,
}

/// One failure to come. A test instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which operation fails.
    pub at: FaultPoint,
    /// 1 for the next such operation, 2 for the one after, and so on.
    pub nth: u64,
}

/// Ranges in the order of [`index`].
pub const RANGES: [RangeKind; 4] = [RangeKind::Weights, RangeKind::Staging, RangeKind::Kv, RangeKind::Workspace];

/// Index of a range in [`RANGES`].
pub fn index(range: RangeKind) -> usize {
    match range {
        RangeKind::Weights => 0,
        RangeKind::Staging => 1,
        RangeKind::Kv => 2,
        RangeKind::Workspace => 3,
    }
}

#[derive(Debug, Default)]
struct State {
    faults: Mutex<Vec<Fault>>,
    panics: Mutex<Vec<Fault>>,
    fired: AtomicU64,
    mapped: [AtomicU64; 4],
    peak: [AtomicU64; 4],
    fixed: AtomicU64,
    peak_total: AtomicU64,
    copies: AtomicU64,
    copied_bytes: AtomicU64,
    copy_nanos: AtomicU64,
    fences: AtomicU64,
}

/// A handle to a device's instruments, which stays valid when the device itself belongs to somebody else. All counts are
/// since the device was made.
#[derive(Clone, Debug, Default)]
pub struct DeviceProbe {
    state: Arc<State>,
}

impl DeviceProbe {
    /// Makes one operation fail, once.
    pub fn inject(&self, fault: Fault) {
        self.state.faults.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    /// Makes one operation panic, once, as a bug in the provider would.
    pub fn inject_panic(&self, fault: Fault) {
        self.state.panics.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    /// Faults that have fired.
    pub fn fired(&self) -> u64 {
        self.state.fired.load(Ordering::Relaxed)
    }

    /// Bytes mapped in a range now.
    pub fn mapped(&self, range: RangeKind) -> u64 {
        self.state.mapped[index(range)].load(Ordering::Relaxed)
    }

    /// The most bytes that were ever mapped in a range.
    pub fn peak(&self, range: RangeKind) -> u64 {
        self.state.peak[index(range)].load(Ordering::Relaxed)
    }

    /// The most bytes that were ever taken at once: all ranges and the fixed bytes, in whole granules.
    pub fn peak_total(&self) -> u64 {
        self.state.peak_total.load(Ordering::Relaxed)
    }

    /// Bytes taken now: all ranges and the fixed bytes, in whole granules.
    pub fn total(&self) -> u64 {
        RANGES.into_iter().map(|r| self.mapped(r)).sum::<u64>() + self.state.fixed.load(Ordering::Relaxed)
    }

    /// Copies into slots that are done.
    pub fn copies(&self) -> u64 {
        self.state.copies.load(Ordering::Relaxed)
    }

    /// Bytes of weights that those copies moved.
    pub fn copied_bytes(&self) -> u64 {
        self.state.copied_bytes.load(Ordering::Relaxed)
    }

    /// Time that copies took.
    pub fn copy_time(&self) -> Duration {
        Duration::from_nanos(self.state.copy_nanos.load(Ordering::Relaxed))
    }

    /// Fences so far.
    pub fn fences(&self) -> u64 {
        self.state.fences.load(Ordering::Relaxed)
    }

    /// Counts an operation; true if it is to fail.
    pub(super) fn strikes(&self, at: FaultPoint) -> bool {
        let due = |faults: &Mutex<Vec<Fault>>| {
            let mut hit = false;
            faults.lock().unwrap_or_else(PoisonError::into_inner).retain_mut(|f| {
                if f.at != at {
                    return true;
                }
                f.nth = f.nth.saturating_sub(1);
                hit |= f.nth == 0;
                f.nth > 0
            });
            hit
        };
        let (panics, hit) = (due(&self.state.panics), due(&self.state.faults));
        self.state.fired.fetch_add(u64::from(panics) + u64::from(hit), Ordering::Relaxed);
        assert!(!panics, "{at:?}: a panic that was asked for");
        hit
    }

    pub(super) fn set_mapped(&self, range: RangeKind, bytes: u64) {
        self.state.mapped[index(range)].store(bytes, Ordering::Relaxed);
        self.state.peak[index(range)].fetch_max(bytes, Ordering::Relaxed);
        self.state.peak_total.fetch_max(self.total(), Ordering::Relaxed);
    }

    pub(super) fn set_fixed(&self, bytes: u64) {
        self.state.fixed.store(bytes, Ordering::Relaxed);
        self.state.peak_total.fetch_max(self.total(), Ordering::Relaxed);
    }

    pub(super) fn copied(&self, bytes: u64, time: Duration) {
        self.state.copy_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.state.copies.fetch_add(1, Ordering::Relaxed);
        self.state.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn fenced(&self) {
        self.state.fences.fetch_add(1, Ordering::Relaxed);
    }
}
