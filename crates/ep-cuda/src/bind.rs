//! From tasks to kernel arguments: addresses, row buckets, the constants of formats. No device.

use std::collections::HashMap;

use headrace_kv::{KvGeometry, geometry::KvHalf};
use headrace_model::ModelSpec;
use headrace_model::spec::{Tensor, TensorId};
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::{Format, ScaleType, ZeroPoint};
use headrace_numerics::rope::RopeStyle;
use headrace_provider::{Buffer, Place, RowSet, Segment};

use crate::abi::{
    Activation, ArgmaxArgs, AttentionArgs, ChainArgs, EmbedArgs, FloatType, KvRef, LinearArgs, LinearSegment,
    MAX_SEGMENTS, QuantiseArgs, RopeArgs, StepRef,
};
use crate::buckets::GraphKey;
use crate::launch::ChainShape;
use crate::plan::{ActivationTask, LinearTask, Source, Task, slab};

/// Which kernel, with its argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Launch {
    /// Embedding rows.
    Embed(Format, EmbedArgs),
    /// Norm and quantise.
    Norm(QuantiseArgs),
    /// Quantise.
    Quantise(QuantiseArgs),
    /// SwiGLU and quantise.
    Swiglu(QuantiseArgs),
    /// Linear layer.
    Linear(Format, Box<LinearArgs>),
    /// RoPE, keys and values.
    Rope(RopeArgs),
    /// Attention: split if there are partial results, else direct.
    Attention(AttentionArgs),
    /// Arg-maxima.
    Argmax(ArgmaxArgs),
    /// Many tasks of a one-row step at once.
    Chain(Format, ChainShape, ChainArgs),
    /// Results to the host, and the flag.
    Report(ArgmaxArgs),
}

/// Device addresses of the planes of what is read in place on the host, by tensor, first row and rows.
pub type HostMapped = HashMap<(TensorId, usize, usize), [u64; 3]>;

/// Where everything is that the kernels read and write, as device addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Addresses {
    /// The step descriptor.
    pub step: StepRef,
    /// The float buffers, in the order of [`Buffer::ALL`].
    pub buffers: [u64; 5],
    /// Start of the weights range.
    pub weights: u64,
    /// Segments that are read in place on the host.
    pub host_mapped: HostMapped,
    /// Start of the staging range.
    pub staging: u64,
    /// Start of the KV range.
    pub kv: u64,
    /// Norm weights and biases, as binary32.
    pub vectors: HashMap<TensorId, u64>,
    /// Cosines.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// Codes of the activation.
    pub codes: u64,
    /// Step sizes and sums of the activation.
    pub steps: u64,
    /// Floats of the activation.
    pub floats: u64,
    /// Planes of the embedding, or of the rows of it that the host gathered.
    pub table: [u64; 3],
    /// True if the host gathers rows.
    pub gathered: bool,
    /// Chosen tokens by wanted row.
    pub feedback: u64,
    /// Partial results of attention.
    pub partials: u64,
    /// Tickets of attention.
    pub tickets: u64,
    /// Scratch of the arg-maximum.
    pub scratch: u64,
    /// Results of the arg-maximum on the device.
    pub results: u64,
    /// The same on the host, slot after slot.
    pub host_results: u64,
    /// The flags on the host.
    pub host_flag: u64,
    /// Results of a slot.
    pub max_wanted: usize,
}

/// What stays the same from task to task.
#[derive(Clone, Copy, Debug)]
pub struct Binder<'a> {
    /// Model.
    pub model: &'a ModelSpec,
    /// Pages.
    pub geometry: &'a KvGeometry,
    /// Addresses.
    pub at: &'a Addresses,
    /// Width of quantised activations.
    pub width: ActivationWidth,
    /// Bytes of a staging slot.
    pub slot_bytes: u64,
    /// The graph that is captured.
    pub key: GraphKey,
}

/// Rows that an activation's buffers are laid out for: tensor cores take whole groups of 8, and one row goes without them.
pub const fn leading_rows(rows: usize) -> usize {
    if rows > 1 { rows.next_multiple_of(8) } else { rows }
}

/// `(group_shift, flip, scale_half)` of a format, as the kernels take them.
pub fn format_constants(format: Format) -> (u32, u32, u32) {
    let n = match format {
        Format::Nbits(n) => n,
        Format::Planes(_) => return (5, 0, 0),
        _ => return (0, 0, 0),
    };
    let twos = n.zero == ZeroPoint::TwosComplement;
    // 4-bit codes become unsigned, 8-bit codes signed.
    let flip = match (n.bits, twos) {
        (4, true) => 0x8888_8888,
        (8, false) => 0x8080_8080,
        _ => 0,
    };
    (u32::from(n.block).max(1).ilog2(), flip, u32::from(n.scale == ScaleType::F16))
}

impl Binder<'_> {
    fn buffer(&self, buffer: Buffer) -> u64 {
        Buffer::ALL.iter().position(|&b| b == buffer).and_then(|i| self.at.buffers.get(i)).copied().unwrap_or_default()
    }

    fn width_of(&self, buffer: Buffer) -> u32 {
        buffer.width(&self.model.config) as u32
    }

    /// Rows that a launch over `rows` is sized for.
    pub fn rows(&self, rows: RowSet) -> usize {
        match rows {
            RowSet::All => self.key.rows,
            RowSet::Wanted => self.key.wanted,
        }
    }

    fn activation(&self, width: usize, rows: RowSet, codes: bool, floats: bool) -> Activation {
        Activation {
            codes: if codes { self.at.codes } else { 0 },
            steps: if codes { self.at.steps } else { 0 },
            floats: if floats { self.at.floats } else { 0 },
            cols: width as u32,
            ld: leading_rows(self.rows(rows)) as u32,
        }
    }

    fn vector(&self, id: TensorId) -> Result<u64, String> {
        let name = || self.model.tensors.get(id.0).map_or_else(|| format!("{}", id.0), |t| t.name.clone());
        self.at.vectors.get(&id).copied().ok_or_else(|| format!("vector {} is not on the device", name()))
    }

    /// The launches of a task, and the rows that each is sized for.
    pub fn bind(&self, task: &Task) -> Result<Vec<(Launch, usize)>, String> {
        let all = self.key.rows;
        Ok(match task {
            Task::Embed(table) => vec![(self.embed(*table)?, all)],
            Task::Activate(a) => vec![(self.activate(a)?, self.rows(a.rows))],
            Task::Linear(l) => self.linear(l)?.into_iter().map(|launch| (launch, self.rows(l.rows))).collect(),
            Task::Rope(layer) => vec![(self.rope(*layer)?, all)],
            Task::Attention(layer) => vec![(self.attention(*layer)?, all)],
            Task::Argmax => vec![(Launch::Argmax(self.argmax()), self.key.wanted)],
        })
    }

    fn embed(&self, table: TensorId) -> Result<Launch, String> {
        let tensor = self.model.tensors.get(table.0).ok_or("no embedding")?;
        let (group_shift, flip, scale_half) = format_constants(tensor.format);
        Ok(Launch::Embed(
            tensor.format,
            EmbedArgs {
                step: self.at.step,
                planes: self.at.table,
                feedback: self.at.feedback,
                out: self.buffer(Buffer::Residual),
                cols: tensor.cols as u32,
                vocab: tensor.rows as u32,
                gathered: u32::from(self.at.gathered),
                group_shift,
                flip,
                scale_half,
            },
        ))
    }

    fn activate(&self, a: &ActivationTask) -> Result<Launch, String> {
        let wanted = u32::from(a.rows == RowSet::Wanted);
        let args = QuantiseArgs {
            step: self.at.step,
            out: self.activation(a.width, a.rows, a.codes, a.floats),
            wanted,
            codes: u32::from(a.codes),
            floats: u32::from(a.floats),
            weight_type: FloatType::F32 as u32,
            ..QuantiseArgs::default()
        };
        let source = |buffer| (self.buffer(buffer), self.width_of(buffer));
        Ok(match a.source {
            Source::Norm(weight) => {
                let (src, src_ld) = source(Buffer::Residual);
                let (weight, eps) = (self.vector(weight)?, self.model.config.norm_eps);
                Launch::Norm(QuantiseArgs { src, src_ld, weight, eps, gather: wanted, ..args })
            }
            Source::Attention => {
                let (src, src_ld) = source(Buffer::Attention);
                Launch::Quantise(QuantiseArgs { src, src_ld, ..args })
            }
            Source::Swiglu => {
                let (src, src_ld) = source(Buffer::GateUp);
                Launch::Swiglu(QuantiseArgs { src, src_ld, ..args })
            }
        })
    }

    fn linear(&self, l: &LinearTask) -> Result<Vec<Launch>, String> {
        let mut launches = Vec::new();
        for parts in l.parts.chunks(MAX_SEGMENTS) {
            let Some(first) = parts.first() else { continue };
            let tensor = self.model.tensors.get(first.segment.tensor.0).ok_or("no such tensor")?;
            let (group_shift, flip, scale_half) = format_constants(tensor.format);
            let quantised = tensor.format.is_quantised();
            let mut segment = [LinearSegment::default(); MAX_SEGMENTS];
            for (to, part) in segment.iter_mut().zip(parts) {
                let tensor = self.model.tensors.get(part.segment.tensor.0).ok_or("no such tensor")?;
                to.planes = self.planes(&part.segment, tensor)?;
                to.bias = match part.bias {
                    Some(bias) => self.vector(bias)? + part.segment.row as u64 * 4,
                    None => 0,
                };
                to.bias_type = FloatType::F32 as u32;
                to.rows = part.segment.rows as u32;
                to.column = part.column as u32;
                to.accumulate = u32::from(part.accumulate);
            }
            launches.push(Launch::Linear(
                tensor.format,
                Box::new(LinearArgs {
                    step: self.at.step,
                    x: self.activation(tensor.cols, l.rows, quantised, !quantised),
                    out: self.buffer(l.out),
                    out_ld: self.width_of(l.out),
                    wanted: u32::from(l.rows == RowSet::Wanted),
                    segments: parts.len() as u32,
                    group_shift,
                    flip,
                    scale_half,
                    segment,
                    ..Default::default()
                }),
            ));
        }
        Ok(launches)
    }

    /// The addresses of a segment's planes.
    fn planes(&self, segment: &Segment, tensor: &Tensor) -> Result<[u64; 3], String> {
        let base = match segment.place {
            Place::Resident { offset } => self.at.weights + offset,
            Place::Slot { slot, offset } => self.at.staging + u64::from(slot) * self.slot_bytes + offset,
            Place::HostMapped => {
                let at = self.at.host_mapped.get(&(segment.tensor, segment.row, segment.rows)).copied();
                return at.ok_or_else(|| format!("{}: rows {} on the host have no address", tensor.name, segment.row));
            }
            Place::File => return Err(format!("{}: this device can't compute from the file", tensor.name)),
        };
        let (offsets, _) = slab(tensor, segment.rows).ok_or("too many bytes")?;
        let mut planes = [0; 3];
        for (address, offset) in planes.iter_mut().zip(offsets).take(tensor.format.planes()) {
            *address = base + offset;
        }
        Ok(planes)
    }

    /// The pages of one layer as the kernels address them.
    fn pages(&self, layer: usize) -> KvRef {
        let g = self.geometry;
        let element = g.dtype.bytes();
        let start = g.offset(layer, KvHalf::Key, 0, 0);
        let head_stride = if g.kv_heads > 1 { g.offset(layer, KvHalf::Key, 1, 0) - start } else { 0 };
        KvRef {
            base: self.at.kv,
            page_bytes: g.page_bytes() as u64,
            key_offset: start as u64,
            value_offset: g.offset(layer, KvHalf::Value, 0, 0) as u64,
            token_stride: (g.token_stride() / element) as u32,
            head_stride: (head_stride / element) as u32,
            page_tokens: g.page_tokens as u32,
            half: u32::from(g.dtype == KvDtype::F16),
        }
    }

    fn rope(&self, layer: usize) -> Result<Launch, String> {
        let config = &self.model.config;
        let l = self.model.layers.get(layer).ok_or("no such layer")?;
        let norm = |id: Option<TensorId>| id.map_or(Ok(0), |id| self.vector(id));
        Ok(Launch::Rope(RopeArgs {
            step: self.at.step,
            kv: self.pages(layer),
            qkv: self.buffer(Buffer::Qkv),
            cos: self.at.cos,
            sin: self.at.sin,
            q_norm: norm(l.q_norm)?,
            k_norm: norm(l.k_norm)?,
            q_norm_type: FloatType::F32 as u32,
            k_norm_type: FloatType::F32 as u32,
            eps: config.norm_eps,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            dims: config.rope.dims as u32,
            interleaved: u32::from(config.rope.style == RopeStyle::Interleaved),
        }))
    }

    fn attention(&self, layer: usize) -> Result<Launch, String> {
        let config = &self.model.config;
        let params = self.model.layers.get(layer).ok_or("no such layer")?.attention;
        Ok(Launch::Attention(AttentionArgs {
            step: self.at.step,
            kv: self.pages(layer),
            qkv: self.buffer(Buffer::Qkv),
            out: self.buffer(Buffer::Attention),
            partials: if self.key.chunks == 0 { 0 } else { self.at.partials },
            tickets: self.at.tickets,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            qkv_ld: self.width_of(Buffer::Qkv),
            scale: params.scale,
            softcap: params.softcap,
            window: params.window.map_or(0, |w| u32::try_from(w).unwrap_or(u32::MAX)),
            chunks: self.key.chunks as u32,
        }))
    }

    /// The arguments of the arg-maximum, and of the report that ends a step.
    pub fn argmax(&self) -> ArgmaxArgs {
        ArgmaxArgs {
            step: self.at.step,
            logits: self.buffer(Buffer::Logits),
            results: self.at.results,
            feedback: self.at.feedback,
            scratch: self.at.scratch,
            host_results: self.at.host_results,
            host_flag: self.at.host_flag,
            vocab: self.model.config.vocab as u32,
            max_wanted: self.at.max_wanted as u32,
        }
    }
}

#[cfg(test)]
#[path = "bind_tests.rs"]
mod tests;
