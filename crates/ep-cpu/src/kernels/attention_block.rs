//! Attention over one chunk of positions with AVX-512: of one query from its dots on, and of sixteen queries side by
//! side, where element `d` of all of them lies in one register, so that every operation is a vertical one and every key
//! and value is read once for all of them.
//!
//! A query keeps the lanes and trees of the contract to itself: nothing here adds across queries.

// Indices name lanes, keys and elements across several arrays at once.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use headrace_numerics::attention::{ATTENTION_LANES, AttentionParams, CHUNK};
use headrace_numerics::elementwise::{EXP_MAX, EXP_MIN, EXP_POLY, LN2_HI, LN2_LO, LOG2E};

use super::attention::ChunkSums;
use super::elementwise::ROUND;

/// Queries side by side.
pub const SIDE: usize = 16;

/// One float of each query.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Side(pub [f32; SIDE]);

impl Side {
    /// Sixteen zeros.
    pub const ZERO: Side = Side([0.0; SIDE]);
}

/// Output elements that the weighing of values keeps in registers.
const AT_ONCE: usize = 16;

/// What the chunks so far add up to, but for the weighted values.
#[derive(Clone, Copy, Debug)]
pub struct BlockSums {
    /// Largest score of each query.
    pub max: Side,
    /// Sum of `exp(score - max)` of each query.
    pub sum: Side,
}

impl BlockSums {
    /// Of no chunk at all.
    pub const NONE: BlockSums = BlockSums { max: Side::ZERO, sum: Side::ZERO };
}

/// The positions of a chunk that each query sees, as offsets `from .. to`; none where `from >= to`.
#[derive(Clone, Copy, Debug)]
pub struct Visible {
    /// First offset.
    pub from: [i32; SIDE],
    /// Offset behind the last one, at most [`CHUNK`].
    pub to: [i32; SIDE],
    /// Bit `l` set where query `l` saw an earlier chunk, so that this one is combined with it.
    pub later: u16,
}

impl Visible {
    /// Sixteen queries that see nothing.
    pub const NONE: Visible = Visible { from: [0; SIDE], to: [0; SIDE], later: 0 };
}

/// One chunk for sixteen queries, added to what came before: bit-equal, for each query, to
/// [`headrace_numerics::attention::chunk`] and then [`headrace_numerics::attention::combine`].
///
/// `q` and `total` are `head_dim` long, element by element; `keys` and `values` are `[CHUNK, stride]`, and rows that no
/// query sees may be anything. A query that sees nothing of the chunk is left alone.
///
/// # Panics
/// If `total` has another length than `q`, `stride` is less, or `keys` or `values` lack a row that a query sees.
///
/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[allow(clippy::too_many_arguments)]
pub unsafe fn block(
    q: &[Side],
    keys: &[f32],
    values: &[f32],
    stride: usize,
    visible: &Visible,
    params: &AttentionParams,
    sums: &mut BlockSums,
    total: &mut [Side],
) {
    let (mut first, mut last, mut seen, mut full) = (CHUNK, 0, 0u16, true);
    for l in 0..SIDE {
        let (from, to) = (visible.from[l].max(0) as usize, (visible.to[l].max(0) as usize).min(CHUNK));
        full &= from == 0 && to == CHUNK;
        if from < to {
            (first, last) = (first.min(from), last.max(to));
            seen |= 1 << l;
        }
    }
    if seen == 0 {
        return;
    }
    assert!(q.len() == total.len() && q.len() <= stride, "{} elements", q.len());
    assert!(keys.len() >= last * stride && values.len() >= last * stride, "rows of a chunk");
    let mut p = [Side::ZERO; CHUNK];
    let mut masks = [0u16; CHUNK];
    // SAFETY: a `Side` is 64 aligned bytes; rows below `last` of `keys` and `values` hold `q.len()` floats, as checked
    // above; the caller vouches for the processor.
    unsafe {
        let mut j = first;
        while j + 2 <= last {
            let [a, b] = dots(q, [keys.as_ptr().add(j * stride), keys.as_ptr().add((j + 1) * stride)]);
            put(&mut p[j], a);
            put(&mut p[j + 1], b);
            j += 2;
        }
        if j < last {
            let [a] = dots(q, [keys.as_ptr().add(j * stride)]);
            put(&mut p[j], a);
        }
        // Hidden positions take no part in the maximum, and their weights are 0, which changes no sum.
        let (from, to) =
            (_mm512_loadu_si512(visible.from.as_ptr().cast()), _mm512_loadu_si512(visible.to.as_ptr().cast()));
        let scale = _mm512_set1_ps(params.scale);
        let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
        for j in first..last {
            let at = _mm512_set1_epi32(j as i32);
            masks[j] = _mm512_cmpge_epi32_mask(at, from) & _mm512_cmplt_epi32_mask(at, to);
            let mut s = _mm512_mul_ps(get(&p[j]), scale);
            if params.softcap > 0.0 {
                s = softcap(s, params.softcap);
            }
            put(&mut p[j], s);
            max = _mm512_mask_max_ps(max, masks[j], s, max);
        }
        let mut lanes = [_mm512_setzero_ps(); ATTENTION_LANES];
        for j in first..last {
            let weight = _mm512_maskz_mov_ps(masks[j], exp(_mm512_sub_ps(get(&p[j]), max)));
            put(&mut p[j], weight);
            lanes[j % ATTENTION_LANES] = _mm512_add_ps(lanes[j % ATTENTION_LANES], weight);
        }
        let sum = tree(&lanes);
        let (most_before, sum_before) = (get(&sums.max), get(&sums.sum));
        let most = _mm512_max_ps(max, most_before);
        let (before, now) = (exp(_mm512_sub_ps(most_before, most)), exp(_mm512_sub_ps(max, most)));
        let combined = _mm512_fmadd_ps(sum_before, before, _mm512_mul_ps(sum, now));
        let new = |old: __m512, first: __m512, combined: __m512| {
            _mm512_mask_mov_ps(old, seen, _mm512_mask_mov_ps(first, visible.later, combined))
        };
        put(&mut sums.sum, new(sum_before, sum, combined));
        put(&mut sums.max, new(most_before, max, most));

        let combine = |total: &mut Side, part: __m512| {
            let old = get(total);
            put(total, new(old, part, _mm512_fmadd_ps(old, before, _mm512_mul_ps(part, now))));
        };
        let (many, few) = total.as_chunks_mut::<AT_ONCE>();
        let whole = many.len() * AT_ONCE;
        for (i, total) in many.iter_mut().enumerate() {
            let base = values.as_ptr().add(i * AT_ONCE);
            let parts = if full {
                weighted::<AT_ONCE, true>(&p, &masks, base, stride, first..last)
            } else {
                weighted::<AT_ONCE, false>(&p, &masks, base, stride, first..last)
            };
            for i in 0..AT_ONCE {
                combine(&mut total[i], parts[i]);
            }
        }
        for (i, total) in few.iter_mut().enumerate() {
            let base = values.as_ptr().add(whole + i);
            let [part] = weighted::<1, false>(&p, &masks, base, stride, first..last);
            combine(total, part);
        }
    }
}

/// From the dots of one query to the sums of a chunk, as [`super::attention::chunk`] has it.
///
/// # Panics
/// If `visible` isn't in the chunk, `out` is not whole lanes, or `values` lacks a row that is seen.
///
/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn weigh(
    scores: &[f32; CHUNK],
    values: &[f32],
    visible: std::ops::Range<usize>,
    params: &AttentionParams,
    out: &mut [f32],
) -> ChunkSums {
    let dim = out.len();
    assert!(visible.start < visible.end && visible.end <= CHUNK && dim.is_multiple_of(ATTENTION_LANES));
    assert!(values.len() >= visible.end * dim, "rows of a chunk");
    let seen = (u32::MAX << visible.start) & (u32::MAX >> (CHUNK - visible.end));
    let masks = [seen as u16, (seen >> 16) as u16];
    let mut p = [Side::ZERO; 2];
    // SAFETY: both halves of the scores are sixteen floats; rows of `values` below `visible.end` hold `dim` floats, as
    // checked above; the caller vouches for the processor.
    unsafe {
        let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut s = [_mm512_setzero_ps(); 2];
        for h in 0..2 {
            s[h] = _mm512_mul_ps(_mm512_loadu_ps(scores.as_ptr().add(SIDE * h)), _mm512_set1_ps(params.scale));
            if params.softcap > 0.0 {
                s[h] = softcap(s[h], params.softcap);
            }
            max = _mm512_mask_max_ps(max, masks[h], s[h], max);
        }
        let max = _mm512_reduce_max_ps(max);
        for h in 0..2 {
            let weight = exp(_mm512_sub_ps(s[h], _mm512_set1_ps(max)));
            put(&mut p[h], _mm512_maskz_mov_ps(masks[h], weight));
        }
        let p: &[f32; CHUNK] = &*p.as_ptr().cast();
        let mut lanes = _mm256_loadu_ps(p.as_ptr());
        for i in 1..CHUNK / ATTENTION_LANES {
            lanes = _mm256_add_ps(lanes, _mm256_loadu_ps(p.as_ptr().add(ATTENTION_LANES * i)));
        }
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        let sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
        let (mut at, base) = (0, values.as_ptr());
        while at + 4 * SIDE <= dim {
            let mut acc = [_mm512_setzero_ps(); 4];
            for j in visible.clone() {
                let (weight, row) = (_mm512_set1_ps(p[j]), base.add(j * dim + at));
                for i in 0..4 {
                    acc[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row.add(SIDE * i)), acc[i]);
                }
            }
            for i in 0..4 {
                _mm512_storeu_ps(out.as_mut_ptr().add(at + SIDE * i), acc[i]);
            }
            at += 4 * SIDE;
        }
        while at < dim {
            let mut acc = _mm256_setzero_ps();
            for j in visible.clone() {
                acc = _mm256_fmadd_ps(_mm256_set1_ps(p[j]), _mm256_loadu_ps(base.add(j * dim + at)), acc);
            }
            _mm256_storeu_ps(out.as_mut_ptr().add(at), acc);
            at += ATTENTION_LANES;
        }
        ChunkSums { max, sum }
    }
}

#[inline(always)]
unsafe fn get(x: &Side) -> __m512 {
    // SAFETY: 64 aligned bytes; the caller's processor has AVX-512.
    unsafe { _mm512_load_ps(x.0.as_ptr()) }
}

#[inline(always)]
unsafe fn put(x: &mut Side, value: __m512) {
    // SAFETY: 64 aligned bytes; the caller's processor has AVX-512.
    unsafe { _mm512_store_ps(x.0.as_mut_ptr(), value) }
}

/// The contract's tree over eight lanes, for each query.
#[inline(always)]
unsafe fn tree(x: &[__m512; ATTENTION_LANES]) -> __m512 {
    // SAFETY: the caller's processor has AVX-512.
    unsafe {
        let (a, b) = (_mm512_add_ps(x[0], x[4]), _mm512_add_ps(x[1], x[5]));
        let (c, d) = (_mm512_add_ps(x[2], x[6]), _mm512_add_ps(x[3], x[7]));
        _mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d))
    }
}

/// Dots of sixteen queries with `N` keys: eight lanes and the tree, for each.
///
/// # Safety
/// `keys` must be `q.len()` floats each; the processor must have AVX-512.
#[inline(always)]
unsafe fn dots<const N: usize>(q: &[Side], keys: [*const f32; N]) -> [__m512; N] {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); ATTENTION_LANES]; N];
        let (whole, rest) = q.as_chunks::<ATTENTION_LANES>();
        for (m, q) in whole.iter().enumerate() {
            for i in 0..ATTENTION_LANES {
                let x = get(&q[i]);
                for n in 0..N {
                    let k = _mm512_set1_ps(*keys[n].add(m * ATTENTION_LANES + i));
                    acc[n][i] = _mm512_fmadd_ps(x, k, acc[n][i]);
                }
            }
        }
        let at = whole.len() * ATTENTION_LANES;
        for i in 0..ATTENTION_LANES {
            if let Some(x) = rest.get(i) {
                for n in 0..N {
                    acc[n][i] = _mm512_fmadd_ps(get(x), _mm512_set1_ps(*keys[n].add(at + i)), acc[n][i]);
                }
            }
        }
        let mut out = [_mm512_setzero_ps(); N];
        for n in 0..N {
            out[n] = tree(&acc[n]);
        }
        out
    }
}

/// `sum of p[j] * values[j][i]`, for `i < N`, by fma in increasing order of positions. `FULL` says that every
/// query sees all of them.
///
/// # Safety
/// `values` must have `N` floats at every row of `rows`; the processor must have AVX-512.
#[inline(always)]
unsafe fn weighted<const N: usize, const FULL: bool>(
    p: &[Side; CHUNK],
    masks: &[u16; CHUNK],
    values: *const f32,
    stride: usize,
    rows: std::ops::Range<usize>,
) -> [__m512; N] {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); N];
        for j in rows {
            let (weight, row) = (get(&p[j]), values.add(j * stride));
            for i in 0..N {
                let value = _mm512_set1_ps(*row.add(i));
                sums[i] = if FULL {
                    _mm512_fmadd_ps(weight, value, sums[i])
                } else {
                    _mm512_mask3_fmadd_ps(weight, value, sums[i], masks[j])
                };
            }
        }
        sums
    }
}

/// `e^x`, bit-equal to [`headrace_numerics::elementwise::exp`].
#[inline(always)]
unsafe fn exp(x: __m512) -> __m512 {
    // SAFETY: the caller's processor has AVX-512.
    unsafe {
        // Of two operands, one NaN, these yield the second: NaN stays NaN.
        let x = _mm512_min_ps(_mm512_set1_ps(EXP_MAX), _mm512_max_ps(_mm512_set1_ps(EXP_MIN), x));
        let round = _mm512_set1_ps(ROUND);
        let shifted = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(LOG2E)), round);
        let n = _mm512_sub_ps(shifted, round);
        let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_LO), _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_HI), x));
        let mut p = _mm512_set1_ps(EXP_POLY[0]);
        for &c in &EXP_POLY[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
        }
        let y = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0));
        let n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(round));
        let half = _mm512_srai_epi32::<1>(n);
        let pow2 =
            |k: __m512i| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(k, _mm512_set1_epi32(127))));
        _mm512_mul_ps(_mm512_mul_ps(y, pow2(half)), pow2(_mm512_sub_epi32(n, half)))
    }
}

/// `cap * tanh(s / cap)`, as [`super::elementwise::softcap`].
#[inline(always)]
unsafe fn softcap(s: __m512, cap: f32) -> __m512 {
    // SAFETY: the caller's processor has AVX-512.
    unsafe {
        let (cap, one) = (_mm512_set1_ps(cap), _mm512_set1_ps(1.0));
        let x = _mm512_div_ps(s, cap);
        let e = _mm512_add_ps(exp(_mm512_add_ps(x, x)), one);
        _mm512_mul_ps(cap, _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0), e)))
    }
}

/// Lays queries side by side: `q[d][l] = rows[l][d]`; a lane without a row keeps what it holds.
pub fn gather(rows: &[&[f32]; SIDE], q: &mut [Side]) {
    for (l, row) in rows.iter().enumerate() {
        for (q, &x) in q.iter_mut().zip(row.iter()) {
            q.0[l] = x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::elementwise;
    use crate::simd::SimdLevel;

    #[test]
    fn exp_and_softcap_have_the_bits_of_the_portable_ones() {
        if !SimdLevel::Avx512Vnni.is_available() {
            return;
        }
        let x: Vec<f32> = (0..=u32::MAX).step_by(4093).map(f32::from_bits).collect();
        for x in x.as_chunks::<SIDE>().0 {
            let (mut e, mut c) = (Side::ZERO, Side::ZERO);
            // SAFETY: the processor has AVX-512.
            unsafe {
                put(&mut e, exp(get(&Side(*x))));
                put(&mut c, softcap(get(&Side(*x)), 30.0));
            }
            for l in 0..SIDE {
                for (got, want) in [(e.0[l], elementwise::exp(x[l])), (c.0[l], elementwise::softcap(x[l], 30.0))] {
                    assert!(
                        got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                        "{} {got} {want}",
                        x[l]
                    );
                }
            }
        }
    }
}
