//! The lists of a chain, as its kernel reads them: every task bound to addresses, every matrix cut into units.

use zerocopy::{Immutable, IntoBytes};

use super::{Chain, Link};
use crate::abi::{
    AttentionArgs, BLOCK, ChainArgs, ChainLinear, ChainMatrix, ChainSegment, ChainTask, LinearArgs, QuantiseArgs,
    RopeArgs,
};
use crate::bind::{Binder, Launch};
use crate::layout::Cursor;
use crate::plan::{Action, CapturePlan};

/// Weight rows of a unit, as chain.cu was written.
const UNIT_ROWS: u32 = 4;
/// Bytes at the start of the lists that hold the barrier.
const BARRIER_BYTES: u64 = 256;

impl Chain {
    fn count(&self, wanted: fn(&Link) -> bool) -> usize {
        self.links.iter().filter(|l| wanted(l)).count()
    }

    fn linears(&self) -> usize {
        self.count(|l| matches!(l, Link::Linear { .. }))
    }

    /// Offsets in the table of matrices, segments and tasks, and its bytes.
    pub(super) fn table(&self) -> ([usize; 3], usize) {
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
pub(super) struct Lists<'a> {
    plan: &'a CapturePlan,
    binder: &'a Binder<'a>,
    blocks: u32,
    warps: u32,
    /// Units that every block may have had of the matrices so far.
    units: u32,
    pub(super) tasks: Vec<ChainTask>,
    pub(super) matrices: Vec<ChainMatrix>,
    pub(super) linears: Vec<ChainLinear>,
    pub(super) segments: Vec<ChainSegment>,
    attention: Vec<AttentionArgs>,
    rope: Vec<RopeArgs>,
    activations: Vec<QuantiseArgs>,
    swiglus: Vec<QuantiseArgs>,
}

impl<'a> Lists<'a> {
    pub(super) fn new(plan: &'a CapturePlan, binder: &'a Binder<'a>, (blocks, warps): (usize, usize)) -> Lists<'a> {
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

    pub(super) fn add(&mut self, link: Link) -> Result<(), String> {
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
