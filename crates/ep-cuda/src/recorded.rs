//! A recorded program: its plan, its memory, and the graphs that were captured of it.

use std::collections::HashMap;
use std::ops::Range;

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{Buffer, Place, RangeKind, Segment, StepProgram};

use crate::abi::{Activation, ArgmaxArgs, ArgmaxResult};
use crate::bind::{Launch, leading_rows};
use crate::bounce::Fill;
use crate::buckets::{GraphKey, PARTIALS_BYTES, attention_chunks, bucket, partials_bytes};
use crate::chain::Chain;
use crate::descriptor::{DescriptorLayout, Serial, StepWriter};
use crate::graph::StepGraph;
use crate::host_memory::PinnedBuffer;
use crate::layout::Cursor;
use crate::plan::{Action, CapturePlan, Task, slab};

/// Offsets in the scratch range, which all programs share: nothing in it outlives a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchLayout {
    /// Codes of the activation.
    pub codes: u64,
    /// Step sizes and sums.
    pub steps: u64,
    /// Floats of the activation.
    pub floats: u64,
    /// Attention's partial results.
    pub partials: u64,
    /// Bytes of all of it.
    pub bytes: u64,
}

impl ScratchLayout {
    /// What a plan needs.
    pub fn new(plan: &CapturePlan, program: &StepProgram, model: &ModelSpec, positions: usize) -> ScratchLayout {
        let (rows, config) = (leading_rows(program.max_rows), &model.config);
        let wide = program.activations == ActivationWidth::Int16;
        let mut cursor = Cursor::default();
        let codes = cursor.take(Activation::codes_bytes(plan.codes_width, rows, wide) as u64);
        let steps = cursor.take(Activation::steps_bytes(plan.codes_width, rows) as u64);
        let floats = cursor.take(Activation::floats_bytes(plan.floats_width, rows) as u64);
        let partials =
            cursor.take(partials_bytes(program.max_rows, config.heads, config.head_dim, positions, PARTIALS_BYTES));
        ScratchLayout { codes, steps, floats, partials, bytes: cursor.bytes() }
    }
}

/// The lists of a program's chains take a multiple of this.
const LISTS_BYTES: u64 = 128 << 10;

/// Offsets in a program's region of the state range: what must keep its value from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateLayout {
    /// The step descriptor.
    pub descriptor: u64,
    /// Chosen tokens by wanted row.
    pub feedback: u64,
    /// Tickets of attention.
    pub tickets: u64,
    /// Scratch of the arg-maximum.
    pub scratch: u64,
    /// Results of the arg-maximum.
    pub results: u64,
    /// Lists of the chains, one after the other.
    pub chains: u64,
    /// Bytes of all of it.
    pub bytes: u64,
}

impl StateLayout {
    /// What a program needs.
    pub fn new(descriptor: &DescriptorLayout, model: &ModelSpec, chains: &[Chain]) -> StateLayout {
        let (rows, wanted) = (descriptor.max_rows as u64, descriptor.max_wanted.max(1) as u64);
        let mut cursor = Cursor::default();
        let at = cursor.take(descriptor.bytes() as u64);
        let feedback = cursor.take(wanted * 4);
        let tickets = cursor.take(rows.saturating_mul(model.config.kv_heads as u64 * 4));
        let scratch = cursor.take(wanted * ArgmaxArgs::SCRATCH_BYTES as u64);
        let results = cursor.take(wanted * size_of::<ArgmaxResult>() as u64);
        // Placements differ in their lists; the regions of their programs should still fit one another's place.
        let lists = cursor.take(chains.iter().map(Chain::bytes).sum::<u64>().next_multiple_of(LISTS_BYTES));
        StateLayout { descriptor: at, feedback, tickets, scratch, results, chains: lists, bytes: cursor.bytes() }
    }

    /// The region's first contents: zero, but for the scratch of the arg-maximum.
    pub fn image(&self, wanted: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; usize::try_from(self.bytes).unwrap_or_default()];
        let scratch = bytes.get_mut(self.scratch as usize..).unwrap_or_default();
        for row in scratch.chunks_exact_mut(ArgmaxArgs::SCRATCH_BYTES).take(wanted.max(1)) {
            let words = row.chunks_exact_mut(4).zip(ArgmaxArgs::SCRATCH_INIT);
            words.for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        }
        bytes
    }
}

/// Steps of a program that may be in flight where the device finds the rows of chosen tokens by itself.
pub const IN_FLIGHT: usize = 4;

/// Offsets in a program's pinned buffer. Each step in flight has a slot of its own for all but the gathered rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLayout {
    /// Step descriptors.
    pub descriptors: u64,
    /// Bytes from one descriptor to the next.
    pub descriptor_bytes: u64,
    /// Results of the arg-maximum.
    pub results: u64,
    /// Results of a slot.
    pub max_wanted: usize,
    /// The flags, a word a slot.
    pub flags: u64,
    /// Slots.
    pub slots: usize,
    /// Gathered embedding rows, by plane; nothing if the device reads the table itself.
    pub gathered: [u64; 3],
    /// Bytes of all of it.
    pub bytes: u64,
}

impl HostLayout {
    /// What a program needs. `mapped`: the device reads the embedding itself.
    pub fn new(descriptor: &DescriptorLayout, plan: &CapturePlan, model: &ModelSpec, mapped: bool) -> HostLayout {
        let mut cursor = Cursor::default();
        let slots = if mapped && plan.chooses { IN_FLIGHT } else { 1 };
        let descriptor_bytes = (descriptor.bytes() as u64).next_multiple_of(PLANE_ALIGN as u64);
        let descriptors = cursor.take(descriptor_bytes * slots as u64);
        let max_wanted = descriptor.max_wanted.max(1);
        let results = cursor.take((slots * max_wanted * size_of::<ArgmaxResult>()) as u64);
        let flags = cursor.take(slots as u64 * 4);
        let mut gathered = [0; 3];
        if let Some(table) = plan.table.filter(|_| !mapped).and_then(|t| model.tensors.get(t.0)) {
            for (plane, offset) in gathered.iter_mut().enumerate() {
                let row = table.format.row_bytes(plane, table.cols) as u64;
                *offset = cursor.take(row.saturating_mul(descriptor.max_rows as u64));
            }
        }
        let bytes = cursor.bytes();
        HostLayout { descriptors, descriptor_bytes, results, max_wanted, flags, slots, gathered, bytes }
    }

    /// Offset of a slot's descriptor.
    pub fn descriptor(&self, slot: usize) -> usize {
        self.descriptors as usize + slot * self.descriptor_bytes as usize
    }

    /// Offset of a slot's results.
    pub fn results(&self, slot: usize) -> usize {
        self.results as usize + slot * self.max_wanted * size_of::<ArgmaxResult>()
    }

    /// Offset of a slot's flag.
    pub fn flag(&self, slot: usize) -> usize {
        self.flags as usize + slot * 4
    }
}

/// A program that was recorded.
pub struct Recorded {
    /// The program's sizes; its instructions are in the plan.
    pub program: StepProgram,
    /// What is captured.
    pub plan: CapturePlan,
    /// What is launched instead of runs of actions, in steps of one row.
    pub chains: Vec<(Range<usize>, Launch)>,
    /// The descriptor.
    pub descriptor: DescriptorLayout,
    /// Scratch.
    pub scratch: ScratchLayout,
    /// Layout of its region of the state range.
    pub state: StateLayout,
    /// Offset of that region in the range.
    pub state_offset: u64,
    /// Pinned buffer.
    pub host: PinnedBuffer,
    /// Its layout.
    pub host_layout: HostLayout,
    /// Mapped bytes that a replay touches: range, offset, bytes.
    pub needs: Vec<(RangeKind, u64, u64)>,
    /// Count of unmappings up to which `needs` is known to be mapped.
    pub checked: u64,
    /// True for one of many programs of a step, of few launches each: they are made one by one, without a graph.
    pub small: bool,
    /// What the host functions of its last run read.
    pub fills: Vec<Vec<Fill>>,
    /// Graphs by what they are for.
    pub graphs: HashMap<GraphKey, StepGraph>,
    /// Writes descriptors.
    pub writer: StepWriter,
    /// Planes of the embedding where the device reads them; `None` if the host gathers rows.
    pub table: Option<[u64; 3]>,
    /// Number of the step that was submitted last.
    pub serial: u32,
    /// Tokens that it chooses.
    pub chosen: usize,
}

impl Recorded {
    /// Bytes of the card that its graphs take.
    pub fn graph_bytes(&self) -> u64 {
        self.graphs.values().map(StepGraph::bytes).sum()
    }

    /// Number and slot of the next step.
    pub fn next(&self) -> Serial {
        let number = self.serial.wrapping_add(1);
        Serial { number, slot: number % self.host_layout.slots.max(1) as u32 }
    }

    /// The graph that serves a step.
    pub fn key(&self, rows: usize, wanted: usize, positions: usize, model: &ModelSpec) -> GraphKey {
        let rows = bucket(rows, self.program.max_rows);
        let (heads, head_dim) = (model.config.heads, model.config.head_dim);
        let attends = self.plan.tasks().any(|t| matches!(t, Task::Attention(_)));
        let chunks = attention_chunks(rows, heads, head_dim, positions, PARTIALS_BYTES);
        GraphKey {
            rows,
            wanted: bucket(wanted, self.program.max_wanted.max(1)),
            chunks: if attends { chunks } else { 0 },
        }
    }
}

/// Every byte of the four ranges that a replay touches, runs that follow one another joined.
pub fn needs(plan: &CapturePlan, program: &StepProgram, model: &ModelSpec) -> Vec<(RangeKind, u64, u64)> {
    let mut needs = vec![(RangeKind::Workspace, 0, program.workspace_bytes(&model.config))];
    if program.slots > 0 {
        needs.push((RangeKind::Staging, 0, program.slot_bytes.saturating_mul(u64::from(program.slots))));
    }
    let mut resident: Vec<(u64, u64)> = Vec::new();
    let mut add = |segment: &Segment| {
        if let (Place::Resident { offset }, Some(tensor)) = (segment.place, model.tensors.get(segment.tensor.0))
            && let Some((_, bytes)) = slab(tensor, segment.rows)
        {
            resident.push((offset, bytes));
        }
    };
    for action in &plan.actions {
        match action {
            Action::Launch(Task::Linear(l)) => l.parts.iter().for_each(|p| add(&p.segment)),
            Action::CopyIn(segment, _) => add(segment),
            _ => {}
        }
    }
    resident.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (offset, bytes) in resident {
        match joined.last_mut() {
            Some((from, len)) if offset <= *from + *len + headrace_provider::program::PLANE_ALIGN as u64 => {
                *len = (*len).max(offset + bytes - *from);
            }
            _ => joined.push((offset, bytes)),
        }
    }
    needs.extend(joined.into_iter().map(|(offset, bytes)| (RangeKind::Weights, offset, bytes)));
    needs
}

/// Every weight format that the launches of a plan read.
pub fn formats(plan: &CapturePlan, model: &ModelSpec) -> Vec<Format> {
    let mut formats = Vec::new();
    let mut add = |id: TensorId| {
        if let Some(tensor) = model.tensors.get(id.0)
            && !formats.contains(&tensor.format)
        {
            formats.push(tensor.format);
        }
    };
    for task in plan.tasks() {
        match task {
            Task::Embed(table) => add(*table),
            Task::Linear(l) => l.parts.iter().for_each(|p| add(p.segment.tensor)),
            _ => {}
        }
    }
    formats
}

/// Byte offset of each float buffer in the workspace range.
pub fn buffer_offsets(program: &StepProgram, model: &ModelSpec) -> [u64; 5] {
    Buffer::ALL.map(|buffer| program.buffer_offset(&model.config, buffer))
}
