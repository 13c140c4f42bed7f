//! What a model needs on the device whatever the placement: norm weights and biases as floats, rotation tables.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_model::spec::{DecoderConfig, TensorId};
use headrace_numerics::attention::CHUNK;

use crate::abi::AttentionArgs;
use crate::host_weights::HostWeights;
use crate::layout::Cursor;

/// A model that was taken.
pub struct Attached {
    /// Model.
    pub model: Arc<ModelSpec>,
    /// Pages.
    pub geometry: KvGeometry,
    /// The host's bytes.
    pub weights: Arc<HostWeights>,
    /// Positions of the rotation tables: the context length at most.
    pub positions: usize,
}

/// The bytes of the fixed region, and where its parts lie.
pub struct FixedImage {
    /// Bytes to be copied to the start of the region.
    pub bytes: Vec<u8>,
    /// Offset of each vector.
    pub vectors: HashMap<TensorId, u64>,
    /// Offset of the cosines.
    pub cos: u64,
    /// Offset of the sines.
    pub sin: u64,
    /// Positions of the tables.
    pub positions: usize,
}

impl FixedImage {
    /// Lays out every vector, and both tables for at most `most` positions.
    pub fn new(weights: &HostWeights, most: usize) -> Result<FixedImage, String> {
        let mut cursor = Cursor::default();
        let (mut vectors, mut parts) = (HashMap::new(), Vec::new());
        for id in weights.vector_ids() {
            let floats = weights.vector(id)?;
            let at = cursor.take(floats.len() as u64 * 4);
            vectors.insert(id, at);
            parts.push((at, floats));
        }
        let rope = &weights.model().config.rope;
        let context = weights.model().config.max_context.min(most).max(1);
        let (cos, sin) = weights.rope_tables(context)?;
        // A head of which nothing is rotated has no tables, and no position is beyond them.
        let positions = cos.len().checked_div(rope.dims / 2).unwrap_or(context).min(context);
        let (cos_at, sin_at) = (cursor.take(cos.len() as u64 * 4), cursor.take(sin.len() as u64 * 4));
        parts.extend([(cos_at, cos), (sin_at, sin)]);
        let mut bytes = vec![0u8; usize::try_from(cursor.bytes()).map_err(|e| e.to_string())?];
        for (at, floats) in parts {
            let to = bytes.get_mut(at as usize..).unwrap_or_default();
            to.chunks_exact_mut(4).zip(&floats).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
        }
        Ok(FixedImage { bytes, vectors, cos: cos_at, sin: sin_at, positions })
    }
}

/// Checks what the kernels rely on: sizes that aren't zero, heads that divide, pages of this model.
pub fn check_config(model: &ModelSpec, kv: &KvGeometry) -> Result<(), String> {
    let DecoderConfig { vocab, hidden, heads, kv_heads, head_dim, ffn, .. } = model.config;
    if [vocab, hidden, heads, kv_heads, head_dim, ffn].contains(&0) || !heads.is_multiple_of(kv_heads) {
        return Err(format!("vocab {vocab}, hidden {hidden}, heads {heads}, {kv_heads}, {head_dim}, ffn {ffn}"));
    }
    if head_dim > AttentionArgs::MAX_HEAD_DIM {
        return Err(format!("heads of {head_dim} elements; {} at most", AttentionArgs::MAX_HEAD_DIM));
    }
    if (kv.layers, kv.kv_heads, kv.head_dim) != (model.layers.len(), kv_heads, head_dim) {
        return Err(format!("a KV geometry for {} layers of {} x {}", kv.layers, kv.kv_heads, kv.head_dim));
    }
    if kv.page_tokens == 0 || !kv.page_tokens.is_multiple_of(CHUNK) {
        return Err(format!("pages of {} positions; a multiple of {CHUNK} is needed", kv.page_tokens));
    }
    let widest = [vocab, ffn.saturating_mul(2), heads.saturating_add(2 * kv_heads).saturating_mul(head_dim)];
    if widest.iter().any(|&w| u32::try_from(w).is_err()) {
        return Err("rows of more than 2^32 elements".to_string());
    }
    Ok(())
}
