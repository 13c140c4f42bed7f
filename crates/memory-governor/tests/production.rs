//! The path an engine takes: weights fill what KV does not use yet, and KV reaches its declared maximum regardless.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![cfg(not(loom))]

mod common;

use std::sync::{Arc, Mutex};

use common::{DEVICE, MIB, Yielder, assert_sound, governor, pool};
use headrace_memory_governor::{HolderSpec, PressureKind, Role, Source, Sources};

const GIB: u64 = 1 << 30;
const GRANULE: u64 = 2 * MIB;

/// KV bytes of a 14B model: 196,608 B a token, in geometric buckets of whole granules.
fn bucket(tokens: u64) -> u64 {
    (tokens * 196_608).next_multiple_of(GRANULE)
}

#[test]
fn kv_grows_to_its_maximum_and_takes_back_exactly_what_it_lent() {
    let governor = governor(8 * GIB, GRANULE);
    let fixed = governor.holder(DEVICE, HolderSpec::new("context", Role::Other, 9)).unwrap();
    let staging = governor.holder(DEVICE, HolderSpec::new("staging", Role::Staging, 9)).unwrap();
    let _fixed = fixed.reserve(419 * MIB + 12345).unwrap().commit();
    let _ring = staging.reserve(8 * 32 * MIB).unwrap().commit();
    let (first, last) = (256, 8192);
    let spec = HolderSpec::new("kv", Role::Kv, 5).floor(bucket(first)).promise(bucket(last));
    let kv = governor.holder(DEVICE, spec).unwrap();
    let norms = 6 * MIB;
    let spec = HolderSpec::new("weights", Role::Weights, 1).floor(norms);
    let weights = Yielder::with(&governor, spec);

    // The weights take everything that is not in use or set aside, the lent bytes included, to the last granule.
    let full = weights.holder.room().free;
    weights.fill(full);
    let start = pool(&governor);
    assert_eq!(start.unassigned, 0);
    assert_eq!((start.lent, start.on_loan), (bucket(last) - bucket(first), bucket(last) - bucket(first)));
    assert_eq!(full, 8 * GIB - (420 * MIB) - 256 * MIB - bucket(first));
    assert_eq!(weights.holder.room().free, 0);

    let mut lease = kv.empty_lease();
    let mut tokens = first;
    while tokens <= last {
        let (grown, had) = (bucket(tokens) - lease.bytes(), weights.bytes());
        let reservation = kv.reserve(grown).unwrap();
        let own = if tokens == first { grown } else { 0 };
        assert_eq!(reservation.sources(), Sources { own, unassigned: 0, reclaimed: grown - own });
        assert_eq!(had - weights.bytes(), grown - own, "the weights shed exactly what was taken");
        assert!(weights.bytes().is_multiple_of(GRANULE));
        reservation.commit_into(&mut lease).unwrap();
        let now = pool(&governor);
        assert_eq!((now.used, now.oversubscribed, now.unassigned), (8 * GIB, 0, 0));
        assert_eq!(now.on_loan, bucket(last) - lease.bytes());
        governor.record_physical(DEVICE, Source::MapCount, now.used).unwrap();
        tokens *= 2;
    }
    assert_eq!(lease.bytes(), bucket(last));
    assert_eq!(full - weights.bytes(), start.lent, "exactly the lent bytes came back");
    assert_eq!(weights.holder.report().yielded, start.lent);
    assert_eq!(kv.report().allowance, 0);

    // The sequence ends: its bytes are lent again, and the weights are back where they were.
    let keep = lease.bytes() - bucket(first);
    lease.shrink(keep).unwrap();
    weights.fill(weights.holder.room().free);
    assert_eq!(weights.bytes(), full);
    assert_eq!((pool(&governor).unaccounted, pool(&governor).peak), (Some(0), 8 * GIB));
    assert_sound(&governor);
}

#[test]
fn promotion_hears_of_freed_bytes() {
    let governor = governor(100, 1);
    let kv = governor.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5).promise(90)).unwrap();
    let weights = Yielder::new(&governor, "weights", 1);
    weights.fill(100);
    let wake = Arc::new(Mutex::new(0));
    let flag = wake.clone();
    let _subscription = governor.on_pressure(DEVICE, 50, move |event| {
        *flag.lock().unwrap() += u32::from(event.kind == PressureKind::Falling);
    });
    let lease = kv.reserve(90).unwrap().commit();
    assert_eq!(weights.bytes(), 10);
    drop(lease);
    assert_eq!(*wake.lock().unwrap(), 1);
    weights.fill(weights.holder.room().free);
    assert_eq!(weights.bytes(), 100);
}
