//! Tiny random decoder models of any shape and format, whole in memory.

use headrace_model::ModelSpec;
use headrace_model::file::{Extent, ModelFile};
use headrace_model::spec::{DecoderConfig, Layer, Layout, Linear, Rope, RopeTables, SpecialTokens, Tensor, TensorId};
use headrace_numerics::attention::AttentionParams;
use headrace_numerics::format::{Format, MAX_PLANES};
use headrace_numerics::rope::{RopeStyle, inv_freq, table_row};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use crate::random::generator;
use crate::weights::random_matrix;

/// What a random model looks like.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Layers.
    pub layers: usize,
    /// Norms over query and key heads.
    pub qk_norm: bool,
    /// Biases of every linear layer.
    pub bias: bool,
    /// Attention window of every second layer.
    pub window: Option<usize>,
    /// Soft cap of scores; 0 for none.
    pub softcap: f32,
    /// Pairing of elements in RoPE.
    pub rope: RopeStyle,
    /// Elements of a head that are rotated.
    pub rope_dims: usize,
    /// Format of stored RoPE tables; `None` for computed angles.
    pub rope_tables: Option<Format>,
    /// The head is the embedding.
    pub tied: bool,
    /// `[q | k | v]` and `[gate | up]` are one matrix each.
    pub fused: bool,
    /// Dense matrices lie column-major.
    pub col_major: bool,
    /// Each linear layer takes one of these at random, of those whose blocks divide its columns.
    pub formats: Vec<Format>,
    /// Context length, and rows of stored RoPE tables.
    pub max_context: usize,
}

impl Default for ModelShape {
    fn default() -> Self {
        ModelShape {
            vocab: 97,
            hidden: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 96,
            layers: 2,
            qk_norm: false,
            bias: false,
            window: None,
            softcap: 0.0,
            rope: RopeStyle::Half,
            rope_dims: 16,
            rope_tables: None,
            tied: false,
            fused: false,
            col_major: false,
            formats: vec![Format::Q4_1],
            max_context: 512,
        }
    }
}

struct Builder {
    rng: ChaCha8Rng,
    bytes: Vec<u8>,
    tensors: Vec<Tensor>,
    formats: Vec<Format>,
    col_major: bool,
}

impl Builder {
    fn add(
        &mut self,
        name: String,
        format: Format,
        rows: usize,
        cols: usize,
        planes: [Vec<u8>; MAX_PLANES],
    ) -> TensorId {
        let mut extents = [None; MAX_PLANES];
        for (extent, plane) in extents.iter_mut().zip(&planes).take(format.planes()) {
            // An odd start: nothing may rely on alignment.
            self.bytes.push(0xa5);
            *extent = Some(Extent { file: 0, offset: self.bytes.len(), len: plane.len() });
            self.bytes.extend_from_slice(plane);
        }
        let dense = !format.is_quantised() && rows > 1;
        let layout = if self.col_major && dense { Layout::ColMajor } else { Layout::RowMajor };
        self.tensors.push(Tensor { name, format, stored: None, rows, cols, layout, planes: extents });
        TensorId(self.tensors.len() - 1)
    }

    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> TensorId {
        let fitting: Vec<Format> =
            self.formats.iter().copied().filter(|f| cols.is_multiple_of(f.col_multiple())).collect();
        let format = fitting.choose(&mut self.rng).copied().unwrap_or(Format::F32);
        let planes = random_matrix(&mut self.rng, format, rows, cols, 2.0 / (cols as f32).sqrt());
        self.add(name, format, rows, cols, planes)
    }

    fn vector(&mut self, name: String, len: usize, around: f32) -> TensorId {
        let bytes = (0..len).flat_map(|_| (around + self.rng.random_range(-0.3f32..0.3)).to_le_bytes()).collect();
        self.add(name, Format::F32, 1, len, [bytes, vec![], vec![]])
    }

    fn linear(&mut self, name: String, rows: usize, cols: usize, bias: bool) -> Linear {
        let bias = bias.then(|| self.vector(format!("{name}.bias"), rows, 0.0));
        Linear { weight: self.matrix(name, rows, cols), bias }
    }
}

/// A random model: the same for the same seed and shape.
pub fn random_model(seed: u64, s: &ModelShape) -> ModelSpec {
    let mut b = Builder {
        rng: generator(seed),
        bytes: Vec::new(),
        tensors: Vec::new(),
        formats: s.formats.clone(),
        col_major: s.col_major,
    };
    let embedding = b.matrix("embedding".into(), s.vocab, s.hidden);
    let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
    let layers = (0..s.layers)
        .map(|l| {
            let split = |fused: bool, parts: &[(&'static str, usize)]| match fused {
                true => vec![("fused", parts.iter().map(|p| p.1).sum())],
                false => parts.to_vec(),
            };
            let many = |b: &mut Builder, parts: Vec<(&str, usize)>| -> Vec<Linear> {
                parts.into_iter().map(|(n, rows)| b.linear(format!("{l}.{n}.{rows}"), rows, s.hidden, s.bias)).collect()
            };
            Layer {
                attn_norm: b.vector(format!("{l}.attn_norm"), s.hidden, 1.0),
                qkv: many(&mut b, split(s.fused, &[("q", q), ("k", kv), ("v", kv)])),
                q_norm: s.qk_norm.then(|| b.vector(format!("{l}.q_norm"), s.head_dim, 1.0)),
                k_norm: s.qk_norm.then(|| b.vector(format!("{l}.k_norm"), s.head_dim, 1.0)),
                o: b.linear(format!("{l}.o"), s.hidden, q, s.bias),
                ffn_norm: b.vector(format!("{l}.ffn_norm"), s.hidden, 1.0),
                gate_up: many(&mut b, split(s.fused, &[("gate", s.ffn), ("up", s.ffn)])),
                down: b.linear(format!("{l}.down"), s.hidden, s.ffn, s.bias),
                attention: AttentionParams {
                    scale: 1.0 / (s.head_dim as f32).sqrt(),
                    softcap: s.softcap,
                    window: s.window.filter(|_| l % 2 == 0),
                },
            }
        })
        .collect();
    let final_norm = b.vector("final_norm".into(), s.hidden, 1.0);
    let lm_head = match s.tied {
        true => Linear { weight: embedding, bias: None },
        false => b.linear("lm_head".into(), s.vocab, s.hidden, s.bias),
    };
    let tables = match s.rope_tables {
        None => RopeTables::Computed { base: 10_000.0, factors: None, position_scale: 1.0 },
        Some(format) => {
            let freqs: Vec<f64> = (0..s.rope_dims / 2).map(|i| inv_freq(500.0, s.rope_dims, None, i)).collect();
            let (mut cos, mut sin) = (vec![0f32; freqs.len()], vec![0f32; freqs.len()]);
            let (mut cos_bytes, mut sin_bytes) = (Vec::new(), Vec::new());
            for pos in 0..s.max_context {
                table_row(&freqs, pos, &mut cos, &mut sin);
                for (x, bytes) in cos.iter().map(|x| (x, 0)).chain(sin.iter().map(|x| (x, 1))) {
                    let to = if bytes == 0 { &mut cos_bytes } else { &mut sin_bytes };
                    match format {
                        Format::F16 => to.extend_from_slice(&half::f16::from_f32(*x).to_le_bytes()),
                        _ => to.extend_from_slice(&x.to_le_bytes()),
                    }
                }
            }
            b.col_major = false;
            let format = if format == Format::F16 { Format::F16 } else { Format::F32 };
            let cos = b.add("cos".into(), format, s.max_context, freqs.len(), [cos_bytes, vec![], vec![]]);
            let sin = b.add("sin".into(), format, s.max_context, freqs.len(), [sin_bytes, vec![], vec![]]);
            RopeTables::Stored { cos, sin }
        }
    };
    ModelSpec {
        container: "synthetic",
        name: format!("random {seed}"),
        config: DecoderConfig {
            arch: "llama".into(),
            vocab: s.vocab,
            hidden: s.hidden,
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            ffn: s.ffn,
            norm_eps: 1e-5,
            max_context: s.max_context,
            rope: Rope { style: s.rope, dims: s.rope_dims, tables },
        },
        embedding,
        layers,
        final_norm,
        lm_head,
        tensors: b.tensors,
        files: vec![ModelFile::owned("random model", b.bytes)],
        special: SpecialTokens::default(),
    }
}
