//! Where weights are read from: the file's mapping, transposed copies, small vectors as floats.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_model::arrange::arrange_rows;
use headrace_model::spec::{Layout, RopeTables, TensorId};
use headrace_numerics::block::dequantise_row;
use headrace_numerics::format::{Format, MAX_PLANES, WeightView};
use headrace_provider::{Place, Segment};

/// Turns a segment into the bytes that a kernel reads. Nothing else in the executor knows where bytes are, so that a
/// device with an arena and a staging ring differs in its source alone.
pub trait WeightSource: Sync {
    /// The rows of `segment` as a matrix of their own. The error says what is missing.
    fn segment(&self, segment: &Segment) -> Result<WeightView<'_>, String>;

    /// The whole matrix, from which the embedding takes single rows.
    fn matrix(&self, tensor: TensorId) -> Result<WeightView<'_>, String>;

    /// A vector (norm weight, bias) as `len` floats.
    fn vector(&self, tensor: TensorId, len: usize) -> Result<&[f32], String>;
}

/// The weights of a model in the file's own mapping, and the little that is kept beside it: column-major matrices
/// transposed once, vectors as floats.
pub struct FileWeights {
    model: Arc<ModelSpec>,
    transposed: HashMap<TensorId, Vec<u8>>,
    /// Planes of the matrices that are laid out anew.
    arranged: HashMap<TensorId, [Vec<u8>; MAX_PLANES]>,
    vectors: HashMap<TensorId, Vec<f32>>,
}

impl FileWeights {
    /// Transposes what needs it and turns vectors to floats.
    pub fn new(model: Arc<ModelSpec>) -> Result<FileWeights, String> {
        let mut weights = FileWeights {
            model: model.clone(),
            transposed: HashMap::new(),
            arranged: HashMap::new(),
            vectors: HashMap::new(),
        };
        for (i, t) in model.tensors.iter().enumerate() {
            if let Some(stored) = t.stored {
                let planes = weights.arrange(TensorId(i), stored)?;
                weights.arranged.insert(TensorId(i), planes);
            }
            if t.layout == Layout::ColMajor {
                let bytes = weights.transpose(TensorId(i))?;
                weights.transposed.insert(TensorId(i), bytes);
            }
        }
        for id in vector_ids(&model) {
            let view = weights.matrix(id)?;
            if view.rows != 1 {
                return Err(format!("{} has {} rows; a vector has one", model.tensor(id).name, view.rows));
            }
            let mut floats = vec![0.0; view.cols];
            dequantise_row(&view, 0, &mut floats);
            weights.vectors.insert(id, floats);
        }
        Ok(weights)
    }

    /// Bytes of matrices in another layout than the file's.
    pub fn repacked_bytes(&self) -> u64 {
        self.transposed.values().chain(self.arranged.values().flatten()).map(|v| v.len() as u64).sum()
    }

    /// Bytes of vectors kept as floats.
    pub fn vector_bytes(&self) -> u64 {
        self.vectors.values().map(|v| v.len() as u64 * 4).sum()
    }

    fn plane(&self, id: TensorId, plane: usize) -> Result<&[u8], String> {
        let tensor = self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))?;
        let Some(extent) = tensor.planes.get(plane).copied().flatten() else { return Ok(&[]) };
        let file = self.model.files.get(extent.file).map(|f| &f.bytes[..]).unwrap_or_default();
        let end = extent.offset.checked_add(extent.len);
        let bytes = end.and_then(|end| file.get(extent.offset..end));
        bytes.ok_or_else(|| format!("{}: bytes {} + {} are not in the file", tensor.name, extent.offset, extent.len))
    }

    fn arrange(&self, id: TensorId, stored: Format) -> Result<[Vec<u8>; MAX_PLANES], String> {
        let (tensor, from) = (self.model.tensor(id), self.plane(id, 0)?);
        let mut planes: [Vec<u8>; MAX_PLANES] = Default::default();
        for (plane, to) in planes.iter_mut().enumerate().take(tensor.format.planes()) {
            *to = vec![0; tensor.rows.saturating_mul(tensor.format.row_bytes(plane, tensor.cols))];
            if !arrange_rows(stored, plane, tensor.cols, from, to) {
                return Err(format!(
                    "{}: {} can't be laid out as {}",
                    tensor.name,
                    stored.name(),
                    tensor.format.name()
                ));
            }
        }
        Ok(planes)
    }

    fn transpose(&self, id: TensorId) -> Result<Vec<u8>, String> {
        let tensor = self.model.tensor(id);
        let size = match tensor.format {
            Format::F32 => 4,
            Format::F16 | Format::BF16 => 2,
            other => return Err(format!("{}: a column-major {} matrix", tensor.name, other.name())),
        };
        let (rows, cols, from) = (tensor.rows, tensor.cols, self.plane(id, 0)?);
        let need = rows.checked_mul(cols).and_then(|n| n.checked_mul(size));
        let from = need.and_then(|n| from.get(..n)).ok_or_else(|| format!("{}: too few bytes", tensor.name))?;
        let mut to = vec![0u8; from.len()];
        // In tiles, so that both sides stay in the cache.
        const TILE: usize = 32;
        for r0 in (0..rows).step_by(TILE) {
            for c0 in (0..cols).step_by(TILE) {
                for r in r0..(r0 + TILE).min(rows) {
                    for c in c0..(c0 + TILE).min(cols) {
                        let (src, dst) = ((c * rows + r) * size, (r * cols + c) * size);
                        to[dst..dst + size].copy_from_slice(&from[src..src + size]);
                    }
                }
            }
        }
        Ok(to)
    }
}

impl WeightSource for FileWeights {
    fn segment(&self, segment: &Segment) -> Result<WeightView<'_>, String> {
        let view = self.matrix(segment.tensor)?;
        if segment.place != Place::File {
            return Err(format!(
                "{}: {:?} is not a place of this device",
                self.model.tensor(segment.tensor).name,
                segment.place
            ));
        }
        match segment.row.checked_add(segment.rows) {
            Some(end) if end <= view.rows => Ok(view.slice_rows(segment.row, segment.rows)),
            _ => Err(format!(
                "{}: rows {} + {} of {}",
                self.model.tensor(segment.tensor).name,
                segment.row,
                segment.rows,
                view.rows
            )),
        }
    }

    fn matrix(&self, id: TensorId) -> Result<WeightView<'_>, String> {
        let tensor = self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))?;
        let planes = match (self.transposed.get(&id), self.arranged.get(&id)) {
            (Some(bytes), _) => [&bytes[..], &[], &[]],
            (_, Some(planes)) => planes.each_ref().map(Vec::as_slice),
            _ if tensor.layout == Layout::ColMajor => return Err(format!("{} is not transposed", tensor.name)),
            _ => [self.plane(id, 0)?, self.plane(id, 1)?, self.plane(id, 2)?],
        };
        WeightView::new(tensor.format, tensor.rows, tensor.cols, planes)
            .ok_or_else(|| format!("{}: {} x {} doesn't fit its bytes", tensor.name, tensor.rows, tensor.cols))
    }

    fn vector(&self, id: TensorId, len: usize) -> Result<&[f32], String> {
        let floats = self.vectors.get(&id).ok_or_else(|| format!("tensor {} is not a vector of the model", id.0))?;
        if floats.len() != len {
            return Err(format!("{} has {} elements instead of {len}", self.model.tensor(id).name, floats.len()));
        }
        Ok(floats)
    }
}

/// Every norm weight, bias and RoPE divisor that the model names, within its tensors.
fn vector_ids(model: &ModelSpec) -> Vec<TensorId> {
    let mut ids = vec![model.final_norm];
    ids.extend(model.lm_head.bias);
    for layer in &model.layers {
        ids.extend([layer.attn_norm, layer.ffn_norm]);
        ids.extend(layer.q_norm.into_iter().chain(layer.k_norm));
        let linears = layer.qkv.iter().chain(&layer.gate_up).chain([&layer.o, &layer.down]);
        ids.extend(linears.filter_map(|l| l.bias));
    }
    if let RopeTables::Computed { factors, .. } = &model.config.rope.tables {
        ids.extend(*factors);
    }
    ids.sort();
    ids.dedup();
    ids
}
