//! Chains: runs of tasks of a one-row step that one persistent kernel does, and the lists that it reads. No device.
//!
//! A step of one token row is hundreds of short launches, and the memory rests between them. kernels/chain.cu does as many of
//! them as follow one another in one launch: all of a step whose weights are resident, the runs between two waits of one
//! that streams.

use std::ops::Range;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::attention::CHUNK;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};
use headrace_provider::Place;
use zerocopy::{Immutable, IntoBytes};

use crate::abi::{
    AttentionArgs, BLOCK, ChainArgs, ChainLinear, ChainMatrix, ChainSegment, ChainTask, LinearArgs, QuantiseArgs,
    RopeArgs,
};
use crate::bind::{Binder, Launch};
use crate::layout::Cursor;
use crate::plan::{Action, ActivationTask, CapturePlan, LinearTask, Source, Task};

/// Weight rows of a unit, as chain.cu was written.
const UNIT_ROWS: u32 = 4;
/// Most warps of a block.
pub const WARPS: usize = 16;
/// Slots of a warp's ring, the most first: each holds the codes and scales of four rows and 32 blocks.
pub const DEPTHS: [usize; 3] = [4, 3, 2];
/// Bytes at the start of the lists that hold the barrier.
const BARRIER_BYTES: u64 = 256;

/// One task of a chain, by the plan's actions that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Linear { task: usize, norm: Option<usize> },
    Attend { rope: usize, attention: usize },
    Combine { activation: usize },
    Swiglu { activation: usize },
}

/// A run of actions that one launch does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The actions.
    pub actions: Range<usize>,
    /// Format of its weights, as far as the kernel depends on it.
    pub format: Format,
    links: Vec<Link>,
    segments: usize,
}

/// Shared memory that a chain needs before its rings, and how attention divides it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Area {
    /// Bytes for the widest activation, and for the row that it is the norm of.
    pub activation: usize,
    /// Bytes of a chunk's keys and values; 0 without attention.
    pub keys: usize,
    /// Bytes of a query and its weights; 0 without attention.
    pub query: usize,
    /// Query heads of a key head.
    pub share: usize,
    /// Bytes of the table of matrices, segments and tasks.
    pub table: usize,
}

/// The planar 4-bit formats with a scale for every 32 columns and no zero points, whatever their codes' sign.
fn is_served(format: Format) -> bool {
    matches!(format, Format::Nbits(Nbits { bits: 4, block: 32, zero, .. }) if zero != ZeroPoint::PerBlock)
}

fn scale_of(format: Format) -> Option<ScaleType> {
    match format {
        Format::Nbits(n) => Some(n.scale),
        _ => None,
    }
}

/// Finds chains in a plan.
struct Finder<'a> {
    plan: &'a CapturePlan,
    model: &'a ModelSpec,
    attends: bool,
}

impl Finder<'_> {
    fn task(&self, i: usize) -> Option<&Task> {
        match self.plan.actions.get(i) {
            Some(Action::Launch(task)) => Some(task),
            _ => None,
        }
    }

    fn linear(&self, i: usize, format: Option<Format>) -> Option<(&LinearTask, Format)> {
        let Some(Task::Linear(task)) = self.task(i) else { return None };
        let tensor = |id: TensorId| self.model.tensors.get(id.0);
        let own = tensor(task.parts.first()?.segment.tensor)?;
        let steps = own.cols / (8 * BLOCK);
        let fits = steps > 0 && own.cols.is_multiple_of(8 * BLOCK);
        let alike = |f: Format| is_served(f) && format.is_none_or(|g| scale_of(f) == scale_of(g));
        let resident = task.parts.iter().all(|p| {
            matches!(p.segment.place, Place::Resident { .. })
                && p.segment.rows > 0
                && tensor(p.segment.tensor).is_some_and(|t| t.format == own.format)
        });
        (fits && alike(own.format) && resident).then_some((task, own.format))
    }

    fn activation(&self, i: usize) -> Option<&ActivationTask> {
        match self.task(i) {
            Some(Task::Activate(a)) if a.codes && !a.floats && a.width.is_multiple_of(BLOCK) => Some(a),
            _ => None,
        }
    }

    /// The links that begin at action `i`, and where they end; `format` is that of the chain so far.
    fn links(&self, i: usize, format: Option<Format>) -> Option<(Vec<Link>, usize, Option<Format>)> {
        match self.task(i)? {
            Task::Linear(_) => {
                let (_, own) = self.linear(i, format)?;
                Some((vec![Link::Linear { task: i, norm: None }], i + 1, Some(own)))
            }
            Task::Activate(ActivationTask { source: Source::Norm(_), .. }) => {
                self.activation(i)?;
                // A norm is made where it is used, so all that use it must be in the chain.
                let actions = self.plan.actions.iter().enumerate().skip(i + 1);
                let until = |a: &Action| matches!(a, Action::Launch(Task::Activate(_)));
                let readers: Vec<usize> = actions
                    .take_while(|(_, a)| !until(a))
                    .filter_map(|(n, a)| matches!(a, Action::Launch(Task::Linear(_))).then_some(n))
                    .collect();
                let mut format = format;
                let mut links = Vec::new();
                for (n, &reader) in readers.iter().enumerate() {
                    let (_, own) = self.linear(reader, format)?;
                    if reader != i + 1 + n {
                        return None;
                    }
                    format = Some(own);
                    links.push(Link::Linear { task: reader, norm: Some(i) });
                }
                (!links.is_empty()).then_some((links, i + 1 + readers.len(), format))
            }
            Task::Activate(ActivationTask { source: Source::Swiglu, .. }) => {
                self.activation(i)?;
                Some((vec![Link::Swiglu { activation: i }], i + 1, format))
            }
            Task::Rope(layer) if self.attends => {
                let (Some(Task::Attention(l)), Some(a)) = (self.task(i + 1), self.activation(i + 2)) else {
                    return None;
                };
                (l == layer && a.source == Source::Attention).then_some(())?;
                let links = vec![Link::Attend { rope: i, attention: i + 1 }, Link::Combine { activation: i + 2 }];
                Some((links, i + 3, format))
            }
            _ => None,
        }
    }
}

/// Every chain of a plan for steps of one row. `chunks` is how many partial results of attention the workspace holds for
/// each head; 0 for none.
pub fn chains(plan: &CapturePlan, model: &ModelSpec, geometry: &KvGeometry, chunks: usize) -> Vec<Chain> {
    let config = &model.config;
    let share = config.heads.checked_div(config.kv_heads).unwrap_or_default();
    let dim = config.head_dim;
    let attends = chunks > 0
        && geometry.dtype == KvDtype::F16
        && geometry.page_tokens.is_multiple_of(CHUNK)
        && dim.is_multiple_of(32)
        && dim <= AttentionArgs::MAX_HEAD_DIM
        && share * config.kv_heads == config.heads
        && (1..=WARPS).contains(&share);
    let finder = Finder { plan, model, attends };
    let mut chains = Vec::new();
    let mut i = 0;
    while i < plan.actions.len() {
        let (start, mut links, mut format) = (i, Vec::new(), None);
        while let Some((more, next, own)) = finder.links(i, format) {
            links.extend(more);
            (i, format) = (next, own);
        }
        let linears = links.iter().filter(|l| matches!(l, Link::Linear { .. })).count();
        if let Some(format) = format
            && linears > 0
            && links.len() > 1
        {
            let segments = |l: &Link| match l {
                Link::Linear { task, .. } => finder.linear(*task, None).map_or(0, |(t, _)| t.parts.len()),
                _ => 0,
            };
            let segments = links.iter().map(segments).sum();
            chains.push(Chain { actions: start..i, format, links, segments });
        }
        i = i.max(start + 1);
    }
    chains
}

impl Chain {
    fn count(&self, wanted: fn(&Link) -> bool) -> usize {
        self.links.iter().filter(|l| wanted(l)).count()
    }

    fn linears(&self) -> usize {
        self.count(|l| matches!(l, Link::Linear { .. }))
    }

    /// Offsets in the table of matrices, segments and tasks, and its bytes.
    fn table(&self) -> ([usize; 3], usize) {
        let segments = self.linears() * size_of::<ChainMatrix>();
        let tasks = segments + self.segments * size_of::<ChainSegment>();
        ([0, segments, tasks], (tasks + self.links.len() * size_of::<ChainTask>()).next_multiple_of(16))
    }

    fn layout(&self) -> ([u64; 6], u64) {
        let attends = self.count(|l| matches!(l, Link::Attend { .. }));
        let swiglus = self.count(|l| matches!(l, Link::Swiglu { .. }));
        let mut cursor = Cursor::default();
        let sizes = [
            BARRIER_BYTES as usize,
            self.table().1,
            self.linears() * size_of::<ChainLinear>(),
            attends * size_of::<AttentionArgs>(),
            attends * size_of::<RopeArgs>(),
            (attends + swiglus) * size_of::<QuantiseArgs>(),
        ];
        (sizes.map(|bytes| cursor.take(bytes as u64)), cursor.bytes())
    }

    /// Bytes of its lists on the device.
    pub fn bytes(&self) -> u64 {
        self.layout().1
    }

    /// What it needs of shared memory; `block_bytes` are those of the codes of an activation block.
    pub fn area(&self, plan: &CapturePlan, model: &ModelSpec, block_bytes: usize) -> Area {
        let mut area = Area { table: self.table().1, ..Area::default() };
        for link in &self.links {
            match *link {
                Link::Linear { task, norm } => {
                    let Some(Action::Launch(Task::Linear(l))) = plan.actions.get(task) else { continue };
                    let tensor = l.parts.first().and_then(|p| model.tensors.get(p.segment.tensor.0));
                    let cols = tensor.map_or(0, |t| t.cols);
                    let codes = (cols / BLOCK * (block_bytes + 8)).next_multiple_of(16);
                    area.activation = area.activation.max(codes + if norm.is_some() { cols * 4 } else { 0 });
                }
                Link::Attend { .. } => {
                    let dim = model.config.head_dim;
                    area.keys = 2 * CHUNK * dim.next_multiple_of(64) * 2;
                    area.query = (dim + CHUNK) * 4;
                    area.share = model.config.heads / model.config.kv_heads.max(1);
                }
                Link::Combine { .. } | Link::Swiglu { .. } => {}
            }
        }
        area
    }

    /// The lists for device address `at`, for a grid of `blocks` of `warps` that multiply, and the kernel's argument.
    ///
    /// # Errors
    /// What can't be bound.
    pub fn lists(
        &self,
        plan: &CapturePlan,
        binder: &Binder<'_>,
        at: u64,
        (blocks, warps): (usize, usize),
    ) -> Result<(Vec<u8>, ChainArgs), String> {
        let mut lists = Lists::new(plan, binder, (blocks, warps));
        for link in &self.links {
            lists.add(*link)?;
        }
        lists.activations.append(&mut lists.swiglus);
        let attends = lists.attention.len() as u32;
        for task in lists.tasks.iter_mut().filter(|t| t.kind == 3) {
            task.index += attends;
        }
        let (offsets, bytes) = self.layout();
        let [_, table, linear, attention, rope, activation] = offsets.map(|offset| at + offset);
        let (in_table, table_bytes) = self.table();
        let [matrices, segments, tasks] = in_table.map(|offset| offsets[1] + offset as u64);
        let mut image = vec![0u8; usize::try_from(bytes).map_err(|e| e.to_string())?];
        put(&mut image, matrices, &lists.matrices);
        put(&mut image, segments, &lists.segments);
        put(&mut image, tasks, &lists.tasks);
        put(&mut image, offsets[2], &lists.linears);
        put(&mut image, offsets[3], &lists.attention);
        put(&mut image, offsets[4], &lists.rope);
        put(&mut image, offsets[5], &lists.activations);
        let args = ChainArgs {
            step: binder.at.step,
            table,
            linear,
            attention,
            rope,
            activation,
            barrier: at,
            tasks: lists.tasks.len() as u32,
            linears: lists.linears.len() as u32,
            segments: lists.segments.len() as u32,
            table_bytes: table_bytes as u32,
            area: 0,
            slots: 0,
        };
        Ok((image, args))
    }
}

fn put<T: IntoBytes + Immutable>(image: &mut [u8], offset: u64, values: &[T]) {
    let bytes = values.as_bytes();
    if let Some(to) = image.get_mut(offset as usize..offset as usize + bytes.len()) {
        to.copy_from_slice(bytes);
    }
}

/// The lists while they are made.
struct Lists<'a> {
    plan: &'a CapturePlan,
    binder: &'a Binder<'a>,
    blocks: u32,
    warps: u32,
    /// Units that every block may have had of the matrices so far.
    units: u32,
    tasks: Vec<ChainTask>,
    matrices: Vec<ChainMatrix>,
    linears: Vec<ChainLinear>,
    segments: Vec<ChainSegment>,
    attention: Vec<AttentionArgs>,
    rope: Vec<RopeArgs>,
    activations: Vec<QuantiseArgs>,
    swiglus: Vec<QuantiseArgs>,
}

impl<'a> Lists<'a> {
    fn new(plan: &'a CapturePlan, binder: &'a Binder<'a>, (blocks, warps): (usize, usize)) -> Lists<'a> {
        Lists {
            plan,
            binder,
            blocks: blocks.max(1) as u32,
            warps: warps.max(1) as u32,
            units: 0,
            tasks: Vec::new(),
            matrices: Vec::new(),
            linears: Vec::new(),
            segments: Vec::new(),
            attention: Vec::new(),
            rope: Vec::new(),
            activations: Vec::new(),
            swiglus: Vec::new(),
        }
    }

    fn bound(&self, action: usize) -> Result<Vec<Launch>, String> {
        match self.plan.actions.get(action) {
            Some(Action::Launch(task)) => Ok(self.binder.bind(task)?.into_iter().map(|(launch, _)| launch).collect()),
            other => Err(format!("{other:?} in a chain")),
        }
    }

    fn quantise(&self, action: usize) -> Result<QuantiseArgs, String> {
        match self.bound(action)?.as_slice() {
            [Launch::Norm(a) | Launch::Quantise(a) | Launch::Swiglu(a)] => Ok(*a),
            other => Err(format!("{other:?} for an activation")),
        }
    }

    fn add(&mut self, link: Link) -> Result<(), String> {
        let (kind, index) = match link {
            Link::Linear { task, norm } => {
                self.linear(task, norm)?;
                (0, self.linears.len())
            }
            Link::Attend { rope, attention } => {
                match (self.bound(rope)?.as_slice(), self.bound(attention)?.as_slice()) {
                    ([Launch::Rope(r)], [Launch::Attention(a)]) => {
                        self.rope.push(*r);
                        self.attention.push(*a);
                    }
                    other => return Err(format!("{other:?} for attention")),
                }
                // The linear layer before has time to ask for the pages.
                if let Some(ChainTask { kind: 0, index }) = self.tasks.last()
                    && let Some(linear) = self.linears.get_mut(*index as usize)
                {
                    linear.kv = self.attention.len() as u32;
                }
                (1, self.attention.len())
            }
            Link::Combine { activation } => {
                self.activations.push(self.quantise(activation)?);
                (2, self.activations.len())
            }
            Link::Swiglu { activation } => {
                self.swiglus.push(self.quantise(activation)?);
                (3, self.swiglus.len())
            }
        };
        self.tasks.push(ChainTask { kind, index: index as u32 - 1 });
        Ok(())
    }

    fn linear(&mut self, task: usize, norm: Option<usize>) -> Result<(), String> {
        let launches = self.bound(task)?;
        let parts = launches.iter().map(|launch| match launch {
            Launch::Linear(_, args) => Ok(args.as_ref()),
            other => Err(format!("{other:?} for a linear layer")),
        });
        let parts: Vec<&LinearArgs> = parts.collect::<Result<_, _>>()?;
        let Some(first) = parts.first() else { return Err("an empty linear layer".into()) };
        let mut linear = ChainLinear { x: first.x, ..ChainLinear::default() };
        if let Some(norm) = norm {
            let norm = self.quantise(norm)?;
            (linear.src, linear.weight, linear.eps) = (norm.src, norm.weight, norm.eps);
        }
        let mut matrix = ChainMatrix {
            out: first.out,
            // Warps take units in turn, through all matrices.
            first: self.units % self.warps,
            segment: self.segments.len() as u32,
            blocks: first.x.cols / BLOCK as u32,
            flip: first.flip,
            ..ChainMatrix::default()
        };
        for s in parts.iter().flat_map(|args| args.segment.iter().take(args.segments as usize)) {
            self.segments.push(ChainSegment {
                codes: s.planes[0],
                scales: s.planes[1],
                bias: s.bias,
                rows: s.rows,
                column: s.column,
                before: matrix.units,
                accumulate: s.accumulate,
            });
            matrix.units += s.rows.div_ceil(UNIT_ROWS);
            matrix.segments += 1;
        }
        self.units += matrix.units.div_ceil(self.blocks);
        self.matrices.push(matrix);
        self.linears.push(linear);
        Ok(())
    }
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
