//! One limit for everything on a device: who holds how much of it, and how the weights give way and come back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headrace_memory_governor::{Holder, HolderSpec, Lease, Report, Role, Source};
use headrace_provider::{DeviceReport, LinkCeilings, PhysicalSource, RangeKind, StepInput, StepOutput, Ticket};

use crate::books::{Member, Others};
use crate::error::{EngineError, Result};
use crate::mode::PlacementMode;
use crate::paged::{EpochReason, PagedWeights};
use crate::plan::MemoryPlan;
use crate::schedule::Ring;
use crate::shared::{Held, Shared};

mod give_way;

use give_way::GiveWay;

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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held has been reported; the state is checked against the device's count by the stats.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what the device has mapped. Between a change of that and the release of what it was charged, so that another engine's
/// look at the books finds nothing that isn't explained.
fn record(member: &Member, weights: &PagedWeights) -> Result<()> {
    let physical = weights.provider().report().physical;
    let own = physical.iter().find(|figure| figure.source == PhysicalSource::MapCount);
    own.map_or(Ok(()), |figure| member.record_mapped(figure.bytes.next_multiple_of(weights.granule())))
}

/// Makes the plan anew, under the same limit, of what the link was measured at, or why it can't be measured.
pub type Replan<'a> = dyn FnMut(std::result::Result<LinkCeilings, String>) -> Result<MemoryPlan> + 'a;

/// A device's memory under one limit.
pub struct Budget {
    /// Engines that had left the books when the weights last took what is free.
    left: u64,
    holders: Holders,
    weights: Arc<Shared<PagedWeights>>,
    give_way: Arc<GiveWay>,
    staging_lease: Lease,
    kv_lease: Lease,
    /// Fixed bytes and workspace: held from beginning to end.
    _held: Vec<Lease>,
    plan: MemoryPlan,
    /// The engine's part in the books. The last to go: others take the bytes back once it has.
    member: Arc<Member>,
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.member.forget_mapped();
    }
}

impl Budget {
    /// Takes what `plan` needs from the beginning, and makes as many weights resident as fit. `plan` counts what others have in
    /// the books of `member`, whose limit becomes the plan's. Before any weight is placed, `replan` makes another plan under
    /// the same limit of what the link measures, if it is given.
    ///
    /// # Errors
    /// The device's; the governor's, if another user of the pool took what the plan counted on. The limit is as before then.
    pub fn new(
        weights: PagedWeights,
        plan: MemoryPlan,
        member: Member,
        replan: Option<&mut Replan<'_>>,
    ) -> Result<Budget> {
        let books = member.books().clone();
        let before = books.limit();
        if plan.breakdown.limit != before {
            books.set_limit(plan.breakdown.limit)?;
        }
        Budget::take_part(weights, plan, member, replan).inspect_err(|_| {
            if let Err(error) = books.set_limit(before) {
                log::error!("the limit can't be changed back to {before} bytes: {error}");
            }
        })
    }

    fn take_part(
        mut weights: PagedWeights,
        plan: MemoryPlan,
        member: Member,
        replan: Option<&mut Replan<'_>>,
    ) -> Result<Budget> {
        let member = Arc::new(member);
        let unmanaged = plan.choice.mode == PlacementMode::Unmanaged.name();
        let holder = |spec: HolderSpec| {
            let holder = member.holder(spec)?;
            if unmanaged {
                holder.decline("placement = unmanaged")?;
            }
            Ok::<Holder, EngineError>(holder)
        };
        member.books().take_context(plan.context)?;
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
        if unmanaged {
            let provider = weights.provider_mut();
            provider.expect_at_most(RangeKind::Workspace, plan.workspace);
            provider.expect_at_most(RangeKind::Kv, plan.buckets.max().bytes);
            weights.expect_all();
        }
        let reservation = space.reserve(plan.workspace)?;
        weights.provider_mut().resize(RangeKind::Workspace, plan.workspace)?;
        weights.set_mapped_budget(plan.choice.host_mapped_budget);
        held.push(reservation.commit());
        let weights = Arc::new(Shared::new(weights));
        let give_way = Arc::new(GiveWay {
            weights: weights.clone(),
            lease: Mutex::new(weights_holder.empty_lease()),
            target: Mutex::new(None),
            placing: Mutex::new(()),
            member: member.clone(),
        });
        weights_holder.set_reclaim(&give_way);
        let mut budget = Budget {
            staging_lease: staging.empty_lease(),
            kv_lease: kv.empty_lease(),
            holders: Holders { weights: weights_holder, kv, staging, _headroom: headroom },
            left: member.left(),
            weights,
            give_way,
            _held: held,
            plan,
            member,
        };
        if let Some(replan) = replan {
            let plan = replan(budget.measure_link()?)?;
            budget.set_terms(&plan)?;
            budget.plan = plan;
        }
        budget.promote(EpochReason::Load)?;
        budget.fit_ring()?;
        if unmanaged {
            // So that a device that can't hold it says so now.
            budget.grow_kv(budget.plan.buckets.max().bytes)?;
        }
        budget.observe()?;
        Ok(budget)
    }

    /// What the link carries, measured with the ring in place, which holds nothing yet. The inner error is the device's word why
    /// it can't be measured.
    fn measure_link(&mut self) -> Result<std::result::Result<LinkCeilings, String>> {
        let reservation = self.holders.staging.reserve(self.plan.full_ring_bytes())?;
        self.weights().set_ring(self.plan.ring)?;
        reservation.commit_into(&mut self.staging_lease)?;
        self.observe()?;
        Ok(self.weights().measure_link())
    }

    /// The weights, for one operation.
    pub fn weights(&self) -> Held<'_, PagedWeights> {
        self.weights.lock()
    }

    /// True once a thread, another engine's perhaps, has panicked in the middle of changing them.
    pub fn is_broken(&self) -> bool {
        self.weights.is_broken()
    }

    /// The plan it works by.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Submits one step, after making the ring fit the placement; `None` if another engine has had what was in flight dropped:
    /// [`PagedWeights::take_overtaken`] has to be asked first.
    ///
    /// # Errors
    /// The device's, or the governor's.
    pub fn submit(&mut self, input: &StepInput) -> Result<Option<Ticket>> {
        if self.weights().is_overtaken() {
            return Ok(None);
        }
        self.take_back();
        self.fit_ring()?;
        let mut weights = self.weights();
        match weights.is_overtaken() {
            true => Ok(None),
            false => Ok(Some(weights.submit(input)?)),
        }
    }

    /// Runs one step and waits for its results, so that no other engine comes in between. Nothing is in flight.
    ///
    /// # Errors
    /// The device's, or the governor's.
    pub fn run(&mut self, input: &StepInput, output: &mut StepOutput) -> Result<()> {
        self.take_back();
        self.fit_ring()?;
        let mut weights = self.weights();
        let ticket = weights.submit(input)?;
        Ok(weights.collect(ticket, output)?)
    }

    /// Most steps that may be in flight.
    pub fn max_in_flight(&self) -> usize {
        self.weights().max_in_flight()
    }

    /// What other engines have for certain in the same books.
    pub fn others(&self) -> Others {
        self.member.books().others(Some(&self.member))
    }

    /// Once another engine has left the books, makes resident what fits now. A failure costs nothing but speed.
    fn take_back(&mut self) {
        let left = self.member.left();
        if left == self.left || self.weights().in_flight() > 0 {
            return;
        }
        self.left = left;
        if let Err(error) = self.promote(EpochReason::OtherEngine) {
            log::warn!("bytes that another engine gave back were not taken: {error}");
        }
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
        self.observe()?;
        self.kv_lease.shrink(self.kv_lease.bytes().saturating_sub(mapped))?;
        self.promote(EpochReason::KvShrink)
    }

    /// Changes the limit of the live engine, whole or not at all. `plan` is the plan for the new limit.
    ///
    /// # Errors
    /// The governor's, if what is held can't be brought below the new limit; the device's, if it refuses what the new plan
    /// maps or unmaps. The old limit and plan are in force then.
    pub fn set_plan(&mut self, plan: MemoryPlan) -> Result<()> {
        let books = self.member.books().clone();
        let _joining = books.joining();
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
            self.member.books().set_limit(limit)?;
        }
        self.set_terms(&plan)?;
        self.member.books().set_limit(limit)?;
        self.plan = plan;
        self.promote(EpochReason::Limit)?;
        self.fit_ring()
    }

    /// Back to the plan that was in force before a change that failed somewhere on its way.
    fn go_back(&mut self, old: MemoryPlan, highest: u64) -> Result<()> {
        let limit = old.breakdown.limit;
        self.member.books().set_limit(highest)?;
        self.set_terms(&old)?;
        self.plan = old;
        self.member.books().set_limit(limit)?;
        // What can't come back now is streamed; the next step asks for its ring again.
        if let Err(error) = self.promote(EpochReason::Limit).and_then(|()| self.fit_ring()) {
            log::warn!("after a change of the limit that failed: {error}");
        }
        Ok(())
    }

    fn set_terms(&self, plan: &MemoryPlan) -> Result<()> {
        self.holders.staging.set_terms(0, plan.ring_bytes)?;
        self.holders.kv.set_terms(plan.buckets.floor().bytes, plan.buckets.max().bytes)?;
        self.weights().set_mapped_budget(plan.choice.host_mapped_budget);
        Ok(())
    }

    /// Makes as many weights resident as free bytes allow.
    fn promote(&mut self, reason: EpochReason) -> Result<()> {
        let give_way = self.give_way.clone();
        let _placing = lock(&give_way.placing);
        if lock(&give_way.target).is_some() {
            // Another engine is taking bytes from these weights at this moment.
            return Ok(());
        }
        let held = self.weights().held_bytes();
        let have = held + self.holders.weights.room().free + self.staging_lease.bytes();
        // Where nothing is streamed, everything being resident or read in place, the ring's bytes are free as well.
        let streams = self.weights().may_stream(have);
        let ring = if streams { self.plan.ring_room.max(self.staging_lease.bytes()) } else { 0 };
        let target = self.weights().within(have.saturating_sub(ring));
        if !streams && self.staging_lease.bytes() > 0 {
            self.weights().set_ring(Ring::default())?;
            self.observe()?;
            self.staging_lease.shrink(self.staging_lease.bytes())?;
        }
        let need = target.held.saturating_sub(held);
        if need == 0 {
            return Ok(());
        }
        let reservation = self.holders.weights.try_reserve(need)?;
        reservation.commit_into(&mut lock(&self.give_way.lease))?;
        let placed = self.weights().place(target, reason);
        let observed = self.observe();
        self.give_way.settle();
        placed?;
        observed
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
                self.observe()?;
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
            match figure.source {
                // The ledger counts whole granules.
                PhysicalSource::MapCount => self.member.record_mapped(figure.bytes.next_multiple_of(granule))?,
                PhysicalSource::Driver => self.member.record(Source::Driver, figure.bytes)?,
                PhysicalSource::Nvml => self.member.record(Source::Nvml, figure.bytes)?,
            }
        }
        Ok(self.member.report())
    }

    /// Takes the device's physical figures, so that a peak between two reports is seen.
    fn observe(&self) -> Result<()> {
        let device = self.weights().provider().report();
        self.report(&device).map(drop)
    }

    /// Peaks start again at what is held now.
    pub fn reset_peaks(&self) {
        self.member.books().reset_peaks();
    }
}
