//! What more sequences at once buy and cost: streamed bytes are shared by their tokens, and KV takes room from the weights.

use headrace_kv::KvGeometry;
use serde::Serialize;

use crate::layout::PieceLayout;
use crate::plan::{MemoryPlan, Sizes};

/// A step of so many sequences, all of them as long as the table says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TradeRow {
    /// Sequences.
    pub sequences: usize,
    /// KV capacity that they need, in bytes.
    pub kv_bytes: u64,
    /// Bytes of weights that stay on the device.
    pub resident_bytes: u64,
    /// Bytes of weights that a step streams.
    pub streamed_bytes: u64,
    /// Bytes of weights that a step reads in place on the host.
    pub host_mapped_bytes: u64,
    /// Streamed bytes over the tokens of a decode step, one a sequence.
    pub streamed_bytes_per_token: f64,
    /// Resident bytes over all bytes of weights that a step reads.
    pub byte_hit_rate: f64,
}

/// What a limit means for batches of sequences of one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trade {
    /// Positions of each sequence.
    pub length: usize,
    /// Most sequences of that length at once: what memory allows, `max_batch` at most.
    pub largest: usize,
    /// What memory alone would allow, with buffers for `max_batch` rows.
    pub largest_by_memory: usize,
    /// Most sequences beside which a step reads at most 2% more bytes of cold weights than beside one: up to here streamed bytes
    /// a token fall as one over their number.
    pub before_kv_takes_weights: usize,
    /// 1, 2, 4, ... sequences, and the most.
    pub rows: Vec<TradeRow>,
}

impl Trade {
    /// For sequences of `length` positions under `plan`, which was made of `layout` and `sizes`.
    pub fn new(layout: &PieceLayout, plan: &MemoryPlan, sizes: &Sizes, length: usize) -> Trade {
        let length = length.clamp(1, sizes.max_context);
        let pages = sizes.geometry.pages_for(length);
        let largest = (plan.buckets.max().pages / pages).min(sizes.max_batch);
        let row = |sequences| plan.trade_row(layout, &sizes.geometry, sequences, pages);
        let powers = (0..).map(|shift| 1usize << shift).take_while(|&n| n < largest);
        let rows: Vec<TradeRow> = powers.chain(Some(largest).filter(|&n| n > 0)).filter_map(row).collect();
        let cold = |n| row(n).map_or(u64::MAX, |r| r.streamed_bytes + r.host_mapped_bytes);
        // The more sequences, the more is cold: so the last is found by halving.
        let bound = cold(1).saturating_add(cold(1) / 50);
        let (mut low, mut high) = (1, largest + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if cold(middle) <= bound { low = middle } else { high = middle }
        }
        Trade {
            length,
            largest,
            largest_by_memory: plan.kv_room() as usize / sizes.geometry.page_bytes() / pages,
            before_kv_takes_weights: low,
            rows,
        }
    }
}

impl MemoryPlan {
    /// Bytes that KV could take if it were asked for them: all but the ring, or the weights that have to be resident.
    fn kv_room(&self) -> u64 {
        let weights = self.breakdown.needs.iter().find(|n| n.name == "weights").map_or(self.all_bytes, |n| n.bytes);
        let stays = if self.ring_room > 0 { self.ring_room } else { weights };
        self.for_weights_and_kv.saturating_sub(stays)
    }

    fn trade_row(
        &self,
        layout: &PieceLayout,
        geometry: &KvGeometry,
        sequences: usize,
        pages_each: usize,
    ) -> Option<TradeRow> {
        let bucket = self.buckets.bucket_for(sequences.checked_mul(pages_each)?)?;
        debug_assert_eq!(self.buckets.page_bytes(), geometry.page_bytes() as u64);
        let placement = self.placement_beside(layout, bucket.bytes);
        let cold = placement.cold_bytes(layout);
        let host_mapped_bytes = placement.host_mapped_bytes(layout, self.choice.host_mapped_budget);
        let (streamed_bytes, resident_bytes) = (cold - host_mapped_bytes, layout.weight_bytes - cold);
        Some(TradeRow {
            sequences,
            kv_bytes: bucket.bytes,
            resident_bytes,
            streamed_bytes,
            host_mapped_bytes,
            streamed_bytes_per_token: streamed_bytes as f64 / sequences.max(1) as f64,
            byte_hit_rate: resident_bytes as f64 / layout.weight_bytes.max(1) as f64,
        })
    }
}
