//! The rules G1 to G9 of the design, one by one. Each test breaks when its rule is broken.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![cfg(not(loom))]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{DEVICE, MIB, Yielder, assert_sound, governor, pool};
use headrace_memory_governor::{
    Ask, Governor, GovernorError, HolderSpec, Lease, Pool, PoolSpec, PressureKind, Reclaim, ReclaimError, Refusal,
    Role, Source, Sources,
};

fn plain(name: &str) -> HolderSpec {
    HolderSpec::new(name, Role::Other, 9)
}

fn budget(result: Result<impl std::fmt::Debug, GovernorError>) -> Box<headrace_memory_governor::BudgetError> {
    match result {
        Err(GovernorError::Budget(error)) => error,
        other => panic!("expected a budget error, got {other:?}"),
    }
}

#[test]
fn g1_bytes_are_charged_from_reserve_on_and_released_exactly_once() {
    let governor = governor(100, 10);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    let reservation = holder.reserve(40).unwrap();
    assert_eq!((holder.report().used, holder.report().reserved), (40, 40));
    let mut lease = reservation.commit();
    assert_eq!((holder.report().used, holder.report().reserved), (40, 0));
    let part = lease.split(10).unwrap();
    assert_eq!(holder.report().used, 40, "splitting moves no bytes");
    part.release();
    assert_eq!(holder.report().used, 30);
    lease.shrink(10).unwrap();
    holder.grow(&mut lease, 30).unwrap();
    assert_eq!((lease.bytes(), holder.report().used), (50, 50));
    drop(lease);
    let open = holder.reserve(20).unwrap();
    holder.reserve(20).unwrap().abort();
    drop(open);
    assert_eq!((holder.report().used, holder.report().reserved, holder.report().peak), (0, 0, 50));
    assert_sound(&governor);
}

#[test]
fn g1_no_two_grants_share_a_byte() {
    let governor = governor(100, 1);
    let a = governor.holder(DEVICE, plain("a")).unwrap();
    let b = governor.holder(DEVICE, plain("b")).unwrap();
    let _lease = a.reserve(60).unwrap();
    assert_eq!(budget(b.reserve(41)).missing, 1);
    assert_eq!(b.reserve(40).unwrap().bytes(), 40);
}

#[test]
fn g2_a_failed_growth_changes_nothing() {
    let governor = governor(100, 1);
    let first = Yielder::new(&governor, "first", 1);
    let second = Yielder::new(&governor, "second", 2);
    let taker = governor.holder(DEVICE, plain("taker")).unwrap();
    first.fill(50);
    second.fill(50);
    second.mood.lock().unwrap().cap = Some(29);
    let before = pool(&governor);
    let error = budget(taker.reserve(80));
    assert_eq!((error.missing, error.smallest_limit, &error.refusal), (1, Some(101), &Refusal::NotEnough));
    assert_eq!(error.yields, [("first".into(), 50, 50), ("second".into(), 30, 29)]);
    let mut after = pool(&governor);
    after.refused -= 1;
    assert_eq!(after, before);
    assert_eq!((first.bytes(), second.bytes()), (50, 50));
    assert_eq!(
        *first.restored.lock().unwrap(),
        [(1, false)],
        "nothing may be unmapped for a growth that can't succeed"
    );
}

#[test]
fn g2_the_limit_that_an_error_names_is_enough_and_one_less_is_not() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let taker = governor.holder(DEVICE, plain("taker").promise(30)).unwrap();
    weights.fill(90);
    weights.mood.lock().unwrap().cap = Some(10);
    let limit = budget(taker.reserve(60)).smallest_limit.unwrap();
    governor.set_limit(DEVICE, limit - 1).unwrap();
    budget(taker.reserve(60));
    governor.set_limit(DEVICE, limit).unwrap();
    taker.reserve(60).unwrap().abort();
}

#[test]
fn g2_a_request_of_several_holders_and_pools_is_granted_whole_or_not_at_all() {
    let pools = [DEVICE, Pool::PinnedHost].map(|pool| PoolSpec { pool, limit: 100, granule: 10 });
    let governor = Governor::new(pools).unwrap();
    let weights = Yielder::new(&governor, "weights", 1);
    weights.fill(100);
    let kv = governor.holder(DEVICE, plain("kv")).unwrap();
    let mirror = governor.holder(Pool::PinnedHost, plain("mirror")).unwrap();
    let before = governor.report();
    assert_eq!(budget(governor.reserve_all(&[(&kv, 50), (&mirror, 101)])).pool, Pool::PinnedHost);
    let mut after = governor.report();
    after.pools[1].refused = 0;
    assert_eq!((after, weights.bytes()), (before, 100));
    let both = governor.reserve_all(&[(&kv, 45), (&mirror, 100)]).unwrap();
    assert_eq!(both.iter().map(|r| r.bytes()).collect::<Vec<_>>(), [50, 100]);
    assert_eq!(weights.bytes(), 50);
    assert!(matches!(governor.reserve_all(&[(&kv, 1), (&kv, 1)]), Err(GovernorError::Spec { .. })));
}

#[test]
fn g3_growth_takes_own_bytes_then_unassigned_ones_then_reclaims() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let kv = governor.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5).floor(20).promise(70)).unwrap();
    weights.fill(50);
    assert_eq!(pool(&governor).unassigned, 30);
    let own = kv.reserve(15).unwrap();
    assert_eq!(own.sources(), Sources { own: 15, unassigned: 0, reclaimed: 0 });
    assert_eq!(pool(&governor).unassigned, 30);
    let mixed = kv.reserve(10).unwrap();
    assert_eq!(mixed.sources(), Sources { own: 5, unassigned: 5, reclaimed: 0 });
    assert!(weights.asks.lock().unwrap().is_empty(), "nobody is asked while bytes are free");
    let rest = kv.reserve(40).unwrap();
    assert_eq!(rest.sources(), Sources { own: 0, unassigned: 25, reclaimed: 15 });
    assert_eq!(weights.asks.lock().unwrap()[0].bytes, 15);
}

#[test]
fn g3_victims_are_asked_by_ascending_priority_and_never_the_requester() {
    let governor = governor(100, 1);
    let late = Yielder::new(&governor, "late", 7);
    let early = Yielder::new(&governor, "early", 2);
    let middle = Yielder::new(&governor, "middle", 3);
    for holder in [&late, &early, &middle] {
        holder.fill(33);
    }
    early.mood.lock().unwrap().cap = Some(0);
    let bytes = middle.holder.reserve(20).unwrap();
    assert_eq!(bytes.sources(), Sources { own: 0, unassigned: 1, reclaimed: 19 });
    assert_eq!((early.bytes(), middle.bytes(), late.bytes()), (33, 33, 14));
    assert!(middle.asks.lock().unwrap().is_empty());
    assert_eq!(early.asks.lock().unwrap()[0].bytes, 19);
    drop(bytes);
    early.mood.lock().unwrap().cap = None;
    let _bytes = middle.holder.reserve(21).unwrap();
    assert_eq!((early.bytes(), late.bytes()), (32, 14), "20 B were free, the first in line gives the rest");
}

#[test]
fn g3_what_was_promised_is_never_asked_for() {
    let governor = governor(100, 1);
    let kv = Yielder::with(&governor, HolderSpec::new("kv", Role::Kv, 0).promise(60));
    let weights = Yielder::new(&governor, "weights", 9);
    kv.fill(60);
    weights.fill(40);
    assert_eq!(budget(weights.holder.reserve(1)).missing, 1);
    assert!(kv.asks.lock().unwrap().is_empty());
}

#[test]
fn g4_only_leases_that_a_holder_hands_over_are_taken() {
    struct Thief {
        loot: Mutex<Vec<Lease>>,
        back: AtomicU64,
    }
    impl Reclaim for Thief {
        fn offer(&self, _: &Ask) -> Vec<Lease> {
            self.loot.lock().unwrap().drain(..).collect()
        }
        fn evict(&self, _: &[Lease]) -> Result<(), ReclaimError> {
            Ok(())
        }
        fn restore(&self, leases: Vec<Lease>, _: bool) {
            self.back.fetch_add(leases.iter().map(Lease::bytes).sum(), Ordering::Relaxed);
            self.loot.lock().unwrap().extend(leases);
        }
    }
    let governor = governor(100, 1);
    let [thief, victim, taker] = ["thief", "victim", "taker"].map(|n| governor.holder(DEVICE, plain(n)).unwrap());
    let _kept = thief.reserve(50).unwrap().commit();
    let loot = Mutex::new(vec![victim.reserve(50).unwrap().commit()]);
    let callback = Arc::new(Thief { loot, back: AtomicU64::new(0) });
    thief.set_reclaim(&callback);
    budget(taker.reserve(10));
    assert_eq!(victim.report().used, 50, "a holder can't offer what isn't its own");
    assert_eq!(callback.back.load(Ordering::Relaxed), 50);
    assert_eq!(thief.report().used, 50, "and a holder that offers nothing keeps everything");
}

#[test]
fn g5_no_lock_is_held_while_callbacks_run() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let other = governor.holder(DEVICE, plain("other")).unwrap();
    let kept = Mutex::new(Some(other.reserve(10).unwrap().commit()));
    weights.fill(90);
    let (spy, outside, steps) = (governor.clone(), other.clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = steps.clone();
    weights.mood.lock().unwrap().hook = Some(Arc::new(move |step| {
        // Another thread reads, releases, and is kept from reserving by the queue alone.
        let (spy, outside, lease) = (spy.clone(), outside.clone(), kept.lock().unwrap().take());
        let helper = thread::spawn(move || {
            drop(lease);
            assert_eq!(budget(outside.try_reserve(1)).refusal, Refusal::Queued);
            spy.report().pool(DEVICE).unwrap().used
        });
        seen.lock().unwrap().push((step.to_owned(), helper.join().unwrap()));
    }));
    let taken = other.reserve(40).unwrap();
    assert_eq!(*steps.lock().unwrap(), [("offer".to_owned(), 90), ("evict".to_owned(), 90)]);
    assert_eq!(taken.bytes() + weights.bytes(), 90, "40 were asked for when 10 had not been released yet");
    assert_sound(&governor);
}

#[test]
fn g5_a_callback_that_reserves_is_told_so_instead_of_waiting_for_itself() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    weights.fill(100);
    let (holder, spy, count) = (weights.holder.clone(), governor.clone(), Arc::new(AtomicU64::new(0)));
    let counter = count.clone();
    weights.mood.lock().unwrap().hook = Some(Arc::new(move |_| {
        assert!(matches!(holder.reserve(1), Err(GovernorError::Reentrant)));
        assert!(matches!(spy.set_limit(DEVICE, 200), Err(GovernorError::Reentrant)));
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    let taker = governor.holder(DEVICE, plain("taker")).unwrap();
    taker.reserve(10).unwrap().abort();
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

#[test]
fn g5_first_come_first_served() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    let mut all = holder.reserve(100).unwrap().commit();
    let (done, order) = channel();
    let spawn = |bytes, tag| {
        let (holder, done) = (holder.clone(), done.clone());
        let waiting = pool(&governor).waiting;
        let thread = thread::spawn(move || {
            let lease = holder.reserve_within(bytes, Duration::from_secs(30)).unwrap().commit();
            done.send(tag).unwrap();
            lease
        });
        while pool(&governor).waiting == waiting {
            thread::yield_now();
        }
        thread
    };
    let large = spawn(80, "large");
    let small = spawn(10, "small");
    all.shrink(50).unwrap();
    // 50 B are free: enough for the small one, but the large one was first. Nobody overtakes.
    thread::sleep(Duration::from_millis(30));
    assert!(order.try_recv().is_err());
    assert_eq!(budget(holder.reserve(1)).refusal, Refusal::Queued);
    assert_eq!(budget(holder.try_reserve(1)).refusal, Refusal::Queued);
    all.shrink(30).unwrap();
    assert_eq!(order.recv().unwrap(), "large");
    all.shrink(20).unwrap();
    assert_eq!(order.recv().unwrap(), "small");
    drop((large.join().unwrap(), small.join().unwrap(), all));
    assert_sound(&governor);
}

#[test]
fn g5_a_promise_does_not_wait_behind_requests_without_one() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let kv = governor.holder(DEVICE, plain("kv").floor(10).promise(60)).unwrap();
    let other = governor.holder(DEVICE, plain("other")).unwrap();
    weights.fill(90);
    let greedy = thread::spawn(move || budget(other.reserve_within(80, Duration::from_millis(300))));
    while pool(&governor).waiting == 0 {
        thread::yield_now();
    }
    assert_eq!(kv.reserve(60).unwrap().bytes(), 60);
    assert_eq!(greedy.join().unwrap().refusal, Refusal::Promised);
}

#[test]
fn g5_waiting_ends_at_the_deadline_with_the_breakdown() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    let _all = holder.reserve(100).unwrap().commit();
    let start = Instant::now();
    let error = budget(holder.reserve_within(1, Duration::from_millis(20)));
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!((error.missing, error.smallest_limit, error.holders[0].used), (1, Some(101), 100));
    assert_eq!(pool(&governor).waiting, 0);
    holder.reserve_within(0, Duration::MAX).unwrap().abort();
}

#[test]
fn g5_a_raised_limit_wakes_who_waits() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    let _all = holder.reserve(100).unwrap().commit();
    let waiter = {
        let holder = holder.clone();
        thread::spawn(move || holder.reserve_within(50, Duration::from_secs(30)).unwrap().commit())
    };
    while pool(&governor).waiting == 0 {
        thread::yield_now();
    }
    governor.set_limit(DEVICE, 150).unwrap();
    assert_eq!(waiter.join().unwrap().bytes(), 50);
}

#[test]
fn g5_a_limit_is_changed_whole_or_not_at_all() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let fixed = governor.holder(DEVICE, plain("fixed")).unwrap();
    let _fixed = fixed.reserve(30).unwrap().commit();
    weights.fill(70);
    governor.set_limit(DEVICE, 80).unwrap();
    assert_eq!((pool(&governor).limit, weights.bytes()), (80, 50));
    weights.mood.lock().unwrap().cap = Some(5);
    let error = budget(governor.set_limit(DEVICE, 60));
    assert_eq!((error.requester.as_str(), error.missing, error.smallest_limit), ("limit", 15, Some(75)));
    assert_eq!((pool(&governor).limit, weights.bytes()), (80, 50));
    weights.mood.lock().unwrap().cap = None;
    assert_eq!(budget(governor.set_limit(DEVICE, 29)).missing, 1);
    governor.set_limit(DEVICE, 30).unwrap();
    assert_eq!((pool(&governor).used, weights.bytes()), (30, 0));
    assert!(matches!(governor.set_limit(Pool::Host, 1), Err(GovernorError::UnknownPool { pool: Pool::Host })));
    assert_sound(&governor);
}

#[test]
fn g6_charges_are_whole_granules_and_transients_count() {
    let governor = governor(11 * MIB, 2 * MIB);
    let holder = governor.holder(DEVICE, plain("a").floor(1)).unwrap();
    assert_eq!(holder.report().floor, 2 * MIB);
    let lease = holder.reserve(2 * MIB + 1).unwrap().commit();
    assert_eq!(lease.bytes(), 4 * MIB);
    holder.reserve(6 * MIB).unwrap().abort(); // a transient that never was committed
    assert_eq!((pool(&governor).used, pool(&governor).peak, holder.report().peak), (4 * MIB, 10 * MIB, 10 * MIB));
    assert_eq!(holder.room().free, 6 * MIB, "the last odd MiB can't be mapped");
    let mut lease = lease;
    assert!(matches!(lease.split(MIB), Err(GovernorError::Lease { .. })));
    assert!(matches!(lease.split(6 * MIB), Err(GovernorError::Lease { .. })));
    assert_eq!(lease.bytes(), 4 * MIB);
    assert!(matches!(holder.reserve(u64::MAX), Err(GovernorError::TooLarge { .. })));
    governor.reset_peaks();
    assert_eq!(pool(&governor).peak, 4 * MIB);
}

#[test]
fn g7_physical_figures_stand_beside_the_charge_and_name_their_source() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    let _lease = holder.reserve(40).unwrap().commit();
    assert_eq!(pool(&governor).unaccounted, None, "nobody has measured");
    governor.record_physical(DEVICE, Source::MapCount, 30).unwrap();
    assert_eq!((pool(&governor).used, pool(&governor).unaccounted), (40, Some(0)), "charge is not residency");
    governor.record_physical(DEVICE, Source::Driver, 47).unwrap();
    assert_eq!(pool(&governor).unaccounted, Some(7));
    let text = governor.report().to_string();
    assert!(text.contains("physical by driver: 47 B, peak 47 B, unaccounted 7 B"), "{text}");
    governor.record_physical(DEVICE, Source::Driver, 38).unwrap();
    let (_, figure) = pool(&governor).physical[1];
    assert_eq!((figure.bytes, figure.peak, figure.unaccounted, figure.peak_unaccounted), (38, 47, 0, 7));
}

#[test]
fn g8_only_the_floor_is_withheld_and_the_rest_is_lent() {
    let governor = governor(100, 1);
    let kv = governor.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5).floor(5).promise(60)).unwrap();
    let weights = Yielder::new(&governor, "weights", 1);
    assert_eq!(weights.holder.room().free, 95, "nothing but the floor is withheld");
    weights.fill(95);
    let report = pool(&governor);
    assert_eq!((report.lent, report.on_loan, report.withheld, report.reclaimable), (55, 55, 5, 95));
    assert_eq!(kv.report().allowance, 60);
    assert_eq!(kv.room().with_reclaim, 100);
    let lease = kv.reserve(60).unwrap().commit();
    assert_eq!((weights.bytes(), pool(&governor).on_loan, kv.report().allowance), (40, 0, 0));
    drop(lease);
    assert_eq!(weights.holder.room().free, 55, "what comes back is lent again");
}

#[test]
fn g8_who_cannot_give_back_cannot_borrow() {
    let governor = governor(100, 1);
    let _kv = governor.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5).floor(5).promise(60)).unwrap();
    let fixed = governor.holder(DEVICE, plain("fixed")).unwrap();
    assert_eq!((fixed.room().free, fixed.room().with_reclaim), (40, 40));
    let error = budget(fixed.reserve(41));
    assert_eq!((&error.refusal, error.missing, error.smallest_limit), (&Refusal::Promised, 1, Some(101)));
    let _lease = fixed.reserve(40).unwrap();
    let error = budget(governor.holder(DEVICE, plain("late").promise(1)));
    assert_eq!((error.requester.as_str(), error.missing), ("late", 1));
    assert_eq!(pool(&governor).holders.len(), 2, "a refused holder leaves nothing behind");
}

#[test]
fn g8_terms_change_whole_or_not_at_all_and_end_with_the_handle() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let kv = governor.holder(DEVICE, plain("kv")).unwrap();
    weights.fill(100);
    kv.set_terms(10, 80).unwrap();
    assert_eq!((weights.bytes(), pool(&governor).withheld), (90, 10));
    budget(kv.set_terms(10, 101));
    assert_eq!((kv.report().floor, kv.report().promise), (10, 80));
    let lease = kv.reserve(30).unwrap().commit();
    drop(kv);
    let report = pool(&governor);
    assert_eq!((report.withheld, report.lent, report.holder("kv").unwrap().used), (0, 0, 30));
    drop(lease);
    assert!(pool(&governor).holder("kv").is_none());
}

#[test]
fn g9_quarantined_bytes_stay_charged() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a")).unwrap();
    holder.reserve(10).unwrap().commit().quarantine();
    assert_eq!((holder.report().used, holder.report().quarantined, holder.room().free), (10, 10, 90));
}

#[test]
fn g9_declined_bytes_are_counted_and_reported_but_not_limited() {
    let governor = governor(100, 1);
    let holder = governor.holder(DEVICE, plain("a").promise(50)).unwrap();
    let lease = holder.reserve(1).unwrap().commit();
    assert!(matches!(holder.decline("x"), Err(GovernorError::Spec { .. })));
    drop(lease);
    holder.decline("the platform pages better itself").unwrap();
    let lease = holder.reserve(1000).unwrap().commit();
    let report = pool(&governor);
    assert_eq!((report.unmanaged, report.used, report.unassigned, report.oversubscribed), (1000, 0, 100, 0));
    governor.record_physical(DEVICE, Source::Driver, 1000).unwrap();
    assert_eq!(pool(&governor).unaccounted, Some(0));
    assert!(governor.report().to_string().contains("not managed: the platform pages better itself"));
    assert!(holder.set_terms(1, 1).is_err());
    drop(lease);
    assert_eq!(pool(&governor).unmanaged, 0);
}

#[test]
fn g9_pressure_is_told_without_a_lock_and_survives_a_panic() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    let fixed = governor.holder(DEVICE, plain("fixed")).unwrap();
    let (seen, spy) = (Arc::new(Mutex::new(Vec::new())), governor.clone());
    let log = seen.clone();
    let subscription = governor.on_pressure(DEVICE, 80, move |event| {
        spy.report();
        log.lock().unwrap().push((event.kind, event.used - event.reclaimable));
        if event.kind == PressureKind::Falling {
            panic!("a subscriber's own fault");
        }
    });
    weights.fill(100);
    assert!(seen.lock().unwrap().is_empty(), "bytes that can be had back are no pressure");
    let lease = fixed.reserve(80).unwrap().commit();
    budget(fixed.reserve(21));
    drop(lease);
    let expected = [(PressureKind::Rising, 80), (PressureKind::Refused { missing: 1 }, 80), (PressureKind::Falling, 0)];
    assert_eq!(*seen.lock().unwrap(), expected);
    drop(subscription);
    fixed.reserve(90).unwrap().abort();
    assert_eq!(seen.lock().unwrap().len(), 3);
}

#[test]
fn errors_and_reports_name_everybody_largest_first() {
    let governor = governor(100 * MIB, MIB);
    let [small, large] = ["small", "large"].map(|n| governor.holder(DEVICE, plain(n)).unwrap());
    let _leases = [small.reserve(10 * MIB).unwrap().commit(), large.reserve(70 * MIB).unwrap().commit()];
    let text = small.reserve(30 * MIB).unwrap_err().to_string();
    let first = "device 0: 'small' asked for 30 MiB under a limit of 100 MiB: 10 MiB are missing; a limit of 110 MiB \
                 would do";
    assert!(text.starts_with(first), "{text}");
    assert!(text.find("large").unwrap() > text.find("holder").unwrap());
    assert!(text.rfind("small").unwrap() > text.find("large").unwrap(), "{text}");
    assert!(matches!(governor.holder(Pool::Host, plain("x")), Err(GovernorError::UnknownPool { .. })));
    assert!(Governor::new([PoolSpec { pool: DEVICE, limit: 1, granule: 0 }]).is_err());
    assert!(Governor::new([PoolSpec { pool: DEVICE, limit: 1, granule: 1 }; 2]).is_err());
}
