//! The weights of a step cut into pieces: the units of placement and of copying, at addresses that never change.
//!
//! A **piece** is a contiguous slab of whole rows of one or more tensors, consecutive in read order. Every piece has a fixed
//! address in the weights range, whether it is resident or not: address space costs nothing. So a change of placement
//! maps and unmaps granules and moves no byte that stays.
//!
//! The unit is a read, not a tensor: a matrix that several layers share has rows in a piece for each of its reads, so that every
//! piece is read once a step, in order.

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::format::MAX_PLANES;
use headrace_provider::program::PLANE_ALIGN;

use crate::program::linear_tensors;

/// A run of rows inside a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Tensor.
    pub tensor: TensorId,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Offset of its first plane in the piece's slab.
    pub offset: u64,
}

/// One piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it holds, in read order.
    pub runs: Vec<Run>,
    /// Offset of the slab in the weights range.
    pub address: u64,
    /// Bytes of the slab, a multiple of the plane alignment.
    pub slab_bytes: u64,
    /// Bytes of weights in it: the slab without its padding.
    pub weight_bytes: u64,
}

/// All pieces of a model, in read order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceLayout {
    /// Pieces.
    pub pieces: Vec<Piece>,
    /// Bytes of address space of the weights range.
    pub range_bytes: u64,
    /// Bytes of weights in all pieces.
    pub weight_bytes: u64,
}

impl PieceLayout {
    /// Cuts the linear layers' weights of `model` into pieces of at most `target` bytes of weights (a single row that is
    /// larger is a piece of its own).
    ///
    /// Cuts fall between tensors where they can. A tensor larger than `target` is cut into equal parts; smaller ones are put
    /// together as long as they fit.
    pub fn new(model: &ModelSpec, target: u64) -> PieceLayout {
        PieceLayout::cut(model, target, true)
    }

    /// As [`PieceLayout::new`], but no piece holds rows of two tensors.
    pub fn by_tensor(model: &ModelSpec, target: u64) -> PieceLayout {
        PieceLayout::cut(model, target, false)
    }

    fn cut(model: &ModelSpec, target: u64, together: bool) -> PieceLayout {
        let mut layout = PieceLayout { pieces: Vec::new(), range_bytes: 0, weight_bytes: 0 };
        let mut open: Vec<(TensorId, usize, usize)> = Vec::new();
        let mut open_bytes = 0;
        for id in linear_tensors(model) {
            let t = model.tensor(id);
            let row_bytes = (t.format.total_row_bytes(t.cols) as u64).max(1);
            let bytes = row_bytes * t.rows as u64;
            if (open_bytes + bytes > target || !together) && !open.is_empty() {
                layout.push(model, &open);
                open.clear();
                open_bytes = 0;
            }
            if bytes <= target {
                open.push((id, 0, t.rows));
                open_bytes += bytes;
                continue;
            }
            let parts = bytes.div_ceil(target).min(t.rows as u64) as usize;
            for part in 0..parts {
                let (from, to) = (t.rows * part / parts, t.rows * (part + 1) / parts);
                layout.push(model, &[(id, from, to - from)]);
            }
        }
        if !open.is_empty() {
            layout.push(model, &open);
        }
        layout
    }

    fn push(&mut self, model: &ModelSpec, parts: &[(TensorId, usize, usize)]) {
        let mut piece =
            Piece { runs: Vec::with_capacity(parts.len()), address: self.range_bytes, slab_bytes: 0, weight_bytes: 0 };
        for &(tensor, row, rows) in parts {
            piece.runs.push(Run { tensor, row, rows, offset: piece.slab_bytes });
            let t = model.tensor(tensor);
            for plane in 0..MAX_PLANES {
                let bytes = t.format.row_bytes(plane, t.cols) as u64 * rows as u64;
                piece.slab_bytes += bytes.next_multiple_of(PLANE_ALIGN as u64);
                piece.weight_bytes += bytes;
            }
        }
        self.range_bytes += piece.slab_bytes;
        self.weight_bytes += piece.weight_bytes;
        self.pieces.push(piece);
    }

    /// Bytes of the largest slab: what a staging slot must hold.
    pub fn largest_slab(&self) -> u64 {
        self.pieces.iter().map(|p| p.slab_bytes).max().unwrap_or(0)
    }
}
