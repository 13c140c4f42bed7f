//! One limit for everything on a device: who holds how much of it, and how the weights give way and come back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headrace_memory_governor::{
    Ask, Governor, GovernorError, Holder, HolderSpec, Lease, Pool, PoolSpec, Reclaim, ReclaimError, Report, Role,
    Source,
};
use headrace_provider::{DeviceReport, PhysicalSource, RangeKind, StepInput, Ticket};

use crate::error::Result;
use crate::mode::PlacementMode;
use crate::paged::{EpochReason, PagedWeights, Target};
use crate::plan::MemoryPlan;
use crate::schedule::Ring;

/// Reclaim priority of the weights: they are the first to give way, their host copy being there always.
const WEIGHTS_PRIORITY: u32 = 10;
/// Reclaim priority of everything that can't give way.
const FIXED_PRIORITY: u32 = 100;

struct Holders {
    weights: Holder,
    kv: Holder,
    staging: Holder,
    /// Bytes that stay free below the limit: set aside, never used.
    _headroom: Option<Holder>,
}

/// The weights' side of a reclaim. Kept apart from the engine, because the governor calls it in the middle of a growth.
struct GiveWay {
    weights: Arc<Mutex<PagedWeights>>,
    lease: Mutex<Lease>,
    /// What an offer promised to go down to.
    target: Mutex<Option<(Target, EpochReason)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held has been reported; the state is checked against the device's count by the stats.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GiveWay {
    /// Gives back what the lease holds beyond what the weights need.
    fn settle(&self) {
        let held = lock(&self.weights).held_bytes();
        let mut lease = lock(&self.lease);
        let surplus = lease.bytes().saturating_sub(held);
        if surplus > 0 && lease.shrink(surplus).is_err() {
            log::error!("the weights' lease of {} bytes can't be cut by {surplus}", lease.bytes());
        }
    }
}

impl Reclaim for GiveWay {
    fn offer(&self, ask: &Ask) -> Vec<Lease> {
        let weights = lock(&self.weights);
        let held = weights.held_bytes();
        let target = weights.within(held.saturating_sub(ask.bytes));
        let freed = held - target.held;
        let reason = if ask.requester == "limit" { EpochReason::Limit } else { EpochReason::KvGrowth };
        *lock(&self.target) = Some((target, reason));
        match lock(&self.lease).split(freed) {
            Ok(part) if freed > 0 => vec![part],
            _ => Vec::new(),
        }
    }

    fn evict(&self, _leases: &[Lease]) -> std::result::Result<(), ReclaimError> {
        let Some((target, reason)) = lock(&self.target).take() else { return Ok(()) };
        lock(&self.weights).place(target, reason).map_err(|e| ReclaimError { what: e.to_string() })
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

/// A device's memory under one limit.
pub struct Budget {
    governor: Governor,
    pool: Pool,
    holders: Holders,
    weights: Arc<Mutex<PagedWeights>>,
    give_way: Arc<GiveWay>,
    staging_lease: Lease,
    kv_lease: Lease,
    /// Fixed bytes and workspace: held from beginning to end.
    _held: Vec<Lease>,
    plan: MemoryPlan,
}

impl Budget {
    /// Takes what `plan` needs from the beginning, and makes as many weights resident as fit.
    ///
    /// # Errors
    /// The device's; the governor's, if another user of the pool took what the plan counted on.
    pub fn new(mut weights: PagedWeights, plan: MemoryPlan) -> Result<Budget> {
        let pool = Pool::Device(0);
        let governor = Governor::new([PoolSpec { pool, limit: plan.breakdown.limit, granule: plan.granule }])?;
        let unmanaged = plan.choice.mode == PlacementMode::Unmanaged.name();
        let holder = |spec: HolderSpec| {
            let holder = governor.holder(pool, spec)?;
            if unmanaged {
                holder.decline("placement = unmanaged")?;
            }
            Ok::<Holder, GovernorError>(holder)
        };
        let headroom = HolderSpec::new("headroom", Role::Other, FIXED_PRIORITY).floor(plan.headroom);
        let headroom = (plan.headroom > 0).then(|| holder(headroom)).transpose()?;
        let other = holder(HolderSpec::new("fixed", Role::Other, FIXED_PRIORITY).floor(plan.fixed))?;
        let space = holder(HolderSpec::new("workspace", Role::Workspace, FIXED_PRIORITY).floor(plan.workspace))?;
        let graphs = holder(HolderSpec::new("graphs", Role::Graphs, FIXED_PRIORITY).floor(plan.graphs))?;
        let staging = holder(HolderSpec::new("staging", Role::Staging, FIXED_PRIORITY).promise(plan.ring_bytes))?;
        let (floor, promise) = (plan.buckets.floor().bytes, plan.buckets.max().bytes);
        let kv = holder(HolderSpec::new("kv", Role::Kv, FIXED_PRIORITY).floor(floor).promise(promise))?;
        let weights_holder = holder(HolderSpec::new("weights", Role::Weights, WEIGHTS_PRIORITY))?;
        let mut held = vec![other.reserve(plan.fixed)?.commit(), graphs.reserve(plan.graphs)?.commit()];
        let reservation = space.reserve(plan.workspace)?;
        weights.provider_mut().resize(RangeKind::Workspace, plan.workspace)?;
        held.push(reservation.commit());
        let weights = Arc::new(Mutex::new(weights));
        let give_way = Arc::new(GiveWay {
            weights: weights.clone(),
            lease: Mutex::new(weights_holder.empty_lease()),
            target: Mutex::new(None),
        });
        weights_holder.set_reclaim(&give_way);
        let mut budget = Budget {
            staging_lease: staging.empty_lease(),
            kv_lease: kv.empty_lease(),
            holders: Holders { weights: weights_holder, kv, staging, _headroom: headroom },
            governor,
            pool,
            weights,
            give_way,
            _held: held,
            plan,
        };
        budget.promote(EpochReason::Load)?;
        budget.fit_ring()?;
        budget.observe()?;
        Ok(budget)
    }

    /// The weights, for one operation.
    pub fn weights(&self) -> MutexGuard<'_, PagedWeights> {
        lock(&self.weights)
    }

    /// The plan it works by.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Submits one step, after making the ring fit the placement.
    ///
    /// # Errors
    /// The device's, or the governor's.
    pub fn submit(&mut self, input: &StepInput) -> Result<Ticket> {
        self.fit_ring()?;
        Ok(self.weights().submit(input)?)
    }

    /// Grants and maps KV memory up to `bytes`; the weights give way where they have to.
    ///
    /// # Errors
    /// Nothing has changed then, but that weights which gave way may be cold.
    pub fn grow_kv(&mut self, bytes: u64) -> Result<()> {
        let more = bytes.saturating_sub(self.kv_lease.bytes());
        let reservation = self.holders.kv.reserve(more)?;
        self.weights().provider_mut().resize(RangeKind::Kv, bytes)?;
        reservation.commit_into(&mut self.kv_lease)?;
        self.observe()
    }

    /// Unmaps KV memory beyond `bytes` and gives it back; the weights take it.
    ///
    /// # Errors
    /// The device's; what is still mapped stays charged then.
    pub fn shrink_kv(&mut self, bytes: u64) -> Result<()> {
        let mapped = self.weights().provider_mut().resize(RangeKind::Kv, bytes)?;
        self.kv_lease.shrink(self.kv_lease.bytes().saturating_sub(mapped))?;
        self.promote(EpochReason::KvShrink)
    }

    /// Changes the limit of the live engine, whole or not at all. `plan` is the plan for the new limit.
    ///
    /// # Errors
    /// The governor's, if what is held can't be brought below the new limit; the device's, if it refuses what the new plan
    /// maps or unmaps. The old limit and plan are in force then.
    pub fn set_plan(&mut self, plan: MemoryPlan) -> Result<()> {
        let old = self.plan.clone();
        let highest = old.breakdown.limit.max(plan.breakdown.limit);
        let Err(error) = self.take_up(plan) else { return Ok(()) };
        if let Err(second) = self.go_back(old, highest) {
            log::error!("the limit could not be changed ({error}), and not be changed back either: {second}");
        }
        Err(error)
    }

    fn take_up(&mut self, plan: MemoryPlan) -> Result<()> {
        let limit = plan.breakdown.limit;
        // A higher limit first, so that higher promises fit; lower promises first, so that a lower limit fits.
        if limit > self.plan.breakdown.limit {
            self.governor.set_limit(self.pool, limit)?;
        }
        self.set_terms(&plan)?;
        self.governor.set_limit(self.pool, limit)?;
        self.plan = plan;
        self.promote(EpochReason::Limit)?;
        self.fit_ring()
    }

    /// Back to the plan that was in force before a change that failed somewhere on its way.
    fn go_back(&mut self, old: MemoryPlan, highest: u64) -> Result<()> {
        let limit = old.breakdown.limit;
        self.governor.set_limit(self.pool, highest)?;
        self.set_terms(&old)?;
        self.plan = old;
        self.governor.set_limit(self.pool, limit)?;
        // What can't come back now is streamed; the next step asks for its ring again.
        if let Err(error) = self.promote(EpochReason::Limit).and_then(|()| self.fit_ring()) {
            log::warn!("after a change of the limit that failed: {error}");
        }
        Ok(())
    }

    fn set_terms(&self, plan: &MemoryPlan) -> Result<()> {
        self.holders.staging.set_terms(0, plan.ring_bytes)?;
        Ok(self.holders.kv.set_terms(plan.buckets.floor().bytes, plan.buckets.max().bytes)?)
    }

    /// Makes as many weights resident as free bytes allow.
    fn promote(&mut self, reason: EpochReason) -> Result<()> {
        let (held, all) = {
            let weights = self.weights();
            (weights.held_bytes(), weights.all_bytes())
        };
        let have = held + self.holders.weights.room().free + self.staging_lease.bytes();
        // With everything resident there is nothing to stream, and the ring's bytes are free as well.
        let whole = have >= all && !self.weights().may_stream(all);
        let target = match whole {
            true => self.weights().within(all),
            false => {
                let ring = self.plan.ring_room.max(self.staging_lease.bytes());
                self.weights().within(have.saturating_sub(ring))
            }
        };
        if whole && self.staging_lease.bytes() > 0 {
            self.weights().set_ring(Ring::default())?;
            self.staging_lease.shrink(self.staging_lease.bytes())?;
        }
        let need = target.held.saturating_sub(held);
        if need == 0 {
            return Ok(());
        }
        let reservation = self.holders.weights.try_reserve(need)?;
        reservation.commit_into(&mut lock(&self.give_way.lease))?;
        let placed = self.weights().place(target, reason);
        self.give_way.settle();
        placed?;
        self.observe()
    }

    /// Gives the ring the size that the placement needs: slots if anything is streamed, none otherwise.
    fn fit_ring(&mut self) -> Result<()> {
        loop {
            let (streams, ring) = {
                let weights = self.weights();
                (weights.streams(), weights.ring())
            };
            let want = match streams {
                true => self.plan.ring,
                false => Ring::default(),
            };
            if want == ring {
                return Ok(());
            }
            if streams {
                // The weights may have to give way for their own ring, which changes the placement: look again after.
                let more = self.plan.full_ring_bytes().saturating_sub(self.staging_lease.bytes());
                let reservation = self.holders.staging.reserve(more)?;
                self.weights().set_ring(want)?;
                reservation.commit_into(&mut self.staging_lease)?;
                self.observe()?;
            } else {
                self.weights().set_ring(want)?;
                self.staging_lease.shrink(self.staging_lease.bytes())?;
            }
        }
    }

    /// The ledger, with every physical figure that the device reported beside it.
    ///
    /// # Errors
    /// The governor's, if the pool were unknown to it.
    pub fn report(&self, device: &DeviceReport) -> Result<Report> {
        let granule = self.plan.granule;
        for figure in &device.physical {
            let (source, bytes) = match figure.source {
                // The ledger counts whole granules.
                PhysicalSource::MapCount => (Source::MapCount, figure.bytes.next_multiple_of(granule)),
                PhysicalSource::Driver => (Source::Driver, figure.bytes),
                PhysicalSource::Nvml => (Source::Nvml, figure.bytes),
            };
            self.governor.record_physical(self.pool, source, bytes)?;
        }
        Ok(self.governor.report())
    }

    /// Takes the device's physical figures, so that a peak between two reports is seen.
    fn observe(&self) -> Result<()> {
        let device = self.weights().provider().report();
        self.report(&device).map(drop)
    }

    /// Peaks start again at what is held now.
    pub fn reset_peaks(&self) {
        self.governor.reset_peaks();
    }
}
