//! Page-locked host memory: what devices lock it for, and who grants it.

use std::fmt::Debug;

/// What host memory is page-locked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostUse {
    /// A model file's own mapping, which the device reads in place.
    Registration,
    /// A copy of weights whose file can't be read in place.
    Copy,
    /// Buffers of steps, loads and measurements.
    Buffer,
}

impl HostUse {
    /// Every use.
    pub const ALL: [HostUse; 3] = [HostUse::Registration, HostUse::Copy, HostUse::Buffer];

    /// Its holder in the ledger.
    pub fn name(self) -> &'static str {
        match self {
            HostUse::Registration => "registrations",
            HostUse::Copy => "pinned copies",
            HostUse::Buffer => "buffers",
        }
    }
}

/// Grants page-locked host memory. A device asks before it locks anything.
pub trait HostLedger: Send + Sync + Debug {
    /// Charges `bytes` bytes until the result is dropped.
    ///
    /// # Errors
    /// Why not, in words for a user.
    fn reserve(&self, of: HostUse, bytes: u64) -> Result<Box<dyn HostLease>, String>;
}

/// Bytes that were granted; they are given back when it is dropped.
pub trait HostLease: Send + Sync + Debug {}
