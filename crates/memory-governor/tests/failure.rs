//! Failure at every step: whatever callback goes wrong, the ledger and every holder are as before.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![cfg(not(loom))]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{DEVICE, Yielder, assert_sound, governor, pool};
use headrace_memory_governor::{Governor, GovernorError, Holder, HolderSpec, Refusal, Role};

const VICTIMS: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Fault {
    YieldsLess,
    YieldsNothing,
    CannotEvict,
    PanicsInOffer,
    PanicsInEvict,
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Growth,
    Limit,
    Floor,
}

struct Scene {
    governor: Governor,
    victims: Vec<Arc<Yielder>>,
    kv: Holder,
}

/// 100 B: four holders of 20 B that can yield, and KV with 20 of a promised 90 B.
fn scene() -> (Scene, headrace_memory_governor::Lease) {
    let governor = governor(100, 1);
    let kv = governor.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 99).floor(10).promise(90)).unwrap();
    let lease = kv.reserve(20).unwrap().commit();
    let victims: Vec<_> = (0..VICTIMS).map(|i| Yielder::new(&governor, &format!("victim {i}"), i as u32)).collect();
    victims.iter().for_each(|v| v.fill(20));
    (Scene { governor, victims, kv }, lease)
}

impl Scene {
    /// All of them need 70 B, so every victim is asked, the last one for half of what it has.
    fn ask(&self, request: Request) -> Result<(), GovernorError> {
        match request {
            Request::Growth => self.kv.reserve(70).map(|r| drop(r.commit())),
            Request::Limit => self.governor.set_limit(DEVICE, 30).and(Ok(())),
            Request::Floor => self.kv.set_terms(90, 90),
        }
    }
}

#[test]
fn g2_a_fault_at_any_step_leaves_everything_as_it_was() {
    let faults =
        [Fault::YieldsLess, Fault::YieldsNothing, Fault::CannotEvict, Fault::PanicsInOffer, Fault::PanicsInEvict];
    for request in [Request::Growth, Request::Limit, Request::Floor] {
        for fault in faults {
            for step in 0..VICTIMS {
                check(request, fault, step);
            }
        }
    }
}

fn check(request: Request, fault: Fault, step: usize) {
    let context = format!("{request:?}, {fault:?} at victim {step}");
    let (scene, _lease) = scene();
    if let Request::Limit = request {
        scene.kv.set_terms(10, 20).unwrap(); // a lower limit could not keep a promise of 90 B
    }
    let at =
        |phase: &'static str| -> common::Hook { Arc::new(move |now| assert!(now != phase, "a holder's own fault")) };
    {
        let mut mood = scene.victims[step].mood.lock().unwrap();
        match fault {
            Fault::YieldsLess => mood.cap = Some(9),
            Fault::YieldsNothing => mood.cap = Some(0),
            Fault::CannotEvict => mood.stuck = true,
            Fault::PanicsInOffer => mood.hook = Some(at("offer")),
            Fault::PanicsInEvict => mood.hook = Some(at("evict")),
        }
    }
    // 80 B could be had and 70 are needed: a victim that yields 9 leaves 1 missing, one that yields nothing 10.
    let before = pool(&scene.governor);
    let result = catch_unwind(AssertUnwindSafe(|| scene.ask(request)));
    let mut after = pool(&scene.governor);
    match (&result, fault) {
        (Ok(Err(GovernorError::Budget(error))), Fault::CannotEvict) => {
            let holder = format!("victim {step}");
            assert_eq!(error.refusal, Refusal::Eviction { holder, reason: "the stream hangs".into() }, "{context}");
        }
        (Ok(Err(GovernorError::Budget(error))), Fault::YieldsLess) => assert_eq!(error.missing, 1, "{context}"),
        (Ok(Err(GovernorError::Budget(error))), Fault::YieldsNothing) => assert_eq!(error.missing, 10, "{context}"),
        (Err(_), Fault::PanicsInOffer | Fault::PanicsInEvict) => {}
        (other, _) => panic!("{context}: {other:?}"),
    }
    assert_eq!(after.waiting, 0, "{context}");
    after.refused = before.refused;
    assert_eq!(after, before, "{context}");
    for victim in &scene.victims {
        assert_eq!((victim.bytes(), *victim.evicted.lock().unwrap()), (20, 0), "{context}");
    }
    // And once the fault is gone, the same request succeeds.
    *scene.victims[step].mood.lock().unwrap() = common::Mood::default();
    scene.ask(request).unwrap();
    assert_eq!(scene.victims.iter().map(|v| v.bytes()).sum::<u64>(), 10, "{context}");
    assert_sound(&scene.governor);
}

#[test]
fn g5_a_waiting_request_tries_again_when_a_holder_can_yield_again() {
    let governor = governor(100, 1);
    let weights = Yielder::new(&governor, "weights", 1);
    weights.fill(100);
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    {
        let mut mood = weights.mood.lock().unwrap();
        mood.cap = Some(0);
        mood.hook = Some(Arc::new(move |step| {
            count.fetch_add(usize::from(step == "offer"), Ordering::SeqCst);
        }));
    }
    let taker = governor.holder(DEVICE, HolderSpec::new("taker", Role::Other, 9)).unwrap();
    let waiter = std::thread::spawn(move || taker.reserve_within(50, std::time::Duration::from_secs(30)).unwrap());
    while asked.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(asked.load(Ordering::SeqCst), 1, "asked once, not in a loop");
    weights.mood.lock().unwrap().cap = None;
    weights.holder.can_yield_again();
    assert_eq!(waiter.join().unwrap().bytes(), 50);
    assert_eq!(weights.bytes(), 50);
}

#[test]
fn g1_dropping_everything_in_any_order_never_panics_and_empties_the_books() {
    let (scene, lease) = scene();
    let Scene { governor, victims, kv } = scene;
    let reservation = kv.reserve(30).unwrap();
    drop(kv);
    drop(victims);
    drop((reservation, lease));
    assert_eq!((pool(&governor).used, pool(&governor).holders.len()), (0, 0));
    let holder = governor.holder(DEVICE, HolderSpec::new("last", Role::Other, 0)).unwrap();
    let lease = holder.reserve(1).unwrap().commit();
    drop((governor, holder));
    lease.release();
}
