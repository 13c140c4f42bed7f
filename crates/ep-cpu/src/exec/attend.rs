//! RoPE, append and attention of a step's rows, by key and value head.

use std::sync::atomic::AtomicUsize;

use headrace_kv::geometry::KvHalf;
use headrace_numerics::attention::{AttentionParams, CHUNK};
use headrace_provider::Buffer;

use super::Step;
#[cfg(target_arch = "x86_64")]
use super::attend_block::{SIDE_BY_SIDE, SideScratch};
use crate::compile::Stage;
use crate::kernels::attention::{ChunkSums, KEY_PAD, QUERY_PAD, chunk, combine, finish, padded};
use crate::kernels::norm::rms_norm_in_place;
use crate::kernels::rope::rotate;
use crate::kv_pages::Entries;
use crate::rows::TILE_ROWS;
#[cfg(target_arch = "x86_64")]
use crate::simd::SimdLevel;

/// A worker's float rows for attention, kept from step to step.
#[derive(Default)]
pub struct AttendScratch {
    /// Keys of a chunk, `[CHUNK, padded]`; the padding is [`KEY_PAD`].
    keys: Vec<f32>,
    /// Values of a chunk, `[CHUNK, padded]`; the padding is 0.
    values: Vec<f32>,
    /// Queries of a tile, `[rows * group, padded]`.
    queries: Vec<f32>,
    /// What the chunks so far add up to, `[rows * group, padded]`.
    totals: Vec<f32>,
    sums: Vec<ChunkSums>,
    /// One chunk's output.
    part: Vec<f32>,
    padded: usize,
    /// The same by sixteen queries, for tiles that have as many.
    #[cfg(target_arch = "x86_64")]
    side: SideScratch,
}

impl AttendScratch {
    fn prepare(&mut self, padded: usize, queries: usize) {
        if self.padded != padded || self.sums.len() < queries {
            self.padded = padded;
            self.keys = vec![KEY_PAD; CHUNK * padded];
            self.values = vec![0.0; CHUNK * padded];
            self.queries = vec![QUERY_PAD; queries * padded];
            self.totals = vec![0.0; queries * padded];
            self.part = vec![0.0; padded];
            self.sums = vec![ChunkSums { max: 0.0, sum: 0.0 }; queries];
        }
    }
}

impl Step<'_> {
    /// RoPE and append of all rows, a row at a time.
    pub(super) fn rope_all(&self, stage: &Stage, layer: usize) -> Result<(), String> {
        self.draw(&stage.next[0], self.input.rows.len(), |row| {
            (0..self.model.config.kv_heads).try_for_each(|head| self.rope_append(layer, row, head))
        })
    }

    /// Attention of all rows, a tile of rows and a key-value head at a time.
    pub(super) fn attend_all(
        &self,
        next: &AtomicUsize,
        layer: usize,
        scratch: &mut AttendScratch,
    ) -> Result<(), String> {
        let heads = self.model.config.kv_heads;
        let tiles = self.plan.tiles.len();
        // The last tile of a sequence sees most and goes first, so that the workers finish together.
        self.draw(next, tiles * heads, |i| self.attend_tile(layer, tiles - 1 - i / heads, i % heads, scratch))
    }

    /// RoPE, append and attention in one go: for steps in which no sequence has two rows, so that what a key-value
    /// head needs of this step is its own row.
    pub(super) fn rope_and_attend(
        &self,
        stage: &Stage,
        layer: usize,
        scratch: &mut AttendScratch,
    ) -> Result<(), String> {
        let heads = self.model.config.kv_heads;
        self.draw(&stage.next[0], self.plan.tiles.len() * heads, |i| {
            let (tile, head) = (i / heads, i % heads);
            self.rope_append(layer, self.plan.order[self.plan.tiles[tile].start], head)?;
            self.attend_tile(layer, tile, head, scratch)
        })
    }

    /// Norms, rotates and stores what belongs to one key-value head of one row: its queries, its key, its value.
    fn rope_append(&self, layer: usize, row: usize, kv_head: usize) -> Result<(), String> {
        let config = &self.model.config;
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let spec = &self.model.layers[layer];
        let token = self.input.rows[row];
        let (cos, sin) = self.rope.row(token.position);
        let style = config.rope.style;
        let prepare = |x: &mut [f32], norm: Option<_>| -> Result<(), String> {
            if let Some(norm) = norm {
                rms_norm_in_place(self.level, x, self.weights.vector(norm, dim)?, config.norm_eps);
            }
            rotate(self.level, x, style, cos, sin);
            Ok(())
        };
        let first = kv_head * group * dim;
        // SAFETY: these columns of this row belong to this head, which one worker draws; nobody else reads them
        // before the barrier.
        let queries = unsafe { self.buffers.row_mut(Buffer::Qkv, row, first..first + group * dim) };
        for q in queries.chunks_exact_mut(dim) {
            prepare(q, spec.q_norm)?;
        }
        let key_at = (config.heads + kv_head) * dim;
        // SAFETY: as above.
        let key = unsafe { self.buffers.row_mut(Buffer::Qkv, row, key_at..key_at + dim) };
        prepare(key, spec.k_norm)?;
        let value_at = (config.heads + config.kv_heads + kv_head) * dim;
        // SAFETY: the value was written before the last barrier and is not changed by anybody.
        let value = unsafe { self.buffers.row(Buffer::Qkv, row, value_at..value_at + dim) };
        let tokens = self.kv.geometry().page_tokens;
        let (page, at) = (self.input.page_tables[token.sequence][token.position / tokens], token.position % tokens);
        // SAFETY: this position of this sequence is stored once a step, by the worker that drew this row and head, and
        // nobody else reads it before the barrier: other sequences don't share a page that is being written.
        unsafe {
            self.kv.store(Entries { page, layer, half: KvHalf::Key, head: kv_head }, at, key);
            self.kv.store(Entries { page, layer, half: KvHalf::Value, head: kv_head }, at, value);
        }
        Ok(())
    }

    /// Attention of a tile's rows for the query heads of one key-value head: chunk by chunk, each loaded once.
    fn attend_tile(
        &self,
        layer: usize,
        tile: usize,
        kv_head: usize,
        scratch: &mut AttendScratch,
    ) -> Result<(), String> {
        let config = &self.model.config;
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let params = &self.model.layers[layer].attention;
        let rows = &self.plan.order[self.plan.tiles[tile].clone()];
        let wide = padded(dim);
        scratch.prepare(wide, group * TILE_ROWS);
        #[cfg(target_arch = "x86_64")]
        if self.level == SimdLevel::Avx512Vnni && rows.len() * group >= SIDE_BY_SIDE {
            let AttendScratch { keys, values, side, .. } = scratch;
            return self.attend_side_by_side(layer, rows, kv_head, keys, values, side);
        }
        let AttendScratch { keys, values, queries, totals, sums, part, .. } = scratch;
        let columns = kv_head * group * dim;
        for (r, &row) in rows.iter().enumerate() {
            // SAFETY: the queries were rotated before the last barrier, or by this worker.
            let q = unsafe { self.buffers.row(Buffer::Qkv, row, columns..columns + group * dim) };
            for (h, q) in q.chunks_exact(dim).enumerate() {
                queries[(r * group + h) * wide..][..dim].copy_from_slice(q);
            }
        }
        let position = |row: usize| self.input.rows[row].position;
        for c in self.chunks(params, rows) {
            let start = c * CHUNK;
            self.load_chunk(layer, rows, kv_head, start, keys, values);
            for (r, &row) in rows.iter().enumerate() {
                let pos = position(row);
                let first = params.first_visible(pos);
                let visible = first.max(start)..(pos + 1).min(start + CHUNK);
                if visible.is_empty() {
                    continue;
                }
                let inside = visible.start - start..visible.end - start;
                for i in r * group..(r + 1) * group {
                    let q = &queries[i * wide..(i + 1) * wide];
                    let total = &mut totals[i * wide..(i + 1) * wide];
                    if c == first / CHUNK {
                        sums[i] = chunk(self.level, q, keys, values, inside.clone(), params, total);
                    } else {
                        let next = chunk(self.level, q, keys, values, inside.clone(), params, part);
                        combine(self.level, &mut sums[i], total, next, part);
                    }
                }
            }
        }
        for (r, &row) in rows.iter().enumerate() {
            // SAFETY: the output of this row and these heads is written by the worker that drew the tile.
            let out = unsafe { self.buffers.row_mut(Buffer::Attention, row, columns..columns + group * dim) };
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let i = r * group + h;
                finish(self.level, &totals[i * wide..i * wide + dim], sums[i].sum, out);
            }
        }
        Ok(())
    }

    /// The chunks that a tile's rows see.
    pub(super) fn chunks(&self, params: &AttentionParams, rows: &[usize]) -> std::ops::RangeInclusive<usize> {
        let position = |row: Option<&usize>| row.map_or(0, |&r| self.input.rows[r].position);
        params.first_visible(position(rows.first())) / CHUNK..=position(rows.last()) / CHUNK
    }

    /// Loads what a tile's rows see of the chunk at position `start`: position `start + j` in row `j` of `keys` and of
    /// `values`.
    pub(super) fn load_chunk(
        &self,
        layer: usize,
        rows: &[usize],
        kv_head: usize,
        start: usize,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let (Some(&first), Some(&last)) = (rows.first(), rows.last()) else { return };
        let (first, last) = (self.input.rows[first], self.input.rows[last]);
        let wide = padded(self.model.config.head_dim);
        let page_tokens = self.kv.geometry().page_tokens;
        let lowest = self.model.layers[layer].attention.first_visible(first.position);
        let (from, to) = (lowest.max(start), (last.position + 1).min(start + CHUNK));
        let page = self.input.page_tables[first.sequence][start / page_tokens];
        let (at, offset) = (start % page_tokens, (from - start) * wide);
        let tokens = at + from - start..at + to - start;
        let entries = |half| Entries { page, layer, half, head: kv_head };
        // SAFETY: positions before this step's were stored by earlier steps, this step's before the last barrier, or by
        // this worker.
        unsafe {
            self.kv.load(self.level, entries(KvHalf::Key), tokens.clone(), wide, &mut keys[offset..]);
            self.kv.load(self.level, entries(KvHalf::Value), tokens, wide, &mut values[offset..]);
        }
    }
}
