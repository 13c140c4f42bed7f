//! The decoder in the graph: found by walking from the logits back to the tokens, layer by layer.

use super::attention::{self, FoundAttention};
use super::graph::{Graph, MICROSOFT};
use super::mask::Mask;
use super::weights::{Found, Weights};
use crate::error::Result;
use crate::spec::{Layer, Linear, Rope, TensorId};

/// A walk in progress.
pub struct Decoder<'a, 'w> {
    pub g: &'w Graph<'a>,
    pub w: &'w mut Weights<'a>,
    pub mask: Mask<'a>,
    pub position_ids: &'a str,
    eps: Option<(f32, usize)>,
}

/// What the walk found.
pub struct FoundDecoder<'a> {
    pub embedding: TensorId,
    pub layers: Vec<Layer>,
    pub final_norm: TensorId,
    pub lm_head: Linear,
    pub vocab: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
    pub rope: Rope,
    /// Names of each layer's cache values, as in [`FoundAttention::cache`].
    pub caches: Vec<[&'a str; 4]>,
}

/// A value of the residual stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    /// The sum that node `n` computes: `Add`, or the sum inside a `SkipSimplifiedLayerNormalization`.
    Sum(usize),
    /// Made by node `n`, which should be the embedding.
    Start(usize),
}

/// True if node `n` is a norm of one input.
pub fn normalise(g: &Graph<'_>, n: usize) -> bool {
    g.is(n, "", "SimplifiedLayerNormalization")
        || g.is(n, MICROSOFT, "SimplifiedLayerNormalization")
        || g.is(n, "", "RMSNormalization")
}

fn skip_norm(g: &Graph<'_>, n: usize) -> bool {
    g.is(n, MICROSOFT, "SkipSimplifiedLayerNormalization")
}

impl<'a, 'w> Decoder<'a, 'w> {
    /// A walk over `g`; `mask` and `position_ids` name graph inputs.
    pub fn new(g: &'w Graph<'a>, w: &'w mut Weights<'a>, mask: &'a str, position_ids: &'a str) -> Decoder<'a, 'w> {
        Decoder { g, w, mask: Mask::new(mask), position_ids, eps: None }
    }

    /// Checks that a norm's epsilon is that of all others.
    pub fn epsilon(&mut self, n: usize, name: &str, value: f32) -> Result<()> {
        match self.eps {
            Some((eps, first)) if eps != value => Err(self.g.unsupported(
                n,
                format!("attribute {name} = {value:e}, but {} has {eps:e}; all norms must agree", self.g.label(first)),
            )),
            Some(_) => Ok(()),
            None if value < 0.0 => Err(self.g.format(n, format!("attribute {name} = {value:e}"))),
            None => {
                self.eps = Some((value, n));
                Ok(())
            }
        }
    }

    /// Weight and input of a norm of one input.
    pub fn plain_norm(&mut self, n: usize) -> Result<(TensorId, &'a str)> {
        let g = self.g;
        let mut a = g.claim(n)?;
        a.only_int("axis", -1, -1)?;
        a.only_int("stash_type", 1, 1)?;
        let eps = a.float("epsilon")?.unwrap_or(1e-5);
        a.finish()?;
        g.at_most(n, 2)?;
        self.epsilon(n, "epsilon", eps)?;
        Ok((self.w.vector(g, n, g.need(n, 1, "scale")?, "scale")?, g.need(n, 0, "X")?))
    }

    /// The norm that makes `value`, and the residual stream that it reads.
    fn norm(&mut self, value: &'a str, hidden: usize) -> Result<(TensorId, Stream)> {
        let g = self.g;
        let value = g.through_casts(value)?;
        let Some((n, 0)) = g.producer(value) else {
            return Err(g.origin.unsupported(Some(value.to_string()), "a norm is expected here"));
        };
        let (weight, stream) = if skip_norm(g, n) {
            let mut a = g.claim(n)?;
            let eps = a.float("epsilon")?.unwrap_or(1e-12);
            a.finish()?;
            g.at_most(n, 3)?;
            self.epsilon(n, "epsilon", eps)?;
            (self.w.vector(g, n, g.need(n, 2, "gamma")?, "gamma")?, Stream::Sum(n))
        } else if normalise(g, n) {
            let (weight, input) = self.plain_norm(n)?;
            (weight, self.stream(input)?)
        } else {
            return Err(g.unsupported(n, "stands where a norm is expected"));
        };
        let have = self.w.tensor(weight).cols;
        if have != hidden {
            return Err(g.format(n, format!("{have} weights, but the layer that reads it has {hidden} inputs")));
        }
        Ok((weight, stream))
    }

    /// The place of a value in the residual stream.
    fn stream(&self, value: &'a str) -> Result<Stream> {
        let g = self.g;
        let value = g.through_casts(value)?;
        match g.producer(value) {
            Some((n, 3)) if skip_norm(g, n) => Ok(Stream::Sum(n)),
            Some((n, 0)) if g.is(n, "", "Add") => Ok(Stream::Sum(n)),
            Some((n, 0)) => Ok(Stream::Start(n)),
            _ => Err(g.origin.unsupported(Some(value.to_string()), "a value of the residual stream is expected here")),
        }
    }

    /// Splits a residual sum into the stream before it and the branch that is added. `before` is the reader of the
    /// stream inside the branch, found by `follow`.
    fn branch_of(&mut self, n: usize) -> Result<[&'a str; 2]> {
        let g = self.g;
        if g.is(n, "", "Add") {
            g.claim(n)?.finish()?;
            g.at_most(n, 2)?;
        } else if !g.is_claimed(n) {
            return Err(g.unsupported(n, "its sum is read, but not its norm"));
        }
        let (a, b) = (g.need(n, 0, "A")?, g.need(n, 1, "B")?);
        // The branch ends in a linear layer; the stream is a sum or the embedding.
        Ok(if self.ends_in_linear(a)? && !self.ends_in_linear(b)? { [b, a] } else { [a, b] })
    }

    fn ends_in_linear(&self, value: &'a str) -> Result<bool> {
        let g = self.g;
        let value = g.through_casts(value)?;
        let linear =
            |v: &str| g.producer(v).is_some_and(|(n, _)| g.is(n, MICROSOFT, "MatMulNBits") || g.is(n, "", "MatMul"));
        let Some(add) = g.producer_of(value, "", "Add") else { return Ok(linear(value)) };
        let sides = [g.need(add, 0, "A")?, g.need(add, 1, "B")?];
        Ok(sides.iter().any(|s| self.w.init.contains(s)))
    }

    fn same(&self, n: usize, before: &'a str, read: Stream) -> Result<()> {
        if self.stream(before)? == read {
            return Ok(());
        }
        Err(self.g.unsupported(n, "adds to another value of the residual stream than its branch reads"))
    }

    /// `down(silu(gate(x)) * up(x))`, ending in `value`. Gives gate and up, and down.
    fn feed_forward(&mut self, value: &'a str) -> Result<([Found<'a>; 2], Found<'a>)> {
        let g = self.g;
        let down = self.w.linear(g, value)?;
        let product = g.through_casts(down.input)?;
        let Some(mul) = g.producer_of(product, "", "Mul") else {
            return Err(g.unsupported(down.node, "reads no product of gate and up: only SwiGLU is supported"));
        };
        g.claim(mul)?.finish()?;
        let sides = [g.need(mul, 0, "A")?, g.need(mul, 1, "B")?];
        let sides = [g.through_casts(sides[0])?, g.through_casts(sides[1])?];
        let is_mul = sides.map(|s| g.producer_of(s, "", "Mul"));
        let (act, up) = match is_mul {
            [Some(n), None] => (n, sides[1]),
            [None, Some(n)] => (n, sides[0]),
            _ => return Err(g.unsupported(mul, "multiplies no SiLU by a linear layer: only SwiGLU is supported")),
        };
        g.claim(act)?.finish()?;
        let (x, y) = (g.need(act, 0, "A")?, g.need(act, 1, "B")?);
        let pair = [(x, y), (y, x)].into_iter().find_map(|(gate, s)| {
            g.producer_of(s, "", "Sigmoid").filter(|n| g.input(*n, 0) == Some(gate)).map(|n| (gate, n))
        });
        let Some((gate, sigmoid)) = pair else {
            return Err(g.unsupported(act, "is no x * Sigmoid(x): only SwiGLU is supported"));
        };
        g.claim(sigmoid)?.finish()?;
        let (gate, up) = (self.w.linear(g, gate)?, self.w.linear(g, up)?);
        if gate.input != up.input {
            return Err(g.unsupported(up.node, "gate and up read different values"));
        }
        if gate.rows != up.rows || gate.rows != down.cols || gate.cols != up.cols {
            return Err(g.format(
                down.node,
                format!(
                    "gate [{}, {}], up [{}, {}] and down [{}, {}] don't fit each other",
                    gate.rows, gate.cols, up.rows, up.cols, down.rows, down.cols
                ),
            ));
        }
        Ok(([gate, up], down))
    }

    fn residual_width(&self, found: &Found<'a>, hidden: usize) -> Result<()> {
        if found.rows == hidden {
            return Ok(());
        }
        Err(self.g.format(found.node, format!("{} outputs are added to a stream of {hidden}", found.rows)))
    }

    /// One layer, the last not yet found: from its residual sum `top` to the stream before it.
    fn layer(&mut self, top: usize, hidden: usize) -> Result<(Layer, FoundAttention<'a>, usize, Stream)> {
        let g = self.g;
        let [before, branch] = self.branch_of(top)?;
        let ([gate, up], down) = self.feed_forward(branch)?;
        self.residual_width(&down, hidden)?;
        let (ffn_norm, middle) = self.norm(gate.input, gate.cols)?;
        self.width(&gate, hidden)?;
        self.same(top, before, middle)?;
        let Stream::Sum(middle) = middle else {
            return Err(g.unsupported(top, "a feed-forward part without attention in front of it"));
        };
        let [before, branch] = self.branch_of(middle)?;
        let o = self.w.linear(g, branch)?;
        self.residual_width(&o, hidden)?;
        let found = attention::find(self, o.input)?;
        if o.cols != found.heads * found.head_dim {
            return Err(g.format(
                o.node,
                format!("{} inputs, but attention gives {} heads of {}", o.cols, found.heads, found.head_dim),
            ));
        }
        let first = found.qkv[0];
        for p in &found.qkv {
            self.width(p, hidden)?;
            if p.input != first.input {
                return Err(g.unsupported(p.node, "query, key and value read different values"));
            }
        }
        let (attn_norm, start) = self.norm(first.input, hidden)?;
        self.same(middle, before, start)?;
        let layer = Layer {
            attn_norm,
            qkv: found.qkv.iter().map(|f| f.linear).collect(),
            q_norm: found.q_norm,
            k_norm: found.k_norm,
            o: o.linear,
            ffn_norm,
            gate_up: vec![gate.linear, up.linear],
            down: down.linear,
            attention: found.params,
        };
        Ok((layer, found, gate.rows, start))
    }

    fn width(&self, found: &Found<'a>, hidden: usize) -> Result<()> {
        if found.cols == hidden {
            return Ok(());
        }
        Err(self.g.format(found.node, format!("{} inputs, but the residual stream has {hidden}", found.cols)))
    }

    /// The whole decoder, from the graph output `logits` to the graph input `ids`.
    ///
    /// # Errors
    /// `Unsupported` or `Format` naming the first node that is not as expected.
    pub fn walk(&mut self, logits: &'a str, ids: &str) -> Result<FoundDecoder<'a>> {
        let g = self.g;
        let head = self.w.linear(g, logits)?;
        let hidden = head.cols;
        let (final_norm, mut at) = self.norm(head.input, hidden)?;
        let mut layers = Vec::new();
        let mut caches = Vec::new();
        let mut shape: Option<(usize, usize, usize, usize, Rope)> = None;
        let start = loop {
            let top = match at {
                Stream::Start(n) => break n,
                Stream::Sum(n) => n,
            };
            let (layer, found, ffn, below) = self.layer(top, hidden)?;
            let this = (found.heads, found.kv_heads, found.head_dim, ffn, found.rope);
            match &shape {
                Some(first) if *first != this => {
                    return Err(g.unsupported(
                        found.node,
                        "layers of different shapes: heads, head size, feed-forward width and rotary embedding must be equal",
                    ));
                }
                Some(_) => {}
                None => shape = Some(this),
            }
            layers.push(layer);
            caches.push(found.cache);
            at = below;
        };
        let embedding = self.w.embedding(g, start, ids)?;
        let t = self.w.tensor(embedding);
        if t.cols != hidden || t.rows != head.rows {
            return Err(g.format(
                start,
                format!("an embedding of [{}, {}], but the output head is [{}, {hidden}]", t.rows, t.cols, head.rows),
            ));
        }
        let Some((heads, kv_heads, head_dim, ffn, rope)) = shape else {
            return Err(g.unsupported(start, "a model without layers"));
        };
        layers.reverse();
        caches.reverse();
        let norm_eps = self.eps.map_or(0.0, |(e, _)| e);
        Ok(FoundDecoder {
            embedding,
            layers,
            final_norm,
            lm_head: head.linear,
            vocab: head.rows,
            hidden,
            ffn,
            heads,
            kv_heads,
            head_dim,
            norm_eps,
            rope,
            caches,
        })
    }
}
