//! What a limit means for a model, before anything is taken: what must fit, what is resident, what is streamed.

use std::fmt;

use headrace_kv::{Buckets, KvGeometry};
use headrace_model::ModelSpec;
use serde::Serialize;

use crate::auto::{self, Link};
use crate::books::Others;
use crate::error::{EngineError, Result};
use crate::layout::PieceLayout;
use crate::mode::{PlacementChoice, PlacementMode};
use crate::placement::Placement;
use crate::schedule::Ring;

/// One part of what a limit has to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Need {
    /// What it is for.
    pub name: String,
    /// Bytes, whole granules.
    pub bytes: u64,
    /// Why so many.
    pub why: String,
}

impl Need {
    fn new(name: &str, bytes: u64, why: impl Into<String>) -> Need {
        Need { name: name.to_string(), bytes, why: why.into() }
    }
}

/// What a limit has to hold at least, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breakdown {
    /// The limit asked for, in bytes.
    pub limit: u64,
    /// Everything that must fit.
    pub needs: Vec<Need>,
    /// The limit from which on nothing is ever cold, in bytes.
    pub everything: u64,
    /// The mode that it was planned for.
    pub mode: PlacementMode,
}

impl Breakdown {
    /// The smallest limit that works, in bytes.
    pub fn minimum(&self) -> u64 {
        self.needs.iter().map(|n| n.bytes).sum()
    }
}

impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minimum = self.minimum();
        writeln!(f, "vram_limit = {} bytes; at least {minimum} are needed:", self.limit)?;
        for need in &self.needs {
            writeln!(f, "  {:<10} {:>16}  {}", need.name, need.bytes, need.why)?;
        }
        let missing = minimum.saturating_sub(self.limit);
        let advice = match self.mode {
            PlacementMode::Resident => ", or let cold weights be streamed with placement = stream",
            PlacementMode::ZeroCopy => {
                ", or raise host_mapped_budget, or have the rest streamed with placement = hybrid"
            }
            _ => "",
        };
        write!(
            f,
            "  {:<10} {missing:>16}\nraise vram_limit, or lower max_context, max_batch or prefill_chunk{advice}",
            "missing"
        )
    }
}

/// What a device takes for itself, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// What the process takes once, however many engines use the device.
    pub context: u64,
    /// What other engines of the process hold for certain.
    pub others: Others,
    /// Tables, descriptors, activations: what it takes now, and what recording the step's program adds.
    pub fixed: u64,
    /// What all captured graphs together may take.
    pub graphs: u64,
    /// What is assumed where the device isn't here, and why; a sentence for a user.
    pub assumed: Option<String>,
}

/// Sizes that a budget is made from, in bytes.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// The limit over everything.
    pub limit: u64,
    /// Buffers of a step.
    pub workspace: u64,
    /// KV geometry.
    pub geometry: KvGeometry,
    /// Most positions of a sequence.
    pub max_context: usize,
    /// Most sequences at once.
    pub max_batch: usize,
    /// Slots of the ring where anything is streamed.
    pub slots: u32,
    /// Where cold weights may be read from.
    pub mode: PlacementMode,
    /// Bytes of weights that a step may read in place; in `auto`, if it chooses to.
    pub mapped_budget: u64,
    /// What `auto` knows of the link.
    pub link: Link,
    /// Bytes that stay free below the limit.
    pub headroom: u64,
}

/// The memory of a device under one limit.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// What must fit.
    pub breakdown: Breakdown,
    /// Mapping unit in bytes.
    pub granule: u64,
    /// What the process takes of the device once, in bytes.
    pub context: u64,
    /// What the device takes for this engine, in bytes.
    pub fixed: u64,
    /// What is set aside for captured graphs, in bytes.
    pub graphs: u64,
    /// Buffers of a step, in bytes.
    pub workspace: u64,
    /// What weights, ring and KV share, in bytes.
    pub for_weights_and_kv: u64,
    /// The ring that anything streamed needs.
    pub ring: Ring,
    /// Bytes promised to the ring: 0 if nothing can ever be streamed.
    pub ring_bytes: u64,
    /// Bytes that weights leave to the ring as long as some are cold: 0 in modes that stream nothing.
    pub ring_room: u64,
    /// Bytes that stay free below the limit.
    pub headroom: u64,
    /// The mode in force, and why.
    pub choice: PlacementChoice,
    /// The ladder of KV capacities.
    pub buckets: Buckets,
    /// Bytes of granules that all weights take.
    pub all_bytes: u64,
    /// Bytes of granules that weights may take while KV is at its floor.
    pub weights_bytes: u64,
    /// What is resident then.
    pub placement: Placement,
    /// True if everything stays resident whatever KV takes.
    pub never_cold: bool,
}

impl MemoryPlan {
    /// Plans `layout` under `sizes.limit`.
    ///
    /// # Errors
    /// [`EngineError::Budget`] with the breakdown if the limit can't work.
    pub fn new(layout: &PieceLayout, granule: u64, device: &DeviceNeeds, sizes: &Sizes) -> Result<MemoryPlan> {
        match sizes.mode {
            PlacementMode::Auto => auto::plan(layout, granule, device, sizes),
            _ => MemoryPlan::with_budget(layout, granule, device, sizes, sizes.mapped_budget),
        }
    }

    /// As [`MemoryPlan::new`], the mode taken as it is, with `mapped_budget` bytes of weights that a step may read in place.
    pub(crate) fn with_budget(
        layout: &PieceLayout,
        granule: u64,
        device: &DeviceNeeds,
        sizes: &Sizes,
        mapped_budget: u64,
    ) -> Result<MemoryPlan> {
        let up = |bytes: u64| bytes.next_multiple_of(granule);
        let (fixed, graphs, workspace) = (up(device.fixed), up(device.graphs), up(sizes.workspace));
        let (context, others) = (up(device.context), device.others.bytes);
        let page_bytes = sizes.geometry.page_bytes() as u64;
        let one = sizes.geometry.pages_for(sizes.max_context);
        let kv_one = Buckets::new(one, one, page_bytes, granule)?.max().bytes;
        let all = Placement::all_resident(layout);
        let all_bytes = all.mapped_bytes(layout, granule);
        let ring = Ring { slots: sizes.slots, slot_bytes: layout.largest_slab() };
        let (mode, headroom) = (sizes.mode, up(sizes.headroom));
        let full_ring = if mode.streams() { up(u64::from(ring.slots) * ring.slot_bytes) } else { 0 };
        // Weights that have to be resident whatever KV takes. A ring that takes more than all weights together buys nothing.
        let must = match mode {
            PlacementMode::ZeroCopy => Placement::with_cold(layout, mapped_budget).mapped_bytes(layout, granule),
            _ if mode.streams() && full_ring < all_bytes => 0,
            _ => all_bytes,
        };
        let mut needs = vec![
            Need::new("fixed", fixed, "norms, biases, tables, and what the device takes for this model"),
            Need::new("workspace", workspace, "buffers of a step, logits included"),
            Need::new("kv", kv_one, format!("one sequence of max_context = {} positions", sizes.max_context)),
        ];
        if context > 0 {
            let assumed = device.assumed.as_ref().map_or("", |_| "; assumed");
            let why = format!("what the process takes of the device once: context and kernels{assumed}");
            needs.insert(0, Need::new("context", context, why));
        }
        if others > 0 {
            let names: Vec<String> =
                device.others.holders.iter().map(|(name, bytes)| format!("{name} {bytes}")).collect();
            needs
                .insert(0, Need::new("others", others, format!("other engines in this process: {}", names.join(", "))));
        }
        if graphs > 0 {
            needs.push(Need::new("graphs", graphs, "what captured graphs may take"));
        }
        if headroom > 0 {
            needs.push(Need::new("headroom", headroom, "left free below the limit"));
        }
        let without_weights: u64 = needs.iter().map(|n| n.bytes).sum();
        let whole = without_weights.saturating_add(all_bytes) <= sizes.limit;
        if mode == PlacementMode::ZeroCopy && must < all_bytes {
            let why = format!("all but host_mapped_budget = {mapped_budget} bytes, which are read in place");
            needs.push(Need::new("weights", must, why));
        } else if whole || must > 0 {
            needs.push(Need::new("weights", all_bytes, "all of them"));
        } else {
            let why = format!("{} slots of {} bytes, through which weights are streamed", ring.slots, ring.slot_bytes);
            needs.push(Need::new("staging", full_ring, why));
        }
        let want = one.saturating_mul(sizes.max_batch);
        let most = Buckets::new(1, want, page_bytes, granule)?.max().bytes;
        let own = context + others + fixed + graphs + workspace;
        let everything = own + headroom + most + all_bytes;
        let breakdown = Breakdown { limit: sizes.limit, needs, everything, mode };
        if breakdown.minimum() > sizes.limit {
            return Err(EngineError::Budget(Box::new(breakdown)));
        }
        // KV may take the weights' bytes, but neither the ring's nor those of weights that have to be resident.
        let usable = sizes.limit / granule * granule - headroom;
        let ring_room = if must == 0 { full_ring } else { 0 };
        let elastic = usable - own - must - ring_room;
        let buckets = match mode {
            // Nothing gives way, so that nothing is gained by growing: all of it at once, as without a governor.
            PlacementMode::Unmanaged => Buckets::new(want, want, page_bytes, granule)?,
            _ => kv_buckets(one, want, page_bytes, granule, elastic)?,
        };
        let never_cold = own + buckets.max().bytes + all_bytes <= usable;
        let ring_bytes = if never_cold { 0 } else { ring_room };
        let choice = PlacementChoice {
            mode: mode.name().to_string(),
            asked_for: mode.name().to_string(),
            reason: "asked for".to_string(),
            host_mapped_budget: mapped_budget,
            headroom,
        };
        let mut plan = MemoryPlan {
            breakdown,
            granule,
            context,
            fixed,
            graphs,
            workspace,
            for_weights_and_kv: usable - own,
            ring,
            ring_bytes,
            ring_room,
            headroom,
            choice,
            buckets,
            all_bytes,
            weights_bytes: 0,
            placement: all,
            never_cold,
        };
        (plan.weights_bytes, plan.placement) = plan.beside(layout, plan.buckets.floor().bytes);
        Ok(plan)
    }

    /// Bytes of granules that weights may take while KV has a capacity of `kv` bytes, and what is resident then.
    fn beside(&self, layout: &PieceLayout, kv: u64) -> (u64, Placement) {
        let room = self.for_weights_and_kv.saturating_sub(kv);
        // Where everything cold is read in place there is no ring, and its bytes are free as long as that is so.
        let without_ring = Placement::within(layout, self.granule, room.min(self.all_bytes));
        match without_ring.streams(layout, self.choice.host_mapped_budget) {
            false => (room.min(self.all_bytes), without_ring),
            true => {
                let bytes = room.saturating_sub(self.ring_room);
                (bytes, Placement::within(layout, self.granule, bytes))
            }
        }
    }

    /// What is resident while KV has a capacity of `kv` bytes.
    pub fn placement_beside(&self, layout: &PieceLayout, kv: u64) -> Placement {
        self.beside(layout, kv).1
    }

    /// Bytes of the ring when it is there, whole granules.
    pub fn full_ring_bytes(&self) -> u64 {
        (u64::from(self.ring.slots) * self.ring.slot_bytes).next_multiple_of(self.granule)
    }
}

/// A ladder from one page to at most `want` pages, no bucket of which takes more than `room` bytes; at least `one`.
fn kv_buckets(one: usize, want: usize, page_bytes: u64, granule: u64, room: u64) -> Result<Buckets> {
    let fits = (room / granule * granule / page_bytes) as usize;
    let most = want.min(fits).max(one);
    let buckets = Buckets::new(1, most, page_bytes, granule)?;
    // The last bucket is rounded up to whole granules, which may be more than there is.
    if buckets.max().bytes > room && most > one {
        let granule_pages = (granule / page_bytes) as usize + 1;
        return Ok(Buckets::new(1, most.saturating_sub(granule_pages).max(one), page_bytes, granule)?);
    }
    Ok(buckets)
}

/// A piece of weights in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PieceEntry {
    /// Names of its tensors, with the rows `from .. to` of each.
    pub tensors: Vec<(String, usize, usize)>,
    /// Bytes of weights.
    pub bytes: u64,
    /// True if it stays in device memory.
    pub resident: bool,
    /// `resident`, `streamed` or `host-mapped`.
    pub place: &'static str,
}

/// What a limit means for a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryReport {
    /// The limit, in bytes.
    pub limit: u64,
    /// The mode in force, and why.
    pub placement: PlacementChoice,
    /// The smallest limit that works, in bytes.
    pub minimum: u64,
    /// The limit from which on nothing is ever cold, in bytes.
    pub everything: u64,
    /// What must fit.
    pub needs: Vec<Need>,
    /// Slots of the staging ring.
    pub ring_slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// KV bytes from the beginning.
    pub kv_floor_bytes: u64,
    /// KV bytes at most.
    pub kv_max_bytes: u64,
    /// Bytes of weights that are resident.
    pub resident_bytes: u64,
    /// Bytes of weights that a step streams.
    pub streamed_bytes: u64,
    /// Bytes of weights that a step reads in place on the host.
    pub host_mapped_bytes: u64,
    /// Pieces in read order.
    pub pieces: Vec<PieceEntry>,
    /// What is assumed where the device isn't here, and why; `None` for one that is.
    pub assumed: Option<String>,
}

impl MemoryReport {
    /// From a plan, with the placement as it is now.
    pub fn of(model: &ModelSpec, layout: &PieceLayout, plan: &MemoryPlan, placement: &Placement) -> MemoryReport {
        let mapped = placement.host_mapped(layout, plan.choice.host_mapped_budget);
        let pieces = layout.pieces.iter().zip(placement.resident.iter().zip(&mapped));
        let place = |(resident, mapped): (&bool, &bool)| match (resident, mapped) {
            (true, _) => "resident",
            (false, true) => "host-mapped",
            (false, false) => "streamed",
        };
        let entry = |(piece, at): (&crate::layout::Piece, (&bool, &bool))| PieceEntry {
            tensors: piece.runs.iter().map(|r| (model.tensor(r.tensor).name.clone(), r.row, r.row + r.rows)).collect(),
            bytes: piece.weight_bytes,
            resident: *at.0,
            place: place(at),
        };
        let pieces: Vec<PieceEntry> = pieces.map(entry).collect();
        let bytes_in = |place| pieces.iter().filter(|p| p.place == place).map(|p| p.bytes).sum::<u64>();
        let (streamed_bytes, host_mapped_bytes) = (bytes_in("streamed"), bytes_in("host-mapped"));
        let streams = streamed_bytes > 0;
        MemoryReport {
            limit: plan.breakdown.limit,
            placement: plan.choice.clone(),
            minimum: plan.breakdown.minimum(),
            everything: plan.breakdown.everything,
            needs: plan.breakdown.needs.clone(),
            ring_slots: if streams { plan.ring.slots } else { 0 },
            slot_bytes: if streams { plan.ring.slot_bytes } else { 0 },
            kv_floor_bytes: plan.buckets.floor().bytes,
            kv_max_bytes: plan.buckets.max().bytes,
            resident_bytes: layout.weight_bytes - streamed_bytes - host_mapped_bytes,
            streamed_bytes,
            host_mapped_bytes,
            pieces,
            assumed: None,
        }
    }
}
