//! Why epochs begin, and what steps move.

use crate::residency::ResidencyCounters;

/// Why an epoch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpochReason {
    /// The model was loaded.
    Load,
    /// KV grew and took bytes from the weights.
    KvGrowth,
    /// KV shrank and the weights took bytes back.
    KvShrink,
    /// The limit was changed.
    Limit,
    /// Another engine that shares the device took bytes from the weights, or left and gave them back.
    OtherEngine,
    /// A step failed, and the ring was filled anew.
    Recovery,
}

impl EpochReason {
    /// Every reason.
    pub const ALL: [EpochReason; 6] = [
        EpochReason::Load,
        EpochReason::KvGrowth,
        EpochReason::KvShrink,
        EpochReason::Limit,
        EpochReason::OtherEngine,
        EpochReason::Recovery,
    ];

    /// Name in stats.
    pub const fn name(self) -> &'static str {
        match self {
            EpochReason::Load => "load",
            EpochReason::KvGrowth => "kv-growth",
            EpochReason::KvShrink => "kv-shrink",
            EpochReason::Limit => "limit",
            EpochReason::OtherEngine => "other-engine",
            EpochReason::Recovery => "recovery",
        }
    }
}

/// What paged weights count. Totals since the engine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedCounters {
    /// Bytes copied by steps and prologues.
    pub streamed_bytes: u64,
    /// Bytes that steps read where they stay.
    pub resident_bytes_read: u64,
    /// Bytes of weights that steps read in place on the host, and of embedding rows that they took from there.
    pub host_mapped_bytes: u64,
    /// Bytes of weights that the host's cores read and multiplied in place of a device.
    pub host_computed_bytes: u64,
    /// Bytes copied to become resident, at load and by promotions.
    pub loaded_bytes: u64,
    /// Nanoseconds that these copies took, by the host's clock.
    pub loading_nanos: u64,
    /// Steps submitted.
    pub steps: u64,
    /// Epochs by reason, in the order of [`EpochReason::ALL`].
    pub epochs: [u64; EpochReason::ALL.len()],
    /// What a residency policy did; all 0 under the static schedule.
    pub residency: ResidencyCounters,
}
