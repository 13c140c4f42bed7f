//! A whole decode step of a 14B-shaped model, without the embedding: what the bench measures beside linear layers alone.

use headrace_ep_cuda::abi::{ArgmaxArgs, AttentionArgs, LinearArgs, QuantiseArgs, RopeArgs, StepRow};
use headrace_ep_cuda::launch::{Kernels, Queue, Source};
use headrace_kv::{KvGeometry, KvLayout};
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;

use crate::attention::kv_ref;
use crate::bench::{LAYERS, Layer};
use crate::device::{ActMem, Gpu, Mem, Step, WIDTHS};

const HIDDEN: usize = 5120;
const INNER: usize = 13824;
const VOCAB: usize = 152_064;
const HEADS: usize = 40;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// A kind of kernel in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Linear,
    Norm,
    Rope,
    Attention,
    Quantise,
    Swiglu,
    Argmax,
}

/// All of a step.
pub const ALL: [Part; 7] =
    [Part::Linear, Part::Norm, Part::Rope, Part::Attention, Part::Quantise, Part::Swiglu, Part::Argmax];

/// Buffers of a step of `tokens` sequences at position `context`, or, as a prompt, of `tokens` rows of one sequence from that
/// position on. All layers share the pages of one.
pub struct Model<'a> {
    kernels: &'a Kernels,
    layers: &'a [Layer],
    tokens: usize,
    step: Step,
    narrow: ActMem,
    wide: ActMem,
    residual: Mem,
    qkv: Mem,
    mixed: Mem,
    gates: Mem,
    logits: Mem,
    weight: Mem,
    table: Mem,
    store: Mem,
    partials: Mem,
    tickets: Mem,
    results: Mem,
    scratch: Mem,
    g: KvGeometry,
    context: usize,
    /// Rows that want logits.
    wanted: usize,
}

impl<'a> Model<'a> {
    pub fn new(gpu: &'a Gpu, w: usize, layers: &'a [Layer], tokens: usize, context: usize, prompt: bool) -> Self {
        let wide = WIDTHS[w] == ActivationWidth::Int16;
        let g = KvGeometry {
            layers: 2,
            kv_heads: KV_HEADS,
            head_dim: DIM,
            dtype: KvDtype::F16,
            layout: KvLayout::HeadMajor,
            page_tokens: 32,
        };
        let (sequences, last) = if prompt { (1, context + tokens - 1) } else { (tokens, context) };
        let pages = g.pages_for(last + 1);
        let rows: Vec<StepRow> = (0..tokens as u32)
            .map(|s| match prompt {
                true => StepRow { sequence: 0, position: context as u32 + s, token: 0, table: 0 },
                false => StepRow { sequence: s, position: context as u32, token: 0, table: s * pages as u32 },
            })
            .collect();
        let wanted: Vec<u32> = if prompt { vec![tokens as u32 - 1] } else { (0..tokens as u32).collect() };
        let tables: Vec<u32> = (0..(sequences * pages) as u32).collect();
        let ld = tokens.next_multiple_of(8);
        let floats = |n: usize, v: f32| Mem::of(&vec![v; n]);
        let store = Mem::of(&vec![0x2e66u16; sequences * pages * g.page_bytes() / 2]);
        let residual: Vec<f32> = (0..tokens * HIDDEN).map(|i| (i % 37) as f32 / 37.0 - 0.5).collect();
        let scratch: Vec<u32> = ArgmaxArgs::SCRATCH_INIT.repeat(tokens);
        Model {
            kernels: &gpu.kernels[w],
            layers,
            tokens,
            step: Step::new(&rows, &wanted, &tables),
            narrow: ActMem::new(HIDDEN, ld, wide),
            wide: ActMem::new(INNER, ld, wide),
            residual: Mem::of(&residual),
            qkv: floats(tokens * (HEADS + 2 * KV_HEADS) * DIM, 0.0),
            mixed: floats(tokens * HIDDEN, 0.0),
            gates: floats(tokens * 2 * INNER, 0.0),
            logits: floats(wanted.len() * VOCAB, 0.0),
            weight: floats(HIDDEN, 0.02),
            table: floats((last + 1) * DIM / 2, 0.7),
            store,
            partials: Mem::new(AttentionArgs::partials_bytes(tokens, HEADS, (last + 32) / 32, DIM)),
            tickets: Mem::of(&vec![0u32; tokens * HEADS]),
            results: Mem::new(tokens * 8),
            scratch: Mem::of(&scratch),
            g,
            context: last,
            wanted: wanted.len(),
        }
    }

    fn activation(&self, queue: Queue, kind: Source, out: &ActMem, src: &Mem, src_ld: usize) {
        let args = QuantiseArgs {
            step: self.step.at,
            out: out.at,
            src: src.ptr,
            weight: self.weight.ptr,
            src_ld: src_ld as u32,
            eps: 1e-6,
            codes: 1,
            ..Default::default()
        };
        // SAFETY: every buffer has the size that the shapes need.
        unsafe { self.kernels.activation(queue, kind, &args, self.tokens) }.expect("launch");
    }

    fn linear(&self, queue: Queue, layer: &Layer, x: &ActMem, out: &Mem, add: bool, tokens: usize) {
        let mut segment = layer.segment;
        segment.accumulate = u32::from(add);
        let args = LinearArgs { step: self.step.at, x: x.at, out: out.ptr, out_ld: segment.rows, ..Default::default() };
        // SAFETY: every buffer has the size that the shapes need.
        unsafe { self.kernels.linear(queue, layer.format, &args, &[segment], tokens) }.expect("launch");
    }

    /// Launches those kernels of the step, the linear ones on a queue of their own kind.
    pub fn record(&self, queue: Queue, linear: Queue, parts: &[Part]) {
        let has = |part| parts.contains(&part);
        let qkv_ld = (HEADS + 2 * KV_HEADS) * DIM;
        let kv = kv_ref(&self.g, self.store.ptr);
        let rope = RopeArgs {
            step: self.step.at,
            kv,
            qkv: self.qkv.ptr,
            cos: self.table.ptr,
            sin: self.table.ptr,
            heads: HEADS as u32,
            kv_heads: KV_HEADS as u32,
            head_dim: DIM as u32,
            dims: DIM as u32,
            ..Default::default()
        };
        let attention = AttentionArgs {
            step: self.step.at,
            kv,
            qkv: self.qkv.ptr,
            out: self.mixed.ptr,
            partials: self.partials.ptr,
            tickets: self.tickets.ptr,
            heads: HEADS as u32,
            kv_heads: KV_HEADS as u32,
            head_dim: DIM as u32,
            qkv_ld: qkv_ld as u32,
            scale: 0.088,
            chunks: ((self.context + 32) / 32) as u32,
            ..Default::default()
        };
        for layer in self.layers[..LAYERS * 4].chunks(4) {
            if has(Part::Norm) {
                self.activation(queue, Source::Norm, &self.narrow, &self.residual, HIDDEN);
            }
            if has(Part::Linear) {
                self.linear(linear, &layer[0], &self.narrow, &self.qkv, false, self.tokens);
            }
            let form = self.kernels.attention_form(&attention, self.tokens);
            // SAFETY: every buffer has the size that the shapes need.
            unsafe {
                if has(Part::Rope) {
                    self.kernels.rope_append(queue, &rope, self.tokens).expect("launch");
                }
                if has(Part::Attention) {
                    self.kernels.attention(queue, form, &attention, self.tokens).expect("launch");
                }
            }
            if has(Part::Quantise) {
                self.activation(queue, Source::Plain, &self.narrow, &self.mixed, HIDDEN);
            }
            if has(Part::Linear) {
                self.linear(linear, &layer[1], &self.narrow, &self.residual, true, self.tokens);
            }
            if has(Part::Norm) {
                self.activation(queue, Source::Norm, &self.narrow, &self.residual, HIDDEN);
            }
            if has(Part::Linear) {
                self.linear(linear, &layer[2], &self.narrow, &self.gates, false, self.tokens);
            }
            if has(Part::Swiglu) {
                self.activation(queue, Source::Swiglu, &self.wide, &self.gates, 2 * INNER);
            }
            if has(Part::Linear) {
                self.linear(linear, &layer[3], &self.wide, &self.residual, true, self.tokens);
            }
        }
        if has(Part::Norm) {
            self.activation(queue, Source::Norm, &self.narrow, &self.residual, HIDDEN);
        }
        if has(Part::Linear) {
            self.linear(linear, &self.layers[LAYERS * 4], &self.narrow, &self.logits, false, self.wanted);
        }
        let argmax = ArgmaxArgs {
            step: self.step.at,
            logits: self.logits.ptr,
            results: self.results.ptr,
            scratch: self.scratch.ptr,
            vocab: VOCAB as u32,
            ..Default::default()
        };
        if has(Part::Argmax) {
            // SAFETY: every buffer has the size that the shapes need.
            unsafe { self.kernels.argmax(queue, &argmax, self.wanted) }.expect("launch");
        }
    }
}
