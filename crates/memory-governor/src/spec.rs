//! What a caller declares: pools with their limits, holders with their roles and terms.

use std::fmt;

use crate::error::GovernorError;

/// Physical memory of one kind. It is also the name by which a pool is addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pool {
    /// The memory of device N.
    Device(u32),
    /// Page-locked host memory, which a device reads at full link speed.
    PinnedHost,
    /// Pageable host memory.
    Host,
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pool::Device(n) => write!(f, "device {n}"),
            Pool::PinnedHost => f.write_str("pinned host"),
            Pool::Host => f.write_str("host"),
        }
    }
}

/// One pool: how much of it may be used, and in which unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Which memory.
    pub pool: Pool,
    /// Hard limit, bytes. Need not be a multiple of the granule; the remainder then stays unused.
    pub limit: u64,
    /// Mapping unit, bytes, at least 1. Every charge, floor and promise is rounded up to a multiple of it.
    pub granule: u64,
}

/// What a holder uses its bytes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Resident weights.
    Weights,
    /// KV pages.
    Kv,
    /// The staging ring.
    Staging,
    /// Activations and scratch of a step.
    Workspace,
    /// Captured graphs.
    Graphs,
    /// Anything else: the context, modules, logits.
    Other,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Weights => "weights",
            Role::Kv => "kv",
            Role::Staging => "staging",
            Role::Workspace => "workspace",
            Role::Graphs => "graphs",
            Role::Other => "other",
        })
    }
}

/// A subsystem that wants bytes of one pool, and its terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderSpec {
    /// Name in reports and errors.
    pub name: String,
    /// What the bytes are for.
    pub role: Role,
    /// Reclaim priority: holders with lower numbers are asked to yield first; equal ones in order of registration.
    pub priority: u32,
    /// Bytes set aside for this holder from now on, used or not. Nobody else can take them.
    pub floor: u64,
    /// Bytes this holder is certain to get in total (at least `floor`). What it does not use of them beyond the
    /// floor is lent to holders that can give bytes back.
    pub promise: u64,
}

impl HolderSpec {
    /// A holder with no floor and no promise: it lives on unassigned and lent bytes.
    pub fn new(name: impl Into<String>, role: Role, priority: u32) -> Self {
        Self { name: name.into(), role, priority, floor: 0, promise: 0 }
    }

    /// Sets aside `bytes` for this holder; raises the promise to at least as much.
    pub fn floor(mut self, bytes: u64) -> Self {
        self.floor = bytes;
        self.promise = self.promise.max(bytes);
        self
    }

    /// Promises `bytes` in total, elastically: only the floor is withheld from others while it is unused.
    pub fn promise(mut self, bytes: u64) -> Self {
        self.promise = bytes;
        self
    }

    pub(crate) fn terms(&self, granule: u64) -> Result<Terms, GovernorError> {
        Terms::new(self.floor, self.promise, granule)
    }
}

/// Floor and promise of a holder, bytes, multiples of the granule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    pub floor: u64,
    pub promise: u64,
}

impl Terms {
    pub(crate) fn new(floor: u64, promise: u64, granule: u64) -> Result<Self, GovernorError> {
        if promise < floor {
            return Err(GovernorError::Spec {
                what: format!("a promise of {promise} B is below the floor of {floor} B; raise it to the floor"),
            });
        }
        Ok(Self { floor: round_up(floor, granule)?, promise: round_up(promise, granule)? })
    }
}

/// `bytes` rounded up to a multiple of `granule`, or an error if that does not fit in 64 bits.
pub(crate) fn round_up(bytes: u64, granule: u64) -> Result<u64, GovernorError> {
    bytes.checked_next_multiple_of(granule).ok_or(GovernorError::TooLarge { bytes, granule })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_exact_and_checked() {
        assert_eq!(round_up(0, 2 << 20).unwrap(), 0);
        assert_eq!(round_up(1, 2 << 20).unwrap(), 2 << 20);
        assert_eq!(round_up(2 << 20, 2 << 20).unwrap(), 2 << 20);
        assert_eq!(round_up(u64::MAX, 1).unwrap(), u64::MAX);
        assert!(matches!(round_up(u64::MAX, 2), Err(GovernorError::TooLarge { .. })));
    }

    #[test]
    fn a_promise_below_the_floor_is_refused() {
        assert!(Terms::new(2, 1, 1).is_err());
        assert_eq!(Terms::new(1, 1, 4).unwrap(), Terms { floor: 4, promise: 4 });
    }
}
