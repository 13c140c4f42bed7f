//! What `auto` comes to: everything resident, or cold weights streamed, or read in place as far as the budget goes. Where weights
//! may be cold, what this machine's link was measured at decides.

use headrace_provider::LinkCeilings;

use crate::error::Result;
use crate::layout::PieceLayout;
use crate::mode::PlacementMode;
use crate::plan::{DeviceNeeds, MemoryPlan, Sizes};

/// What kernels of a step reach of the ceiling of reads in place, which a kernel that does nothing else sets. Measured on an H200
/// (docs/benchmarks/over-budget.md), as the next one.
const IN_PLACE_REACHED: f64 = 0.92;

/// What kernels of a step of one row reach of the memory's clock and width.
const MEMORY_REACHED: f64 = 0.5;

/// What is known of the link when a plan is made.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Link {
    /// Nobody has measured it yet.
    #[default]
    Unmeasured,
    /// It can't be measured, and why.
    Unknown(String),
    /// Its ceilings.
    Measured(LinkCeilings),
}

impl Link {
    /// What came of measuring it.
    pub(crate) fn of(measured: std::result::Result<LinkCeilings, String>) -> Link {
        measured.map_or_else(Link::Unknown, Link::Measured)
    }
}

/// The plan of `auto`. Cold weights are read in place where a step is expected to be shorter so, by ceilings that were measured;
/// in all other cases they are copied.
pub(crate) fn plan(layout: &PieceLayout, granule: u64, device: &DeviceNeeds, sizes: &Sizes) -> Result<MemoryPlan> {
    let copied = MemoryPlan::with_budget(layout, granule, device, sizes, 0)?;
    let (limit, budget, most) = (sizes.limit, sizes.mapped_budget, copied.buckets.max().bytes);
    let largest = limit / granule * granule - copied.for_weights_and_kv + most + copied.all_bytes;
    if copied.never_cold {
        let what =
            format!("all weights fit beside the most that KV may take, {most} bytes: {largest} of {limit} bytes");
        return Ok(chosen(copied, PlacementMode::Resident, what));
    }
    let over =
        format!("all weights beside the most that KV may take would be {largest} bytes, and the limit is {limit}");
    let copies = format!("{over}; what is cold is copied through the ring");
    let ceilings = match &sizes.link {
        _ if budget == 0 => Err(": nothing may be read in place".to_string()),
        Link::Unmeasured => {
            Err(", unless reads in place are found to be faster: the link hasn't been measured yet".to_string())
        }
        Link::Unknown(why) => Err(format!("; whether reads in place would be faster is not known: {why}")),
        Link::Measured(ceilings) => Ok(ceilings),
    };
    let ceilings = match ceilings {
        Ok(ceilings) => ceilings,
        Err(why) => return Ok(chosen(copied, PlacementMode::Stream, copies + &why)),
    };
    let in_place = MemoryPlan::with_budget(layout, granule, device, sizes, budget)?;
    // Compared as it is at the beginning; where nothing is cold then, as it is in the end.
    let cold_at_once = copied.placement.cold().next().is_some();
    let kv = if cold_at_once { copied.buckets.floor().bytes } else { most };
    let seconds = [&copied, &in_place].map(|plan| expected_seconds(layout, plan, kv, ceilings));
    let figures = format!(
        "copies were measured at {:.1} GB/s and reads in place at {:.1} GB/s; beside {kv} bytes of KV a step is expected to take \
         {:.1} ms with copies alone, and {:.1} ms with up to {budget} bytes of weights read in place",
        ceilings.copies / 1e9,
        ceilings.in_place / 1e9,
        seconds[0] * 1e3,
        seconds[1] * 1e3,
    );
    if seconds[1] < seconds[0] {
        let what = format!("{over}; what is cold is read in place, and beyond the budget copied: {figures}");
        return Ok(chosen(in_place, PlacementMode::Hybrid, what));
    }
    Ok(chosen(copied, PlacementMode::Stream, format!("{copies}: {figures}")))
}

fn chosen(mut plan: MemoryPlan, mode: PlacementMode, reason: String) -> MemoryPlan {
    plan.choice.mode = mode.name().to_string();
    plan.choice.reason = reason;
    plan
}

/// True if there may be a choice that the link decides.
pub(crate) fn may_measure(sizes: &Sizes) -> bool {
    sizes.mode == PlacementMode::Auto && sizes.mapped_budget > 0
}

/// True if `plan` is to be made anew once the link is measured.
pub(crate) fn depends_on_link(plan: &MemoryPlan, sizes: &Sizes) -> bool {
    may_measure(sizes) && !plan.never_cold && sizes.link == Link::Unmeasured
}

/// Seconds that a step of one row is expected to take under `plan` while KV has `kv` bytes.
///
/// Copies run beside the kernels. A kernel that reads in place holds up those that read the device's memory, and shares the link
/// with the copies.
fn expected_seconds(layout: &PieceLayout, plan: &MemoryPlan, kv: u64, ceilings: &LinkCeilings) -> f64 {
    let placement = plan.placement_beside(layout, kv);
    let cold = placement.cold_bytes(layout);
    let in_place = placement.host_mapped_bytes(layout, plan.choice.host_mapped_budget);
    let resident = (layout.weight_bytes - cold) as f64;
    let computing = ceilings.memory.map_or(0.0, |speed| resident / (speed * MEMORY_REACHED));
    let reading = in_place as f64 / (ceilings.in_place * IN_PLACE_REACHED);
    let copying = (cold - in_place) as f64 / ceilings.copies;
    reading + copying.max(computing)
}

#[cfg(test)]
mod tests {
    use headrace_kv::{KvGeometry, KvLayout};
    use headrace_numerics::elementwise::KvDtype;
    use headrace_testing::{ModelShape, random_model};

    use super::*;

    const GRANULE: u64 = 4096;

    /// A plan of a model half of which fits, with as many bytes read in place as `auto` likes.
    fn chosen_by(ceilings: LinkCeilings) -> MemoryPlan {
        let shape = ModelShape { layers: 40, ..ModelShape::default() };
        let layout = PieceLayout::new(&random_model(3, &shape), 8192);
        let geometry = KvGeometry {
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            dtype: KvDtype::F16,
            layout: KvLayout::HeadMajor,
            page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
        };
        let sizes = Sizes {
            limit: layout.range_bytes / 2 + 2 * geometry.page_bytes() as u64,
            workspace: GRANULE,
            geometry,
            max_context: 16,
            max_batch: 1,
            slots: 2,
            mode: PlacementMode::Auto,
            mapped_budget: 1 << 30,
            link: Link::Measured(ceilings),
            headroom: 0,
        };
        MemoryPlan::new(&layout, GRANULE, &DeviceNeeds::default(), &sizes).unwrap()
    }

    #[test]
    fn reads_in_place_have_to_make_up_for_the_kernels_that_they_hold_up() {
        // As fast as copies, a fifth faster, ten times as fast; and with memory that is beyond compare, unknown, four times as
        // fast as the link, or as slow as it: then copies are hidden behind kernels, and cost nothing.
        for (in_place, memory, mode) in [
            (1e9, None, "stream"),
            (1.2e9, None, "hybrid"),
            (1.2e9, Some(4e9), "stream"),
            (1.2e9, Some(4e12), "hybrid"),
            (10e9, Some(4e9), "hybrid"),
            (10e9, Some(1e9), "stream"),
        ] {
            let plan = chosen_by(LinkCeilings { copies: 1e9, in_place, memory });
            let choice = &plan.choice;
            assert_eq!(choice.mode, mode, "{in_place} {memory:?}: {}", choice.reason);
            assert_eq!(choice.host_mapped_budget > 0, mode == "hybrid");
            assert!(choice.reason.contains("copies were measured at 1.0 GB/s"), "{}", choice.reason);
        }
    }
}
