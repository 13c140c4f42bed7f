//! Random histories against a naive model: a few lines of bookkeeping that are obviously right.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![cfg(not(loom))]

mod common;

use common::{DEVICE, Yielder, governor, pool};
use headrace_memory_governor::{HolderSpec, Lease, Reservation, Role};
use proptest::prelude::*;

const LIMIT: u64 = 1000;
const GRANULE: u64 = 10;

#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve { holder: usize, bytes: u64 },
    Try { holder: usize, bytes: u64 },
    Commit { holder: usize },
    Abort { holder: usize },
    Release { holder: usize },
    Shrink { holder: usize, bytes: u64 },
    Limit { bytes: u64 },
    Terms { holder: usize, floor: u64, more: u64 },
    Cap { cap: Option<u64> },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let holder = 0usize..3;
    let bytes = 0u64..500;
    let step = prop_oneof![
        4 => (holder.clone(), bytes.clone()).prop_map(|(holder, bytes)| Step::Reserve { holder, bytes }),
        2 => (holder.clone(), bytes.clone()).prop_map(|(holder, bytes)| Step::Try { holder, bytes }),
        3 => holder.clone().prop_map(|holder| Step::Commit { holder }),
        1 => holder.clone().prop_map(|holder| Step::Abort { holder }),
        2 => holder.clone().prop_map(|holder| Step::Release { holder }),
        2 => (holder.clone(), bytes.clone()).prop_map(|(holder, bytes)| Step::Shrink { holder, bytes }),
        2 => (0u64..1500).prop_map(|bytes| Step::Limit { bytes }),
        2 => (holder, 0u64..200, 0u64..400).prop_map(|(holder, floor, more)| Step::Terms { holder, floor, more }),
        1 => proptest::option::of(0u64..300).prop_map(|cap| Step::Cap { cap }),
    ];
    prop::collection::vec(step, 1..60)
}

/// One holder of the model. Number 0 is the one that can yield.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    used: u64,
    floor: u64,
    promise: u64,
}

#[derive(Clone, Debug)]
struct Model {
    limit: u64,
    cap: u64,
    accounts: [Account; 3],
}

fn up(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE) * GRANULE
}

impl Model {
    fn held(&self) -> u64 {
        self.accounts.iter().map(|a| a.used.max(a.floor)).sum()
    }

    fn firm(&self) -> u64 {
        let [weights, others @ ..] = self.accounts;
        weights.promise + others.iter().map(|a| a.used.max(a.promise)).sum::<u64>()
    }

    /// The model after `edit`, if that is allowed: everything fits, or it does once holder 0 has yielded.
    fn after(&self, requester: Option<usize>, help: bool, edit: impl Fn(&mut Model)) -> Option<Model> {
        let mut next = self.clone();
        edit(&mut next);
        if next.firm() > next.limit && (next.firm() > self.firm() || next.limit < self.limit) {
            return None;
        }
        let mut weights = next.accounts[0];
        if next.held() > next.limit && help && requester != Some(0) {
            let ask = up(next.held() - next.limit).min(weights.used.saturating_sub(weights.promise));
            weights.used -= ask.min(self.cap);
            next.accounts[0] = weights;
        }
        (next.held() <= next.limit).then_some(next)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_agrees_with_the_naive_model(steps in steps()) {
        let governor = governor(LIMIT, GRANULE);
        let weights = Yielder::new(&governor, "0", 1);
        let others = ["1", "2"].map(|n| governor.holder(DEVICE, HolderSpec::new(n, Role::Other, 5)).unwrap());
        let holders = [weights.holder.clone(), others[0].clone(), others[1].clone()];
        let mut open: [Vec<Reservation>; 3] = Default::default();
        let mut leases: [Vec<Lease>; 3] = Default::default();
        let mut model = Model { limit: LIMIT, cap: u64::MAX, accounts: Default::default() };
        // Only what the yielder has as leases can be offered, so its reservations are committed at once.
        for step in steps {
            let expected = match step {
                Step::Reserve { holder, bytes } | Step::Try { holder, bytes } => {
                    let help = matches!(step, Step::Reserve { .. });
                    let next = model.after(Some(holder), help, |m| m.accounts[holder].used += up(bytes));
                    let got = if help { holders[holder].reserve(bytes) } else { holders[holder].try_reserve(bytes) };
                    prop_assert_eq!(got.is_ok(), next.is_some(), "{:?} {:?} {:?}", step, model, got);
                    match got {
                        Ok(got) if holder == 0 => weights.leases.lock().unwrap().push(got.commit()),
                        Ok(got) => open[holder].push(got),
                        Err(_) => {}
                    }
                    next
                }
                Step::Commit { holder } => {
                    leases[holder].extend(open[holder].pop().map(Reservation::commit));
                    None
                }
                Step::Abort { holder } => open[holder].pop().map(|r| {
                    let mut next = model.clone();
                    next.accounts[holder].used -= r.bytes();
                    next
                }),
                Step::Release { holder } => {
                    let lease = if holder == 0 { weights.leases.lock().unwrap().pop() } else { leases[holder].pop() };
                    lease.map(|lease| {
                        let mut next = model.clone();
                        next.accounts[holder].used -= lease.bytes();
                        next
                    })
                }
                Step::Shrink { holder, bytes } => leases[holder].last_mut().map(|lease| {
                    let bytes = up(bytes).min(lease.bytes());
                    lease.shrink(bytes).unwrap();
                    let mut next = model.clone();
                    next.accounts[holder].used -= bytes;
                    next
                }),
                Step::Limit { bytes } => {
                    let next = model.after(None, true, |m| m.limit = bytes);
                    prop_assert_eq!(governor.set_limit(DEVICE, bytes).is_ok(), next.is_some(), "{:?} {:?}", step, model);
                    next
                }
                Step::Terms { holder, floor, more } => {
                    let next = model.after(Some(holder), true, |m| {
                        (m.accounts[holder].floor, m.accounts[holder].promise) = (up(floor), up(floor + more));
                    });
                    let got = holders[holder].set_terms(floor, floor + more);
                    prop_assert_eq!(got.is_ok(), next.is_some(), "{:?} {:?} {:?}", step, model, got);
                    next
                }
                Step::Cap { cap } => {
                    let cap = cap.map(up);
                    weights.mood.lock().unwrap().cap = cap;
                    model.cap = cap.unwrap_or(u64::MAX);
                    None
                }
            };
            model = expected.unwrap_or(model);
            let report = pool(&governor);
            for (at, account) in model.accounts.iter().enumerate() {
                let holder = report.holder(&at.to_string()).unwrap();
                prop_assert_eq!((holder.used, holder.floor, holder.promise),
                    (account.used, account.floor, account.promise), "{:?} {:?}", step, model);
                prop_assert_eq!(holder.allowance, account.promise.saturating_sub(account.used));
            }
            let used: u64 = model.accounts.iter().map(|a| a.used).sum();
            prop_assert_eq!((report.limit, report.used), (model.limit, used));
            prop_assert_eq!(report.unassigned, model.limit - model.held());
            prop_assert_eq!((report.peak_oversubscribed, report.underflows, report.waiting), (0, 0, 0));
        }
        drop((open, leases, holders, others, weights));
        let report = pool(&governor);
        prop_assert_eq!((report.used, report.holders.len()), (0, 0));
    }
}
