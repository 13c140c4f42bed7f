//! Where the host's copy of each weight is: the file's own mapping, or a row-major copy of what the file holds column-major; and how
//! rows of blocks become planes.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_model::arrange::arrange_rows;
use headrace_model::spec::{RopeTables, TensorId};
use headrace_numerics::block::dequantise_row;
use headrace_numerics::format::{Format, WeightView};
use headrace_numerics::rope::{scaled_inv_freqs, table_row};
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::{ParallelSlice, ParallelSliceMut};

use crate::plan::needs_transposing;

/// Bytes of one part of a plane that one thread lays out.
const PART: usize = 256 << 10;

/// Rows of one plane on the host.
#[derive(Clone, Copy, Debug)]
pub struct HostRows<'a> {
    /// The bytes as the host has them: of the plane, or of whole rows in the file's own format.
    bytes: &'a [u8],
    /// The file whose mapping holds them, if it holds them as the device wants them.
    pub file: Option<usize>,
    /// The format of `bytes` where rows are laid out anew; the plane and the bytes of one of its rows.
    anew: Option<(Format, usize, usize)>,
    /// Columns of the matrix.
    cols: usize,
    /// Bytes of the plane's rows on the device.
    pub len: usize,
}

impl<'a> HostRows<'a> {
    /// The bytes, if the host has them as the device wants them.
    pub fn as_they_are(&self) -> Option<&'a [u8]> {
        self.anew.is_none().then_some(self.bytes)
    }

    /// Rows that may be made apart from each other, as bytes on the device: whole rows, `most` bytes at most or one row.
    pub fn step(&self, most: usize) -> usize {
        match self.anew {
            Some((_, _, row)) => (most / row.max(1)).max(1) * row.max(1),
            None => most,
        }
    }

    /// Writes the bytes from `from` on, which is a multiple of [`HostRows::step`], as the device wants them. Works in all threads.
    ///
    /// # Errors
    /// If the rows can't be laid out.
    pub fn write(&self, from: usize, to: &mut [u8]) -> Result<(), String> {
        let Some((stored, plane, row)) = self.anew else {
            let bytes = self.bytes.get(from..).and_then(|b| b.get(..to.len())).ok_or("rows that aren't there")?;
            to.copy_from_slice(bytes);
            return Ok(());
        };
        let (row, rows) = (row.max(1), self.len / row.max(1));
        let size = self.bytes.len() / rows.max(1);
        let source = self.bytes.get(from / row * size..).and_then(|b| b.get(..to.len() / row * size));
        let source = source.ok_or("rows that aren't there")?;
        let part = (PART / row).max(1);
        let parts = to.par_chunks_mut(part * row).zip(source.par_chunks((part * size).max(1)));
        match parts.map(|(to, from)| arrange_rows(stored, plane, self.cols, from, to)).all(|done| done) {
            true => Ok(()),
            false => Err(format!("{} can't be laid out in planes", stored.name())),
        }
    }
}

/// The host's bytes of a model.
#[derive(Debug)]
pub struct HostWeights {
    model: Arc<ModelSpec>,
    transposed: HashMap<TensorId, Vec<u8>>,
}

impl HostWeights {
    /// Transposes what lies column-major. The error says what is wrong with the model.
    pub fn new(model: Arc<ModelSpec>) -> Result<HostWeights, String> {
        let mut weights = HostWeights { model: model.clone(), transposed: HashMap::new() };
        for (i, tensor) in model.tensors.iter().enumerate() {
            if needs_transposing(tensor) {
                let bytes = weights.transpose(TensorId(i))?;
                weights.transposed.insert(TensorId(i), bytes);
            }
        }
        Ok(weights)
    }

    /// The model.
    pub fn model(&self) -> &Arc<ModelSpec> {
        &self.model
    }

    /// Bytes of the row-major copies.
    pub fn transposed_bytes(&self) -> u64 {
        self.transposed.values().map(|v| v.len() as u64).sum()
    }

    /// Bytes of weights that the device keeps in another layout than the file's.
    pub fn repacked_bytes(&self) -> u64 {
        let anew = self.model.tensors.iter().filter(|t| t.stored.is_some());
        self.transposed_bytes() + anew.map(|t| t.bytes() as u64).sum::<u64>()
    }

    /// `rows` rows from `row` on in one plane.
    pub fn rows(&self, id: TensorId, plane: usize, row: usize, rows: usize) -> Result<HostRows<'_>, String> {
        let tensor = self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))?;
        let wanted = tensor.format.row_bytes(plane, tensor.cols);
        let (size, from_plane) = match tensor.stored {
            Some(stored) => (stored.row_bytes(0, tensor.cols), 0),
            None => (wanted, plane),
        };
        let from = row.checked_mul(size);
        let to = row.checked_add(rows).and_then(|end| end.checked_mul(size));
        let (bytes, file) = self.plane(id, from_plane)?;
        let part = from.zip(to).and_then(|(from, to)| bytes.get(from..to));
        let bytes = part.ok_or_else(|| format!("{}: rows {row} + {rows} are not there", tensor.name))?;
        Ok(HostRows {
            bytes,
            file: file.filter(|_| tensor.stored.is_none()),
            anew: tensor.stored.map(|stored| (stored, plane, wanted)),
            cols: tensor.cols,
            len: wanted.saturating_mul(rows),
        })
    }

    fn plane(&self, id: TensorId, plane: usize) -> Result<(&[u8], Option<usize>), String> {
        if let Some(bytes) = self.transposed.get(&id) {
            return Ok((if plane == 0 { bytes } else { &[] }, None));
        }
        self.file_plane(id, plane)
    }

    fn file_plane(&self, id: TensorId, plane: usize) -> Result<(&[u8], Option<usize>), String> {
        let tensor = self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))?;
        let Some(extent) = tensor.planes.get(plane).copied().flatten() else { return Ok((&[], None)) };
        let file = self.model.files.get(extent.file).map(|f| &f.bytes[..]).unwrap_or_default();
        let bytes = extent.offset.checked_add(extent.len).and_then(|end| file.get(extent.offset..end));
        let missing = || format!("{}: bytes {} + {} are not in the file", tensor.name, extent.offset, extent.len);
        Ok((bytes.ok_or_else(missing)?, Some(extent.file)))
    }

    /// A matrix as the arithmetic reads it.
    pub fn matrix(&self, id: TensorId) -> Result<WeightView<'_>, String> {
        let tensor = self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))?;
        let planes = [self.plane(id, 0)?.0, self.plane(id, 1)?.0, self.plane(id, 2)?.0];
        WeightView::new(tensor.format, tensor.rows, tensor.cols, planes)
            .ok_or_else(|| format!("{}: {} x {} doesn't fit its bytes", tensor.name, tensor.rows, tensor.cols))
    }

    /// A vector as floats.
    pub fn vector(&self, id: TensorId) -> Result<Vec<f32>, String> {
        let view = self.matrix(id)?;
        if view.rows != 1 {
            return Err(format!("a vector of {} rows", view.rows));
        }
        let mut floats = vec![0.0; view.cols];
        dequantise_row(&view, 0, &mut floats);
        Ok(floats)
    }

    /// Every norm weight and bias that a program can name, in the order of their numbers.
    pub fn vector_ids(&self) -> Vec<TensorId> {
        let model = &self.model;
        let mut ids = vec![model.final_norm];
        ids.extend(model.lm_head.bias);
        for layer in &model.layers {
            ids.extend([layer.attn_norm, layer.ffn_norm]);
            ids.extend(layer.q_norm.into_iter().chain(layer.k_norm));
            let linears = layer.qkv.iter().chain(&layer.gate_up).chain([&layer.o, &layer.down]);
            ids.extend(linears.filter_map(|l| l.bias));
        }
        ids.sort();
        ids.dedup();
        ids
    }

    /// Cosines and sines of positions `0 .. positions`, `[positions][dims / 2]` each. Stored tables may be shorter: as many
    /// rows as they have.
    pub fn rope_tables(&self, positions: usize) -> Result<(Vec<f32>, Vec<f32>), String> {
        let rope = &self.model.config.rope;
        let half = rope.dims / 2;
        if !rope.dims.is_multiple_of(2) || rope.dims > self.model.config.head_dim {
            return Err(format!("RoPE over {} of {} elements of a head", rope.dims, self.model.config.head_dim));
        }
        match &rope.tables {
            RopeTables::Computed { base, factors, position_scale } => {
                let factors = factors.map(|id| self.vector(id)).transpose()?;
                if factors.as_ref().is_some_and(|f| f.len() != half) {
                    return Err(format!("RoPE divisors of other than {half} elements"));
                }
                let freqs = scaled_inv_freqs(*base, rope.dims, factors.as_deref(), *position_scale);
                let (mut cos, mut sin) = (vec![0.0; positions * half], vec![0.0; positions * half]);
                if half > 0 {
                    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
                    rows.enumerate().for_each(|(p, (cos, sin))| table_row(&freqs, p, cos, sin));
                }
                Ok((cos, sin))
            }
            RopeTables::Stored { cos, sin } => {
                let views = [self.matrix(*cos)?, self.matrix(*sin)?];
                if views.iter().any(|v| v.cols != half) || views[0].rows != views[1].rows {
                    return Err(format!("RoPE tables of {} x {}", views[0].rows, views[0].cols));
                }
                let rows = positions.min(views[0].rows);
                let mut tables = views.iter().map(|view| {
                    let mut floats = vec![0.0; rows * half];
                    if half > 0 {
                        floats.chunks_exact_mut(half).enumerate().for_each(|(p, row)| dequantise_row(view, p, row));
                    }
                    floats
                });
                Ok((tables.next().unwrap_or_default(), tables.next().unwrap_or_default()))
            }
        }
    }

    fn transpose(&self, id: TensorId) -> Result<Vec<u8>, String> {
        let tensor = self.model.tensors.get(id.0).ok_or("no such tensor")?;
        let size = match tensor.format {
            Format::F32 => 4,
            Format::F16 | Format::BF16 => 2,
            other => return Err(format!("{}: a column-major {} matrix", tensor.name, other.name())),
        };
        let (rows, cols, from) = (tensor.rows, tensor.cols, self.file_plane(id, 0)?.0);
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
