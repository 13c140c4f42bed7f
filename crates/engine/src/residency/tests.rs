//! The policies over cyclic scans, whose outcomes are known.

use std::sync::Arc;

use headrace_model::spec::TensorId;
use proptest::prelude::*;

use super::simulate::{Scenario, run_step};
use super::*;
use crate::error::EngineError;
use crate::layout::{Piece, PieceLayout, Run};

/// One piece a size, packed without gaps.
fn layout(sizes: &[u64]) -> Arc<PieceLayout> {
    let mut layout = PieceLayout { pieces: Vec::new(), range_bytes: 0, weight_bytes: 0 };
    for (i, &size) in sizes.iter().enumerate() {
        let runs = vec![Run { tensor: TensorId(i), row: 0, rows: 1, offset: 0 }];
        layout.pieces.push(Piece { runs, address: layout.range_bytes, slab_bytes: size, weight_bytes: size });
        layout.range_bytes += size;
        layout.weight_bytes += size;
    }
    Arc::new(layout)
}

fn scenario(sizes: &[u64], budget: u64, pinned: &[usize]) -> Scenario {
    Scenario {
        layout: layout(sizes),
        granule: 1,
        limits: Limits { capacity: budget, budget },
        pinned: (0..sizes.len()).map(|i| pinned.contains(&i)).collect(),
        schedule: None,
        schedule_bytes: 0,
    }
}

fn simulated(s: &Scenario, kinds: &[PolicyKind], steps: u64) -> Simulation {
    simulate(s, kinds, steps, &mut || Ok(())).unwrap()
}

fn cache(s: &Scenario, kind: PolicyKind) -> ResidencyCache {
    let mut cache = ResidencyCache::new(s.layout.clone(), s.granule, kind, s.pinned.clone(), s.schedule.clone());
    cache.set_limits(s.limits);
    cache
}

fn hits(kind: PolicyKind, steps: u64) -> f64 {
    simulated(&scenario(&[10; 20], 120, &[]), &[kind], steps).policies[0].hits_per_step
}

#[test]
fn a_cyclic_scan_larger_than_the_budget_washes_lru_out_and_nothing_else() {
    assert_eq!(hits(PolicyKind::Lru, 40), 0.0);
    // MRU keeps 11 of 12 places from one step to the next, but for the places that move: (12 - 1) * 20 / (20 - 1) a step.
    assert!(hits(PolicyKind::Mru, 40) > 10.9, "{}", hits(PolicyKind::Mru, 40));
    for kind in [PolicyKind::Static, PolicyKind::Stable, PolicyKind::ByteAware] {
        assert_eq!(hits(kind, 40), 12.0, "{}", kind.name());
    }
}

#[test]
fn a_hook_that_fails_ends_a_simulation_before_the_next_step() {
    let mut asked = 0;
    let result = simulate(&scenario(&[10; 20], 120, &[]), &PolicyKind::ALL, 10_000, &mut || {
        asked += 1;
        if asked == 3 { Err(EngineError::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(result, Err(EngineError::Interrupted)), "{result:?}");
    assert_eq!(asked, 3);
}

#[test]
fn lru_hits_everything_once_everything_fits() {
    let outcome = simulated(&scenario(&[10; 20], 200, &[]), &PolicyKind::ALL, 4);
    for p in &outcome.policies {
        assert_eq!((p.hits_per_step, p.bytes_per_step, p.total_bytes), (20.0, 0.0, 200), "{}", p.policy);
    }
}

#[test]
fn a_size_blind_order_keeps_the_small_and_streams_the_large() {
    // Room for all ten small pieces, which come first, or for a large one and four of them.
    let sizes = [5, 5, 5, 5, 5, 40, 5, 5, 5, 5, 5, 40];
    let result = simulated(&scenario(&sizes, 64, &[]), &[PolicyKind::Stable, PolicyKind::ByteAware], 20);
    let (stable, byte_aware) = (&result.policies[0], &result.policies[1]);
    assert_eq!((stable.hits_per_step, stable.bytes_per_step), (10.0, 80.0));
    assert_eq!((byte_aware.hits_per_step, byte_aware.bytes_per_step), (5.0, 70.0));
    assert_eq!(result.optimum_bytes, 70);
}

#[test]
fn stable_never_evicts_and_static_never_takes_in_anything_else() {
    let s = scenario(&[30, 20, 50, 10, 40], 85, &[]);
    let (mut stable, mut fixed) = (cache(&s, PolicyKind::Stable), cache(&s, PolicyKind::Static));
    for _ in 0..5 {
        run_step(&mut stable);
        run_step(&mut fixed);
    }
    assert_eq!((stable.counters().evictions, fixed.counters().evictions), (0, 0));
    assert_eq!(stable.set().placement().resident, [true, true, false, true, false]);
    // 30 + 50, 20 + 50 + 10 and 40 + 30 + 10 have 80 bytes; nothing has more.
    assert_eq!(fixed.set().resident_bytes(), 80);
}

#[test]
fn a_pinned_piece_stays_whatever_the_policy() {
    for kind in PolicyKind::ALL {
        let s = scenario(&[10, 10, 10, 10, 25, 10, 10], 40, &[4]);
        let mut cache = cache(&s, kind);
        run_step(&mut cache);
        assert!(cache.set().is_resident(4), "{}", kind.name());
        for _ in 0..6 {
            assert_eq!(cache.look(4), Access::Hit, "{}", kind.name());
            run_step(&mut cache);
        }
        let trace = cache.trace(|t| (format!("t{}", t.0), 10));
        assert_eq!((trace[4].pinned, trace[4].page_ins, trace[4].reads), (true, 1, 7), "{}", kind.name());
        assert!(cache.set().resident_bytes() <= 40);
    }
}

#[test]
fn pins_that_don_t_fit_are_pinned_as_far_as_they_do() {
    let mut cache = cache(&scenario(&[30, 30, 30, 5], 65, &[0, 1, 2]), PolicyKind::Lru);
    for _ in 0..3 {
        run_step(&mut cache);
    }
    assert_eq!(cache.set().placement().resident, [true, true, false, true]);
}

#[test]
fn a_smaller_budget_evicts_by_the_policy_s_order_and_pins_last() {
    let s = scenario(&[10, 20, 30, 40], 100, &[3]);
    for (kind, left) in [
        (PolicyKind::Lru, [false, false, false, true]),
        (PolicyKind::Mru, [true, false, false, true]),
        (PolicyKind::Smallest, [false, false, false, true]),
        (PolicyKind::Largest, [true, false, false, true]),
        (PolicyKind::Stable, [true, false, false, true]),
    ] {
        let mut cache = cache(&s, kind);
        run_step(&mut cache);
        let limits = Limits { capacity: 55, budget: 55 };
        assert_eq!(cache.within(limits).resident, left, "{}", kind.name());
        assert_eq!(cache.set().resident_bytes(), 100);
        cache.set_limits(limits);
        assert_eq!(cache.set().placement().resident, left, "{}", kind.name());
        cache.set_limits(Limits { capacity: 20, budget: 20 });
        assert_eq!(cache.set().resident_bytes(), if left[0] { 10 } else { 0 }, "{}", kind.name());
    }
}

#[test]
fn granules_bound_what_is_resident_as_well_as_bytes() {
    // Pieces of 6 bytes in granules of 8: two neighbours touch two granules, two strangers up to four.
    let s = Scenario { granule: 8, limits: Limits { capacity: 16, budget: 100 }, ..scenario(&[6; 8], 0, &[]) };
    for kind in PolicyKind::ALL {
        let mut cache = cache(&s, kind);
        for _ in 0..4 {
            for piece in 0..8 {
                match cache.look(piece) {
                    Access::Hit => cache.hit(piece),
                    Access::Retain { victims } => {
                        victims.into_iter().for_each(|v| cache.evicted(v));
                        cache.retained(piece);
                    }
                    Access::Bypass => cache.bypassed(piece),
                }
                let mapped = cache.set().placement().mapped_bytes(&s.layout, 8);
                assert!(mapped <= 16, "{}: {mapped}", kind.name());
            }
        }
    }
}

#[test]
fn the_trace_adds_up_to_the_totals() {
    for kind in PolicyKind::ALL {
        let mut cache = cache(&scenario(&[7, 11, 13, 17, 19], 40, &[]), kind);
        (0..5).for_each(|_| run_step(&mut cache));
        let (c, trace) = (*cache.counters(), cache.trace(|_| (String::new(), 0)));
        let sum = |f: fn(&TensorTrace) -> u64| trace.iter().map(f).sum::<u64>();
        assert_eq!(sum(|t| t.reads), c.hits + c.page_ins);
        assert_eq!(sum(|t| t.reads), 25);
        assert_eq!(sum(|t| t.read_bytes), 5 * 67);
        assert_eq!((sum(|t| t.page_ins), sum(|t| t.page_in_bytes)), (c.page_ins, c.page_in_bytes));
        assert_eq!((sum(|t| t.bypassed), sum(|t| t.bypassed_bytes)), (c.bypassed_page_ins, c.bypassed_bytes));
        assert_eq!(sum(|t| t.retained_bytes) + c.bypassed_bytes, c.page_in_bytes);
        assert_eq!(sum(|t| t.evictions), c.evictions);
        cache.reset_trace();
        assert_eq!(cache.trace(|_| (String::new(), 0)).iter().map(|t| t.reads).sum::<u64>(), 0);
        assert_eq!(*cache.counters(), c);
    }
}

#[test]
fn names_are_their_own_inverse() {
    for kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::parse(kind.name()), Some(kind));
        assert_eq!(kind.policy().kind(), kind);
    }
    assert_eq!(PolicyKind::parse("LRU"), None);
}

proptest! {
    #[test]
    fn no_policy_moves_fewer_bytes_in_any_step_than_static_does(
        sizes in prop::collection::vec(1u64..60, 1..14),
        share in 0.0f64..1.1,
        pins in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    ) {
        let total: u64 = sizes.iter().sum();
        let pinned: Vec<usize> = pins.iter().map(|i| i.index(sizes.len())).collect();
        let s = scenario(&sizes, (total as f64 * share) as u64, &pinned);
        let moved = |kind: PolicyKind| {
            let mut cache = cache(&s, kind);
            let mut steps = Vec::new();
            for _ in 0..10 {
                let before = *cache.counters();
                run_step(&mut cache);
                prop_assert!(cache.set().resident_bytes() <= s.limits.budget);
                steps.push(cache.counters().since(&before).page_in_bytes);
            }
            Ok(steps)
        };
        let optimum = moved(PolicyKind::Static)?;
        for kind in PolicyKind::ALL {
            let steps = moved(kind)?;
            for (step, (m, o)) in steps.iter().zip(&optimum).enumerate() {
                prop_assert!(m >= o, "{} in step {step}: {m} < {o}", kind.name());
            }
        }
        if pinned.is_empty() {
            prop_assert_eq!(simulated(&s, &[], 2).optimum_bytes, optimum[9]);
        }
    }

    #[test]
    fn the_largest_sum_is_that_of_trying_every_choice(sizes in prop::collection::vec(1u64..40, 0..10), budget in 0u64..200) {
        let best = super::fixed::largest_sum(&sizes, budget);
        let every = (0u32..1 << sizes.len()).map(|set| {
            (0..sizes.len()).filter(|i| set >> i & 1 == 1).map(|i| sizes[i]).sum::<u64>()
        });
        prop_assert_eq!(Some(best.sum), every.filter(|s| *s <= budget).max());
        prop_assert_eq!(best.chosen.iter().map(|&i| sizes[i]).sum::<u64>(), best.sum);
        prop_assert!(best.exact);
    }
}
