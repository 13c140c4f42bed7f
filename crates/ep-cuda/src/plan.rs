//! What is captured of a step program: tasks on the compute stream, copies on the copy stream, and the events between them.
//! `planner` makes it. No device, no addresses.

use headrace_model::spec::{Layout, Tensor, TensorId};
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{Buffer, Place, RowSet, Segment};

mod planner;

pub use planner::plan;

/// Where an activation comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `rms_norm(Residual) * weight`.
    Norm(TensorId),
    /// The `Attention` buffer as it is.
    Attention,
    /// `swiglu` of the `GateUp` buffer.
    Swiglu,
}

/// An activation: what makes it, and what reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationTask {
    /// Where it comes from.
    pub source: Source,
    /// Rows.
    pub rows: RowSet,
    /// Elements of a row.
    pub width: usize,
    /// True if a quantised matrix reads it.
    pub codes: bool,
    /// True if an unquantised matrix reads it.
    pub floats: bool,
}

/// One segment of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Weight rows, resident or in a slot.
    pub segment: Segment,
    /// Bias of the whole tensor.
    pub bias: Option<TensorId>,
    /// Column of the output that the segment's first row goes to.
    pub column: usize,
    /// True to add what the output holds.
    pub accumulate: bool,
}

/// Segments of one format that read one activation and write different columns of one buffer: one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearTask {
    /// Rows of the activation.
    pub rows: RowSet,
    /// Output buffer.
    pub out: Buffer,
    /// Segments.
    pub parts: Vec<Part>,
}

/// What one launch on the compute stream does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Rows of the embedding.
    Embed(TensorId),
    /// An activation.
    Activate(ActivationTask),
    /// A linear layer, or several.
    Linear(LinearTask),
    /// Norms of the heads, rotation, keys and values into their pages.
    Rope(usize),
    /// Attention of one layer.
    Attention(usize),
    /// Arg-maxima.
    Argmax,
}

impl Task {
    /// True if it reads a slot of the staging ring.
    pub fn reads_ring(&self) -> bool {
        match self {
            Task::Linear(l) => l.parts.iter().any(|p| matches!(p.segment.place, Place::Slot { .. })),
            _ => false,
        }
    }

    /// True if it reads weights in place on the host.
    pub fn reads_host(&self) -> bool {
        match self {
            Task::Linear(l) => l.parts.iter().any(|p| p.segment.place == Place::HostMapped),
            _ => false,
        }
    }
}

/// The two streams of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Copies into the staging ring.
    Copy,
}

/// One thing to capture, in order. Events are numbered from 0; each is signalled once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Launch a task on the compute lane.
    Launch(Task),
    /// Copy a segment's planes, so many bytes without alignment, from the host into its slot, on the copy lane.
    CopyIn(Segment, u64),
    /// Mark this point of the lane.
    Signal(Lane, usize),
    /// What comes later in the lane waits for the event.
    Await(Lane, usize),
}

/// A program as actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturePlan {
    /// Actions in order.
    pub actions: Vec<Action>,
    /// Number of events.
    pub events: usize,
    /// True if tokens are chosen.
    pub chooses: bool,
    /// True if there is any launch: a program without one is only a run of copies.
    pub computes: bool,
    /// Widest activation that is read quantised; 0 for none.
    pub codes_width: usize,
    /// Widest activation that is read as floats; 0 for none.
    pub floats_width: usize,
    /// The matrix that embeddings are taken from.
    pub table: Option<TensorId>,
    /// Bytes that one replay copies into the ring, alignment not counted.
    pub copied_bytes: u64,
}

impl CapturePlan {
    /// Every task, in order.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.actions.iter().filter_map(|a| match a {
            Action::Launch(task) => Some(task),
            _ => None,
        })
    }

    /// Every segment that a linear layer reads.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.tasks()
            .flat_map(|task| match task {
                Task::Linear(l) => l.parts.as_slice(),
                _ => &[],
            })
            .map(|part| &part.segment)
    }

    /// Every segment that is copied into the ring.
    pub fn copies(&self) -> impl Iterator<Item = &Segment> {
        self.actions.iter().filter_map(|a| match a {
            Action::CopyIn(segment, _) => Some(segment),
            _ => None,
        })
    }
}

/// Byte offsets of the planes of `rows` rows of a tensor from the start of their slab, and the slab's length; `None` where
/// the sum overflows.
pub fn slab(tensor: &Tensor, rows: usize) -> Option<([u64; 3], u64)> {
    let (mut at, mut offsets) = (0u64, [0u64; 3]);
    for (plane, offset) in offsets.iter_mut().enumerate().take(tensor.format.planes()) {
        at = at.checked_next_multiple_of(PLANE_ALIGN as u64)?;
        *offset = at;
        at = at.checked_add(plane_bytes(tensor, plane, rows)?)?;
    }
    Some((offsets, at))
}

/// Bytes of one plane of `rows` rows.
pub fn plane_bytes(tensor: &Tensor, plane: usize, rows: usize) -> Option<u64> {
    (tensor.format.row_bytes(plane, tensor.cols) as u64).checked_mul(rows as u64)
}

/// True if a provider must keep a row-major copy of the tensor: it lies column-major in its file.
pub fn needs_transposing(tensor: &Tensor) -> bool {
    tensor.layout == Layout::ColMajor && tensor.rows > 1
}

#[cfg(test)]
mod tests;
