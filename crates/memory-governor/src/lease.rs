//! Bytes granted: a reservation until the memory exists, a lease from then on. Each is released exactly once.

use std::fmt;
use std::sync::Arc;

use crate::error::GovernorError;
use crate::ledger::{HolderId, Sources};
use crate::transaction::Shared;

/// Charged bytes behind which there is no memory yet. Allocate, then [`commit`](Self::commit); dropping it aborts.
#[must_use = "dropping a reservation gives its bytes back"]
pub struct Reservation {
    lease: Lease,
    sources: Sources,
    open: bool,
}

impl Reservation {
    pub(crate) fn new(shared: Arc<Shared>, holder: HolderId, bytes: u64, sources: Sources) -> Self {
        Self { lease: Lease { shared, holder, bytes }, sources, open: true }
    }

    /// Bytes charged, a multiple of the granule.
    pub fn bytes(&self) -> u64 {
        self.lease.bytes
    }

    /// Where the bytes came from.
    pub fn sources(&self) -> Sources {
        self.sources
    }

    /// The memory exists now: makes a lease of the reservation.
    pub fn commit(mut self) -> Lease {
        self.close();
        self.lease.take()
    }

    /// Like [`commit`](Self::commit), into a lease of the same holder.
    ///
    /// # Errors
    /// If `lease` is another holder's; the reservation's bytes are then given back.
    pub fn commit_into(self, lease: &mut Lease) -> Result<(), GovernorError> {
        let grown = self.commit();
        lease.merge(grown)
    }

    /// Gives the bytes back; the same as dropping it.
    pub fn abort(self) {}

    fn close(&mut self) {
        if std::mem::take(&mut self.open) {
            self.lease.shared.edit(|ledger| ledger.commit(self.lease.holder, self.lease.bytes));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.close(); // then the lease inside is dropped, which releases the bytes
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("bytes", &self.bytes()).field("sources", &self.sources).finish()
    }
}

/// Bytes that a holder has. Free the memory first, then [`release`](Self::release) or drop the lease.
#[must_use = "dropping a lease releases its bytes"]
pub struct Lease {
    shared: Arc<Shared>,
    holder: HolderId,
    bytes: u64,
}

impl Lease {
    pub(crate) fn empty(shared: Arc<Shared>, holder: HolderId) -> Self {
        Self { shared, holder, bytes: 0 }
    }

    /// Bytes charged, a multiple of the granule.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the bytes back; the same as dropping it.
    pub fn release(self) {}

    /// Cuts `bytes` off into a lease of their own. Nothing changes in the ledger.
    ///
    /// # Errors
    /// If `bytes` is no multiple of the granule or more than there is.
    pub fn split(&mut self, bytes: u64) -> Result<Lease, GovernorError> {
        let granule = self.shared.lock().ledger.granule_of(self.holder);
        if bytes > self.bytes || !bytes.is_multiple_of(granule) {
            let have = self.bytes;
            return Err(GovernorError::Lease {
                what: format!("cannot split {bytes} B off a lease of {have} B in granules of {granule} B"),
            });
        }
        self.bytes -= bytes;
        Ok(Lease { shared: self.shared.clone(), holder: self.holder, bytes })
    }

    /// Takes over the bytes of another lease of the same holder. Nothing changes in the ledger.
    ///
    /// # Errors
    /// If `other` is another holder's lease; it is released then.
    pub fn merge(&mut self, mut other: Lease) -> Result<(), GovernorError> {
        if !other.belongs_to(&self.shared, self.holder) {
            return Err(GovernorError::Lease { what: "cannot merge leases of different holders".to_owned() });
        }
        // One holder's leases sum to its charge, which fits in 64 bits.
        self.bytes += std::mem::take(&mut other.bytes);
        Ok(())
    }

    /// Releases a part of the bytes.
    ///
    /// # Errors
    /// If `bytes` is no multiple of the granule or more than there is.
    pub fn shrink(&mut self, bytes: u64) -> Result<(), GovernorError> {
        self.split(bytes).map(Lease::release)
    }

    /// The memory could not be freed: the bytes stay charged for ever, and the report shows them.
    pub fn quarantine(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.shared.edit(|ledger| {
            if let Some(holder) = ledger.holders.get_mut(&self.holder) {
                holder.quarantined = holder.quarantined.saturating_add(bytes);
            }
        });
    }

    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>, holder: HolderId) -> bool {
        self.holder == holder && Arc::ptr_eq(&self.shared, shared)
    }

    /// Ends a lease whose bytes the ledger has retired already.
    pub(crate) fn forget(mut self) {
        self.bytes = 0;
    }

    fn take(&mut self) -> Lease {
        Lease { shared: self.shared.clone(), holder: self.holder, bytes: std::mem::take(&mut self.bytes) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.shared.edit(|ledger| ledger.discharge(self.holder, self.bytes));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
