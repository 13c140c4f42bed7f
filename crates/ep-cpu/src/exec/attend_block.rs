//! Attention of a tile whose queries are many: sixteen of them side by side.

use headrace_numerics::attention::{AttentionParams, CHUNK};
use headrace_provider::Buffer;

use super::Step;
use crate::kernels::attention::padded;
use crate::kernels::attention_block::{BlockSums, SIDE, Side, Visible, block, gather};

/// Queries of a tile from which on they are computed side by side, however many of the last sixteen are there: a block
/// takes about as long as a dozen queries one by one.
pub(super) const SIDE_BY_SIDE: usize = 12;

/// Sixteen queries of a tile.
struct Block {
    /// `[head_dim][query]`.
    queries: Vec<Side>,
    /// `[head_dim][query]`.
    totals: Vec<Side>,
    sums: BlockSums,
}

/// A tile's queries by sixteen, kept from step to step.
#[derive(Default)]
pub(super) struct SideScratch {
    head_dim: usize,
    blocks: Vec<Block>,
}

impl SideScratch {
    /// The blocks for `queries` queries, with nothing summed up.
    fn prepare(&mut self, head_dim: usize, queries: usize) -> &mut [Block] {
        let count = queries.div_ceil(SIDE);
        if self.head_dim != head_dim {
            (self.head_dim, self.blocks) = (head_dim, Vec::new());
        }
        let zeros = || vec![Side::ZERO; head_dim];
        while self.blocks.len() < count {
            self.blocks.push(Block { queries: zeros(), totals: zeros(), sums: BlockSums::NONE });
        }
        for block in &mut self.blocks[..count] {
            block.sums = BlockSums::NONE;
        }
        &mut self.blocks[..count]
    }
}

impl Step<'_> {
    /// Attention of `rows`, a tile of one sequence, for the query heads of one key-value head. The level must be
    /// AVX-512; `keys` and `values` are a chunk's scratch.
    pub(super) fn attend_side_by_side(
        &self,
        layer: usize,
        rows: &[usize],
        kv_head: usize,
        keys: &mut [f32],
        values: &mut [f32],
        scratch: &mut SideScratch,
    ) -> Result<(), String> {
        let config = &self.model.config;
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let columns = kv_head * group * dim;
        let params = &self.model.layers[layer].attention;
        let blocks = scratch.prepare(dim, rows.len() * group);
        // Query `l` of block `b`: its row and its first column.
        let place = |b: usize, l: usize| {
            let i = b * SIDE + l;
            rows.get(i / group).map(|&row| (row, columns + i % group * dim))
        };
        for (b, block) in blocks.iter_mut().enumerate() {
            let mut queries: [&[f32]; SIDE] = [&[]; SIDE];
            for (l, q) in queries.iter_mut().enumerate() {
                if let Some((row, at)) = place(b, l) {
                    // SAFETY: the queries were rotated before the last barrier, or by this worker.
                    *q = unsafe { self.buffers.row(Buffer::Qkv, row, at..at + dim) };
                }
            }
            gather(&queries, &mut block.queries);
        }
        for c in self.chunks(params, rows) {
            let start = c * CHUNK;
            self.load_chunk(layer, rows, kv_head, start, keys, values);
            for (b, Block { queries, totals, sums }) in blocks.iter_mut().enumerate() {
                let visible = self.visible(params, start, |l| place(b, l).map(|(row, _)| row));
                // SAFETY: the level is AVX-512, and `CpuProvider::new` refuses a level that the processor lacks.
                unsafe { block(queries, keys, values, padded(dim), &visible, params, sums, totals) };
            }
        }
        for (b, block) in blocks.iter().enumerate() {
            for l in 0..SIDE {
                let Some((row, at)) = place(b, l) else { break };
                // SAFETY: the output of this row and these heads is written by the worker that drew the tile.
                let out = unsafe { self.buffers.row_mut(Buffer::Attention, row, at..at + dim) };
                let sum = block.sums.sum.0[l];
                for (out, total) in out.iter_mut().zip(&block.totals) {
                    *out = total.0[l] / sum;
                }
            }
        }
        Ok(())
    }

    /// What sixteen queries see of the chunk at position `start`; `row` says whose they are.
    fn visible(&self, params: &AttentionParams, start: usize, row: impl Fn(usize) -> Option<usize>) -> Visible {
        let mut visible = Visible::NONE;
        for l in 0..SIDE {
            let Some(row) = row(l) else { break };
            let position = self.input.rows[row].position;
            let first = params.first_visible(position);
            let offset = |p: usize| p.saturating_sub(start).min(CHUNK) as i32;
            (visible.from[l], visible.to[l]) = (offset(first), offset(position + 1));
            // The first chunk that a query sees is the one that holds its first position.
            visible.later |= u16::from(first < start) << l;
        }
        visible
    }
}
