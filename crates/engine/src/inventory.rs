//! What a model's files hold: every tensor in read order with format, shape and bytes.

use std::path::PathBuf;

use headrace_model::ModelSpec;
use serde::Serialize;

/// One tensor of the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// Format name, such as `Q4_1`.
    pub format: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Bytes referenced.
    pub bytes: u64,
    /// Place in the read order of a step, from 0.
    pub order: usize,
    /// File of the first extent.
    pub file: PathBuf,
    /// Offset of the first extent in that file.
    pub offset: u64,
}

/// What a model's files hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inventory {
    /// Name for people.
    pub name: String,
    /// `gguf` or `onnx`.
    pub container: String,
    /// Architecture.
    pub arch: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Context length that the file declares.
    pub max_context: usize,
    /// True if the head is the embedding.
    pub tied: bool,
    /// Elements of all weights.
    pub parameters: u64,
    /// Bytes referenced, each extent once.
    pub weight_bytes: u64,
    /// Bytes of weights that one step reads.
    pub step_bytes: u64,
    /// Bytes of the files: not what a run needs, and only here so that nobody takes it for that.
    pub file_bytes: u64,
    /// KV bytes of one position with fp16 entries.
    pub kv_token_bytes: u64,
    /// Tensors in read order.
    pub tensors: Vec<TensorEntry>,
}

impl Inventory {
    /// Lists what `model` references.
    pub fn of(model: &ModelSpec) -> Inventory {
        let c = &model.config;
        let tensors: Vec<TensorEntry> = model
            .read_order()
            .into_iter()
            .enumerate()
            .map(|(order, id)| {
                let t = model.tensor(id);
                let first = t.planes[0];
                TensorEntry {
                    name: t.name.clone(),
                    format: t.format.name(),
                    rows: t.rows,
                    cols: t.cols,
                    bytes: t.bytes() as u64,
                    order,
                    file: first.map(|e| model.files[e.file].path.clone()).unwrap_or_default(),
                    offset: first.map_or(0, |e| e.offset as u64),
                }
            })
            .collect();
        Inventory {
            name: model.name.clone(),
            container: model.container.to_string(),
            arch: c.arch.clone(),
            layers: model.layers.len(),
            hidden: c.hidden,
            ffn: c.ffn,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            vocab: c.vocab,
            max_context: c.max_context,
            tied: model.embedding == model.lm_head.weight,
            parameters: tensors.iter().map(|t| t.rows as u64 * t.cols as u64).sum(),
            weight_bytes: model.weight_bytes() as u64,
            step_bytes: crate::program::bytes_per_step(model),
            file_bytes: model.files.iter().map(|f| f.bytes.len() as u64).sum(),
            kv_token_bytes: (model.layers.len() * 2 * c.kv_heads * c.head_dim * 2) as u64,
            tensors,
        }
    }
}
