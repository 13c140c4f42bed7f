//! What a limit means for a model, before anything is taken: what must fit, what is resident, what is streamed.

use std::fmt;

use headrace_kv::{Buckets, KvGeometry};
use headrace_model::ModelSpec;
use serde::Serialize;

use crate::error::{EngineError, Result};
use crate::layout::PieceLayout;
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
    /// The limit from which on nothing is ever streamed, in bytes.
    pub everything: u64,
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
        write!(
            f,
            "  {:<10} {missing:>16}\nraise vram_limit, or lower max_context, max_batch or prefill_chunk",
            "missing"
        )
    }
}

/// What a device takes for itself, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// Context, tables, descriptors, activations: what it takes now, and what recording the step's program adds.
    pub fixed: u64,
    /// What all captured graphs together may take.
    pub graphs: u64,
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
    /// Slots of the ring where anything is cold.
    pub slots: u32,
}

/// The memory of a device under one limit.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// What must fit.
    pub breakdown: Breakdown,
    /// Mapping unit in bytes.
    pub granule: u64,
    /// What the device itself takes, in bytes.
    pub fixed: u64,
    /// What is set aside for captured graphs, in bytes.
    pub graphs: u64,
    /// Buffers of a step, in bytes.
    pub workspace: u64,
    /// The ring that anything cold needs.
    pub ring: Ring,
    /// Bytes promised to the ring: 0 if nothing can ever be cold.
    pub ring_bytes: u64,
    /// The ladder of KV capacities.
    pub buckets: Buckets,
    /// Bytes of granules that weights may take while KV is at its floor.
    pub weights_bytes: u64,
    /// What is resident then.
    pub placement: Placement,
}

impl MemoryPlan {
    /// Plans `layout` under `sizes.limit`.
    ///
    /// # Errors
    /// [`EngineError::Budget`] with the breakdown if the limit can't work.
    pub fn new(layout: &PieceLayout, granule: u64, device: DeviceNeeds, sizes: &Sizes) -> Result<MemoryPlan> {
        let up = |bytes: u64| bytes.next_multiple_of(granule);
        let (fixed, graphs, workspace) = (up(device.fixed), up(device.graphs), up(sizes.workspace));
        let page_bytes = sizes.geometry.page_bytes() as u64;
        let one = sizes.geometry.pages_for(sizes.max_context);
        let kv_one = Buckets::new(one, one, page_bytes, granule)?.max().bytes;
        let all = Placement::all_resident(layout);
        let all_bytes = all.mapped_bytes(layout, granule);
        let ring = Ring { slots: sizes.slots, slot_bytes: layout.largest_slab() };
        let full_ring = up(u64::from(ring.slots) * ring.slot_bytes);
        let mut needs = vec![
            Need::new("fixed", fixed, "norms, biases, tables, and what the device itself takes"),
            Need::new("workspace", workspace, "buffers of a step, logits included"),
            Need::new("kv", kv_one, format!("one sequence of max_context = {} positions", sizes.max_context)),
        ];
        if graphs > 0 {
            needs.push(Need::new("graphs", graphs, "what captured graphs may take"));
        }
        let without_weights: u64 = needs.iter().map(|n| n.bytes).sum();
        let whole = without_weights + all_bytes <= sizes.limit;
        // A ring that takes more than all weights together buys nothing: then everything has to be resident.
        if whole || full_ring >= all_bytes {
            needs.push(Need::new("weights", all_bytes, "all of them"));
        } else {
            let why = format!("{} slots of {} bytes, through which weights are streamed", ring.slots, ring.slot_bytes);
            needs.push(Need::new("staging", full_ring, why));
        }
        let want = one.saturating_mul(sizes.max_batch);
        let most = Buckets::new(1, want, page_bytes, granule)?.max().bytes;
        let own = fixed + graphs + workspace;
        let everything = own + most + all_bytes;
        let breakdown = Breakdown { limit: sizes.limit, needs, everything };
        if breakdown.minimum() > sizes.limit {
            return Err(EngineError::Budget(Box::new(breakdown)));
        }
        // KV may take the weights' bytes, but neither the ring's nor, where a ring is no use, the weights' own.
        let usable = sizes.limit / granule * granule;
        let elastic = usable - own - full_ring.min(all_bytes);
        let buckets = kv_buckets(one, want, page_bytes, granule, elastic)?;
        let never_cold = own + buckets.max().bytes + all_bytes <= usable;
        let ring_bytes = if never_cold || full_ring >= all_bytes { 0 } else { full_ring };
        let room = usable - own - buckets.floor().bytes;
        let weights_bytes = if all_bytes <= room { all_bytes } else { room.saturating_sub(full_ring) };
        let placement = Placement::within(layout, granule, weights_bytes);
        Ok(MemoryPlan {
            breakdown,
            granule,
            fixed,
            graphs,
            workspace,
            ring,
            ring_bytes,
            buckets,
            weights_bytes,
            placement,
        })
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
}

/// What a limit means for a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryReport {
    /// The limit, in bytes.
    pub limit: u64,
    /// The smallest limit that works, in bytes.
    pub minimum: u64,
    /// The limit from which on nothing is ever streamed, in bytes.
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
    /// Pieces in read order.
    pub pieces: Vec<PieceEntry>,
}

impl MemoryReport {
    /// From a plan, with the placement as it is now.
    pub fn of(model: &ModelSpec, layout: &PieceLayout, plan: &MemoryPlan, placement: &Placement) -> MemoryReport {
        let streamed_bytes = placement.cold_bytes(layout);
        let cold = streamed_bytes > 0;
        let entry = |(piece, resident): (&crate::layout::Piece, &bool)| PieceEntry {
            tensors: piece.runs.iter().map(|r| (model.tensor(r.tensor).name.clone(), r.row, r.row + r.rows)).collect(),
            bytes: piece.weight_bytes,
            resident: *resident,
        };
        MemoryReport {
            limit: plan.breakdown.limit,
            minimum: plan.breakdown.minimum(),
            everything: plan.breakdown.everything,
            needs: plan.breakdown.needs.clone(),
            ring_slots: if cold { plan.ring.slots } else { 0 },
            slot_bytes: if cold { plan.ring.slot_bytes } else { 0 },
            kv_floor_bytes: plan.buckets.floor().bytes,
            kv_max_bytes: plan.buckets.max().bytes,
            resident_bytes: layout.weight_bytes - streamed_bytes,
            streamed_bytes,
            pieces: layout.pieces.iter().zip(&placement.resident).map(entry).collect(),
        }
    }
}
