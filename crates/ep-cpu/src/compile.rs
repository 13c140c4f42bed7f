//! From a step program to stages: what the workers do between two barriers, checked against the model.

use std::sync::atomic::AtomicUsize;

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::format::Format;
use headrace_provider::{Buffer, Instr, Op, RowSet, Segment, StepProgram, check};

use crate::weights::WeightSource;

/// Pieces that a worker takes from a stage of linear layers: enough that a worker which started late costs little.
const PIECES_PER_WORKER: usize = 6;

/// Fewest weight rows of a piece, and what every piece but a segment's last is a multiple of.
const PIECE_ROWS: usize = 16;

/// Where an activation comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// `rms_norm(Residual) * weight`.
    Norm(TensorId),
    /// The `Attention` buffer as it is.
    Attention,
    /// `swiglu` of the `GateUp` buffer.
    Swiglu,
}

/// One linear layer's segment within a stage.
#[derive(Clone, Debug)]
pub struct Part {
    /// Weight rows.
    pub segment: Segment,
    /// Bias of the whole tensor.
    pub bias: Option<TensorId>,
    /// Rows of the whole tensor: the bias's length.
    pub tensor_rows: usize,
    /// True if the activation is read quantised.
    pub quantised: bool,
    /// Output buffer.
    pub out: Buffer,
    /// Column of the output that the segment's first row goes to.
    pub column: usize,
    /// True to add what the output holds.
    pub accumulate: bool,
}

/// Some rows of a part: what one worker takes at a time.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Index of the part.
    pub part: usize,
    /// First row within the part's segment.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
}

/// Which activation a stage of linear layers reads, or an activation stage makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activation {
    /// Where it comes from.
    pub source: Source,
    /// Rows.
    pub rows: RowSet,
    /// Elements of a row.
    pub width: usize,
    /// True if something reads it quantised.
    pub quantised: bool,
    /// True if something reads it as floats.
    pub float: bool,
    /// True if every worker may make a copy of its own: nothing overwrites the source before the next barrier.
    pub private: bool,
    /// Index among the program's activation shapes.
    pub shape: usize,
}

/// What the workers do together.
#[derive(Debug)]
pub enum Work {
    /// Rows of the embedding.
    Embed(TensorId),
    /// An activation.
    Activate(Activation),
    /// Linear layers that read one activation and write different columns.
    Linear {
        /// The activation that they read.
        activation: Activation,
        /// Segments.
        parts: Vec<Part>,
        /// What the workers take.
        pieces: Vec<Piece>,
    },
    /// RoPE, append.
    Rope(usize),
    /// Attention.
    Attention(usize),
    /// RoPE, append and attention of one layer: one stage where no sequence has two rows.
    RopeAttention(usize),
    /// Arg-maxima.
    Argmax,
}

/// What the compute side owes the staging ring before a stage: in program order, frees first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sync {
    /// Slots that everything before has read for the last time.
    pub frees: Vec<u32>,
    /// Slots to wait for, and how many copies into each must be done by then, counted from the start of the step.
    pub waits: Vec<(u32, u64)>,
}

impl Sync {
    fn is_empty(&self) -> bool {
        self.frees.is_empty() && self.waits.is_empty()
    }
}

/// A stage and the counters from which its workers draw pieces.
#[derive(Debug)]
pub struct Stage {
    /// What is done.
    pub work: Work,
    /// What comes before it, once every worker has left the stages before.
    pub sync: Sync,
    /// Next piece to be taken; the second counter is for the second half of a stage that has a barrier within.
    pub next: [AtomicUsize; 2],
}

/// Rows and columns of an activation that stays in one buffer for the whole step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationShape {
    /// Rows.
    pub rows: RowSet,
    /// Elements of a row.
    pub width: usize,
    /// True if some activation of this shape is read as floats.
    pub float: bool,
}

/// A recorded program.
#[derive(Debug)]
pub struct Compiled {
    /// The program as it was recorded.
    pub program: StepProgram,
    /// Stages in order, a barrier after each (except after private activations).
    pub stages: Vec<Stage>,
    /// Distinct shapes of activations.
    pub shapes: Vec<ActivationShape>,
    /// Slots that are free once the last stage is done.
    pub last_frees: Vec<u32>,
}

impl Compiled {
    /// True if the program chooses tokens.
    pub fn has_argmax(&self) -> bool {
        self.stages.iter().any(|s| matches!(s.work, Work::Argmax))
    }
}

struct Compiler<'a> {
    model: &'a ModelSpec,
    weights: &'a dyn WeightSource,
    works: Vec<(Sync, Work)>,
    shapes: Vec<ActivationShape>,
    current: Option<(usize, Activation)>,
    /// What the next stage has to do first.
    pending: Sync,
    /// Copies so far, by slot.
    copies: Vec<u64>,
}

/// Checks `program` against the model and splits it into stages for `threads` workers. The error says which
/// instruction is wrong and why. Without a `ring` there are no slots. Whether the ring is used safely is not checked here.
pub fn compile(
    program: StepProgram,
    model: &ModelSpec,
    weights: &dyn WeightSource,
    threads: usize,
    ring: bool,
) -> Result<Compiled, String> {
    check(&program, model)?;
    let mut c = Compiler {
        model,
        weights,
        works: Vec::new(),
        shapes: Vec::new(),
        current: None,
        pending: Sync::default(),
        copies: vec![0; program.slots as usize],
    };
    for (i, instr) in program.instrs.iter().enumerate() {
        match instr {
            Instr::Op(op) => c.op(op),
            other if !ring => Err(format!("this device has no staging ring, and no {other:?}")),
            other => c.sync(other),
        }
        .map_err(|what| format!("instruction {i}: {what}"))?;
    }
    let Compiler { mut works, shapes, pending, .. } = c;
    settle(&mut works, threads);
    let stages = works.into_iter().map(|(sync, work)| Stage { work, sync, next: Default::default() }).collect();
    Ok(Compiled { program, stages, shapes, last_frees: pending.frees })
}

impl Compiler<'_> {
    fn push(&mut self, work: Work) {
        self.works.push((std::mem::take(&mut self.pending), work));
    }

    fn sync(&mut self, instr: &Instr) -> Result<(), String> {
        let (Instr::Copy { slot, .. } | Instr::WaitCopy { slot } | Instr::Free { slot }) = instr else {
            return Ok(());
        };
        let slots = self.copies.len();
        let copies = self.copies.get_mut(*slot as usize).ok_or_else(|| format!("slot {slot} of {slots}"))?;
        match instr {
            Instr::Copy { .. } => *copies += 1,
            Instr::WaitCopy { .. } => self.pending.waits.push((*slot, *copies)),
            _ => self.pending.frees.push(*slot),
        }
        Ok(())
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        let config = &self.model.config;
        match op {
            Op::Embed { table } => {
                self.weights.matrix(*table)?;
                self.push(Work::Embed(*table));
            }
            Op::Norm { weight, rows } => {
                self.weights.vector(*weight, config.hidden)?;
                self.activate(Source::Norm(*weight), *rows, config.hidden);
            }
            Op::Quantise => self.activate(Source::Attention, RowSet::All, Buffer::Attention.width(config)),
            Op::Swiglu => self.activate(Source::Swiglu, RowSet::All, config.ffn),
            Op::Linear { segments, bias, out, column, accumulate } => {
                self.linear(segments, *bias, *out, *column, *accumulate)?;
            }
            Op::RopeAppend { layer } => {
                self.layer(*layer)?;
                self.push(Work::Rope(*layer));
            }
            Op::Attention { layer } => {
                self.layer(*layer)?;
                if self.pending.is_empty()
                    && let Some((_, last)) = self.works.last_mut()
                    && matches!(last, Work::Rope(l) if l == layer)
                {
                    *last = Work::RopeAttention(*layer);
                } else {
                    self.push(Work::Attention(*layer));
                }
            }
            Op::Argmax => self.push(Work::Argmax),
        }
        Ok(())
    }

    fn layer(&self, layer: usize) -> Result<(), String> {
        let l = &self.model.layers[layer];
        for norm in [l.q_norm, l.k_norm].into_iter().flatten() {
            self.weights.vector(norm, self.model.config.head_dim)?;
        }
        Ok(())
    }

    fn activate(&mut self, source: Source, rows: RowSet, width: usize) {
        let found = self.shapes.iter().position(|s| s.rows == rows && s.width == width);
        let shape = found.unwrap_or_else(|| {
            self.shapes.push(ActivationShape { rows, width, float: false });
            self.shapes.len() - 1
        });
        let activation = Activation { source, rows, width, quantised: false, float: false, private: true, shape };
        self.current = Some((self.works.len(), activation));
        self.push(Work::Activate(activation));
    }

    fn linear(
        &mut self,
        segments: &[Segment],
        bias: Option<TensorId>,
        out: Buffer,
        column: usize,
        accumulate: bool,
    ) -> Result<(), String> {
        let Some((made_at, mut activation)) = self.current else {
            return Err("a linear layer without an activation".to_string());
        };
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            self.weights.segment(segment)?;
            let tensor = self.model.tensor(segment.tensor);
            if let Some(bias) = bias {
                self.weights.vector(bias, tensor.rows)?;
            }
            let quantised = reads_codes(tensor.format);
            activation.quantised |= quantised;
            activation.float |= !quantised;
            let column = column + segment.row;
            let segment = *segment;
            parts.push(Part { segment, bias, tensor_rows: tensor.rows, quantised, out, column, accumulate });
        }
        let source = match activation.source {
            Source::Norm(_) => Buffer::Residual,
            Source::Attention => Buffer::Attention,
            Source::Swiglu => Buffer::GateUp,
        };
        activation.private &= out != source;
        self.shapes[activation.shape].float |= activation.float;
        self.works[made_at].1 = Work::Activate(activation);
        self.current = Some((made_at, activation));
        // Layers with a wait or a release between them are stages of their own.
        if self.pending.is_empty()
            && let Some((_, Work::Linear { parts: before, .. })) = self.works.last_mut()
            && parts.iter().all(|p| before.iter().all(|b| apart(p, b)))
        {
            before.extend(parts);
            return Ok(());
        }
        self.push(Work::Linear { activation, parts, pieces: Vec::new() });
        Ok(())
    }
}

/// True where a format's linear layer reads quantised activations.
fn reads_codes(format: Format) -> bool {
    format.is_quantised()
}

/// True if two parts write different floats.
fn apart(a: &Part, b: &Part) -> bool {
    a.out != b.out || a.column + a.segment.rows <= b.column || b.column + b.segment.rows <= a.column
}

/// Gives every stage of linear layers the final form of its activation, and splits it into pieces.
fn settle(works: &mut [(Sync, Work)], threads: usize) {
    let mut latest = None;
    for (_, work) in works {
        match work {
            Work::Activate(a) => latest = Some(*a),
            Work::Linear { activation, parts, pieces } => {
                *activation = latest.unwrap_or(*activation);
                let total: usize = parts.iter().map(|p| p.segment.rows).sum();
                let rows = match threads {
                    1 => usize::MAX,
                    n => total.div_ceil(n * PIECES_PER_WORKER).next_multiple_of(PIECE_ROWS),
                };
                for (part, p) in parts.iter().enumerate() {
                    for row in (0..p.segment.rows).step_by(rows) {
                        pieces.push(Piece { part, row, rows: rows.min(p.segment.rows - row) });
                    }
                }
            }
            _ => {}
        }
    }
}
