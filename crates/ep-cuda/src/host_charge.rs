//! Page-locked host memory of a context: charged to the ledger before it is locked, and counted while it is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use headrace_provider::{HostLease, HostLedger, HostUse};

use crate::driver::CudaError;

/// Bytes locked now, by use.
type Counts = [AtomicU64; HostUse::ALL.len()];

/// What is locked through one context, and who grants it.
#[derive(Debug, Default)]
pub struct HostCharges {
    ledger: OnceLock<Arc<dyn HostLedger>>,
    counts: Arc<Counts>,
}

/// Bytes that were granted and are counted until this is dropped: after the memory is given back.
#[derive(Debug)]
pub struct HostCharge {
    of: HostUse,
    bytes: u64,
    counts: Arc<Counts>,
    _lease: Option<Box<dyn HostLease>>,
}

impl HostCharges {
    /// Everything locked from now on is charged to `ledger` first. Said once.
    pub fn charge_to(&self, ledger: Arc<dyn HostLedger>) {
        if self.ledger.set(ledger).is_err() {
            log::error!("page-locked memory of one context can't be charged to two ledgers");
        }
    }

    /// Charges `bytes` bytes.
    ///
    /// # Errors
    /// The ledger's refusal, with `what` it was for.
    pub fn charge(&self, of: HostUse, bytes: u64, what: &str) -> Result<HostCharge, CudaError> {
        let lease = self.ledger.get().map(|ledger| ledger.reserve(of, bytes)).transpose();
        let lease = lease.map_err(|text| CudaError { call: what.to_string(), code: 0, text })?;
        self.counts[of as usize].fetch_add(bytes, Ordering::Relaxed);
        Ok(HostCharge { of, bytes, counts: self.counts.clone(), _lease: lease })
    }

    /// Bytes locked now for `of`.
    pub fn bytes_of(&self, of: HostUse) -> u64 {
        self.counts[of as usize].load(Ordering::Relaxed)
    }

    /// Bytes locked now.
    pub fn bytes(&self) -> u64 {
        HostUse::ALL.into_iter().map(|of| self.bytes_of(of)).sum()
    }
}

impl Drop for HostCharge {
    fn drop(&mut self) {
        self.counts[self.of as usize].fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
