//! How a holder gives bytes back: the callback it implements. The governor never takes bytes itself.

use crate::lease::Lease;
use crate::spec::Pool;

/// A request to yield bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ask {
    /// Pool that is short.
    pub pool: Pool,
    /// Bytes wanted, a multiple of the granule, never more than the holder uses beyond its promise.
    pub bytes: u64,
    /// On whose behalf: a holder's name, or "limit".
    pub requester: String,
}

/// A holder could not release what it offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct ReclaimError {
    /// What stood in the way.
    pub what: String,
}

/// A holder that can give bytes back, in three steps, so that a growth that fails half-way can be undone:
///
/// 1. [`offer`](Reclaim::offer): pick victims that nothing in flight uses and hand over their leases. Cheap: nothing
///    is unmapped yet. The leases stay charged to this holder.
/// 2. [`evict`](Reclaim::evict): make the memory free. Comes only when all offers together suffice.
/// 3. Then the governor retires the leases; or, if anything failed, [`restore`](Reclaim::restore) hands them back.
///
/// One transaction at a time runs on a pool, so a holder never sees a second `offer` before the first has ended. No
/// lock of the governor is held meanwhile: callbacks may release leases, and read reports, but neither reserve bytes
/// nor change limits ([`Reentrant`](crate::GovernorError::Reentrant)), nor wait for a thread that does.
pub trait Reclaim: Send + Sync {
    /// Hands over leases to be given up: about `ask.bytes`, or less, or none. A surplus becomes unassigned.
    fn offer(&self, ask: &Ask) -> Vec<Lease>;

    /// Makes the memory behind the offered leases free. On `Err` the holder still has all of it.
    ///
    /// # Errors
    /// When the memory could not be released; the whole growth is then undone.
    fn evict(&self, leases: &[Lease]) -> Result<(), ReclaimError>;

    /// The growth failed: the leases are the holder's again. If `evicted`, their memory has to be filled anew (or the
    /// leases dropped). Must not fail.
    fn restore(&self, leases: Vec<Lease>, evicted: bool);
}
