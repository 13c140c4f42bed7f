//! One `GroupQueryAttention` node: its shape, its rotary embedding, and the projections in front of it.

use headrace_numerics::attention::AttentionParams;
use headrace_numerics::rope::RopeStyle;

use super::decoder::{Decoder, normalise};
use super::graph::{Attributes, MICROSOFT};
use super::weights::Found;
use crate::error::Result;
use crate::spec::{Rope, RopeTables, TensorId};

/// What was found in front of and inside one attention node.
pub struct FoundAttention<'a> {
    pub node: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[q | k | v]`, one layer or three.
    pub qkv: Vec<Found<'a>>,
    pub q_norm: Option<TensorId>,
    pub k_norm: Option<TensorId>,
    pub rope: Rope,
    pub params: AttentionParams,
    /// Names of the cache's inputs and outputs: past key, past value, present key, present value.
    pub cache: [&'a str; 4],
}

/// Inputs of `GroupQueryAttention`.
mod input {
    pub const PAST_KEY: usize = 3;
    pub const SEQUENCE_LENGTHS: usize = 5;
    pub const TOTAL_LENGTH: usize = 6;
    pub const COS: usize = 7;
    pub const SIN: usize = 8;
    pub const POSITIONS: usize = 9;
    pub const BIAS: usize = 10;
    pub const SINKS: usize = 11;
    pub const K_SCALE: usize = 12;
    pub const V_SCALE: usize = 13;
    pub const Q_NORM: usize = 14;
    pub const K_NORM: usize = 15;
}

fn positive(d: &Decoder<'_, '_>, n: usize, name: &str, value: Option<i64>) -> Result<usize> {
    value
        .and_then(|v| usize::try_from(v).ok())
        .filter(|v| (1..=1 << 16).contains(v))
        .ok_or_else(|| d.g.format(n, format!("attribute {name} = {value:?}")))
}

/// Scale, cap and window. `local_window_size` counts the query's own position, as ONNX Runtime has it since 1.23 (the
/// builder writes the model's `sliding_window` into it): position `p` sees `(p - w, p]`.
fn params(d: &Decoder<'_, '_>, n: usize, a: &mut Attributes<'_, '_>, head_dim: usize) -> Result<AttentionParams> {
    let scale = match a.float("scale")? {
        Some(s) if s < 0.0 => return Err(d.g.format(n, format!("attribute scale = {s}"))),
        Some(s) if s > 0.0 => s,
        _ => (1.0 / (head_dim as f64).sqrt()) as f32,
    };
    let softcap = a.float("softcap")?.unwrap_or(0.0);
    if softcap < 0.0 {
        return Err(d.g.format(n, format!("attribute softcap = {softcap}")));
    }
    let window = match a.int("local_window_size")?.unwrap_or(-1) {
        -1 => None,
        w => match usize::try_from(w) {
            Ok(w) if w > 0 => Some(w),
            _ => return Err(d.g.format(n, format!("attribute local_window_size = {w}; -1 or a positive number"))),
        },
    };
    Ok(AttentionParams { scale, softcap, window })
}

/// Refuses what Headrace's attention does not do.
fn refuse_unsupported(d: &Decoder<'_, '_>, n: usize, a: &mut Attributes<'_, '_>) -> Result<()> {
    if d.g.input(n, input::SINKS).is_some() {
        return Err(d.g.unsupported(n, "input head_sink: attention sinks, as in GPT-OSS mixture-of-experts models"));
    }
    if let Some(b) = d.g.input(n, input::BIAS) {
        return Err(d.g.unsupported(n, format!("input attention_bias ({b:?})")));
    }
    for i in [input::K_SCALE, input::V_SCALE] {
        if let Some(s) = d.g.input(n, i) {
            return Err(d.g.unsupported(n, format!("input {s:?}: a quantised KV cache; export with a float one")));
        }
    }
    for name in ["k_quant_type", "v_quant_type"] {
        if let Some(t) = a.text(name)?.filter(|t| t != "NONE") {
            return Err(d
                .g
                .unsupported(n, format!("attribute {name} = {t:?}: a quantised KV cache; export with a float one")));
        }
    }
    a.only_int("kv_cache_bit_width", 0, 0)?;
    match a.int("smooth_softmax")?.unwrap_or(-1) {
        -1 | 0 => {}
        s => return Err(d.g.unsupported(n, format!("attribute smooth_softmax = {s}"))),
    }
    a.only_int("qk_output", 0, 0)?;
    if d.g.node(n).output.iter().skip(3).any(|o| !o.is_empty()) {
        return Err(d.g.unsupported(n, "a fourth output (attention scores)"));
    }
    Ok(())
}

/// Recognises the attention that makes `value`.
pub fn find<'a>(d: &mut Decoder<'a, '_>, value: &'a str) -> Result<FoundAttention<'a>> {
    let g = d.g;
    let value = g.through_casts(value)?;
    let n = match g.producer(value) {
        Some((n, 0)) if g.is(n, MICROSOFT, "GroupQueryAttention") => n,
        Some((n, _)) => return Err(g.unsupported(n, "stands where GroupQueryAttention is expected")),
        None => return Err(g.origin.unsupported(Some(value.to_string()), "GroupQueryAttention is expected here")),
    };
    let mut a = g.claim(n)?;
    g.at_most(n, 16)?;
    refuse_unsupported(d, n, &mut a)?;
    let heads = positive(d, n, "num_heads", a.int("num_heads")?)?;
    let kv_heads = positive(d, n, "kv_num_heads", a.int("kv_num_heads")?)?;
    if heads % kv_heads != 0 {
        return Err(g.format(n, format!("{heads} query heads are no multiple of {kv_heads} key heads")));
    }
    d.mask.sequence_lengths(g, &d.w.init, g.need(n, input::SEQUENCE_LENGTHS, "seqlens_k")?)?;
    d.mask.total_length(g, &d.w.init, g.need(n, input::TOTAL_LENGTH, "total_sequence_length")?)?;

    let do_rotary = match a.int("do_rotary")?.unwrap_or(0) {
        0 => false,
        1 => true,
        v => return Err(g.format(n, format!("attribute do_rotary = {v}"))),
    };
    let interleaved = a.int("rotary_interleaved")?.unwrap_or(0);

    // The projections: one packed, or q, k and v on their own, each with what stands between it and attention.
    let query = g.need(n, 0, "query")?;
    let mut parts = Parts::default();
    match (g.input(n, 1), g.input(n, 2)) {
        (None, None) => parts.packed = Some(query),
        (Some(k), Some(v)) => {
            parts.q = d.branch(query, heads, true, &mut parts.norm_q, &mut parts.ropes)?;
            parts.k = d.branch(k, kv_heads, true, &mut parts.norm_k, &mut parts.ropes)?;
            parts.v = d.branch(v, kv_heads, false, &mut None, &mut parts.ropes)?;
            parts.packed = d.common_split(n, [parts.q, parts.k, parts.v])?;
        }
        _ => return Err(g.format(n, "key without value, or value without key")),
    }
    let (qkv, head_dim) = d.projections(n, &parts, heads, kv_heads)?;

    let fused = (g.input(n, input::Q_NORM), g.input(n, input::K_NORM));
    let epsilon = a.float("qk_norm_epsilon")?;
    let (q_norm, k_norm) = match (fused, parts.norm_q, parts.norm_k) {
        ((Some(q), Some(k)), None, None) => {
            d.epsilon(n, "qk_norm_epsilon", epsilon.unwrap_or(1e-6))?;
            (Some(d.w.vector(g, n, q, "q_norm weight")?), Some(d.w.vector(g, n, k, "k_norm weight")?))
        }
        ((None, None), q, k) if q.is_some() == k.is_some() => (q, k),
        _ => return Err(g.unsupported(n, "a norm over the query heads without one over the key heads, or two norms")),
    };
    for id in q_norm.iter().chain(&k_norm) {
        let t = d.w.tensor(*id);
        if t.cols != head_dim {
            return Err(g.format(n, format!("norm {} has {} elements, but a head {head_dim}", t.name, t.cols)));
        }
    }

    let rope = d.rotary(n, do_rotary, interleaved, &parts.ropes, head_dim)?;
    let params = params(d, n, &mut a, head_dim)?;
    a.finish()?;
    let output = |i: usize| g.node(n).output.get(i).map_or("", String::as_str);
    let cache =
        [g.need(n, input::PAST_KEY, "past_key")?, g.need(n, input::PAST_KEY + 1, "past_value")?, output(1), output(2)];
    Ok(FoundAttention { node: n, heads, kv_heads, head_dim, qkv, q_norm, k_norm, rope, params, cache })
}

/// The values that a layer's query, key and value start from.
#[derive(Default)]
struct Parts<'a> {
    packed: Option<&'a str>,
    q: &'a str,
    k: &'a str,
    v: &'a str,
    norm_q: Option<TensorId>,
    norm_k: Option<TensorId>,
    ropes: Vec<usize>,
}

impl<'a> Decoder<'a, '_> {
    /// Follows one of q, k, v from attention back to its projection: `RotaryEmbedding`, then
    /// `Reshape(norm(Reshape(...)))`, both optional.
    fn branch(
        &mut self,
        value: &'a str,
        heads: usize,
        rotated: bool,
        norm: &mut Option<TensorId>,
        ropes: &mut Vec<usize>,
    ) -> Result<&'a str> {
        let g = self.g;
        let mut value = g.through_casts(value)?;
        if let Some(r) = g.producer_of(value, MICROSOFT, "RotaryEmbedding").filter(|_| rotated) {
            ropes.push(r);
            value = g.through_casts(g.need(r, 0, "input")?)?;
        }
        let Some(outer) = g.producer_of(value, "", "Reshape") else { return Ok(value) };
        let to = self.reshape(outer)?;
        let normed = g.through_casts(g.need(outer, 0, "data")?)?;
        let Some(n) = g.producer(normed).map(|(n, _)| n).filter(|n| normalise(g, *n)) else {
            return Err(g.unsupported(outer, "a Reshape between projection and attention that belongs to no norm"));
        };
        let (weight, from) = self.plain_norm(n)?;
        let head_dim = self.w.tensor(weight).cols;
        let from = g.through_casts(from)?;
        let Some(inner) = g.producer_of(from, "", "Reshape") else {
            return Err(g.unsupported(n, "a norm between projection and attention that is not over single heads"));
        };
        let split = self.reshape(inner)?;
        if split != [0, -1, head_dim as i64] || to != [0, -1, (heads * head_dim) as i64] {
            return Err(
                g.unsupported(n, format!("shapes {split:?} and {to:?} around the norm over heads of {head_dim}"))
            );
        }
        *norm = Some(weight);
        g.through_casts(g.need(inner, 0, "data")?)
    }

    fn reshape(&self, n: usize) -> Result<Vec<i64>> {
        let g = self.g;
        let mut a = g.claim(n)?;
        a.only_int("allowzero", 0, 0)?;
        a.finish()?;
        g.at_most(n, 2)?;
        g.ints(g.need(n, 1, "shape")?, &self.w.init)?.ok_or_else(|| g.unsupported(n, "a shape that is no constant"))
    }

    /// The packed value, where q, k and v are the three outputs of one `Split` in order.
    fn common_split(&self, attention: usize, parts: [&'a str; 3]) -> Result<Option<&'a str>> {
        let g = self.g;
        let Some(n) = g.producer_of(parts[0], "", "Split") else { return Ok(None) };
        if parts.map(|p| g.producer(p)) != [0, 1, 2].map(|i| Some((n, i))) || g.node(n).output.len() != 3 {
            return Err(
                g.unsupported(attention, "query, key and value are not the three outputs of one Split in order")
            );
        }
        Ok(Some(parts[0]))
    }

    /// Claims the `Split`, if there is one, and the linear layers; checks their sizes. Gives the size of a head too.
    fn projections(
        &mut self,
        n: usize,
        parts: &Parts<'a>,
        heads: usize,
        kv_heads: usize,
    ) -> Result<(Vec<Found<'a>>, usize)> {
        let g = self.g;
        let all = heads + 2 * kv_heads;
        let Some(packed) = parts.packed else {
            let found = [parts.q, parts.k, parts.v].map(|p| self.w.linear(g, p));
            let [q, k, v] = found;
            let (q, k, v) = (q?, k?, v?);
            let head_dim = q.rows / heads;
            if head_dim == 0 || q.rows != heads * head_dim || k.rows != kv_heads * head_dim || v.rows != k.rows {
                return Err(g.format(
                    n,
                    format!(
                        "projections of {}, {} and {} outputs don't make {heads} query and {kv_heads} key and value heads",
                        q.rows, k.rows, v.rows
                    ),
                ));
            }
            return Ok((vec![q, k, v], head_dim));
        };
        let mut packed = g.through_casts(packed)?;
        let mut sizes = None;
        if let Some(split) = g.producer_of(packed, "", "Split").filter(|_| !parts.q.is_empty()) {
            let mut a = g.claim(split)?;
            match a.int("axis")?.unwrap_or(0) {
                -1 | 2 => {}
                axis => return Err(g.unsupported(split, format!("attribute axis = {axis}"))),
            }
            a.finish()?;
            g.at_most(split, 2)?;
            sizes = g.ints(g.need(split, 1, "split")?, &self.w.init)?.map(|s| (split, s));
            if sizes.is_none() {
                return Err(g.unsupported(split, "sizes that are no constant"));
            }
            packed = g.through_casts(g.need(split, 0, "input")?)?;
        }
        let found = self.w.linear(g, packed)?;
        let head_dim = found.rows / all;
        if head_dim == 0 || found.rows != all * head_dim {
            return Err(g.format(
                n,
                format!(
                    "a projection of {} outputs doesn't make {heads} query and {kv_heads} key and value heads",
                    found.rows
                ),
            ));
        }
        let want = [heads, kv_heads, kv_heads].map(|h| (h * head_dim) as i64);
        if let Some((split, s)) = sizes.filter(|(_, s)| *s != want) {
            return Err(g.format(split, format!("splits into {s:?}, but the heads need {want:?}")));
        }
        Ok((vec![found], head_dim))
    }

    /// The rotary embedding, inside attention or as nodes of its own.
    fn rotary(&mut self, n: usize, inside: bool, interleaved: i64, ropes: &[usize], head_dim: usize) -> Result<Rope> {
        let g = self.g;
        if inside {
            if let Some(r) = ropes.first() {
                return Err(g.unsupported(*r, "a second rotary embedding: attention has one already"));
            }
            if let Some(p) = g.input(n, input::POSITIONS) {
                self.positions(n, p)?;
            }
            let tables = (g.need(n, input::COS, "cos_cache")?, g.need(n, input::SIN, "sin_cache")?);
            return self.rope(n, tables, interleaved, head_dim);
        }
        if let Some(extra) = [input::COS, input::SIN, input::POSITIONS].iter().find_map(|i| g.input(n, *i)) {
            return Err(g.unsupported(n, format!("input {extra:?}, but attribute do_rotary = 0")));
        }
        let &[q, k] = ropes else {
            return Err(g.unsupported(n, "attribute do_rotary = 0 without RotaryEmbedding of query and key"));
        };
        let mut found = Vec::new();
        for r in [q, k] {
            let mut a = g.claim(r)?;
            let interleaved = a.int("interleaved")?.unwrap_or(0);
            a.only_int("is_packed_batching", 0, 0)?;
            let dims = a.int("rotary_embedding_dim")?.unwrap_or(0);
            a.ignore("num_heads");
            if a.float("scale")?.is_some_and(|s| s != 1.0) {
                return Err(g.unsupported(r, "attribute scale other than 1"));
            }
            a.finish()?;
            g.at_most(r, 4)?;
            self.positions(r, g.need(r, 1, "position_ids")?)?;
            let rope = self.rope(r, (g.need(r, 2, "cos_cache")?, g.need(r, 3, "sin_cache")?), interleaved, head_dim)?;
            if dims != 0 && dims != rope.dims as i64 {
                return Err(
                    g.format(r, format!("attribute rotary_embedding_dim = {dims}, but tables for {}", rope.dims))
                );
            }
            found.push(rope);
        }
        if found[0] != found[1] {
            return Err(g.unsupported(k, "a rotary embedding of the keys that differs from the queries'"));
        }
        Ok(found.swap_remove(0))
    }

    fn positions(&self, n: usize, value: &'a str) -> Result<()> {
        if value == self.position_ids && self.g.is_input(value) {
            return Ok(());
        }
        Err(self.g.unsupported(n, format!("positions {value:?} that are not the graph input {}", self.position_ids)))
    }

    fn rope(&mut self, n: usize, (cos, sin): (&'a str, &'a str), interleaved: i64, head_dim: usize) -> Result<Rope> {
        let g = self.g;
        let style = match interleaved {
            0 => RopeStyle::Half,
            1 => RopeStyle::Interleaved,
            v => return Err(g.format(n, format!("attribute rotary_interleaved = {v}"))),
        };
        let (cos, sin) = (self.w.table(g, n, cos, "cosines")?, self.w.table(g, n, sin, "sines")?);
        let (c, s) = (self.w.tensor(cos), self.w.tensor(sin));
        let dims = c.cols.saturating_mul(2);
        if (c.rows, c.cols, c.format) != (s.rows, s.cols, s.format) || dims > head_dim {
            return Err(g.format(
                n,
                format!(
                    "cosines [{}, {}] and sines [{}, {}] don't fit each other and heads of {head_dim}",
                    c.rows, c.cols, s.rows, s.cols
                ),
            ));
        }
        Ok(Rope { style, dims, tables: RopeTables::Stored { cos, sin } })
    }
}
