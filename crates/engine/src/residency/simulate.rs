//! What each policy would move, step after step, without a device: the cache's own decisions over the read order.

use std::sync::Arc;

use serde::Serialize;

use crate::error::Result;
use crate::layout::PieceLayout;
use crate::residency::cache::{Access, ResidencyCache};
use crate::residency::fixed::largest_sum;
use crate::residency::policy::PolicyKind;
use crate::residency::resident::Limits;
use crate::residency::trace::ResidencyCounters;

/// What a policy moves. Means over the second half of the steps, when what a policy will learn it has learnt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyOutcome {
    /// Its name.
    pub policy: String,
    /// Bytes copied from the host by a step.
    pub bytes_per_step: f64,
    /// Accesses of a step that found their piece resident.
    pub hits_per_step: f64,
    /// Accesses of a step whose piece was copied.
    pub page_ins_per_step: f64,
    /// Pieces evicted in a step.
    pub evictions_per_step: f64,
    /// Hits over accesses.
    pub hit_rate: f64,
    /// Bytes of hits over bytes read.
    pub byte_hit_rate: f64,
    /// Bytes that did not stay over bytes copied; 0 if nothing was copied.
    pub bypassed_share: f64,
    /// Bytes copied by all steps, the first one included.
    pub total_bytes: u64,
}

/// Policies side by side under the same limits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simulation {
    /// Steps that were simulated.
    pub steps: u64,
    /// Bytes of weights that a step reads.
    pub step_bytes: u64,
    /// Accesses of a step.
    pub accesses: u64,
    /// Bytes of weights that a policy may keep.
    pub budget: u64,
    /// Bytes of granules that they may touch.
    pub capacity: u64,
    /// Bytes of weights that are pinned.
    pub pinned_bytes: u64,
    /// Fewest bytes that a step can move with this budget, whatever the policy: all but those of the best fixed set.
    pub optimum_bytes: u64,
    /// Bytes that a step of the static schedule streams under the same limit.
    pub schedule_bytes: u64,
    /// One entry a policy.
    pub policies: Vec<PolicyOutcome>,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Pieces in read order.
    pub layout: Arc<PieceLayout>,
    /// Mapping unit in bytes.
    pub granule: u64,
    /// What may be kept.
    pub limits: Limits,
    /// One flag a piece.
    pub pinned: Vec<bool>,
    /// The static schedule's pieces over the same addresses.
    pub schedule: Option<Arc<PieceLayout>>,
    /// Bytes that a step of the static schedule streams.
    pub schedule_bytes: u64,
}

/// Runs `steps` steps (at least 2) of every policy of `kinds`. The hook is called before every step, and ends the simulation with
/// its error.
///
/// # Errors
/// The hook's.
pub fn simulate(
    scenario: &Scenario,
    kinds: &[PolicyKind],
    steps: u64,
    hook: &mut dyn FnMut() -> Result<()>,
) -> Result<Simulation> {
    let Scenario { layout, limits, pinned, .. } = scenario;
    let sizes: Vec<u64> = layout.pieces.iter().map(|p| p.weight_bytes).collect();
    let best = largest_sum(&sizes, limits.budget);
    let most_kept = if best.exact { best.sum } else { limits.budget.min(layout.weight_bytes) };
    let pinned_sizes = sizes.iter().zip(pinned).filter(|(_, p)| **p).map(|(s, _)| s);
    Ok(Simulation {
        steps: steps.max(2),
        step_bytes: layout.weight_bytes,
        accesses: layout.pieces.len() as u64,
        budget: limits.budget,
        capacity: limits.capacity,
        pinned_bytes: pinned_sizes.sum(),
        optimum_bytes: layout.weight_bytes - most_kept,
        schedule_bytes: scenario.schedule_bytes,
        policies: kinds.iter().map(|&kind| outcome(scenario, kind, steps.max(2), hook)).collect::<Result<_>>()?,
    })
}

fn outcome(
    scenario: &Scenario,
    kind: PolicyKind,
    steps: u64,
    hook: &mut dyn FnMut() -> Result<()>,
) -> Result<PolicyOutcome> {
    let layout = scenario.layout.clone();
    let mut cache =
        ResidencyCache::new(layout, scenario.granule, kind, scenario.pinned.clone(), scenario.schedule.clone());
    cache.set_limits(scenario.limits);
    let mut half_way = ResidencyCounters::default();
    for step in 0..steps {
        if step == steps / 2 {
            half_way = *cache.counters();
        }
        hook()?;
        run_step(&mut cache);
    }
    let steady = cache.counters().since(&half_way);
    let per_step = |count: u64| count as f64 / (steps - steps / 2) as f64;
    Ok(PolicyOutcome {
        policy: kind.name().to_string(),
        bytes_per_step: per_step(steady.page_in_bytes),
        hits_per_step: per_step(steady.hits),
        page_ins_per_step: per_step(steady.page_ins),
        evictions_per_step: per_step(steady.evictions),
        hit_rate: steady.hit_rate().unwrap_or(0.0),
        byte_hit_rate: steady.byte_hit_rate().unwrap_or(0.0),
        bypassed_share: steady.bypassed_share().unwrap_or(0.0),
        total_bytes: cache.counters().page_in_bytes,
    })
}

/// Reads every piece once, in read order, as if every move succeeded.
pub(crate) fn run_step(cache: &mut ResidencyCache) {
    for piece in 0..cache.set().layout().pieces.len() {
        match cache.look(piece) {
            Access::Hit => cache.hit(piece),
            Access::Retain { victims } => {
                victims.into_iter().for_each(|v| cache.evicted(v));
                cache.retained(piece);
            }
            Access::Bypass => cache.bypassed(piece),
        }
    }
}
