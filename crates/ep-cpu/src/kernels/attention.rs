//! Attention of one query over one chunk of positions whose keys and values lie in float rows, and the combination of
//! chunks.

use headrace_numerics::attention::{ATTENTION_LANES, AttentionParams, CHUNK};

use super::elementwise::{exp, softcap};
use super::per_level;
use crate::simd::SimdLevel;

/// Floats of a row of queries, keys or values: `head_dim` rounded up to whole lanes. The floats behind `head_dim` are
/// [`QUERY_PAD`] in queries and [`KEY_PAD`] in keys, whose product, -0, changes no sum.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(ATTENTION_LANES)
}

/// Filling of a query row behind `head_dim`.
pub const QUERY_PAD: f32 = 0.0;
/// Filling of a key row behind `head_dim`.
pub const KEY_PAD: f32 = -0.0;

/// The largest score of a chunk and the sum of its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkSums {
    /// Largest score.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

/// The dots of `q` with the rows `8 * groups.start .. 8 * groups.end` of `keys`, each in eight lanes and the tree.
fn dots(level: SimdLevel, q: &[f32], keys: &[f32], groups: std::ops::Range<usize>, out: &mut [f32; CHUNK]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a level above scalar is only ever made on a processor that has AVX2 and FMA.
        SimdLevel::Avx2 | SimdLevel::Avx512Vnni => unsafe { dots_avx2(q, keys, groups, out) },
        _ => dots_scalar(q, keys, groups, out),
    }
}

fn dots_scalar(q: &[f32], keys: &[f32], groups: std::ops::Range<usize>, out: &mut [f32; CHUNK]) {
    for j in groups.start * 8..groups.end * 8 {
        let mut lanes = [0f32; ATTENTION_LANES];
        let row = &keys[j * q.len()..(j + 1) * q.len()];
        for (x, k) in q.chunks_exact(ATTENTION_LANES).zip(row.chunks_exact(ATTENTION_LANES)) {
            for i in 0..ATTENTION_LANES {
                lanes[i] = x[i].mul_add(k[i], lanes[i]);
            }
        }
        let (a, b) = (lanes[0] + lanes[4], lanes[1] + lanes[5]);
        let (c, d) = (lanes[2] + lanes[6], lanes[3] + lanes[7]);
        out[j] = (a + c) + (b + d);
    }
}

/// Eight keys at a time, one register of lanes each; the tree of all eight at once by shuffles.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2(q: &[f32], keys: &[f32], groups: std::ops::Range<usize>, out: &mut [f32; CHUNK]) {
    use std::arch::x86_64::*;
    let dim = q.len();
    assert!(dim.is_multiple_of(8) && groups.end * 8 <= CHUNK && keys.len() >= groups.end * 8 * dim);
    for g in groups {
        let mut acc = [_mm256_setzero_ps(); 8];
        let rows = keys[g * 8 * dim..].as_ptr();
        for m in (0..dim).step_by(8) {
            // SAFETY: `m + 8 <= dim = q.len()`.
            let x = unsafe { _mm256_loadu_ps(q.as_ptr().add(m)) };
            for (j, a) in acc.iter_mut().enumerate() {
                // SAFETY: row `8 g + j` of `dim` floats is in `keys`, checked above.
                *a = _mm256_fmadd_ps(x, unsafe { _mm256_loadu_ps(rows.add(j * dim + m)) }, *a);
            }
        }
        // Lanes i and i + 4 of keys j (low half) and j + 4 (high half).
        let fours = |j: usize| {
            let (a, b) = (acc[j], acc[j + 4]);
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        };
        // Lanes i and i + 2: of two keys in each half.
        let twos =
            |a: __m256, b: __m256| _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
        let (a, b) = (twos(fours(0), fours(1)), twos(fours(2), fours(3)));
        let sums = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b));
        // SAFETY: `8 g + 8 <= CHUNK`, checked above.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(g * 8), sums) };
    }
}

/// One chunk for one query, bit-equal to [`headrace_numerics::attention::chunk`]: the positions `visible` of the chunk,
/// of which there is at least one. `q` is [`padded`] long; `keys` and `values` are `[CHUNK, q.len()]`, rows outside
/// `visible` being anything; `out` (`q.len()` long) becomes the weighted sum of the values.
pub fn chunk(
    level: SimdLevel,
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    visible: std::ops::Range<usize>,
    params: &AttentionParams,
    out: &mut [f32],
) -> ChunkSums {
    let mut scores = [0f32; CHUNK];
    dots(level, q, keys, visible.start / 8..visible.end.div_ceil(8), &mut scores);
    #[cfg(target_arch = "x86_64")]
    if level == SimdLevel::Avx512Vnni {
        // SAFETY: such a level is only ever made on a processor that has it.
        return unsafe { super::attention_block::weigh(&scores, values, visible, params, out) };
    }
    weigh(level, &mut scores, values, visible.start, visible.end, params.scale, params.softcap, out)
}

per_level! {
    /// From dots to the sums of a chunk.
    fn weigh(
        scores: &mut [f32; CHUNK],
        values: &[f32],
        from: usize,
        to: usize,
        scale: f32,
        cap: f32,
        out: &mut [f32],
    ) -> ChunkSums {
        for s in scores.iter_mut() {
            *s *= scale;
        }
        if cap > 0.0 {
            for s in scores.iter_mut() {
                *s = softcap(*s, cap);
            }
        }
        // Hidden positions take no part: -inf is no maximum, and their weights are set to 0, which changes no sum.
        let mut max = f32::NEG_INFINITY;
        for &s in &scores[from..to] {
            max = if s > max { s } else { max };
        }
        let mut p = [0f32; CHUNK];
        for (j, (p, &s)) in p.iter_mut().zip(scores.iter()).enumerate() {
            let weight = exp(s - max);
            *p = if j >= from && j < to { weight } else { 0.0 };
        }
        let mut lanes = [0f32; ATTENTION_LANES];
        for row in p.as_chunks::<ATTENTION_LANES>().0 {
            for (lane, &x) in lanes.iter_mut().zip(row) {
                *lane += x;
            }
        }
        let (a, b) = (lanes[0] + lanes[4], lanes[1] + lanes[5]);
        let (c, d) = (lanes[2] + lanes[6], lanes[3] + lanes[7]);
        let dim = out.len();
        let mut at = 0;
        while at + 64 <= dim {
            accumulate::<64>(&p, values, from, to, dim, at, out);
            at += 64;
        }
        while at + 8 <= dim {
            accumulate::<8>(&p, values, from, to, dim, at, out);
            at += 8;
        }
        ChunkSums { max, sum: (a + c) + (b + d) }
    }
}

/// `out[at + i] = sum of p[j] * values[j][at + i]` by fma in increasing order of `j`, for `N` elements held in
/// registers.
#[inline(always)]
fn accumulate<const N: usize>(
    p: &[f32; CHUNK],
    values: &[f32],
    from: usize,
    to: usize,
    dim: usize,
    at: usize,
    out: &mut [f32],
) {
    let mut acc = [0f32; N];
    for (&p, row) in p[from..to].iter().zip(values[from * dim..].chunks_exact(dim)) {
        if let Some(row) = row[at..].first_chunk::<N>() {
            for i in 0..N {
                acc[i] = p.mul_add(row[i], acc[i]);
            }
        }
    }
    out[at..at + N].copy_from_slice(&acc);
}

per_level! {
    /// Adds the next chunk to what came before, bit-equal to [`headrace_numerics::attention::combine`].
    pub fn combine(a: &mut ChunkSums, a_out: &mut [f32], b: ChunkSums, b_out: &[f32]) {
        let max = if b.max > a.max { b.max } else { a.max };
        let (ea, eb) = (exp(a.max - max), exp(b.max - max));
        a.max = max;
        a.sum = a.sum.mul_add(ea, b.sum * eb);
        for (x, &y) in a_out.iter_mut().zip(b_out) {
            *x = x.mul_add(ea, y * eb);
        }
    }
}

per_level! {
    /// `out[d] = total[d] / sum`.
    pub fn finish(total: &[f32], sum: f32, out: &mut [f32]) {
        for (o, &x) in out.iter_mut().zip(total) {
            *o = x / sum;
        }
    }
}
