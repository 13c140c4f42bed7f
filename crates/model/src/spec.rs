//! What a decoder model is, whatever file it came from: shapes, layers, tensors, the order in which they are read.

use headrace_numerics::attention::AttentionParams;
use headrace_numerics::format::{Format, MAX_PLANES, WeightView};
use headrace_numerics::rope::RopeStyle;

use crate::file::{Extent, ModelFile};

/// Index into [`ModelSpec::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// Direction in which a matrix lies in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[rows, cols]`: one row (output) after the other. All quantised formats.
    #[default]
    RowMajor,
    /// `[cols, rows]`: as ONNX's `MatMul` has its right-hand side. Only F32, F16 and BF16. A provider transposes such
    /// a matrix when it loads it.
    ColMajor,
}

/// One weight: format, shape, and where its bytes are. Vectors (norm weights, biases) have one row.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name in the file.
    pub name: String,
    /// Storage format, as devices keep the rows.
    pub format: Format,
    /// Format of the bytes in the file where it isn't `format`: rows are laid out anew when they are loaded
    /// ([`crate::arrange`]).
    pub stored: Option<Format>,
    /// Outputs.
    pub rows: usize,
    /// Inputs, the reduction axis.
    pub cols: usize,
    /// Direction in the file.
    pub layout: Layout,
    /// The extents referenced, one a plane of the format in the file, each exactly as long as the shape needs.
    pub planes: [Option<Extent>; MAX_PLANES],
}

impl Tensor {
    /// Bytes referenced: the sum of the extents.
    pub fn bytes(&self) -> usize {
        self.planes.iter().flatten().map(|e| e.len).sum()
    }
}

/// A linear layer. Its output has `tensors[weight].rows` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Weight matrix.
    pub weight: TensorId,
    /// Bias, one element an output.
    pub bias: Option<TensorId>,
}

/// One transformer layer: `x += o(attention(qkv(norm(x)))); x += down(swiglu(gate_up(norm(x))))`.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attn_norm: TensorId,
    /// One or more linear layers whose outputs, one after the other, are `[q | k | v]`.
    pub qkv: Vec<Linear>,
    /// Norm over each query head, before RoPE (Qwen3).
    pub q_norm: Option<TensorId>,
    /// Norm over each key head, before RoPE (Qwen3).
    pub k_norm: Option<TensorId>,
    /// Output projection of attention.
    pub o: Linear,
    /// Norm before the feed-forward part.
    pub ffn_norm: TensorId,
    /// One or more linear layers whose outputs, one after the other, are `[gate | up]`.
    pub gate_up: Vec<Linear>,
    /// Down projection.
    pub down: Linear,
    /// Scale, soft cap and window of this layer's attention.
    pub attention: AttentionParams,
}

/// Where the cosines and sines come from.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeTables {
    /// Computed: `inv_freq(i) = base^(-2 i / dims) / factors[i]`, times `position_scale` on the position.
    Computed {
        /// Base of the angular steps (theta).
        base: f64,
        /// Divisors of the angular steps, `[dims / 2]`.
        factors: Option<TensorId>,
        /// Factor of every position: `1 / factor` for linear scaling, else 1.
        position_scale: f64,
    },
    /// In the file: two matrices `[positions, dims / 2]`.
    Stored {
        /// Cosines.
        cos: TensorId,
        /// Sines.
        sin: TensorId,
    },
}

/// Rotary embedding of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pairing of elements.
    pub style: RopeStyle,
    /// Elements of a head that are rotated, from the first on.
    pub dims: usize,
    /// Angles.
    pub tables: RopeTables,
}

/// Sizes and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Architecture name as the file gives it: `llama`, `mistral`, `qwen2`, `qwen3`.
    pub arch: String,
    /// Vocabulary: rows of the embedding and outputs of the head.
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
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Context length that the file declares.
    pub max_context: usize,
    /// Rotary embedding.
    pub rope: Rope,
}

/// Special tokens that the file names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// True if a prompt starts with `bos` unless the caller says otherwise.
    pub add_bos: bool,
}

/// A decoder model, ready to be planned and run.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// `gguf` or `onnx`.
    pub container: &'static str,
    /// Name for people: the file's own, else the file name.
    pub name: String,
    /// Sizes and constants.
    pub config: DecoderConfig,
    /// Embedding matrix `[vocab, hidden]`, read by rows.
    pub embedding: TensorId,
    /// Layers, first to last.
    pub layers: Vec<Layer>,
    /// Norm after the last layer.
    pub final_norm: TensorId,
    /// Output head `[vocab, hidden]`; the embedding's tensor where they are tied.
    pub lm_head: Linear,
    /// Every tensor that the model references, once.
    pub tensors: Vec<Tensor>,
    /// Every file that a tensor references.
    pub files: Vec<ModelFile>,
    /// Special tokens.
    pub special: SpecialTokens,
}

impl ModelSpec {
    /// The tensor `id` stands for.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    /// The bytes of one extent.
    pub fn extent(&self, e: Extent) -> &[u8] {
        &self.files[e.file].bytes[e.offset..e.offset + e.len]
    }

    /// A row-major tensor as a matrix in the file's mapping; `None` for a column-major one, or one whose rows are laid out anew.
    pub fn view(&self, id: TensorId) -> Option<WeightView<'_>> {
        let t = self.tensor(id);
        if t.layout == Layout::ColMajor || t.stored.is_some() {
            return None;
        }
        let planes = t.planes.map(|p| p.map_or(&[][..], |e| self.extent(e)));
        WeightView::new(t.format, t.rows, t.cols, planes)
    }

    /// Every tensor in the order in which one step reads it first; the embedding, of which a step reads single rows,
    /// comes first.
    pub fn read_order(&self) -> Vec<TensorId> {
        let mut order = vec![self.embedding];
        let linear = |order: &mut Vec<TensorId>, l: &Linear| {
            order.push(l.weight);
            order.extend(l.bias);
        };
        for layer in &self.layers {
            order.push(layer.attn_norm);
            layer.qkv.iter().for_each(|l| linear(&mut order, l));
            order.extend(layer.q_norm);
            order.extend(layer.k_norm);
            linear(&mut order, &layer.o);
            order.push(layer.ffn_norm);
            layer.gate_up.iter().for_each(|l| linear(&mut order, l));
            linear(&mut order, &layer.down);
        }
        order.push(self.final_norm);
        linear(&mut order, &self.lm_head);
        let mut seen = vec![false; self.tensors.len()];
        order.retain(|t| !std::mem::replace(&mut seen[t.0], true));
        order
    }

    /// Bytes that tensors reference, each extent once.
    pub fn weight_bytes(&self) -> usize {
        let mut extents: Vec<Extent> = self.tensors.iter().flat_map(|t| t.planes.into_iter().flatten()).collect();
        extents.sort();
        extents.dedup();
        extents.iter().map(|e| e.len).sum()
    }
}
