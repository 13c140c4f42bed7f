//! How weights give way to another holder of the device's memory, in the middle of its growth.

use std::sync::{Arc, Mutex};

use headrace_memory_governor::{Ask, Lease, Reclaim, ReclaimError};

use super::{lock, record};
use crate::books::Member;
use crate::paged::{EpochReason, PagedWeights, Target};
use crate::shared::{Held, Shared};

/// The weights' side of a reclaim. Kept apart from the engine, because the governor calls it in the middle of a growth, which may
/// be another engine's, on another thread.
pub(super) struct GiveWay {
    pub(super) weights: Arc<Shared<PagedWeights>>,
    pub(super) lease: Mutex<Lease>,
    /// What an offer promised to go down to, from the offer to its end.
    pub(super) target: Mutex<Option<Promised>>,
    /// Held while weights become resident: no offer is made meanwhile, and none of them starts in the middle of one.
    pub(super) placing: Mutex<()>,
    /// The engine's part in the books.
    pub(super) member: Arc<Member>,
}

/// What an offer promised.
pub(super) struct Promised {
    target: Target,
    reason: EpochReason,
    /// True if another engine asked: then steps of this one may be in flight.
    foreign: bool,
}

impl GiveWay {
    /// The weights, with no step in flight whose results anybody waits for. Any result may be dropped: what another engine has in
    /// flight is, and it computes that again.
    fn weights_at_rest(&self) -> std::result::Result<Held<'_, PagedWeights>, ReclaimError> {
        let mut weights = self.weights.lock();
        if self.weights.is_broken() {
            return Err(ReclaimError { what: "another engine failed in the middle of a change".to_string() });
        }
        weights.overtake();
        Ok(weights)
    }

    /// Gives back what the lease holds beyond what the weights need.
    pub(super) fn settle(&self) {
        let held = self.weights.lock().held_bytes();
        let mut lease = lock(&self.lease);
        let surplus = lease.bytes().saturating_sub(held);
        if surplus > 0 && lease.shrink(surplus).is_err() {
            log::error!("the weights' lease of {} bytes can't be cut by {surplus}", lease.bytes());
        }
    }
}

impl Reclaim for GiveWay {
    fn offer(&self, ask: &Ask) -> Vec<Lease> {
        let _placing = lock(&self.placing);
        let weights = self.weights.lock();
        let held = weights.held_bytes();
        let target = weights.within(held.saturating_sub(ask.bytes));
        let freed = held - target.held;
        let own = self.member.ending();
        let foreign =
            ask.requester != "limit" && own.as_ref().is_some_and(|own| !ask.requester.ends_with(own.as_str()));
        let reason = match ask.requester.as_str() {
            "limit" => EpochReason::Limit,
            _ if foreign => EpochReason::OtherEngine,
            _ => EpochReason::KvGrowth,
        };
        // A changed limit may be another engine's as well.
        let foreign = foreign || (ask.requester == "limit" && own.is_some());
        match lock(&self.lease).split(freed) {
            Ok(part) if freed > 0 => {
                *lock(&self.target) = Some(Promised { target, reason, foreign });
                vec![part]
            }
            _ => Vec::new(),
        }
    }

    fn evict(&self, _leases: &[Lease]) -> std::result::Result<(), ReclaimError> {
        let Some(Promised { target, reason, foreign }) = lock(&self.target).take() else { return Ok(()) };
        let mut weights = if foreign { self.weights_at_rest()? } else { self.weights.lock() };
        let placed = weights.place(target, reason).map_err(|e| ReclaimError { what: e.to_string() });
        // Before the bytes are anybody else's.
        if let Err(error) = record(&self.member, &weights) {
            log::error!("{error}");
        }
        placed
    }

    fn restore(&self, leases: Vec<Lease>, evicted: bool) {
        if evicted {
            // The pieces are cold already. They stay so; their bytes are free.
            drop(leases);
        } else {
            let mut own = lock(&self.lease);
            for lease in leases {
                if let Err(error) = own.merge(lease) {
                    log::error!("a lease of the weights did not come home: {error}");
                }
            }
        }
        lock(&self.target).take();
        self.settle();
    }
}
