//! What the chain kernels read: a table that they copy to shared memory, the lists beside it, their argument.

use zerocopy::{Immutable, IntoBytes};

use super::{Activation, StepRef};

/// A run of whole rows of a weight matrix in a chain.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct ChainSegment {
    /// Codes, `[rows][cols / 32][16]` bytes.
    pub codes: u64,
    /// Scales, `[rows][cols / 32]`.
    pub scales: u64,
    /// Bias of the segment's first row, binary32, or 0.
    pub bias: u64,
    /// Rows.
    pub rows: u32,
    /// Column of the output that the first row goes to.
    pub column: u32,
    /// Units of the segments before it in the matrix.
    pub before: u32,
    /// 1 to add what the output holds.
    pub accumulate: u32,
}

/// One linear layer of a chain, or several that read the same activation: what multiplying it takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct ChainMatrix {
    /// Output row.
    pub out: u64,
    /// Units of all of its segments.
    pub units: u32,
    /// The warp of each block that has the first of the block's units.
    pub first: u32,
    /// Index of its first segment.
    pub segment: u32,
    /// Number of segments.
    pub segments: u32,
    /// Blocks of a row.
    pub blocks: u32,
    /// As in [`super::LinearArgs`].
    pub flip: u32,
}

/// Where the activation of a [`ChainMatrix`] comes from.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, Immutable)]
pub struct ChainLinear {
    /// Activation; its codes are read only if there is no `src`.
    pub x: Activation,
    /// Row whose norm is the activation, or 0.
    pub src: u64,
    /// Norm weight, binary32.
    pub weight: u64,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Index of the attention that follows, and one, whose pages are asked for early; 0 for none.
    pub kv: u32,
}

/// A task of a chain: what kind, and which of its kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct ChainTask {
    /// `ChainKind` of chain.cuh: 0 linear, 1 attention over chunks, 2 their combination and quantisation, 3 SwiGLU.
    pub kind: u32,
    /// Index into the list of that kind.
    pub index: u32,
}

/// Argument of the chain kernels. The lists are in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainArgs {
    /// Step descriptor, of one row.
    pub step: StepRef,
    /// [`ChainMatrix`]es in the order of the tasks, their [`ChainSegment`]s, [`ChainTask`]s.
    pub table: u64,
    /// [`ChainLinear`]s, as many as matrices.
    pub linear: u64,
    /// [`super::AttentionArgs`], whose partial results hold every chunk.
    pub attention: u64,
    /// [`super::RopeArgs`] of the same layers.
    pub rope: u64,
    /// [`super::QuantiseArgs`]: of attention's output where attention has the same index, else of SwiGLU.
    pub activation: u64,
    /// Two `u32`, zero between launches.
    pub barrier: u64,
    /// Number of tasks.
    pub tasks: u32,
    /// Number of matrices.
    pub linears: u32,
    /// Number of segments.
    pub segments: u32,
    /// Bytes of the table, a multiple of 16.
    pub table_bytes: u32,
    /// Bytes of shared memory before the rings (chosen by the launch).
    pub area: u32,
    /// Chunks that a block attends to at once (chosen by the launch).
    pub slots: u32,
}

const _: () = {
    assert!(size_of::<ChainSegment>() == 40 && size_of::<ChainMatrix>() == 32 && size_of::<ChainTask>() == 8);
    assert!(size_of::<ChainLinear>() == 56 && size_of::<ChainArgs>() == 104);
};
