//! Where a model lives: in its file's mapping on the host, or in the memory of a device under a limit.

use std::sync::Arc;

use headrace_kv::{Buckets, KvGeometry};
use headrace_memory_governor::Report;
use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, DeviceInfo, DeviceReport, ProgramId, Provider, RangeKind, StepInput, StepOutput, Ticket,
};

use crate::auto::{self, Link};
use crate::books::Books;
use crate::budget::{Budget, Replan};
use crate::cards::AbsentCard;
use crate::dynamic::policy_limits;
use crate::error::{EngineError, Result};
use crate::host_ledger::HostMemory;
use crate::laps::Laps;
use crate::layout::PieceLayout;
use crate::mode::PlacementMode;
use crate::options::EngineOptions;
use crate::paged::{PagedCounters, PagedWeights};
use crate::plan::{MemoryPlan, MemoryReport, Sizes};
use crate::program;
use crate::residency::pins::pinned_pieces;
use crate::residency::simulate::Scenario;
use crate::schedule::Ring;
use crate::trade::Trade;

mod needs;

use needs::{check_in_place, device_needs, expect_sizes, plan_under};

/// A model's home.
pub(crate) enum Home {
    /// Weights are read from the file's own mapping; nothing is limited.
    InPlace {
        provider: Box<dyn Provider>,
        step: ProgramId,
        /// Bytes of weights that a step reads.
        step_bytes: u64,
        counters: PagedCounters,
    },
    /// Weights, ring, KV and workspace are in a device's memory, under one limit.
    Paged {
        /// Who holds what.
        budget: Box<Budget>,
        /// What it was planned from.
        sizes: Sizes,
        /// What the device page-locks of the host, where it does.
        host: Option<Arc<HostMemory>>,
    },
    /// The engine failed: nothing is held any more.
    Gone {
        /// What computed.
        info: DeviceInfo,
        /// What happened.
        why: String,
    },
}

impl Home {
    /// On the host, in place.
    pub(crate) fn in_place(
        mut provider: Box<dyn Provider>,
        model: &Arc<ModelSpec>,
        geometry: KvGeometry,
        max_context: usize,
        options: &EngineOptions,
        laps: &mut Laps,
    ) -> Result<Home> {
        if let Some(kind) = options.policy {
            let what = "this device reads weights in place and has no residency to decide";
            return Err(EngineError::argument("policy", kind.name(), what));
        }
        provider.attach(model.clone(), geometry)?;
        laps.end("attach");
        let step = program::in_place(model, options);
        provider.expect_at_most(RangeKind::Workspace, step.workspace_bytes(&model.config));
        let pages = geometry.pages_for(max_context).saturating_mul(options.max_batch) as u64;
        provider.expect_at_most(RangeKind::Kv, pages.saturating_mul(geometry.page_bytes() as u64));
        provider.resize(RangeKind::Workspace, step.workspace_bytes(&model.config))?;
        let step = provider.record(step)?;
        laps.end("plan");
        Ok(Home::InPlace {
            provider,
            step,
            step_bytes: program::bytes_per_step(model),
            counters: PagedCounters::default(),
        })
    }

    /// On a device, under `sizes.limit` bytes.
    pub(crate) fn paged(
        mut provider: Box<dyn Provider>,
        model: &Arc<ModelSpec>,
        options: &EngineOptions,
        mut sizes: Sizes,
        laps: &mut Laps,
    ) -> Result<Home> {
        let host = provider
            .locks_host_memory()
            .then(|| HostMemory::join(options.host_limit, crate::memory_bytes()))
            .transpose()?;
        if let Some(host) = &host {
            provider.charge_host_memory(host.clone());
        }
        check_in_place(provider.as_ref(), options, &mut sizes)?;
        provider.attach(model.clone(), sizes.geometry)?;
        laps.end("attach");
        let info = provider.info();
        let target = options.piece_bytes.unwrap_or(info.piece_bytes);
        let mut weights = PagedWeights::new(provider, model.clone(), options.clone(), target)?;
        let layout = weights.schedule_layout().clone();
        expect_sizes(weights.provider_mut(), &layout, &sizes, info.granule);
        let mut needs = device_needs(weights.provider_mut(), model, options, &layout, &mut sizes)?;
        laps.end("kernels");
        // An engine without a limit has no part in anybody's.
        let key = weights.provider().memory_key().filter(|_| sizes.mode != PlacementMode::Unmanaged);
        let books = Books::open(key.as_deref(), sizes.limit, info.granule)?;
        let joining = books.joining();
        let member = books.join();
        needs.others = books.others(Some(&member));
        let plan = MemoryPlan::new(&layout, info.granule, &needs, &sizes)?;
        laps.end("plan");
        let measures = auto::depends_on_link(&plan, &sizes);
        let mut replan = |measured| {
            sizes.link = Link::of(measured);
            MemoryPlan::new(&layout, info.granule, &needs, &sizes)
        };
        let replan = measures.then_some(&mut replan as &mut Replan<'_>);
        let budget = Box::new(Budget::new(weights, plan, member, replan)?);
        laps.end("weights");
        drop(joining);
        Ok(Home::Paged { budget, sizes, host })
    }

    /// What [`Home::paged`] would do, without mapping anything. If the device stands in for an `absent` card, the report says so.
    pub(crate) fn plan_paged(
        mut provider: Box<dyn Provider>,
        model: &Arc<ModelSpec>,
        options: &EngineOptions,
        mut sizes: Sizes,
        length: usize,
        absent: Option<&AbsentCard>,
    ) -> Result<(MemoryReport, Trade)> {
        check_in_place(provider.as_ref(), options, &mut sizes)?;
        provider.attach(model.clone(), sizes.geometry)?;
        let info = provider.info();
        let layout = PieceLayout::new(model, options.piece_bytes.unwrap_or(info.piece_bytes));
        let mut needs = device_needs(provider.as_mut(), model, options, &layout, &mut sizes)?;
        needs.others = Books::others_of(provider.memory_key().as_deref());
        if let Some(card) = absent {
            needs.graphs = card.graph_bytes();
            needs.assumed = Some(card.note.clone());
        }
        let plan = MemoryPlan::new(&layout, info.granule, &needs, &sizes)?;
        let report = MemoryReport::of(model, &layout, &plan, &plan.placement);
        Ok((MemoryReport { assumed: needs.assumed, ..report }, Trade::new(&layout, &plan, &sizes, length)))
    }

    /// What a residency policy would have to work with, without mapping anything.
    pub(crate) fn scenario(
        mut provider: Box<dyn Provider>,
        model: &Arc<ModelSpec>,
        options: &EngineOptions,
        mut sizes: Sizes,
    ) -> Result<Scenario> {
        provider.attach(model.clone(), sizes.geometry)?;
        let info = provider.info();
        let target = options.piece_bytes.unwrap_or(info.piece_bytes);
        let schedule = PieceLayout::new(model, target);
        let mut needs = device_needs(provider.as_mut(), model, options, &schedule, &mut sizes)?;
        needs.others = Books::others_of(provider.memory_key().as_deref());
        let plan = MemoryPlan::new(&schedule, info.granule, &needs, &sizes)?;
        let layout = Arc::new(PieceLayout::by_tensor(model, target));
        Ok(Scenario {
            limits: policy_limits(&schedule, info.granule, plan.weights_bytes, options.policy_budget),
            pinned: pinned_pieces(model, &layout, &options.pinned, options.pin_threshold)?,
            schedule_bytes: plan.placement.cold_bytes(&schedule),
            schedule: Some(Arc::new(schedule)),
            layout,
            granule: info.granule,
        })
    }

    /// Fails if the engine has failed, or another one in the middle of changing this one's weights.
    ///
    /// # Errors
    /// [`EngineError::Failed`].
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Home::Gone { why, .. } => Err(EngineError::Failed(why.clone())),
            Home::Paged { budget, .. } if budget.is_broken() => {
                Err(EngineError::Failed("a thread panicked while it changed the weights".to_string()))
            }
            _ => Ok(()),
        }
    }

    fn gone(&self) -> DeviceError {
        let (info, why) = match self {
            Home::Gone { info, why } => (info.name.clone(), why.clone()),
            _ => (self.info().name, "the device is gone".to_string()),
        };
        DeviceError::Failed { device: info, what: why }
    }

    /// The budget, where there is a limit.
    pub(crate) fn budget(&self) -> Option<&Budget> {
        match self {
            Home::InPlace { .. } | Home::Gone { .. } => None,
            Home::Paged { budget, .. } => Some(budget),
        }
    }

    /// What batches of sequences of `length` positions would take and save; `None` where nothing is limited.
    pub(crate) fn trade(&self, length: usize) -> Option<Trade> {
        match self {
            Home::InPlace { .. } | Home::Gone { .. } => None,
            Home::Paged { budget, sizes, .. } => {
                Some(Trade::new(budget.weights().schedule_layout(), budget.plan(), sizes, length))
            }
        }
    }

    /// What the device does in another way than it would, and why.
    pub(crate) fn fallbacks(&self) -> Vec<String> {
        match self {
            Home::InPlace { provider, .. } => provider.fallbacks(),
            Home::Paged { budget, .. } => budget.weights().provider().fallbacks(),
            Home::Gone { .. } => Vec::new(),
        }
    }

    pub(crate) fn info(&self) -> DeviceInfo {
        match self {
            Home::InPlace { provider, .. } => provider.info(),
            Home::Paged { budget, .. } => budget.weights().provider().info(),
            Home::Gone { info, .. } => info.clone(),
        }
    }

    /// What the device has done and holds.
    pub(crate) fn device_report(&self) -> DeviceReport {
        match self {
            Home::InPlace { provider, .. } => provider.report(),
            Home::Paged { budget, .. } => budget.weights().device_report(),
            Home::Gone { .. } => DeviceReport::default(),
        }
    }

    /// The ladder of KV capacities.
    pub(crate) fn buckets(&self, geometry: KvGeometry, max_context: usize, max_batch: usize) -> Result<Buckets> {
        match self {
            Home::InPlace { provider, .. } => {
                let most = geometry.pages_for(max_context).saturating_mul(max_batch);
                Ok(Buckets::new(1, most, geometry.page_bytes() as u64, provider.info().granule)?)
            }
            Home::Paged { budget, .. } => Ok(budget.plan().buckets.clone()),
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Most steps that may be submitted and not collected.
    pub(crate) fn max_in_flight(&self) -> usize {
        match self {
            Home::InPlace { provider, .. } => provider.max_in_flight(),
            Home::Paged { budget, .. } => budget.max_in_flight(),
            Home::Gone { .. } => 1,
        }
    }

    /// True if the next step reads weights over a link: streams them, or reads them in place on the host. Never on the host
    /// itself.
    pub(crate) fn has_cold(&self) -> bool {
        self.budget().is_some_and(|budget| budget.weights().has_cold())
    }

    /// Nobody waits for the results of any step in flight.
    pub(crate) fn abandon(&self) {
        if let Some(budget) = self.budget() {
            budget.weights().abandon();
        }
    }

    /// True if another engine has had results dropped that were in flight; says so once. Then everything in flight has to be
    /// landed, and what it would have given is computed again.
    pub(crate) fn take_overtaken(&self) -> bool {
        self.budget().is_some_and(|budget| budget.weights().take_overtaken())
    }

    /// Submits one step behind those in flight; `None` where another engine has had those dropped, so that nothing can follow them.
    pub(crate) fn submit(&mut self, input: &StepInput) -> Result<Option<Ticket>> {
        match self {
            Home::InPlace { provider, step, step_bytes, counters } => {
                let ticket = provider.submit(*step, input)?;
                counters.host_computed_bytes += *step_bytes;
                Ok(Some(ticket))
            }
            Home::Paged { budget, .. } => budget.submit(input),
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Waits for the results of the step that was submitted first. False if another engine has had them dropped: then `output`
    /// means nothing.
    pub(crate) fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<bool> {
        match self {
            Home::InPlace { provider, .. } => provider.collect(ticket, output).map(|()| true).map_err(Into::into),
            Home::Paged { budget, .. } => {
                let mut weights = budget.weights();
                let collected = weights.collect(ticket, output);
                if !weights.is_overtaken() {
                    return collected.map(|()| true).map_err(Into::into);
                }
                if let Err(error) = collected {
                    log::warn!("a step that was dropped for another engine failed: {error}");
                }
                Ok(false)
            }
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Runs one step; nothing is in flight.
    pub(crate) fn run(&mut self, input: &StepInput, output: &mut StepOutput) -> Result<()> {
        match self {
            Home::Paged { budget, .. } => budget.run(input, output),
            _ => match self.submit(input)? {
                Some(ticket) => self.collect(ticket, output).map(drop),
                None => Err(EngineError::Internal("a step was overtaken where nothing is shared".to_string())),
            },
        }
    }

    /// Calls `work` with the device.
    ///
    /// # Errors
    /// What `work` says.
    pub(crate) fn with_provider<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Provider) -> std::result::Result<T, DeviceError>,
    ) -> std::result::Result<T, DeviceError> {
        match self {
            Home::InPlace { provider, .. } => work(provider.as_mut()),
            Home::Paged { budget, .. } => work(budget.weights().provider_mut()),
            Home::Gone { .. } => Err(self.gone()),
        }
    }

    /// Reads mapped KV bytes.
    pub(crate) fn read_kv(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), DeviceError> {
        match self {
            Home::InPlace { provider, .. } => provider.read(RangeKind::Kv, offset, into),
            Home::Paged { budget, .. } => budget.weights().provider().read(RangeKind::Kv, offset, into),
            Home::Gone { .. } => Err(self.gone()),
        }
    }

    /// Bytes mapped for KV.
    pub(crate) fn kv_mapped(&self) -> u64 {
        match self {
            Home::InPlace { provider, .. } => provider.mapped(RangeKind::Kv),
            Home::Paged { budget, .. } => budget.weights().provider().mapped(RangeKind::Kv),
            Home::Gone { .. } => 0,
        }
    }

    /// Maps KV memory up to `bytes`, granted first where there is a limit.
    pub(crate) fn grow_kv(&mut self, bytes: u64) -> Result<()> {
        match self {
            Home::InPlace { provider, .. } => provider.resize(RangeKind::Kv, bytes).map(drop).map_err(Into::into),
            Home::Paged { budget, .. } => budget.grow_kv(bytes),
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Unmaps KV memory beyond `bytes`.
    pub(crate) fn shrink_kv(&mut self, bytes: u64) -> Result<()> {
        match self {
            Home::InPlace { provider, .. } => provider.resize(RangeKind::Kv, bytes).map(drop).map_err(Into::into),
            Home::Paged { budget, .. } => budget.shrink_kv(bytes),
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Totals since the engine was made.
    pub(crate) fn counters(&self) -> PagedCounters {
        match self {
            Home::InPlace { counters, .. } => counters.clone(),
            Home::Paged { budget, .. } => budget.weights().counters(),
            Home::Gone { .. } => PagedCounters::default(),
        }
    }

    /// Peaks start again at what is held now, and the trace at nothing.
    pub(crate) fn reset_peaks(&self) {
        if let Some(budget) = self.budget() {
            budget.weights().reset_residency_trace();
            budget.reset_peaks();
        }
        if let Home::Paged { host: Some(host), .. } = self {
            host.reset_peaks();
        }
    }

    /// The plan for another limit.
    ///
    /// # Errors
    /// [`EngineError::Budget`] if it can't work; [`EngineError::Argument`] where nothing is limited.
    pub(crate) fn plan_for(&self, limit: u64) -> Result<MemoryPlan> {
        match self {
            Home::InPlace { .. } => {
                Err(EngineError::argument("vram_limit", limit, "this device reads weights in place and has no limit"))
            }
            Home::Paged { sizes, .. } if sizes.mode == PlacementMode::Unmanaged => {
                Err(EngineError::argument("vram_limit", limit, "placement = unmanaged enforces no limit"))
            }
            Home::Paged { budget, sizes, .. } => plan_under(budget, sizes, limit),
            Home::Gone { .. } => Err(self.gone().into()),
        }
    }

    /// Takes up a plan made by [`Home::plan_for`].
    ///
    /// # Errors
    /// As [`Budget::set_plan`].
    pub(crate) fn set_plan(&mut self, plan: MemoryPlan) -> Result<()> {
        match self {
            Home::InPlace { .. } => Ok(()),
            Home::Gone { .. } => Err(self.gone().into()),
            Home::Paged { budget, sizes, .. } => {
                let limit = plan.breakdown.limit;
                let measures = auto::depends_on_link(&plan, sizes);
                budget.set_plan(plan)?;
                sizes.limit = limit;
                // A model that fitted until now: only now is there a ring to measure with.
                if measures && budget.weights().ring() != Ring::default() {
                    sizes.link = Link::of(budget.weights().measure_link());
                    let measured = plan_under(budget, sizes, limit).and_then(|plan| budget.set_plan(plan));
                    if let Err(error) = measured {
                        log::warn!("the limit is changed; what is cold goes on being copied: {error}");
                    }
                }
                Ok(())
            }
        }
    }

    /// The ledgers, with what the device reported beside them: the device's memory, and what it page-locks of the host; none where
    /// nothing is limited.
    pub(crate) fn reports(&self, device: &DeviceReport) -> Result<Vec<Report>> {
        let Home::Paged { budget, host, .. } = self else { return Ok(Vec::new()) };
        let locked = host.iter().map(|host| host.report(device.sources.pinned_bytes));
        [budget.report(device)].into_iter().chain(locked).collect()
    }
}
