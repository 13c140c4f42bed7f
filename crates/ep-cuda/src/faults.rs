//! Refusals on demand, for tests of what happens when a driver says no. A provider that is opened without them has none.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::driver::CudaError;

/// What the driver can be made to refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultPoint {
    /// Page-locked memory.
    Pin,
    /// The registration of a file's mapping.
    Register,
    /// A granule of the card's memory, as if another process had taken the last one.
    Granule,
}

impl FaultPoint {
    const fn code(self) -> sys::CUresult {
        match self {
            FaultPoint::Pin | FaultPoint::Granule => sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            FaultPoint::Register => sys::CUresult::CUDA_ERROR_NOT_SUPPORTED,
        }
    }
}

#[derive(Debug)]
struct Fault {
    at: FaultPoint,
    /// Calls that still succeed.
    after: u64,
    /// Calls that are refused after that.
    times: u64,
    /// Requests of fewer bytes are let through.
    from_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Faults to come. Looked at only if there is any.
    armed: AtomicU64,
    faults: Mutex<Vec<Fault>>,
    fired: AtomicU64,
}

/// A handle to the refusals of one provider, which stays valid when the provider belongs to somebody else.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    state: Arc<State>,
}

impl Faults {
    /// After `after` calls of at least `from_bytes` bytes, the next `times` are refused.
    pub fn refuse(&self, at: FaultPoint, after: u64, times: u64, from_bytes: u64) {
        let mut faults = self.state.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.push(Fault { at, after, times, from_bytes });
        self.state.armed.store(faults.len() as u64, Ordering::Release);
    }

    /// Nothing is refused from now on.
    pub fn clear(&self) {
        self.state.faults.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.state.armed.store(0, Ordering::Release);
    }

    /// Calls that were refused so far.
    pub fn fired(&self) -> u64 {
        self.state.fired.load(Ordering::Relaxed)
    }

    /// Counts a call for `bytes` bytes; the error if it is to be refused.
    pub(crate) fn check(&self, at: FaultPoint, bytes: u64) -> Result<(), CudaError> {
        if self.state.armed.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut faults = self.state.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let mut refused = false;
        for fault in faults.iter_mut().filter(|f| f.at == at && bytes >= f.from_bytes) {
            if fault.after > 0 {
                fault.after -= 1;
            } else if fault.times > 0 {
                fault.times -= 1;
                refused = true;
            }
        }
        if !refused {
            return Ok(());
        }
        self.state.fired.fetch_add(1, Ordering::Relaxed);
        Err(CudaError {
            call: format!("{at:?} of {bytes} bytes"),
            code: at.code() as u32,
            text: "a refusal that was asked for".to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_come_when_they_were_asked_for() {
        let faults = Faults::default();
        assert!(faults.check(FaultPoint::Pin, 1 << 40).is_ok());
        faults.refuse(FaultPoint::Pin, 1, 2, 100);
        let seen: Vec<bool> = [99, 100, 100, 99, 100, 100].map(|b| faults.check(FaultPoint::Pin, b).is_ok()).to_vec();
        assert_eq!(seen, [true, true, false, true, false, true]);
        assert_eq!(faults.fired(), 2);
        faults.refuse(FaultPoint::Granule, 0, u64::MAX, 0);
        assert!(faults.check(FaultPoint::Granule, 2 << 20).is_err_and(|e| e.is_out_of_memory()));
        faults.clear();
        assert!(faults.check(FaultPoint::Granule, 2 << 20).is_ok());
    }
}
