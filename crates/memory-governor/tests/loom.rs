//! The concurrent parts under every interleaving (up to a bound on preemptions), by loom.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p headrace-memory-governor --test loom`
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![cfg(loom)]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headrace_memory_governor::{Ask, Governor, Holder, HolderSpec, Lease, Pool, PoolSpec, Reclaim, ReclaimError, Role};
use loom::thread;

const DEVICE: Pool = Pool::Device(0);
const LONG: Duration = Duration::from_secs(3600);

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}

fn governor(limit: u64) -> Governor {
    Governor::new([PoolSpec { pool: DEVICE, limit, granule: 1 }]).unwrap()
}

fn holder(governor: &Governor, name: &str) -> Holder {
    governor.holder(DEVICE, HolderSpec::new(name, Role::Other, 5)).unwrap()
}

fn assert_sound(governor: &Governor, used: u64) {
    let report = governor.report();
    let pool = report.pool(DEVICE).unwrap();
    assert_eq!((pool.used, pool.peak_oversubscribed, pool.underflows, pool.waiting), (used, 0, 0, 0), "{pool}");
}

/// Weights that yield what they are asked for. The mutex is std's on purpose: it is never held across a call that waits.
struct Weights {
    holder: Holder,
    lease: Mutex<Vec<Lease>>,
    stuck: bool,
    /// Between an offer and its eviction or return.
    offering: AtomicBool,
}

impl Weights {
    fn new(governor: &Governor, bytes: u64, stuck: bool) -> Arc<Self> {
        let holder = holder(governor, "weights");
        let lease = Mutex::new(vec![holder.reserve(bytes).unwrap().commit()]);
        let weights = Arc::new(Self { holder, lease, stuck, offering: AtomicBool::new(false) });
        weights.holder.set_reclaim(&weights);
        weights
    }

    fn bytes(&self) -> u64 {
        self.lease.lock().unwrap().iter().map(Lease::bytes).sum()
    }
}

impl Reclaim for Weights {
    fn offer(&self, ask: &Ask) -> Vec<Lease> {
        assert!(!self.offering.swap(true, SeqCst), "one transaction at a time");
        let mut own = std::mem::take(&mut *self.lease.lock().unwrap());
        let mut left = ask.bytes;
        let mut offer = Vec::new();
        for lease in &mut own {
            let part = left.min(lease.bytes());
            offer.push(lease.split(part).unwrap());
            left -= part;
        }
        self.lease.lock().unwrap().extend(own);
        offer
    }

    fn evict(&self, _: &[Lease]) -> Result<(), ReclaimError> {
        self.offering.store(self.stuck, SeqCst);
        if self.stuck { Err(ReclaimError { what: "stuck".into() }) } else { Ok(()) }
    }

    fn restore(&self, leases: Vec<Lease>, _: bool) {
        self.offering.store(false, SeqCst);
        self.lease.lock().unwrap().extend(leases);
    }
}

#[test]
fn racing_reserves_never_share_a_byte() {
    check(|| {
        let governor = governor(10);
        let (a, b) = (holder(&governor, "a"), holder(&governor, "b"));
        let other = thread::spawn(move || b.reserve(6).ok().map(|r| r.commit()));
        let mine = a.reserve(6).ok().map(|r| r.commit());
        let theirs = other.join().unwrap();
        assert!(mine.is_some() != theirs.is_some(), "one of the two fits, never both, never none");
        assert_sound(&governor, 6);
    });
}

#[test]
fn a_release_is_never_missed_by_who_waits() {
    check(|| {
        let governor = governor(10);
        let a = holder(&governor, "a");
        let all = a.reserve(10).unwrap().commit();
        let waiter = thread::spawn(move || a.reserve_within(6, LONG).unwrap().commit());
        all.release();
        let lease = waiter.join().unwrap();
        assert_sound(&governor, 6);
        drop(lease);
        assert_sound(&governor, 0);
    });
}

#[test]
fn two_waiters_are_both_served() {
    check(|| {
        let governor = governor(10);
        let a = holder(&governor, "a");
        let all = a.reserve(10).unwrap().commit();
        let spawn = || {
            let a = a.clone();
            thread::spawn(move || a.reserve_within(10, LONG).unwrap().commit().release())
        };
        let (first, second) = (spawn(), spawn());
        all.release();
        first.join().unwrap();
        second.join().unwrap();
        assert_sound(&governor, 0);
    });
}

#[test]
fn racing_growths_reclaim_exactly_what_both_need() {
    check(|| {
        let governor = governor(10);
        let weights = Weights::new(&governor, 10, false);
        let (a, b) = (holder(&governor, "a"), holder(&governor, "b"));
        let other = thread::spawn(move || b.reserve(3).unwrap().commit());
        let mine = a.reserve(4).unwrap().commit();
        let theirs = other.join().unwrap();
        assert_eq!(weights.bytes(), 3);
        assert_sound(&governor, 10);
        drop((mine, theirs));
        assert_sound(&governor, 3);
    });
}

#[test]
fn a_limit_change_racing_a_growth_stays_exact() {
    check(|| {
        let governor = governor(10);
        let weights = Weights::new(&governor, 8, false);
        let (a, setter) = (holder(&governor, "a"), governor.clone());
        let limit = thread::spawn(move || setter.set_limit(DEVICE, 5).is_ok());
        let lease = a.reserve(6).ok().map(|r| r.commit());
        let lowered = limit.join().unwrap();
        assert!(lowered != lease.is_some(), "6 B under a limit of 5 B: one of the two must give way");
        let now = governor.report().pools[0].limit;
        assert_eq!(now, if lowered { 5 } else { 10 });
        assert_eq!(weights.bytes(), if lowered { 5 } else { 4 });
        assert_sound(&governor, weights.bytes() + lease.as_ref().map_or(0, Lease::bytes));
    });
}

#[test]
fn racing_limit_changes_leave_one_of_the_two() {
    check(|| {
        let governor = governor(10);
        let weights = Weights::new(&governor, 10, false);
        let setter = governor.clone();
        let other = thread::spawn(move || setter.set_limit(DEVICE, 7).unwrap());
        governor.set_limit(DEVICE, 4).unwrap();
        other.join().unwrap();
        assert!([4, 7].contains(&governor.report().pools[0].limit));
        assert_eq!(weights.bytes(), 4);
        assert_sound(&governor, 4);
    });
}

#[test]
fn a_raised_limit_is_never_missed_by_who_waits() {
    check(|| {
        let governor = governor(4);
        let a = holder(&governor, "a");
        let waiter = thread::spawn(move || a.reserve_within(6, LONG).unwrap().commit());
        governor.set_limit(DEVICE, 6).unwrap();
        waiter.join().unwrap().release();
        assert_sound(&governor, 0);
    });
}

#[test]
fn a_growth_that_is_undone_races_a_release() {
    check(|| {
        let governor = governor(10);
        let weights = Weights::new(&governor, 6, true);
        let (a, b) = (holder(&governor, "a"), holder(&governor, "b"));
        let held = b.reserve(4).unwrap().commit();
        let release = thread::spawn(move || held.release());
        let lease = a.reserve(4).ok().map(|r| r.commit());
        release.join().unwrap();
        assert_eq!(weights.bytes(), 6, "what can't be evicted stays");
        assert_sound(&governor, 6 + lease.as_ref().map_or(0, Lease::bytes));
    });
}
