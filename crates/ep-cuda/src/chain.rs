//! Chains: which runs of tasks of a one-row step one persistent kernel does. No device.
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
use headrace_numerics::format::{Format, Planes, ScaleType};
use headrace_provider::Place;

use crate::abi::{AttentionArgs, BLOCK};
use crate::launch::is_piped;
use crate::plan::{Action, ActivationTask, CapturePlan, LinearTask, Source, Task};

mod lists;

/// Most warps of a block.
pub const WARPS: usize = 16;
/// Slots of a warp's ring, the most first: each holds the codes and scales of four rows and 32 blocks.
pub const DEPTHS: [usize; 3] = [4, 3, 2];

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

/// What of a format the kernel is compiled for, whatever its codes' sign.
fn kind_of(format: Format) -> (Option<ScaleType>, Option<Planes>) {
    match format {
        Format::Nbits(n) => (Some(n.scale), None),
        Format::Planes(p) => (None, Some(p)),
        _ => (None, None),
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
        let alike = |f: Format| is_piped(f) && format.is_none_or(|g| kind_of(f) == kind_of(g));
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
}

#[cfg(test)]
mod tests;
