//! Who wants to hear when a pool gets tight: subscriptions, and the events they get.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use crate::ledger::Ledger;
use crate::spec::Pool;
use crate::transaction::Shared;

/// What happened to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PressureKind {
    /// Bytes that nobody can be asked to yield have reached the subscriber's share of the limit.
    Rising,
    /// They have fallen below it again: a chance to promote.
    Falling,
    /// A request was refused.
    Refused {
        /// Bytes it was short of.
        missing: u64,
    },
}

/// The event a subscriber gets. Figures are those at the time of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pressure {
    /// Which pool.
    pub pool: Pool,
    /// What happened.
    pub kind: PressureKind,
    /// Charged, bytes.
    pub used: u64,
    /// The part of it that holders could be asked to yield, bytes.
    pub reclaimable: u64,
    /// Limit, bytes.
    pub limit: u64,
}

pub(crate) type Callback = Arc<dyn Fn(&Pressure) + Send + Sync>;

/// Ends the subscription when dropped.
#[must_use = "dropping it ends the subscription"]
#[derive(Debug)]
pub struct Subscription {
    pub(crate) shared: Weak<Shared>,
    pub(crate) id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let gone = shared.lock().subscribers.remove(self.id);
            drop(gone); // foreign destructors run without the lock
        }
    }
}

struct Subscriber {
    id: u64,
    pool: usize,
    percent: u8,
    above: bool,
    callback: Callback,
}

/// All subscriptions.
#[derive(Default)]
pub(crate) struct Subscribers {
    list: Vec<Subscriber>,
    next: u64,
}

/// Events to be fired once the lock is free.
#[must_use = "events are fired after unlocking"]
#[derive(Default)]
pub(crate) struct Events(Vec<(Callback, Pressure)>);

impl Events {
    /// Calls everybody. A subscriber that panics harms neither the others nor whoever released a lease.
    pub(crate) fn fire(self) {
        for (callback, event) in self.0 {
            let _ = catch_unwind(AssertUnwindSafe(|| callback(&event)));
        }
    }
}

impl Subscribers {
    pub(crate) fn add(&mut self, ledger: &Ledger, pool: usize, percent: u8, callback: Callback) -> u64 {
        let id = self.next;
        self.next += 1;
        let above = is_above(&measure(ledger, pool, PressureKind::Rising), percent);
        self.list.push(Subscriber { id, pool, percent, above, callback });
        id
    }

    fn remove(&mut self, id: u64) -> Option<Callback> {
        let at = self.list.iter().position(|s| s.id == id)?;
        Some(self.list.remove(at).callback)
    }

    /// The thresholds crossed since the last call.
    pub(crate) fn crossed(&mut self, ledger: &Ledger) -> Events {
        let mut events = Events::default();
        for subscriber in &mut self.list {
            let mut event = measure(ledger, subscriber.pool, PressureKind::Rising);
            let above = is_above(&event, subscriber.percent);
            if above != subscriber.above {
                subscriber.above = above;
                event.kind = if above { PressureKind::Rising } else { PressureKind::Falling };
                events.0.push((subscriber.callback.clone(), event));
            }
        }
        events
    }

    /// The news of a refusal.
    pub(crate) fn refused(&self, ledger: &Ledger, pool: usize, missing: u64) -> Events {
        let event = measure(ledger, pool, PressureKind::Refused { missing });
        Events(self.list.iter().filter(|s| s.pool == pool).map(|s| (s.callback.clone(), event)).collect())
    }
}

fn measure(ledger: &Ledger, pool: usize, kind: PressureKind) -> Pressure {
    let reclaimable = ledger.managed_in(pool).map(|(_, h)| h.reclaimable()).sum();
    let state = &ledger.pools[pool];
    Pressure { pool: state.pool, kind, used: ledger.used(pool), reclaimable, limit: state.limit }
}

fn is_above(event: &Pressure, percent: u8) -> bool {
    let firm = event.used.saturating_sub(event.reclaimable);
    u128::from(firm) * 100 >= u128::from(event.limit) * u128::from(percent)
}
