//! What the host and the kernels share: argument structs, the step descriptor, the layout of activations. The mirror of
//! `kernels/abi.cuh`; sizes and offsets are asserted on both sides.
//!
//! Every pointer is a device address (`0` for none). Floats are binary32, little-endian.

use zerocopy::{Immutable, IntoBytes};

mod chain;

pub use chain::{ChainArgs, ChainLinear, ChainMatrix, ChainSegment, ChainTask};

/// Columns of one activation block.
pub const BLOCK: usize = 32;

/// Most segments that one launch of a linear layer takes; [`crate::launch`] splits longer lists.
pub const MAX_SEGMENTS: usize = 8;

/// [`StepRow::token`]s with this bit set stand for the token that an earlier step chose: the low bits index the
/// feedback buffer.
pub const TOKEN_FEEDBACK: u32 = 1 << 31;

/// [`ArgmaxResult::bad`] of a row whose logits are all finite.
pub const ALL_FINITE: u32 = u32::MAX;

/// First part of the step descriptor. The host writes it before each step; a captured graph only holds its address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepHeader {
    /// Token rows of this step, at most the bucket that the graph was captured for.
    pub rows: u32,
    /// Rows whose logits are wanted.
    pub wanted: u32,
    /// Number of the step, copied to the flag that says it is done.
    pub serial: u32,
    /// Which of the host's slots for results and flags is the step's.
    pub slot: u32,
}

/// One token row of the step descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRow {
    /// Sequence of the step.
    pub sequence: u32,
    /// Position in the sequence.
    pub position: u32,
    /// Token id, or [`TOKEN_FEEDBACK`] with an index.
    pub token: u32,
    /// Index in the page array of the sequence's first page.
    pub table: u32,
}

/// Where the parts of the step descriptor lie. Fixed for the life of a graph.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct StepRef {
    /// [`StepHeader`].
    pub header: u64,
    /// [`StepRow`]s, `[bucket]`.
    pub rows: u64,
    /// Indices of the wanted rows, `u32`, increasing.
    pub wanted: u64,
    /// Page tables, `u32`, one sequence after the other.
    pub pages: u64,
}

/// Quantised and float activations of up to `ld` rows, the operand of the linear layers.
///
/// `codes` is `[blocks][ld][planes][32]` signed bytes: plane 0 the high bytes (or the 8-bit codes), plane 1, for 16-bit
/// activations only, the low bytes. `steps` is `[blocks][ld]` of `{ f32 d; i32 sum of the codes }`.
/// `floats` is `[ld][cols]`, written and read only where an unquantised matrix follows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct Activation {
    /// Codes, or 0.
    pub codes: u64,
    /// Step sizes and sums, or 0.
    pub steps: u64,
    /// Floats, or 0.
    pub floats: u64,
    /// Columns.
    pub cols: u32,
    /// Rows that the buffers hold: the distance from one block to the next.
    pub ld: u32,
}

impl Activation {
    /// Bytes of `codes` for `rows` rows of `cols` columns; `wide` for 16-bit activations.
    pub const fn codes_bytes(cols: usize, rows: usize, wide: bool) -> usize {
        cols.div_ceil(BLOCK) * rows * BLOCK * if wide { 2 } else { 1 }
    }

    /// Bytes of `steps`.
    pub const fn steps_bytes(cols: usize, rows: usize) -> usize {
        cols.div_ceil(BLOCK) * rows * 8
    }

    /// Bytes of `floats`.
    pub const fn floats_bytes(cols: usize, rows: usize) -> usize {
        cols * rows * 4
    }
}

/// A run of whole rows of a weight matrix in a launch of a linear layer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearSegment {
    /// Planes in file format; plane 0 at a multiple of 16 bytes, as all planes of a slab are.
    pub planes: [u64; 3],
    /// Bias of the segment's first row, or 0.
    pub bias: u64,
    /// Rows.
    pub rows: u32,
    /// Column of the output that the first row goes to.
    pub column: u32,
    /// [`FloatType`] of the bias.
    pub bias_type: u32,
    /// 1 to add what the output holds.
    pub accumulate: u32,
}

/// Argument of every linear kernel, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// Activation.
    pub x: Activation,
    /// Output, `[rows][out_ld]` floats.
    pub out: u64,
    /// Floats from one output row to the next.
    pub out_ld: u32,
    /// 1 if the rows are the wanted rows, else all.
    pub wanted: u32,
    /// Number of segments.
    pub segments: u32,
    /// `log2` of the columns that share a scale, for the planar formats.
    pub group_shift: u32,
    /// XORed to every code before the zero point is taken off: makes two's complement codes unsigned.
    pub flip: u32,
    /// Scales of the planar formats: 1 for binary16, 0 for binary32 (generic kernels only).
    pub scale_half: u32,
    /// Bytes of each row that may be asked for before the previous kernel's results (chosen by the launch).
    pub ahead: u32,
    /// 0.
    pub reserved: u32,
    /// Segments.
    pub segment: [LinearSegment; MAX_SEGMENTS],
}

/// Argument of the kernels that make an activation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, Immutable)]
pub struct QuantiseArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// Where the activation goes.
    pub out: Activation,
    /// Source rows, `[rows][src_ld]` floats.
    pub src: u64,
    /// Norm weight, `[cols]`; norm only.
    pub weight: u64,
    /// Floats from one source row to the next.
    pub src_ld: u32,
    /// [`FloatType`] of the norm weight.
    pub weight_type: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// 1 if output row `i` is made from source row `wanted[i]`; norm only.
    pub gather: u32,
    /// 1 if the row count is the number of wanted rows.
    pub wanted: u32,
    /// 1 to write codes and steps.
    pub codes: u32,
    /// 1 to write floats.
    pub floats: u32,
    /// Zero.
    pub reserved: u32,
}

/// Argument of the embedding kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbedArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// Planes of the table, or of the gathered rows; readable by the device wherever they are.
    pub planes: [u64; 3],
    /// Tokens chosen by earlier steps, `u32`.
    pub feedback: u64,
    /// Output, `[rows][cols]` floats.
    pub out: u64,
    /// Columns.
    pub cols: u32,
    /// Rows of the table; a token beyond them reads row 0 (the host has checked those it knows).
    pub vocab: u32,
    /// 1 if row `i` of the planes belongs to token row `i`, 0 if rows are indexed by token.
    pub gathered: u32,
    /// As in [`LinearArgs`].
    pub group_shift: u32,
    /// As in [`LinearArgs`].
    pub flip: u32,
    /// As in [`LinearArgs`].
    pub scale_half: u32,
}

/// Where keys and values are, and the sizes of a page: `headrace_kv::KvGeometry` for one layer, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct KvRef {
    /// Start of the KV range.
    pub base: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Byte offset in a page of this layer's keys.
    pub key_offset: u64,
    /// Byte offset in a page of this layer's values.
    pub value_offset: u64,
    /// Elements from one position of a head to the next.
    pub token_stride: u32,
    /// Elements from one head to the next.
    pub head_stride: u32,
    /// Positions of a page; a multiple of 32.
    pub page_tokens: u32,
    /// 1 for binary16, 0 for binary32.
    pub half: u32,
}

/// Argument of the RoPE kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, Immutable)]
pub struct RopeArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// Pages of the layer.
    pub kv: KvRef,
    /// `[rows][(heads + 2 * kv_heads) * head_dim]` floats; the queries are rotated in place.
    pub qkv: u64,
    /// Cosines, `[positions][dims / 2]` floats.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// Norm weight of a query head, or 0.
    pub q_norm: u64,
    /// Norm weight of a key head, or 0.
    pub k_norm: u64,
    /// [`FloatType`] of the query norm weight.
    pub q_norm_type: u32,
    /// [`FloatType`] of the key norm weight.
    pub k_norm_type: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Rotated elements of a head.
    pub dims: u32,
    /// 1 for pairs `(2 i, 2 i + 1)`, 0 for `(i, i + dims / 2)`.
    pub interleaved: u32,
}

/// Argument of the attention kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, Immutable)]
pub struct AttentionArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// Pages of the layer.
    pub kv: KvRef,
    /// `[rows][qkv_ld]` floats; a row starts with its queries.
    pub qkv: u64,
    /// `[rows][heads * head_dim]` floats.
    pub out: u64,
    /// Partial results of the split kernel, [`AttentionArgs::partials_bytes`]; 0 for the direct kernel.
    pub partials: u64,
    /// `u32 [rows][heads]`, zero before the first launch; each launch leaves them zero.
    pub tickets: u64,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a head, at most [`AttentionArgs::MAX_HEAD_DIM`].
    pub head_dim: u32,
    /// Floats from one row of `qkv` to the next.
    pub qkv_ld: u32,
    /// Factor of every score.
    pub scale: f32,
    /// Soft cap, or 0.
    pub softcap: f32,
    /// Positions seen, the query's own included; 0 for all.
    pub window: u32,
    /// Chunks that the partials hold for each row and head: the split kernel's bucket.
    pub chunks: u32,
}

impl AttentionArgs {
    /// Largest head.
    pub const MAX_HEAD_DIM: usize = 256;

    /// Bytes of the partial results of `rows` rows over `chunks` chunks: `head_dim` sums, the maximum and the sum of
    /// weights for each chunk.
    pub const fn partials_bytes(rows: usize, heads: usize, chunks: usize, head_dim: usize) -> usize {
        rows * heads * chunks * (head_dim + 2) * 4
    }
}

/// The greedy choice of one wanted row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArgmaxResult {
    /// Token id; meaningless if `bad` is not [`ALL_FINITE`].
    pub token: u32,
    /// Index of the first non-finite logit, or [`ALL_FINITE`].
    pub bad: u32,
}

/// Argument of the arg-maximum kernel and of the one that reports a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArgmaxArgs {
    /// Step descriptor.
    pub step: StepRef,
    /// `[wanted][vocab]` floats.
    pub logits: u64,
    /// [`ArgmaxResult`]s, `[wanted]`.
    pub results: u64,
    /// `u32` by wanted row; the chosen token goes there too. 0 for none.
    pub feedback: u64,
    /// 16 bytes a wanted row, as [`ArgmaxArgs::SCRATCH_INIT`] before the first launch; each launch leaves them so.
    pub scratch: u64,
    /// Host-visible copies of the results, `[slots][max_wanted]`; the reporting kernel writes that of the step's slot. 0 for
    /// none.
    pub host_results: u64,
    /// Host-visible `u32`s, `[slots]`; the reporting kernel writes the step's serial number to that of its slot, after
    /// everything else.
    pub host_flag: u64,
    /// Logits of a row.
    pub vocab: u32,
    /// Results of a slot of `host_results`.
    pub max_wanted: u32,
}

impl ArgmaxArgs {
    /// Initial scratch of a wanted row: best key (`u64`), first bad index, blocks done.
    pub const SCRATCH_INIT: [u32; 4] = [0, 0, u32::MAX, 0];
    /// Bytes of scratch a wanted row.
    pub const SCRATCH_BYTES: usize = 16;
}

/// Argument of the kernel that measures how fast memory can be read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeArgs {
    /// What is read.
    pub source: u64,
    /// Pieces of 16 bytes.
    pub count: u64,
    /// A `u32` that may be written.
    pub sink: u64,
}

/// Storage of a vector of floats (bias, norm weight): the format of the file, read exactly.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloatType {
    /// binary32.
    #[default]
    F32 = 0,
    /// binary16.
    F16 = 1,
    /// bfloat16.
    BF16 = 2,
}

const _: () = {
    assert!(size_of::<StepHeader>() == 16 && size_of::<StepRow>() == 16 && size_of::<StepRef>() == 32);
    assert!(size_of::<Activation>() == 32);
    assert!(size_of::<LinearSegment>() == 48);
    assert!(size_of::<LinearArgs>() == 104 + 48 * MAX_SEGMENTS && std::mem::offset_of!(LinearArgs, segment) == 104);
    assert!(size_of::<QuantiseArgs>() == 112);
    assert!(size_of::<EmbedArgs>() == 96);
    assert!(size_of::<KvRef>() == 48);
    assert!(size_of::<RopeArgs>() == 152 && std::mem::offset_of!(RopeArgs, qkv) == 80);
    assert!(size_of::<AttentionArgs>() == 144 && std::mem::offset_of!(AttentionArgs, heads) == 112);
    assert!(size_of::<ArgmaxArgs>() == 88);
    assert!(size_of::<ArgmaxResult>() == 8);
    assert!(size_of::<ProbeArgs>() == 24);
};
