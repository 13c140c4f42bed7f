//! The provider for devices `cuda:N`: everything a step reads in device memory, one captured graph a step.

mod graphs;
mod link;
mod memory;
mod open;
mod programs;
mod report;

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_numerics::format::Format;
use headrace_provider::{
    DeviceError, DeviceInfo, DeviceReport, HostLedger, LinkCeilings, ProgramId, Provider, RangeKind, Segment,
    StepInput, StepOutput, StepProgram, Ticket,
};

use crate::arena::Arena;
use crate::attached::Attached;
use crate::clock::Clock;
use crate::context::Context;
use crate::current::Current;
use crate::descriptor::Serial;
use crate::graph::{GraphCounters, StepGraph};
use crate::host_memory::PinnedBuffer;
use crate::launch;
use crate::launcher::Launcher;
use crate::overhead::{Overhead, OverheadMeter};
use crate::physical::CardMemory;
use crate::reader::Reader;
use crate::recorded::Recorded;
use crate::regions::Regions;
use crate::share::Share;
use crate::stream::Streams;
use crate::upload::{UploadCounters, Uploader};

pub use graphs::GRAPH_BYTES;

/// Bytes of a piece that the link carries at full speed.
pub const PIECE_BYTES: u64 = 32 << 20;

/// Ranges of the arena behind the four of [`RangeKind`].
const FIXED: usize = 4;
const SCRATCH: usize = 5;
const STATE: usize = 6;
const RANGE_COUNT: usize = 7;

/// The ranges that the engine maps.
const RANGES: [RangeKind; 4] = [RangeKind::Weights, RangeKind::Staging, RangeKind::Kv, RangeKind::Workspace];

/// What the device has done and holds, beside what the engine counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaCounters {
    /// Graphs.
    pub graphs: GraphCounters,
    /// Copies from the host.
    pub uploads: UploadCounters,
    /// Bytes of granules mapped, pooled and quarantined.
    pub arena_bytes: u64,
    /// Bytes of granules lost to a failure of the driver.
    pub quarantined_bytes: u64,
    /// Bytes of the card that this process uses, by NVML.
    pub nvml_bytes: Option<u64>,
}

/// Device `cuda:N`. Fields are dropped in order: what uses the context first, the context last.
pub struct CudaProvider {
    programs: HashMap<u64, Recorded>,
    attached: Option<Attached>,
    uploader: Option<Uploader>,
    logits: Option<PinnedBuffer>,
    /// Ended in `drop`, with the context current.
    launcher: ManuallyDrop<Box<dyn Launcher>>,
    pub(crate) arena: Arena<CardMemory>,
    pub(crate) streams: Streams,
    vectors: HashMap<headrace_model::spec::TensorId, u64>,
    rope: (u64, u64),
    /// What the process takes once.
    share: Arc<Share>,
    meter: OverheadMeter,
    /// Bytes that this provider's kernels took beyond that.
    kernel_bytes: u64,
    /// Bytes of the largest graph captured so far.
    largest_graph: u64,
    counters: GraphCounters,
    clock: Clock,
    /// Bytes a second that the link carries, once it was measured.
    link: Option<f64>,
    /// The kernel that reads in place, loaded for measuring.
    reader: Option<Reader>,
    /// Times that something was unmapped: recorded programs are checked again after that.
    unmappings: u64,
    next_program: u64,
    /// Steps that were submitted, oldest first.
    in_flight: VecDeque<InFlight>,
    next_ticket: u64,
    /// Steps that may be: what the programs recorded so far allow.
    depth: usize,
    /// Positions that a sequence may have at most, whatever the model declares.
    most_positions: usize,
    /// Each program's region of its range.
    states: Regions,
    /// Bytes of a slot of the program recorded last that has slots.
    slot_bytes: u64,
    /// Where ranges are allocated whole, bytes that each was said to need at most.
    whole: [u64; RANGE_COUNT],
    context: Arc<Context>,
}

fn range_index(range: RangeKind) -> usize {
    match range {
        RangeKind::Weights => 0,
        RangeKind::Staging => 1,
        RangeKind::Kv => 2,
        RangeKind::Workspace => 3,
    }
}

impl CudaProvider {
    /// Sequences will have at most so many positions, whatever the model declares: rotation tables, descriptors and the scratch
    /// of attention are made for that. Has an effect before a model is attached.
    pub fn limit_positions(&mut self, most: usize) {
        self.most_positions = most;
    }

    /// The card's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What the context and the kernels took, and who says so.
    pub fn overhead(&self) -> Overhead {
        self.share.overhead
    }

    /// Counters of graphs, copies and memory.
    pub fn counters(&self) -> CudaCounters {
        let graphs = self.programs.values().flat_map(|p| p.graphs.values());
        let sum = |(live, nodes, bytes), g: &StepGraph| (live + 1, nodes + g.nodes() as u64, bytes + g.bytes());
        let (live, nodes, bytes) = graphs.fold((0, 0, 0), sum);
        CudaCounters {
            graphs: GraphCounters { live, nodes, bytes, ..self.counters },
            uploads: self.uploader.as_ref().map(Uploader::counters).unwrap_or_default(),
            arena_bytes: self.arena.charged_bytes(),
            quarantined_bytes: self.arena.quarantined_bytes(),
            nvml_bytes: self.meter.process_bytes(),
        }
    }

    fn bind(&self) -> Result<Current, DeviceError> {
        self.context.bind().map_err(|e| self.context.failed(e))
    }
}

impl Drop for CudaProvider {
    fn drop(&mut self) {
        let _current = self.context.bind().inspect_err(|error| log::error!("{error}"));
        if let Err(error) = self.streams.fence() {
            log::error!("{error}");
        }
        // While the context is current, and what uses the kernels first: unloading them leaves current what the loader made so.
        self.programs.clear();
        self.uploader = None;
        self.attached = None;
        self.logits = None;
        // SAFETY: nothing uses the launcher any more, and this is the only place that takes it.
        unsafe { ManuallyDrop::drop(&mut self.launcher) };
    }
}

impl Provider for CudaProvider {
    fn info(&self) -> DeviceInfo {
        let card = self.context.card();
        DeviceInfo {
            name: self.context.name().to_string(),
            description: card.name.clone(),
            granule: self.arena.granule(),
            kernels: self.launcher.name(),
            threads: 0,
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.weights.repacked_bytes()),
            piece_bytes: PIECE_BYTES,
        }
    }

    fn wanted_format(&self, format: Format) -> Format {
        launch::wanted_format(format)
    }

    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        if self.attached.is_some() {
            return Err(self.context.invalid("a model is attached already"));
        }
        self.take(model, kv)
    }

    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        let _current = self.bind()?;
        self.unmappings += u64::from(bytes < self.arena.end(range_index(range)));
        self.ready_range(range_index(range), bytes, &format!("{range:?}"))?;
        let mapped = self
            .fence_and(&format!("{range:?}"), bytes, |arena, fenced| arena.resize(fenced, range_index(range), bytes))?;
        if range == RangeKind::Staging && bytes > 0 && self.link.is_none() {
            self.measure_copies(mapped);
        }
        Ok(mapped)
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.mapped_bytes(range)
    }

    fn fixed_bytes(&self) -> u64 {
        self.fixed_parts().iter().map(|part| part.1).sum()
    }

    fn memory_key(&self) -> Option<String> {
        Some(format!("card {}", self.context.card().bus_id))
    }

    fn shared_bytes(&self) -> u64 {
        self.share.overhead.bytes
    }

    fn graph_allowance(&self) -> u64 {
        graphs::GRAPH_BYTES
    }

    fn reads_host_memory(&self) -> Result<(), String> {
        PinnedBuffer::new(&self.context, 1).map(drop).map_err(|e| {
            format!("{}: pinning is refused, so that kernels read no host memory in place: {e}", self.context.name())
        })
    }

    fn ready_link_ceilings(&mut self) -> Result<(), String> {
        let _current = self.context.bind().map_err(|e| e.to_string())?;
        self.ready_reader()
    }

    fn link_ceilings(&mut self) -> Result<LinkCeilings, String> {
        let _current = self.context.bind().map_err(|e| e.to_string())?;
        self.measure_both()
    }

    fn fallbacks(&self) -> Vec<String> {
        self.uploader.as_ref().map_or_else(Vec::new, Uploader::fallbacks)
    }

    fn expect_at_most(&mut self, range: RangeKind, bytes: u64) {
        self.whole[range_index(range)] = bytes;
    }

    fn locks_host_memory(&self) -> bool {
        true
    }

    fn charge_host_memory(&mut self, ledger: Arc<dyn HostLedger>) {
        self.context.host().charge_to(ledger);
    }

    fn report(&self) -> DeviceReport {
        let _current = self.context.bind().inspect_err(|error| log::error!("{error}"));
        self.device_report()
    }

    fn program_bytes(&mut self, program: &StepProgram, programs: u64) -> Result<u64, DeviceError> {
        let _current = self.bind()?;
        self.bytes_of(program, programs)
    }

    fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        self.ready_range(range_index(range), offset.saturating_add(bytes), &format!("{range:?}"))?;
        let mapped = self.arena.map(range_index(range), offset, bytes);
        mapped.map_err(|e| self.arena_error(&format!("{range:?}"), bytes, e))
    }

    fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        self.unmappings += 1;
        self.fence_and(&format!("{range:?}"), bytes, |arena, fenced| {
            arena.unmap(fenced, range_index(range), offset, bytes)
        })
    }

    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        self.load_segments(segments)
    }

    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        self.copy_in_range(range, from, to, bytes)
    }

    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        let from = self.address(range_index(range), offset, into.len() as u64, &format!("{range:?}"))?;
        // SAFETY: the bytes are mapped, and the stream is waited for before `into` is used.
        let copied = unsafe { self.streams.compute.copy_out(into.as_mut_ptr(), from, into.len()) };
        copied.and_then(|()| self.streams.compute.wait()).map_err(|e| self.context.failed(e))
    }

    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        let to = self.address(range_index(range), offset, bytes.len() as u64, &format!("{range:?}"))?;
        self.put(to, bytes)
    }

    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        let _current = self.bind()?;
        let recorded = self.record_program(program)?;
        if recorded.program.slots > 0 {
            self.slot_bytes = recorded.program.slot_bytes;
        }
        if recorded.plan.chooses {
            self.depth = recorded.host_layout.slots;
        }
        let id = self.next_program;
        self.next_program += 1;
        self.programs.insert(id, recorded);
        Ok(ProgramId(id))
    }

    fn record_small(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        let id = self.record(program)?;
        self.programs.entry(id.0).and_modify(|recorded| recorded.small = true);
        Ok(id)
    }

    fn discard(&mut self, id: ProgramId) {
        let _current = self.context.bind().inspect_err(|error| log::error!("{error}"));
        if let Some(recorded) = self.programs.remove(&id.0) {
            self.forget(recorded);
        }
    }

    fn max_in_flight(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, id: ProgramId, input: &StepInput) -> Result<Ticket, DeviceError> {
        let _current = self.bind()?;
        if self.in_flight.len() >= self.depth {
            let what = format!("{} steps are in flight; {} may be", self.in_flight.len(), self.depth);
            return Err(self.context.invalid(what));
        }
        if self.in_flight.back().is_some_and(|last| last.logits) {
            return Err(self.context.invalid("the logits of the step before were not collected"));
        }
        let Some(mut recorded) = self.programs.remove(&id.0) else {
            return Err(self.context.invalid(format!("no program {}", id.0)));
        };
        let submitted = self.submit_step(&mut recorded, input);
        self.programs.insert(id.0, recorded);
        let serial = submitted?;
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        let wanted = input.wanted.len();
        self.in_flight.push_back(InFlight { ticket, program: id, serial, wanted, logits: input.want_logits });
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), DeviceError> {
        let _current = self.bind()?;
        output.tokens.clear();
        output.logits.clear();
        let Some(&step) = self.in_flight.front().filter(|step| step.ticket == ticket) else {
            return Err(self.context.invalid(format!("step {} is not the first in flight", ticket.0)));
        };
        self.in_flight.pop_front();
        let Some(recorded) = self.programs.remove(&step.program.0) else {
            return Err(self.context.invalid(format!("the program of step {} was discarded", ticket.0)));
        };
        let collected = self.parts().collect(&recorded, step, output);
        self.programs.insert(step.program.0, recorded);
        collected
    }
}

impl CudaProvider {
    pub(crate) fn parts(&mut self) -> StepParts<'_> {
        StepParts {
            attached: self.attached.as_ref(),
            uploader: self.uploader.as_mut(),
            logits: &mut self.logits,
            launcher: self.launcher.as_ref(),
            arena: &self.arena,
            streams: &self.streams,
            counters: &mut self.counters,
            clock: &self.clock,
            context: &self.context,
        }
    }
}

/// A step that was submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub ticket: Ticket,
    pub program: ProgramId,
    pub serial: Serial,
    /// Wanted rows.
    pub wanted: usize,
    /// True if their logits are.
    pub logits: bool,
}

/// What a step uses of the provider.
pub(crate) struct StepParts<'a> {
    pub attached: Option<&'a Attached>,
    pub uploader: Option<&'a mut Uploader>,
    pub logits: &'a mut Option<PinnedBuffer>,
    pub launcher: &'a dyn Launcher,
    pub arena: &'a Arena<CardMemory>,
    pub streams: &'a Streams,
    pub counters: &'a mut GraphCounters,
    pub clock: &'a Clock,
    pub context: &'a Arc<Context>,
}
