//! Cosines and sines of every position that was needed so far: computed or read from the file once, then kept.

use headrace_model::ModelSpec;
use headrace_model::spec::RopeTables;
use headrace_numerics::block::dequantise_row;
use headrace_numerics::rope::{scaled_inv_freqs, table_row};

use crate::weights::WeightSource;

/// Positions that are added at a time.
const STEP: usize = 64;

enum Source {
    Computed(Vec<f64>),
    Stored { positions: usize },
}

/// Rows `[dims / 2]` of cosines and sines for positions `0 ..`.
pub struct RopeTable {
    source: Source,
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// The table of a model, empty so far. The error says what is wrong with the model's tables.
    pub fn new(model: &ModelSpec, weights: &dyn WeightSource) -> Result<RopeTable, String> {
        let rope = &model.config.rope;
        let half = rope.dims / 2;
        if !rope.dims.is_multiple_of(2) || rope.dims > model.config.head_dim {
            return Err(format!("RoPE over {} of {} elements of a head", rope.dims, model.config.head_dim));
        }
        let source = match &rope.tables {
            RopeTables::Computed { base, factors, position_scale } => {
                let factors = factors.map(|id| weights.vector(id, half)).transpose()?;
                Source::Computed(scaled_inv_freqs(*base, rope.dims, factors, *position_scale))
            }
            RopeTables::Stored { cos, sin } => {
                let shapes = [*cos, *sin].map(|id| model.tensors.get(id.0).map(|t| (t.rows, t.cols)));
                let [Some((rows, cols)), Some(other)] = shapes else {
                    return Err("the RoPE tables are not in the model".to_string());
                };
                if cols != half || other != (rows, cols) {
                    return Err(format!("RoPE tables of {rows} x {cols} and {} x {}", other.0, other.1));
                }
                Source::Stored { positions: rows }
            }
        };
        Ok(RopeTable { source, half, cos: Vec::new(), sin: Vec::new() })
    }

    /// Positions that the table can ever hold.
    pub fn limit(&self) -> usize {
        match self.source {
            Source::Computed(_) => usize::MAX,
            Source::Stored { positions } => positions,
        }
    }

    /// Bytes of the rows that are there.
    pub fn bytes(&self) -> u64 {
        ((self.cos.len() + self.sin.len()) * size_of::<f32>()) as u64
    }

    /// Bytes of the rows that there are once the table has grown to `positions` positions. Saturates.
    pub fn bytes_for(&self, positions: usize) -> u64 {
        let floats = (self.rows_for(positions) as u64).saturating_mul(2 * self.half as u64);
        floats.saturating_mul(size_of::<f32>() as u64)
    }

    fn rows_for(&self, positions: usize) -> usize {
        positions.div_ceil(STEP).saturating_mul(STEP).min(self.limit())
    }

    /// Makes positions `0 ..= pos` available. Does nothing if they are.
    pub fn grow_to(&mut self, model: &ModelSpec, weights: &dyn WeightSource, pos: usize) -> Result<(), String> {
        if self.half == 0 || pos < self.cos.len() / self.half {
            return Ok(());
        }
        if pos >= self.limit() {
            return Err(format!("position {pos} is beyond the {} rows of the file's RoPE tables", self.limit()));
        }
        let (from, to) = (self.cos.len() / self.half, self.rows_for(pos.saturating_add(1)));
        self.cos.resize(to * self.half, 0.0);
        self.sin.resize(to * self.half, 0.0);
        for p in from..to {
            let range = p * self.half..(p + 1) * self.half;
            let (cos, sin) = (&mut self.cos[range.clone()], &mut self.sin[range]);
            match (&self.source, &model.config.rope.tables) {
                (Source::Computed(inv_freqs), _) => table_row(inv_freqs, p, cos, sin),
                (Source::Stored { .. }, RopeTables::Stored { cos: cos_id, sin: sin_id }) => {
                    dequantise_row(&weights.matrix(*cos_id)?, p, cos);
                    dequantise_row(&weights.matrix(*sin_id)?, p, sin);
                }
                (Source::Stored { .. }, RopeTables::Computed { .. }) => return Err("the model changed".to_string()),
            }
        }
        Ok(())
    }

    /// Cosines and sines of a position that [`RopeTable::grow_to`] made available.
    pub fn row(&self, pos: usize) -> (&[f32], &[f32]) {
        let range = pos * self.half..(pos + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
