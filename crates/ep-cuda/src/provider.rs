//! The provider for devices `cuda:N`: everything a step reads in device memory, one captured graph a step.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, DeviceInfo, Place, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram,
};

use crate::arena::{Arena, ArenaError};
use crate::attached::{Attached, FixedImage, check_config};
use crate::bind::Addresses;
use crate::context::Context;
use crate::descriptor::{DescriptorLayout, StepWriter};
use crate::driver::DriverProblem;
use crate::graph::GraphCounters;
use crate::host_memory::PinnedBuffer;
use crate::host_weights::HostWeights;
use crate::launcher::Launcher;
use crate::overhead::{Overhead, OverheadMeter};
use crate::physical::CardMemory;
use crate::plan::{plan, plane_bytes, slab};
use crate::recorded::{HostLayout, Recorded, ScratchLayout, StateLayout, buffer_offsets, formats, needs};
use crate::stream::Streams;
use crate::upload::{PieceKey, UploadCounters, Uploader};

/// Bytes of a piece that the link carries at full speed.
pub const PIECE_BYTES: u64 = 32 << 20;

/// Bytes set aside for the graphs of a program, one a bucket of row counts. What they really take is measured when they are
/// captured, and is part of the fixed bytes from then on.
const GRAPH_BYTES: u64 = 32 << 20;

/// Ranges of the arena behind the four of [`RangeKind`].
const FIXED: usize = 4;
const SCRATCH: usize = 5;
const STATE: usize = 6;

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
    launcher: Box<dyn Launcher>,
    pub(crate) arena: Arena<CardMemory>,
    pub(crate) streams: Streams,
    vectors: HashMap<headrace_model::spec::TensorId, u64>,
    rope: (u64, u64),
    overhead: Overhead,
    meter: OverheadMeter,
    counters: GraphCounters,
    /// Times that something was unmapped: recorded programs are checked again after that.
    unmappings: u64,
    next_program: u64,
    next_state: u64,
    /// Bytes of a slot of the program recorded last that has slots.
    slot_bytes: u64,
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
    /// Opens card `ordinal`: context, streams, address ranges, and the kernels that `kernels` loads. Takes no granule yet.
    ///
    /// # Errors
    /// [`DriverProblem`] says what the machine lacks, in words for its user.
    pub fn open_with(
        ordinal: usize,
        kernels: impl FnOnce(&Arc<Context>) -> Result<Box<dyn Launcher>, DriverProblem>,
    ) -> Result<CudaProvider, DriverProblem> {
        // The driver is asked first: without one, nothing else needs to be looked for.
        let driver = crate::driver::Driver::load()?;
        let meter = OverheadMeter::before(&driver.usable_card(ordinal)?);
        let context = Context::open(ordinal)?;
        let streams = Streams::new(&context)?;
        let launcher = kernels(&context)?;
        let memory = CardMemory::new(&context)?;
        let granule = memory.granule();
        let card = context.card().total_bytes;
        // Addresses cost nothing: each range could hold the whole card.
        let arena = Arena::new(memory, granule, &[card; 7]).map_err(|error| match error {
            ArenaError::Driver(error) => DriverProblem::Call(error),
            other => DriverProblem::Call(crate::driver::CudaError {
                call: "address ranges".into(),
                code: 0,
                text: other.to_string(),
            }),
        })?;
        let overhead = meter.after(&context);
        Ok(CudaProvider {
            programs: HashMap::new(),
            attached: None,
            uploader: None,
            logits: None,
            launcher,
            arena,
            streams,
            vectors: HashMap::new(),
            rope: (0, 0),
            overhead,
            meter,
            counters: GraphCounters::default(),
            unmappings: 0,
            next_program: 0,
            next_state: 0,
            slot_bytes: 0,
            context,
        })
    }

    /// Opens card `ordinal` with the crate's own kernels.
    ///
    /// # Errors
    /// As [`CudaProvider::open_with`].
    pub fn open(ordinal: usize) -> Result<CudaProvider, DriverProblem> {
        CudaProvider::open_with(ordinal, crate::kernel_launcher::KernelLauncher::open)
    }

    /// The card's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What the context and the kernels took, and who says so.
    pub fn overhead(&self) -> Overhead {
        self.overhead
    }

    /// Counters of graphs, copies and memory.
    pub fn counters(&self) -> CudaCounters {
        let graphs = self.programs.values().flat_map(|p| p.graphs.values());
        let (nodes, bytes) = graphs.fold((0, 0), |(n, b), g| (n + g.nodes() as u64, b + g.bytes()));
        CudaCounters {
            graphs: GraphCounters { nodes, bytes, ..self.counters },
            uploads: self.uploader.as_ref().map(Uploader::counters).unwrap_or_default(),
            arena_bytes: self.arena.charged_bytes(),
            quarantined_bytes: self.arena.quarantined_bytes(),
            nvml_bytes: self.meter.process_bytes(),
        }
    }

    fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind().map_err(|e| self.context.failed(e))
    }

    fn arena_error(&self, what: &str, bytes: u64, error: ArenaError) -> DeviceError {
        match error {
            ArenaError::Driver(e) if e.is_out_of_memory() => self.context.no_memory(what, bytes, e),
            ArenaError::Beyond { .. } => self.context.no_memory(what, bytes, error),
            ArenaError::Driver(e) => self.context.failed(e),
            other => self.context.invalid(format!("{what}: {other}")),
        }
    }

    /// Maps so that `0 .. bytes` of a private range is backed; it never shrinks.
    fn grow(&mut self, range: usize, bytes: u64, what: &str) -> Result<(), DeviceError> {
        let mapped = self.arena.mapped(range);
        let granule = self.arena.granule();
        let target = bytes.div_ceil(granule).saturating_mul(granule);
        if target <= mapped {
            return Ok(());
        }
        self.arena.map(range, mapped, target - mapped).map_err(|e| self.arena_error(what, target - mapped, e))
    }

    fn address(&self, range: usize, offset: u64, bytes: u64, what: &str) -> Result<u64, DeviceError> {
        self.arena.address(range, offset, bytes).map_err(|e| self.arena_error(what, bytes, e))
    }

    /// Copies host bytes to the device and waits.
    fn put(&mut self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller has checked that `to` is mapped; the stream is waited for before `bytes` can change.
        let copied = unsafe { self.streams.compute.copy_in(to, bytes.as_ptr(), bytes.len()) };
        copied.and_then(|()| self.streams.compute.wait()).map_err(|e| self.context.failed(e))
    }

    fn fence_and<T>(
        &mut self,
        what: &str,
        bytes: u64,
        work: impl FnOnce(&mut Arena<CardMemory>, &crate::stream::Fenced<'_>) -> Result<T, ArenaError>,
    ) -> Result<T, DeviceError> {
        let fenced = self.streams.fence().map_err(|e| self.context.failed(e))?;
        let done = work(&mut self.arena, &fenced);
        done.map_err(|e| self.arena_error(what, bytes, e))
    }

    /// Fails if a program touches what isn't mapped.
    fn check_needs(&self, needs: &[(RangeKind, u64, u64)]) -> Result<(), DeviceError> {
        for &(range, offset, bytes) in needs {
            if self.arena.address(range_index(range), offset, bytes).is_err() {
                let what = format!("the program needs bytes {offset} + {bytes} of {range:?}; map them first");
                return Err(self.context.invalid(what));
            }
        }
        Ok(())
    }

    /// The addresses that the graphs of a program are captured with.
    pub(crate) fn addresses(&self, recorded: &Recorded, model: &ModelSpec) -> Addresses {
        let (state, scratch) = (self.arena.base(STATE) + recorded.state_offset, self.arena.base(SCRATCH));
        let host = recorded.host.device();
        let workspace = self.arena.base(range_index(RangeKind::Workspace));
        Addresses {
            step: recorded.descriptor.at(state + recorded.state.descriptor),
            buffers: buffer_offsets(&recorded.program, model).map(|offset| workspace + offset),
            weights: self.arena.base(range_index(RangeKind::Weights)),
            staging: self.arena.base(range_index(RangeKind::Staging)),
            kv: self.arena.base(range_index(RangeKind::Kv)),
            vectors: self.vectors.clone(),
            cos: self.rope.0,
            sin: self.rope.1,
            codes: scratch + recorded.scratch.codes,
            steps: scratch + recorded.scratch.steps,
            floats: scratch + recorded.scratch.floats,
            gathered: recorded.host_layout.gathered.map(|offset| host + offset),
            feedback: state + recorded.state.feedback,
            partials: scratch + recorded.scratch.partials,
            tickets: state + recorded.state.tickets,
            scratch: state + recorded.state.scratch,
            results: state + recorded.state.results,
            host_results: host + recorded.host_layout.results,
            host_flag: host + recorded.host_layout.flag,
        }
    }

    fn take(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        check_config(&model, &kv).map_err(|e| self.context.invalid(e))?;
        let weights = HostWeights::new(model.clone()).map_err(|e| self.context.invalid(e))?;
        if weights.transposed_bytes() > 0 {
            let bytes = weights.transposed_bytes();
            log::info!("{}: {bytes} bytes of column-major weights were transposed", self.context.name());
        }
        let image = FixedImage::new(&weights).map_err(|e| self.context.invalid(e))?;
        self.grow(FIXED, image.bytes.len() as u64, "vectors and rotation tables")?;
        let base = self.arena.base(FIXED);
        self.put(base, &image.bytes)?;
        self.vectors = image.vectors.iter().map(|(&id, &at)| (id, base + at)).collect();
        self.rope = (base + image.cos, base + image.sin);
        let weights = Arc::new(weights);
        self.uploader = Some(Uploader::new(&self.context, weights.clone()));
        self.attached = Some(Attached { model, geometry: kv, weights, positions: image.positions });
        Ok(())
    }

    fn record_program(&mut self, program: StepProgram) -> Result<Recorded, DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let (model, geometry, positions) = (attached.model.clone(), attached.geometry, attached.positions);
        let plan = plan(&program, &model).map_err(|e| self.context.invalid(e))?;
        self.launcher.prepare(program.activations, &formats(&plan, &model)).map_err(|e| self.context.failed(e))?;
        let needs = needs(&plan, &program, &model);
        self.check_needs(&needs)?;
        let page = geometry.page_bytes().max(1) as u64;
        let store_pages = usize::try_from(self.context.card().total_bytes / page).unwrap_or(usize::MAX);
        let descriptor = DescriptorLayout::new(&program, &geometry, positions, store_pages);
        let scratch = ScratchLayout::new(&plan, &program, &model, positions);
        self.grow(SCRATCH, scratch.bytes, "activations")?;
        let host_layout = HostLayout::new(&descriptor, &plan, &model);
        let host_bytes = usize::try_from(host_layout.bytes).map_err(|e| self.context.invalid(e.to_string()))?;
        let host = PinnedBuffer::new(&self.context, host_bytes)
            .map_err(|e| self.context.no_memory("pinned host memory", host_layout.bytes, e))?;
        let state = StateLayout::new(&descriptor, &model);
        let granule = self.arena.granule();
        let state_bytes = state.bytes.div_ceil(granule).saturating_mul(granule);
        let state_offset = self.next_state;
        self.arena
            .map(STATE, state_offset, state_bytes)
            .map_err(|e| self.arena_error("a program's descriptor and results", state_bytes, e))?;
        // From here on the region has an owner that gives it back.
        self.next_state += state_bytes;
        let recorded = Recorded {
            program,
            plan,
            descriptor,
            scratch,
            state,
            state_offset,
            state_bytes,
            host,
            host_layout,
            needs,
            checked: self.unmappings,
            graphs: HashMap::new(),
            writer: StepWriter::default(),
            serial: 0,
        };
        let image = recorded.state.image(recorded.program.max_wanted);
        let to = self.arena.base(STATE) + state_offset;
        if let Err(error) = self.put(to, &image) {
            self.forget(recorded);
            return Err(error);
        }
        Ok(recorded)
    }

    /// Waits for the streams and gives back what a program holds.
    fn forget(&mut self, mut recorded: Recorded) {
        let (offset, bytes) = (recorded.state_offset, recorded.state_bytes);
        let fenced = match self.streams.fence() {
            Ok(fenced) => fenced,
            Err(error) => {
                // A context that failed takes everything with it; nothing of the program can be given back.
                log::error!("{error}: a program is kept");
                std::mem::forget(recorded);
                return;
            }
        };
        recorded.graphs.clear();
        if let Err(error) = self.arena.unmap(&fenced, STATE, offset, bytes) {
            log::error!("{error}");
        }
    }
}

impl Drop for CudaProvider {
    fn drop(&mut self) {
        if let Err(error) = self.context.bind() {
            log::error!("{error}");
        }
        if let Err(error) = self.streams.fence() {
            log::error!("{error}");
        }
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
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.weights.transposed_bytes()),
            piece_bytes: PIECE_BYTES,
        }
    }

    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        self.bind()?;
        if self.attached.is_some() {
            return Err(self.context.invalid("a model is attached already"));
        }
        self.take(model, kv)
    }

    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        self.bind()?;
        self.unmappings += u64::from(bytes < self.arena.end(range_index(range)));
        self.fence_and(&format!("{range:?}"), bytes, |arena, fenced| arena.resize(fenced, range_index(range), bytes))
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.arena.mapped(range_index(range))
    }

    fn fixed_bytes(&self) -> u64 {
        let own: u64 = [FIXED, SCRATCH, STATE].into_iter().map(|r| self.arena.mapped(r)).sum();
        let graphs: u64 = self.programs.values().flat_map(|p| p.graphs.values()).map(|g| g.bytes()).sum();
        self.overhead.bytes + own + graphs + self.arena.pooled_bytes() + self.arena.quarantined_bytes()
    }

    fn program_bytes(&self, program: &StepProgram) -> Result<u64, DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let (model, positions) = (&attached.model, attached.positions);
        let plan = plan(program, model).map_err(|e| self.context.invalid(e))?;
        let page = attached.geometry.page_bytes().max(1) as u64;
        let store_pages = usize::try_from(self.context.card().total_bytes / page).unwrap_or(usize::MAX);
        let descriptor = DescriptorLayout::new(program, &attached.geometry, positions, store_pages);
        let granule = self.arena.granule();
        let scratch = ScratchLayout::new(&plan, program, model, positions).bytes.next_multiple_of(granule);
        // A step and its prologue have a descriptor each.
        let state = StateLayout::new(&descriptor, model).bytes.next_multiple_of(granule) * 2;
        Ok(scratch + state + GRAPH_BYTES)
    }

    fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.bind()?;
        let mapped = self.arena.map(range_index(range), offset, bytes);
        mapped.map_err(|e| self.arena_error(&format!("{range:?}"), bytes, e))
    }

    fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.bind()?;
        self.unmappings += 1;
        self.fence_and(&format!("{range:?}"), bytes, |arena, fenced| {
            arena.unmap(fenced, range_index(range), offset, bytes)
        })
    }

    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        self.bind()?;
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let model = attached.model.clone();
        let mut jobs = Vec::new();
        for segment in segments {
            let (range, offset) = match segment.place {
                Place::Resident { offset } => (RangeKind::Weights, offset),
                Place::Slot { slot, offset } if self.slot_bytes > 0 => {
                    (RangeKind::Staging, (u64::from(slot)).saturating_mul(self.slot_bytes).saturating_add(offset))
                }
                place => return Err(self.context.invalid(format!("{place:?} can't be loaded"))),
            };
            let tensor = model.tensors.get(segment.tensor.0);
            let slab = tensor.and_then(|t| slab(t, segment.rows).map(|s| (t, s)));
            let (tensor, (planes, bytes)) = slab.ok_or_else(|| self.context.invalid(format!("no {segment:?}")))?;
            let to = self.address(range_index(range), offset, bytes, &tensor.name)?;
            for (plane, at) in planes.iter().enumerate().take(tensor.format.planes()) {
                let key = PieceKey { tensor: segment.tensor.0, plane, row: segment.row, rows: segment.rows };
                if plane_bytes(tensor, plane, segment.rows).is_some_and(|n| n > 0) {
                    jobs.push((key, to + at));
                }
            }
        }
        let Some(uploader) = &mut self.uploader else { return Err(self.context.invalid("no model is attached")) };
        // A step in flight may still read what is about to be overwritten.
        let waited = self.streams.compute.wait();
        let mut done = waited.map_err(|e| e.to_string());
        for (key, to) in jobs {
            done = done.and_then(|()| uploader.upload(&self.streams.load, key, to));
        }
        // Whatever was queued is waited for, also after an error.
        let waited = self.streams.load.wait().map_err(|e| e.to_string());
        done.and(waited).map_err(|e| self.context.failed(e))
    }

    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        self.bind()?;
        let what = format!("{range:?}");
        let from = self.address(range_index(range), from, bytes, &what)?;
        let to = self.address(range_index(range), to, bytes, &what)?;
        if from.abs_diff(to) < bytes {
            return Err(self.context.invalid(format!("{what}: a copy of {bytes} bytes onto themselves")));
        }
        // SAFETY: both runs are mapped and apart; unmapping waits for the stream.
        let copied = unsafe { self.streams.compute.copy_on_device(to, from, bytes as usize) };
        copied.map_err(|e| self.context.failed(e))
    }

    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.bind()?;
        let from = self.address(range_index(range), offset, into.len() as u64, &format!("{range:?}"))?;
        // SAFETY: the bytes are mapped, and the stream is waited for before `into` is used.
        let copied = unsafe { self.streams.compute.copy_out(into.as_mut_ptr(), from, into.len()) };
        copied.and_then(|()| self.streams.compute.wait()).map_err(|e| self.context.failed(e))
    }

    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.bind()?;
        let to = self.address(range_index(range), offset, bytes.len() as u64, &format!("{range:?}"))?;
        self.put(to, bytes)
    }

    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        self.bind()?;
        let recorded = self.record_program(program)?;
        if recorded.program.slots > 0 {
            self.slot_bytes = recorded.program.slot_bytes;
        }
        let id = self.next_program;
        self.next_program += 1;
        self.programs.insert(id, recorded);
        Ok(ProgramId(id))
    }

    fn discard(&mut self, id: ProgramId) {
        if let Err(error) = self.context.bind() {
            log::error!("{error}");
        }
        if let Some(recorded) = self.programs.remove(&id.0) {
            self.forget(recorded);
        }
    }

    fn run(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        self.bind()?;
        output.tokens.clear();
        output.logits.clear();
        let Some(mut recorded) = self.programs.remove(&id.0) else {
            return Err(self.context.invalid(format!("no program {}", id.0)));
        };
        let done = self.step(&mut recorded, input, output);
        self.programs.insert(id.0, recorded);
        done
    }
}

impl CudaProvider {
    pub(crate) fn parts(&mut self) -> StepParts<'_> {
        StepParts {
            attached: self.attached.as_ref(),
            uploader: self.uploader.as_mut(),
            logits: &mut self.logits,
            launcher: &*self.launcher,
            arena: &self.arena,
            streams: &self.streams,
            counters: &mut self.counters,
            context: &self.context,
        }
    }

    /// Checks once after each unmapping that everything a program touches is still mapped.
    pub(crate) fn check_mapped(&self, recorded: &mut Recorded) -> Result<(), DeviceError> {
        if recorded.checked != self.unmappings {
            self.check_needs(&recorded.needs)?;
            recorded.checked = self.unmappings;
        }
        Ok(())
    }
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
    pub context: &'a Arc<Context>,
}
