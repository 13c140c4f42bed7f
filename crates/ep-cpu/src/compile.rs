//! From a step program to stages: what the workers do between two barriers, checked against the model.

use std::sync::atomic::AtomicUsize;

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::format::Format;
use headrace_provider::{Buffer, Instr, Op, RowSet, Segment, StepProgram};

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

/// A stage and the counters from which its workers draw pieces.
#[derive(Debug)]
pub struct Stage {
    /// What is done.
    pub work: Work,
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
    works: Vec<Work>,
    shapes: Vec<ActivationShape>,
    current: Option<(usize, Activation)>,
}

/// Checks `program` against the model and splits it into stages for `threads` workers. The error says which
/// instruction is wrong and why.
pub fn compile(
    program: StepProgram,
    model: &ModelSpec,
    weights: &dyn WeightSource,
    threads: usize,
) -> Result<Compiled, String> {
    if program.max_rows == 0 || program.max_wanted > program.max_rows {
        return Err(format!("a program for {} rows of which {} are wanted", program.max_rows, program.max_wanted));
    }
    let mut c = Compiler { model, weights, works: Vec::new(), shapes: Vec::new(), current: None };
    for (i, instr) in program.instrs.iter().enumerate() {
        let Instr::Op(op) = instr else {
            return Err(format!("instruction {i}: this device has no staging ring, and no {instr:?}"));
        };
        c.op(op).map_err(|what| format!("instruction {i}: {what}"))?;
    }
    let Compiler { mut works, shapes, .. } = c;
    settle(&mut works, threads);
    let stages = works.into_iter().map(|work| Stage { work, next: Default::default() }).collect();
    Ok(Compiled { program, stages, shapes })
}

impl Compiler<'_> {
    fn op(&mut self, op: &Op) -> Result<(), String> {
        let config = &self.model.config;
        match op {
            Op::Embed { table } => {
                let view = self.weights.matrix(*table)?;
                if (view.rows, view.cols) != (config.vocab, config.hidden) {
                    return Err(format!("an embedding of {} x {}", view.rows, view.cols));
                }
                self.works.push(Work::Embed(*table));
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
                self.works.push(Work::Rope(*layer));
            }
            Op::Attention { layer } => {
                self.layer(*layer)?;
                if matches!(self.works.last(), Some(Work::Rope(l)) if l == layer) {
                    self.works.pop();
                    self.works.push(Work::RopeAttention(*layer));
                } else {
                    self.works.push(Work::Attention(*layer));
                }
            }
            Op::Argmax => self.works.push(Work::Argmax),
        }
        Ok(())
    }

    fn layer(&self, layer: usize) -> Result<(), String> {
        let l = self.model.layers.get(layer).ok_or_else(|| format!("layer {layer} of {}", self.model.layers.len()))?;
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
        self.works.push(Work::Activate(activation));
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
        if (out == Buffer::Logits) != (activation.rows == RowSet::Wanted) {
            return Err(format!("{:?} rows into {out:?}", activation.rows));
        }
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            if segment.tensor != segments[0].tensor {
                return Err("segments of two tensors".to_string());
            }
            let view = self.weights.segment(segment)?;
            if view.cols != activation.width {
                let name = &self.model.tensor(segment.tensor).name;
                return Err(format!("{name} has {} columns, the activation {}", view.cols, activation.width));
            }
            let end = column.checked_add(segment.row).and_then(|c| c.checked_add(segment.rows));
            let width = out.width(&self.model.config);
            if end.is_none_or(|end| end > width) {
                return Err(format!("columns {column} + {} + {} of {out:?}: {width}", segment.row, segment.rows));
            }
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
        self.works[made_at] = Work::Activate(activation);
        self.current = Some((made_at, activation));
        if let Some(Work::Linear { parts: before, .. }) = self.works.last_mut()
            && parts.iter().all(|p| before.iter().all(|b| apart(p, b)))
        {
            before.extend(parts);
            return Ok(());
        }
        self.works.push(Work::Linear { activation, parts, pieces: Vec::new() });
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
fn settle(works: &mut [Work], threads: usize) {
    let mut latest = None;
    for work in works {
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
