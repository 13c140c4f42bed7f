//! The arena on a device without a device: every call is checked against what is mapped, and any of them can fail.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::*;
use crate::stream::Fenced;

const GRANULE: u64 = 64;

#[derive(Debug, Default)]
struct State {
    live: BTreeSet<u64>,
    mapped: BTreeMap<u64, u64>,
    allowed: BTreeSet<u64>,
    reserved: BTreeMap<u64, u64>,
    next: u64,
    /// Calls until the next failure, by name.
    fail: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Debug, Default)]
struct Fake(Rc<RefCell<State>>);

impl Fake {
    fn call(&self, name: &'static str) -> Result<std::cell::RefMut<'_, State>, CudaError> {
        let mut state = self.0.borrow_mut();
        if let Some(left) = state.fail.get_mut(name) {
            if *left == 0 {
                state.fail.remove(name);
                return Err(CudaError { call: name.into(), code: 2, text: "on demand".into() });
            }
            *left -= 1;
        }
        Ok(state)
    }

    fn fail_after(&self, name: &'static str, calls: u64) {
        self.0.borrow_mut().fail.insert(name, calls);
    }
}

impl Physical for Fake {
    type Handle = u64;

    fn reserve(&self, bytes: u64) -> Result<u64, CudaError> {
        let mut s = self.call("reserve")?;
        s.next += 1;
        let base = s.next << 32;
        s.reserved.insert(base, bytes);
        Ok(base)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        let mut s = self.call("unreserve")?;
        assert_eq!(s.reserved.remove(&address), Some(bytes));
        assert!(s.mapped.range(address..address + bytes).next().is_none(), "unreserved under a mapping");
        Ok(())
    }

    fn create(&self) -> Result<u64, CudaError> {
        let mut s = self.call("create")?;
        s.next += 1;
        let handle = s.next;
        s.live.insert(handle);
        Ok(handle)
    }

    fn release(&self, handle: u64) -> Result<(), CudaError> {
        let mut s = self.call("release")?;
        assert!(!s.mapped.values().any(|&h| h == handle), "released while mapped");
        assert!(s.live.remove(&handle), "released twice");
        Ok(())
    }

    fn map(&self, address: u64, handle: u64) -> Result<(), CudaError> {
        let mut s = self.call("map")?;
        assert!(s.live.contains(&handle));
        assert_eq!(s.mapped.insert(address, handle), None, "mapped twice");
        Ok(())
    }

    fn allow(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        let mut s = self.call("allow")?;
        for at in (address..address + bytes).step_by(GRANULE as usize) {
            assert!(s.mapped.contains_key(&at));
            s.allowed.insert(at);
        }
        Ok(())
    }

    fn unmap(&self, address: u64) -> Result<(), CudaError> {
        let mut s = self.call("unmap")?;
        s.allowed.remove(&address);
        assert!(s.mapped.remove(&address).is_some(), "unmapped what isn't mapped");
        Ok(())
    }
}

fn arena(fake: &Fake) -> Arena<Fake> {
    Arena::new(fake.clone(), GRANULE, &[100 * GRANULE, 10 * GRANULE]).unwrap()
}

/// Everything the device holds is charged, and everything mapped may be read.
fn consistent(fake: &Fake, arena: &Arena<Fake>) {
    let state = fake.0.borrow();
    assert_eq!(state.live.len() as u64 * GRANULE, arena.charged_bytes());
    assert_eq!(state.mapped.len() as u64 * GRANULE, arena.mapped(0) + arena.mapped(1));
    assert!(state.mapped.keys().all(|a| state.allowed.contains(a)));
}

#[test]
fn granules_come_and_go_at_addresses_that_stay() {
    let fake = Fake::default();
    let fenced = Fenced::without_streams();
    let mut a = arena(&fake);
    let base = a.base(0);
    a.map(0, 2 * GRANULE, 3 * GRANULE).unwrap();
    consistent(&fake, &a);
    assert_eq!((a.mapped(0), a.end(0)), (3 * GRANULE, 5 * GRANULE));
    assert_eq!(a.address(0, 2 * GRANULE + 1, 3 * GRANULE - 1), Ok(base + 2 * GRANULE + 1));
    assert!(a.address(0, 2 * GRANULE, 3 * GRANULE + 1).is_err());
    assert!(a.address(1, 0, 1).is_err(), "ranges share nothing");
    assert!(matches!(a.map(0, 4 * GRANULE, 2 * GRANULE), Err(ArenaError::Mapped { .. })));
    assert!(matches!(a.map(0, 1, GRANULE), Err(ArenaError::Unaligned { .. })));
    assert!(matches!(a.map(0, 99 * GRANULE, 2 * GRANULE), Err(ArenaError::Beyond { .. })));
    assert!(matches!(a.map(0, u64::MAX - GRANULE + 1, GRANULE), Err(ArenaError::Beyond { .. })));
    a.unmap(&fenced, 0, 3 * GRANULE, GRANULE).unwrap();
    assert!(matches!(a.unmap(&fenced, 0, 2 * GRANULE, 2 * GRANULE), Err(ArenaError::NotMapped { .. })));
    assert_eq!(a.resize(&fenced, 0, 3 * GRANULE - 5), Ok(3 * GRANULE));
    assert_eq!((a.mapped(0), a.end(0), a.base(0)), (3 * GRANULE, 3 * GRANULE, base));
    assert_eq!(a.resize(&fenced, 0, 0), Ok(0));
    assert!(a.resize(&fenced, 0, 101 * GRANULE).is_err());
    consistent(&fake, &a);
    assert_eq!(a.charged_bytes(), 0);
}

#[test]
fn a_failed_growth_changes_nothing() {
    for (call, after) in [("create", 0), ("create", 2), ("map", 0), ("map", 3), ("allow", 0), ("allow", 1)] {
        let fake = Fake::default();
        let fenced = Fenced::without_streams();
        let mut a = arena(&fake);
        a.map(0, 2 * GRANULE, 2 * GRANULE).unwrap();
        let before = a.ranges[0].mapped.clone();
        fake.fail_after(call, after);
        // Two gaps: 0 .. 2 and 4 .. 8, so that a failure in the second must undo the first.
        let error = a.resize(&fenced, 0, 8 * GRANULE);
        assert!(matches!(error, Err(ArenaError::Driver(_))), "{call} {after}: {error:?}");
        assert_eq!(a.ranges[0].mapped, before, "{call} {after}");
        consistent(&fake, &a);
        assert_eq!(a.resize(&fenced, 0, 8 * GRANULE), Ok(8 * GRANULE));
        consistent(&fake, &a);
    }
}

#[test]
fn what_the_driver_does_not_unmap_stays_mapped() {
    let fake = Fake::default();
    let fenced = Fenced::without_streams();
    let mut a = arena(&fake);
    a.map(0, 0, 4 * GRANULE).unwrap();
    fake.fail_after("unmap", 1);
    assert!(a.unmap(&fenced, 0, 0, 4 * GRANULE).is_err());
    assert_eq!(a.mapped(0), 4 * GRANULE, "the first was unmapped before the failure, and mapped again");
    consistent(&fake, &a);
    fake.fail_after("unmap", 2);
    fake.fail_after("map", 1);
    assert!(a.unmap(&fenced, 0, 0, 4 * GRANULE).is_err());
    assert_eq!((a.mapped(0), a.quarantined_bytes()), (3 * GRANULE, GRANULE));
    assert_eq!(fake.0.borrow().live.len() as u64 * GRANULE, a.charged_bytes());
}

#[test]
fn what_the_driver_does_not_take_back_stays_charged() {
    let fake = Fake::default();
    let fenced = Fenced::without_streams();
    let mut a = arena(&fake);
    a.map(0, 0, 4 * GRANULE).unwrap();
    fake.fail_after("release", 0);
    a.unmap(&fenced, 0, GRANULE, GRANULE).unwrap();
    assert_eq!((a.mapped(0), a.quarantined_bytes()), (3 * GRANULE, GRANULE));
    consistent(&fake, &a);
}

#[test]
fn the_pool_keeps_granules_up_to_its_limit_and_counts_them() {
    let fake = Fake::default();
    let fenced = Fenced::without_streams();
    let mut a = arena(&fake);
    a.set_pool_limit(2).unwrap();
    a.map(0, 0, 4 * GRANULE).unwrap();
    a.resize(&fenced, 0, 0).unwrap();
    assert_eq!((a.pooled_bytes(), a.charged_bytes()), (2 * GRANULE, 2 * GRANULE));
    fake.fail_after("create", 0);
    a.map(1, 0, 2 * GRANULE).unwrap();
    assert_eq!(a.pooled_bytes(), 0);
    a.resize(&fenced, 1, 0).unwrap();
    a.set_pool_limit(0).unwrap();
    assert_eq!(a.charged_bytes(), 0);
    consistent(&fake, &a);
}

#[test]
fn dropping_gives_everything_back() {
    let fake = Fake::default();
    let mut a = arena(&fake);
    a.set_pool_limit(1).unwrap();
    a.map(0, 0, 5 * GRANULE).unwrap();
    a.map(1, GRANULE, 5 * GRANULE).unwrap();
    a.unmap(&Fenced::without_streams(), 1, GRANULE, GRANULE).unwrap();
    drop(a);
    let state = fake.0.borrow();
    assert!(state.live.is_empty() && state.mapped.is_empty() && state.reserved.is_empty());
}

#[test]
fn a_range_without_addresses_gets_them_once() {
    let fake = Fake::default();
    let fenced = Fenced::without_streams();
    let mut a = Arena::new(fake.clone(), GRANULE, &[0, 10 * GRANULE]).unwrap();
    assert_eq!((a.reserved(0), a.base(0), fake.0.borrow().reserved.len()), (0, 0, 1));
    assert!(matches!(a.map(0, 0, GRANULE), Err(ArenaError::Beyond { .. })));
    fake.fail_after("reserve", 0);
    assert!(matches!(a.reserve(0, GRANULE), Err(ArenaError::Driver(_))));
    assert_eq!(a.reserved(0), 0);
    a.reserve(0, 3 * GRANULE - 1).unwrap();
    assert_eq!(a.reserved(0), 3 * GRANULE);
    assert!(matches!(a.reserve(0, 4 * GRANULE), Err(ArenaError::Mapped { .. })), "a base never changes");
    a.map(0, GRANULE, 2 * GRANULE).unwrap();
    assert!(matches!(a.resize(&fenced, 0, 4 * GRANULE), Err(ArenaError::Beyond { .. })));
    consistent(&fake, &a);
    drop(a);
    assert!(fake.0.borrow().reserved.is_empty());
    // One that never got any has nothing to give back.
    drop(Arena::new(fake.clone(), GRANULE, &[0]).unwrap());
    assert!(fake.0.borrow().reserved.is_empty());
}
