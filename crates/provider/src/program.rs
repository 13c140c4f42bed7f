//! A step as a list of instructions in read order: operations, copies into the staging ring, and waits.

use headrace_model::spec::TensorId;
use headrace_numerics::activation::ActivationWidth;

/// Float buffers of a step, one row a token row. Widths come from the model's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// The residual stream, `[rows, hidden]`.
    Residual,
    /// `[rows, (heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
    Qkv,
    /// `[rows, heads * head_dim]`: the output of attention.
    Attention,
    /// `[rows, 2 * ffn]`: gate, up.
    GateUp,
    /// `[wanted, vocab]`.
    Logits,
}

/// Which rows an operation covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowSet {
    /// Every row of the step.
    All,
    /// The rows whose logits are wanted, packed.
    Wanted,
}

/// Where a segment's bytes are when an operation reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the model file's own mapping (or the provider's transposed copy of it); host providers only.
    File,
    /// In the weights range, at this byte offset.
    Resident {
        /// Offset of the segment's first plane.
        offset: u64,
    },
    /// In a slot of the staging ring.
    Slot {
        /// Slot number.
        slot: u32,
        /// Offset of the segment's first plane in the slot.
        offset: u64,
    },
    /// In host memory that a device's kernels read in place, over the link: the model file's mapping, or the provider's own
    /// copy where they can't read that.
    HostMapped,
}

/// Byte alignment of each plane of a segment outside the model file.
pub const PLANE_ALIGN: usize = 256;

/// A run of whole rows of a tensor, and where it is. Outside the file, a segment is one contiguous slab: its planes one
/// after the other, each starting at a multiple of [`PLANE_ALIGN`] from the slab's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Tensor.
    pub tensor: TensorId,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Where the bytes are.
    pub place: Place,
}

/// One operation of the arithmetic contract. Between a `Norm`, `Quantise` or `Swiglu` and the next one, `Linear`
/// operations read what it left: the activation, as floats or quantised, whichever their weight's format takes.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `Residual[row] = embedding[token]`, dequantised. The embedding is read by single rows from where it is.
    Embed {
        /// Embedding matrix.
        table: TensorId,
    },
    /// Activation = `rms_norm(Residual) * weight`. `rows: Wanted` gathers the wanted rows.
    Norm {
        /// Norm weight, `[hidden]`.
        weight: TensorId,
        /// Rows covered by this and by the linear operations that read the activation.
        rows: RowSet,
    },
    /// Activation = `Attention` buffer.
    Quantise,
    /// Activation = `swiglu(gate, up)` of the `GateUp` buffer.
    Swiglu,
    /// `out[row][column + i] = weight[i] . activation[row] (+ bias[i]) (+ out[row][column + i])` for the segments' rows
    /// `i`.
    Linear {
        /// Segments of one tensor, in row order. One operation may hold a part of the tensor's rows.
        segments: Vec<Segment>,
        /// Bias of the whole tensor, indexed by tensor row.
        bias: Option<TensorId>,
        /// Output buffer.
        out: Buffer,
        /// Column of the output that tensor row 0 goes to.
        column: usize,
        /// True to add what the output holds already (the residual).
        accumulate: bool,
    },
    /// Norms over the heads where the model has them, RoPE on queries and keys in the `Qkv` buffer, keys and values
    /// rounded and stored in their pages.
    RopeAppend {
        /// Layer.
        layer: usize,
    },
    /// `Attention` buffer = attention of the `Qkv` buffer's queries over the pages.
    Attention {
        /// Layer.
        layer: usize,
    },
    /// Arg-maximum of each row of `Logits`.
    Argmax,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Instr {
    /// An operation on the compute stream.
    Op(Op),
    /// On the copy stream: once the slot is free, copies these segments' bytes from the host into it.
    Copy {
        /// Segments, all with the same `Place::Slot`.
        segments: Vec<Segment>,
        /// Slot.
        slot: u32,
    },
    /// The compute stream waits for the last copy into the slot.
    WaitCopy {
        /// Slot.
        slot: u32,
    },
    /// The compute stream has read the slot for the last time before its next copy.
    Free {
        /// Slot.
        slot: u32,
    },
}

/// A step, recorded once per epoch and replayed once a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepProgram {
    /// Instructions in order.
    pub instrs: Vec<Instr>,
    /// Width of quantised activations.
    pub activations: ActivationWidth,
    /// Most rows of a step.
    pub max_rows: usize,
    /// Most rows whose logits are wanted.
    pub max_wanted: usize,
    /// Bytes of a staging slot; 0 without a ring.
    pub slot_bytes: u64,
    /// Number of staging slots.
    pub slots: u32,
}
