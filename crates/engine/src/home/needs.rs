//! What a plan is made from: what the device can do, what it takes for itself, and what is held already.

use headrace_model::ModelSpec;
use headrace_provider::{Provider, RangeKind};

use crate::auto::{self, Link};
use crate::books::Others;
use crate::budget::Budget;
use crate::error::{EngineError, Result};
use crate::layout::PieceLayout;
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::plan::{DeviceNeeds, MemoryPlan, Sizes};
use crate::schedule::{Ring, Schedule};

/// The plan of a live engine for another limit.
pub(super) fn plan_under(budget: &Budget, sizes: &Sizes, limit: u64) -> Result<MemoryPlan> {
    let weights = budget.weights();
    // What is recorded by now is part of the device's own figure; what the plan set aside for it is not less.
    let plan = budget.plan();
    let fixed = plan.fixed.max(weights.provider().fixed_bytes());
    let needs =
        DeviceNeeds { context: plan.context, others: budget.others(), fixed, graphs: plan.graphs, assumed: None };
    let sizes = Sizes { limit, ..sizes.clone() };
    MemoryPlan::new(weights.schedule_layout(), weights.granule(), &needs, &sizes)
}

/// Refuses a mode that reads host memory in place on a device that can't; `auto` reads nothing in place there.
pub(super) fn check_in_place(provider: &dyn Provider, options: &EngineOptions, sizes: &mut Sizes) -> Result<()> {
    match provider.reads_host_memory() {
        Err(why) if options.placement.reads_in_place() => {
            Err(EngineError::argument("placement", options.placement.name(), why))
        }
        Err(_) => {
            sizes.mapped_budget = 0;
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Says to the device what its ranges will hold at most, whatever the limit becomes: it reserves addresses in proportion.
pub(super) fn expect_sizes(provider: &mut dyn Provider, layout: &PieceLayout, sizes: &Sizes, granule: u64) {
    let geometry = &sizes.geometry;
    let pages = geometry.pages_for(sizes.max_context).saturating_mul(sizes.max_batch) as u64;
    let ring = u64::from(sizes.slots).saturating_mul(layout.largest_slab());
    for (range, bytes) in [
        (RangeKind::Kv, pages.saturating_mul(geometry.page_bytes() as u64)),
        (RangeKind::Workspace, sizes.workspace),
        (RangeKind::Staging, ring),
    ] {
        provider.expect_at_most(range, bytes.checked_next_multiple_of(granule).unwrap_or(bytes));
    }
}

/// Bytes that the device takes for itself: now, and once the step program is recorded. If `auto` may come to measure the link, the
/// device is ready for that then, or `sizes` say why it can't be.
pub(super) fn device_needs(
    provider: &mut dyn Provider,
    model: &ModelSpec,
    options: &EngineOptions,
    layout: &PieceLayout,
    sizes: &mut Sizes,
) -> Result<DeviceNeeds> {
    let resident = Placement::all_resident(layout);
    let step = Schedule::new(model, options, layout, &resident, Ring::default(), 0).step;
    // A step and its prologue; or, under a policy, one for each piece where it is resident, and one where it is in a slot.
    let programs = match options.policy {
        None => 2,
        Some(_) => {
            let target = options.piece_bytes.unwrap_or(provider.info().piece_bytes);
            2 * PieceLayout::by_tensor(model, target).pieces.len() as u64
        }
    };
    // In this order: the program's code is part of the fixed bytes once it is loaded.
    let program = provider.program_bytes(&step, programs)?;
    if auto::may_measure(sizes) {
        sizes.link = provider.ready_link_ceilings().map_or_else(Link::Unknown, |()| Link::Unmeasured);
    }
    let fixed = provider.fixed_bytes() + program;
    let context = provider.shared_bytes();
    let graphs = provider.graph_allowance();
    Ok(DeviceNeeds { context, others: Others::default(), fixed, graphs, assumed: None })
}
