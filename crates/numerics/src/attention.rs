//! Causal attention of one query head over stored keys and values, in chunks of positions that combine in order.

use crate::elementwise::{exp, tanh};
use crate::reduce::{dot_lanes, tree};

/// Positions of a chunk. Chunk `c` holds the absolute positions `c * CHUNK .. (c + 1) * CHUNK`, so that nothing
/// depends on where a sequence was split.
pub const CHUNK: usize = 32;

/// Lanes of a score's dot product and of the sum of a chunk's weights.
pub const ATTENTION_LANES: usize = 8;

/// What scales, caps and limits the scores of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// Factor of every score, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `cap * tanh(score / cap)` where it is greater than 0.
    pub softcap: f32,
    /// Number of last positions, the query's own included, that are seen; `None` for all.
    pub window: Option<usize>,
}

impl AttentionParams {
    /// First position that a query at `pos` sees.
    pub fn first_visible(&self, pos: usize) -> usize {
        self.window.map_or(0, |w| (pos + 1).saturating_sub(w))
    }
}

/// The partial result of one chunk, or of all chunks up to one.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// Largest score.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
    /// Sum of `exp(score - max) * value`, `head_dim` long.
    pub out: Vec<f32>,
}

/// Score of one key: eight lanes of `fma(q, k)`, the tree, times the scale, then the soft cap.
pub fn score(q: &[f32], k: &[f32], params: &AttentionParams) -> f32 {
    let s = dot_lanes::<ATTENTION_LANES>(q.iter().copied(), k.iter().copied()) * params.scale;
    if params.softcap > 0.0 { params.softcap * tanh(s / params.softcap) } else { s }
}

/// One chunk. `keys` and `values` yield the visible positions only, as `(offset in the chunk, slice)` in increasing
/// order; `q` and every slice are `head_dim` long.
///
/// `max` is the largest score, `p = exp(score - max)`; `sum` has eight lanes, offset `j` in lane `j % 8`, and the
/// tree; `out[d] = fma(p, v[d], out[d])` over the positions in increasing order.
pub fn chunk<'a>(
    q: &[f32],
    keys: impl Iterator<Item = (usize, &'a [f32])>,
    values: impl Iterator<Item = (usize, &'a [f32])>,
    params: &AttentionParams,
) -> Partial {
    let scores: Vec<(usize, f32)> = keys.map(|(j, k)| (j, score(q, k, params))).collect();
    let max = scores.iter().fold(f32::NEG_INFINITY, |m, &(_, s)| m.max(s));
    let mut lanes = [0f32; ATTENTION_LANES];
    let mut out = vec![0f32; q.len()];
    for (&(j, s), (_, v)) in scores.iter().zip(values) {
        let p = exp(s - max);
        lanes[j % ATTENTION_LANES] += p;
        for (o, &x) in out.iter_mut().zip(v) {
            *o = p.mul_add(x, *o);
        }
    }
    Partial { max, sum: tree(&mut lanes), out }
}

/// Adds the next chunk to what came before: with `m = max(a.max, b.max)`, `ea = exp(a.max - m)`,
/// `eb = exp(b.max - m)`: `sum = fma(a.sum, ea, b.sum * eb)`, `out[d] = fma(a.out[d], ea, b.out[d] * eb)`.
pub fn combine(a: &mut Partial, b: &Partial) {
    let max = a.max.max(b.max);
    let (ea, eb) = (exp(a.max - max), exp(b.max - max));
    a.max = max;
    a.sum = a.sum.mul_add(ea, b.sum * eb);
    for (x, &y) in a.out.iter_mut().zip(&b.out) {
        *x = x.mul_add(ea, y * eb);
    }
}

/// The whole of attention for one query head at position `pos`. `keys` and `values` are `[pos + 1, head_dim]` or
/// longer, row-major. Chunks that the window hides entirely are skipped. `out[d] = out[d] / sum` at the end.
pub fn attend(q: &[f32], keys: &[f32], values: &[f32], pos: usize, params: &AttentionParams, out: &mut [f32]) {
    let dim = q.len();
    let first = params.first_visible(pos);
    let mut total: Option<Partial> = None;
    for c in first / CHUNK..=pos / CHUNK {
        let range = || (c * CHUNK).max(first)..((c + 1) * CHUNK).min(pos + 1);
        let rows = |m: &'_ [f32]| -> Vec<(usize, Vec<f32>)> {
            range().map(|j| (j % CHUNK, m[j * dim..(j + 1) * dim].to_vec())).collect()
        };
        let (k, v) = (rows(keys), rows(values));
        let part =
            chunk(q, k.iter().map(|(j, r)| (*j, r.as_slice())), v.iter().map(|(j, r)| (*j, r.as_slice())), params);
        match &mut total {
            None => total = Some(part),
            Some(t) => combine(t, &part),
        }
    }
    if let Some(t) = total {
        for (o, x) in out.iter_mut().zip(&t.out) {
            *o = x / t.sum;
        }
    }
}
