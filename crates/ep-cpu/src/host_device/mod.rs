//! Device `host-device`: memory of its own on the host, which behaves as a card's memory does.
//!
//! Address ranges are reserved, granules are mapped and unmapped for real (a stale access faults), new and released
//! memory is poisoned, copies run on a thread of their own under events (so that a missing wait is a real race), and
//! kernels run on the host's cores. It exists so that everything that could go wrong on a card goes wrong in a test on a
//! machine without one.
//!
//! What it counts as its memory are the four ranges and the fixed bytes: vectors and rotary tables. The workers' own
//! scratch is the host's, as a card's registers and caches are the card's.

mod check;
mod copier;
mod fault;
mod memory;
mod source;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, DeviceInfo, Place, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram,
};

pub use check::ScheduleError;
pub use fault::{DeviceProbe, Fault, FaultPoint};

use self::check::{Needs, check, ring_fits};
use self::copier::{Copier, CopyList, Job, Ring, Staging};
use self::memory::DeviceMemory;
use self::source::{DeviceWeights, segment_bytes, slab, weight_bytes};
use crate::errors::Named;
use crate::exec::RingEvents;
use crate::executor::{Bound, Executor, Recorded, check_config, processor};
use crate::rope_table::RopeTable;
use crate::simd::SimdLevel;
use crate::weights::{FileWeights, WeightSource};

/// Name of the device in errors and stats.
const NAME: Named = Named("host-device");

/// Bytes of a piece of weights, unless somebody asks for another size.
const PIECE_BYTES: u64 = 1 << 20;

/// How a [`HostDevice`] is made. None of it changes a bit of any result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Threads; `None` for one a physical core that the process may use.
    pub threads: Option<usize>,
    /// Instruction set; `None` for what `HEADRACE_SIMD` asks for, or else the best one.
    pub level: Option<SimdLevel>,
    /// Mapping unit in bytes, a multiple of the system's page.
    pub granule: u64,
    /// Bytes of its physical memory; `None` for all that the machine has.
    pub capacity: Option<u64>,
    /// Positions that rotary tables are kept for; `None` for the context that the model declares. A step beyond is refused.
    pub positions: Option<usize>,
    /// Fill new memory, and slots before each copy, with bytes of ones, a NaN in every float format.
    pub poison: bool,
    /// Bytes per second of the link that slots are filled over; `None` for as fast as memory is.
    pub link: Option<u64>,
}

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions {
            threads: None,
            level: None,
            granule: 64 << 10,
            capacity: None,
            positions: None,
            poison: true,
            link: None,
        }
    }
}

struct Attached {
    model: Arc<ModelSpec>,
    geometry: KvGeometry,
    file: Arc<FileWeights>,
    rope: RopeTable,
    positions: usize,
}

struct Program {
    recorded: Recorded,
    copies: Arc<CopyList>,
    needs: Needs,
    /// The count of unmappings at which the resident bytes were last seen to be mapped.
    seen: u64,
}

/// The ring as the host sees it.
struct HostRing {
    events: Arc<Ring>,
    /// Copies into each slot that were ever started.
    started: Vec<u64>,
    /// The same before the running step's.
    before: Vec<u64>,
    /// What each slot holds when all of them are done.
    contents: Vec<Option<Arc<[Segment]>>>,
}

impl HostRing {
    fn new(slots: u32, slot_bytes: u64) -> HostRing {
        HostRing {
            events: Arc::new(Ring::new(slots, slot_bytes)),
            started: vec![0; slots as usize],
            before: vec![0; slots as usize],
            contents: vec![None; slots as usize],
        }
    }
}

/// Device `host-device`.
pub struct HostDevice {
    // First, so that its thread is gone before the memory that it writes is.
    copier: Copier,
    executor: Executor,
    memory: DeviceMemory,
    attached: Option<Attached>,
    programs: HashMap<u64, Program>,
    next_program: u64,
    ring: Option<HostRing>,
    unmappings: u64,
    options: HostOptions,
    checked: bool,
    probe: DeviceProbe,
}

impl HostDevice {
    /// Starts the threads and reserves address space; no memory is taken yet.
    ///
    /// # Errors
    /// If the options can't be met.
    pub fn new(options: HostOptions) -> Result<HostDevice, DeviceError> {
        let probe = DeviceProbe::default();
        let executor = Executor::new(NAME, options.threads, options.level)?;
        let memory = DeviceMemory::new(&options, probe.clone())?;
        let copier = Copier::new(probe.clone(), options.poison, options.link)
            .map_err(|e| NAME.failed(format!("the copy thread: {e}")))?;
        Ok(HostDevice {
            copier,
            executor,
            memory,
            attached: None,
            programs: HashMap::new(),
            next_program: 0,
            ring: None,
            unmappings: 0,
            options,
            checked: true,
            probe,
        })
    }

    /// A device that records and runs programs without the check that they can't race, so that a test can show what a
    /// broken schedule does. A test instrument.
    ///
    /// # Errors
    /// As [`HostDevice::new`].
    ///
    /// # Safety
    /// Programs may read memory that is being written, or that isn't mapped: whatever comes of it is the caller's.
    pub unsafe fn new_unchecked(options: HostOptions) -> Result<HostDevice, DeviceError> {
        Ok(HostDevice { checked: false, ..HostDevice::new(options)? })
    }

    /// A handle to the device's counts, and for making its operations fail, that stays valid when the device belongs to
    /// somebody else.
    pub fn probe(&self) -> DeviceProbe {
        self.probe.clone()
    }

    /// Makes one operation fail, once. A test instrument, as is all of [`DeviceProbe`].
    pub fn inject(&self, fault: Fault) {
        self.probe.inject(fault);
    }

    /// The barrier before anything is unmapped: waits for every copy that was started. Steps are over when `run` returns.
    pub fn fence(&self) {
        self.copier.fence();
    }

    /// First byte of the weights range, for tests that touch what they shouldn't; `None` without a model.
    pub fn weights_address(&self) -> Option<*const u8> {
        self.memory.weights.as_ref().map(|w| w.base().as_ptr().cast_const())
    }

    fn attached(&self) -> Result<&Attached, DeviceError> {
        self.attached.as_ref().ok_or_else(|| NAME.invalid("no model is attached"))
    }

    /// Fails if somebody asked for it.
    fn strike(&self, at: FaultPoint) -> Result<(), DeviceError> {
        match self.probe.strikes(at) {
            true => Err(NAME.failed(format!("{at:?}: a fault that was asked for"))),
            false => Ok(()),
        }
    }

    fn strike_memory(&self, at: FaultPoint, range: RangeKind, bytes: u64) -> Result<(), DeviceError> {
        match self.probe.strikes(at) {
            true => Err(NAME.no_memory(format!("{range:?}"), bytes, format!("{at:?}: a fault that was asked for"))),
            false => Ok(()),
        }
    }

    /// Whatever was in the slots means nothing from now on, and nothing is on its way there.
    fn forget_ring(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.copier.abandon(&ring.events);
            self.ring = Some(HostRing::new(ring.events.slots(), ring.events.slot_bytes));
        }
    }

    /// Makes the ring that of `program`, checks that it is mapped and that the slots hold what the program's head reads.
    fn ready(&mut self, id: u64) -> Result<(), DeviceError> {
        let program = self.programs.get_mut(&id).ok_or_else(|| NAME.invalid(format!("no program {id}")))?;
        let step = &program.recorded.compiled.program;
        if self.checked && program.seen != self.unmappings {
            let weights = self.memory.weights.as_ref();
            let gone = |&&(offset, bytes): &&(u64, u64)| !weights.is_some_and(|w| w.is_mapped(offset, bytes));
            if let Some((offset, bytes)) = program.needs.resident.iter().find(gone) {
                return Err(NAME.outside(RangeKind::Weights, *offset, *bytes));
            }
            program.seen = self.unmappings;
        }
        if step.slots == 0 {
            return Ok(());
        }
        ring_fits(step, self.memory.mapped(RangeKind::Staging)).map_err(|e| NAME.invalid(e.to_string()))?;
        let (slots, slot_bytes) = (step.slots, step.slot_bytes);
        let same = self.ring.as_ref().is_some_and(|r| (r.events.slots(), r.events.slot_bytes) == (slots, slot_bytes));
        if !same {
            // Slots of another shape overlap these.
            self.copier.fence();
            self.ring = Some(HostRing::new(slots, slot_bytes));
        }
        if let Some(failure) = self.ring.as_ref().and_then(|r| r.events.failure()) {
            self.forget_ring();
            let heads = self.programs.get(&id).is_some_and(|p| !p.needs.heads.is_empty());
            if heads || !self.checked {
                return Err(NAME.failed(failure));
            }
            log::warn!("{}: {failure}; nothing reads that slot any more", NAME.0);
        }
        if self.checked
            && let (Some(ring), Some(program)) = (&self.ring, self.programs.get(&id))
        {
            let holds = |slot: u32, segment: &Segment| {
                let contents = ring.contents.get(slot as usize).and_then(Option::as_ref);
                contents.is_some_and(|c| c.contains(segment))
            };
            if let Some((slot, segment)) = program.needs.heads.iter().find(|(slot, s)| !holds(*slot, s)) {
                let Segment { tensor, row, rows, .. } = segment;
                return Err(NAME.invalid(format!(
                    "slot {slot} doesn't hold rows {row} + {rows} of tensor {}; fill the ring first",
                    tensor.0
                )));
            }
        }
        Ok(())
    }

    /// The ring's events once a program ran: what it holds now, or a new one after a failure.
    fn settle(&mut self, id: u64, started: bool, result: Result<(), DeviceError>) -> Result<(), DeviceError> {
        if !started {
            return result;
        }
        let Some(ring) = &mut self.ring else { return result };
        let failure = ring.events.failure();
        match (result, failure) {
            (Ok(()), None) => {
                if let Some(program) = self.programs.get(&id) {
                    for (slot, contents) in &program.needs.tails {
                        if let Some(to) = ring.contents.get_mut(*slot as usize) {
                            *to = Some(contents.clone());
                        }
                    }
                }
                Ok(())
            }
            (result, failure) => {
                self.forget_ring();
                Err(failure.map_or_else(|| result.err().unwrap_or_else(|| NAME.failed("the ring")), |f| NAME.failed(f)))
            }
        }
    }

    /// Copies one segment from the host to its place.
    fn load_one(&mut self, segment: &Segment) -> Result<(), DeviceError> {
        let attached = self.attached()?;
        let (model, file) = (attached.model.clone(), attached.file.clone());
        let (range, base, offset) = match segment.place {
            Place::Resident { offset } => (RangeKind::Weights, 0, offset),
            Place::Slot { slot, offset } => {
                let ring = self.ring.as_ref().map(|r| &r.events);
                let ring = ring.ok_or_else(|| NAME.invalid("there is no ring before a program with one has run"))?;
                let bytes = segment_bytes(&model, segment, offset).map_err(|e| NAME.invalid(e))?;
                if slot >= ring.slots() || bytes.end > ring.slot_bytes {
                    return Err(NAME.invalid(format!("bytes {bytes:?} of slot {slot}: the ring lacks them")));
                }
                (RangeKind::Staging, u64::from(slot) * ring.slot_bytes, offset)
            }
            Place::File => return Err(NAME.invalid("a segment of the file is where it is")),
        };
        segment_bytes(&model, segment, offset).map_err(|e| NAME.invalid(e))?;
        let view = file.segment(&Segment { place: Place::File, ..*segment }).map_err(|e| NAME.invalid(e))?;
        for (plane, at) in view.planes.iter().zip(slab(&view, offset)).filter(|(p, _)| !p.is_empty()) {
            let (from, len) = (base + at.start, plane.len() as u64);
            let to = self.memory.bytes_mut(range, from, len).ok_or_else(|| NAME.outside(range, from, len))?;
            to.copy_from_slice(plane);
        }
        Ok(())
    }
}

/// The events of one run.
struct Running<'a> {
    copier: &'a Copier,
    ring: &'a HostRing,
    started: &'a AtomicBool,
    job: std::sync::Mutex<Option<Job>>,
}

impl RingEvents for Running<'_> {
    fn start(&self) {
        self.started.store(true, Ordering::Relaxed);
        let job = self.job.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(job) = job.filter(|j| !j.list.is_empty()) {
            self.copier.start(job);
        }
    }

    fn free(&self, slot: u32) {
        self.copier.free(&self.ring.events, slot);
    }

    fn copied(&self, slot: u32, copies: u64) -> Result<bool, String> {
        let before = self.ring.before.get(slot as usize).copied().unwrap_or(0);
        if self.ring.events.copied(slot) >= before + copies {
            return Ok(true);
        }
        match self.ring.events.is_stopped() {
            true => Err(self.ring.events.failure().unwrap_or_else(|| "the ring was abandoned".to_string())),
            false => Ok(false),
        }
    }
}

impl Provider for HostDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: NAME.0.to_string(),
            description: processor(),
            granule: self.memory.granule,
            kernels: self.executor.level().to_string(),
            threads: self.executor.threads(),
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.file.transposed_bytes()),
            piece_bytes: PIECE_BYTES,
        }
    }

    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        if self.attached.is_some() {
            return Err(NAME.invalid("a model is attached already"));
        }
        check_config(&model, &kv).map_err(|e| NAME.invalid(e))?;
        let file = Arc::new(FileWeights::new(model.clone()).map_err(|e| NAME.invalid(e))?);
        let mut rope = RopeTable::new(&model, file.as_ref()).map_err(|e| NAME.invalid(e))?;
        let positions = self.options.positions.unwrap_or(model.config.max_context).min(rope.limit()).max(1);
        // Before the tables are made: the context length is whatever the file declares.
        let fixed = file.vector_bytes().saturating_add(rope.bytes_for(positions));
        self.memory.fits_fixed(fixed)?;
        rope.grow_to(&model, file.as_ref(), positions - 1).map_err(|e| NAME.invalid(e))?;
        // Room for the model twice, were every row a slab of its own: address space costs nothing.
        let addresses = model.tensors.iter().fold(0u64, |sum, t| {
            let padding = (t.rows * t.format.planes() * headrace_provider::program::PLANE_ALIGN) as u64;
            sum.saturating_add(2 * (t.bytes() as u64 + padding))
        });
        self.memory.attach(fixed, addresses)?;
        self.attached = Some(Attached { model, geometry: kv, file, rope, positions });
        Ok(())
    }

    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        self.strike_memory(FaultPoint::Resize, range, bytes)?;
        let before = self.memory.mapped(range);
        if bytes < before || range == RangeKind::Weights {
            self.fence();
            self.unmappings += 1;
        }
        let mapped = self.memory.resize(range, bytes)?;
        if range == RangeKind::Staging && mapped < before {
            self.forget_ring();
        }
        Ok(mapped)
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.memory.mapped(range)
    }

    fn fixed_bytes(&self) -> u64 {
        self.attached.as_ref().map_or(0, |a| a.file.vector_bytes() + a.rope.bytes())
    }

    fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.strike_memory(FaultPoint::Map, range, bytes)?;
        self.memory.map(range, offset, bytes)
    }

    fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.strike(FaultPoint::Unmap)?;
        self.fence();
        self.unmappings += 1;
        self.memory.unmap(range, offset, bytes)
    }

    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        self.strike(FaultPoint::Load)?;
        if segments.iter().any(|s| matches!(s.place, Place::Slot { .. })) {
            self.fence();
        }
        segments.iter().try_for_each(|segment| self.load_one(segment))?;
        // What was loaded into a slot is all that it holds.
        if let Some(ring) = &mut self.ring {
            for (slot, contents) in (0u32..).zip(&mut ring.contents) {
                let of_slot = |s: &&Segment| matches!(s.place, Place::Slot { slot: of, .. } if of == slot);
                if segments.iter().any(|s| of_slot(&s)) {
                    *contents = Some(segments.iter().filter(of_slot).copied().collect());
                }
            }
        }
        Ok(())
    }

    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        self.fence();
        let source = self.memory.bytes(range, from, bytes).ok_or_else(|| NAME.outside(range, from, bytes))?.as_ptr();
        let target = self.memory.bytes_mut(range, to, bytes).ok_or_else(|| NAME.outside(range, to, bytes))?;
        // SAFETY: both are backed, as was checked; `copy` takes care of an overlap. Nothing else touches them: no step runs,
        // and the fence waited for the copies.
        unsafe { std::ptr::copy(source, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.fence();
        let len = into.len() as u64;
        let bytes = self.memory.bytes(range, offset, len).ok_or_else(|| NAME.outside(range, offset, len))?;
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.fence();
        let len = bytes.len() as u64;
        let to = self.memory.bytes_mut(range, offset, len).ok_or_else(|| NAME.outside(range, offset, len))?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        self.strike(FaultPoint::Record)?;
        let attached = self.attached()?;
        let (model, memory) = (&attached.model, &self.memory);
        let staging = memory.mapped(RangeKind::Staging);
        let needs = if self.checked {
            let mapped = |offset, bytes| memory.weights.as_ref().is_some_and(|w| w.is_mapped(offset, bytes));
            check(&program, model, staging, mapped)
        } else {
            ring_fits(&program, staging).map(|()| Needs::default())
        };
        let needs = needs.map_err(|e| NAME.invalid(e.to_string()))?;
        let weights = device_weights(model, &attached.file, memory, &program);
        let recorded = self.executor.record(program, model, &weights, &memory.workspace, true)?;
        let copies = CopyList::new(&recorded.compiled.program, |s| weight_bytes(model, s));
        let id = self.next_program;
        self.next_program += 1;
        let program = Program { recorded, copies: Arc::new(copies), needs, seen: self.unmappings };
        self.programs.insert(id, program);
        Ok(ProgramId(id))
    }

    fn discard(&mut self, id: ProgramId) {
        self.programs.remove(&id.0);
    }

    fn run(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        output.tokens.clear();
        output.logits.clear();
        let positions = self.attached()?.positions;
        if let Some(row) = input.rows.iter().find(|r| r.position >= positions) {
            return Err(NAME.invalid(format!("position {}: tables are kept for {positions}", row.position)));
        }
        self.ready(id.0)?;
        let fault = self.probe.strikes(FaultPoint::Run);
        let HostDevice { copier, executor, memory, attached, programs, ring, .. } = self;
        let (Some(attached), Some(program)) = (attached.as_mut(), programs.get_mut(&id.0)) else {
            return Err(NAME.invalid(format!("no program {}", id.0)));
        };
        let started = AtomicBool::new(false);
        if let Some(ring) = ring.as_mut() {
            ring.before.copy_from_slice(&ring.started);
        }
        let source = Arc::clone(&attached.file);
        let staging = Staging(memory.staging.base());
        let running = ring.as_ref().filter(|_| !program.copies.counts.is_empty()).map(|ring| Running {
            copier,
            ring,
            started: &started,
            job: std::sync::Mutex::new(Some(Job {
                list: program.copies.clone(),
                ring: ring.events.clone(),
                source,
                staging,
            })),
        });
        let (model, geometry, rope) = (&attached.model, attached.geometry, &mut attached.rope);
        let weights = device_weights(model, &attached.file, memory, &program.recorded.compiled.program);
        let bound = Bound {
            model,
            geometry,
            weights: &weights,
            rope,
            workspace: &mut memory.workspace,
            kv: &mut memory.kv,
            ring: running.as_ref().map(|r| r as &dyn RingEvents),
            fault,
        };
        let result = executor.run(&mut program.recorded, bound, input, output);
        let started = started.load(Ordering::Relaxed);
        if started && let Some(ring) = ring.as_mut() {
            for (started, copies) in ring.started.iter_mut().zip(&program.copies.counts) {
                *started += copies;
            }
        }
        let result = self.settle(id.0, started, result);
        if result.is_err() {
            output.tokens.clear();
            output.logits.clear();
        }
        result
    }
}

fn device_weights<'a>(
    model: &'a ModelSpec,
    file: &'a FileWeights,
    memory: &DeviceMemory,
    program: &StepProgram,
) -> DeviceWeights<'a> {
    let staging = memory.staging.base();
    DeviceWeights {
        model,
        file,
        weights: memory.weights.as_ref().map_or((staging, 0), |w| (w.base(), w.reserved() as u64)),
        slots: (staging, program.slot_bytes, program.slots),
    }
}

impl std::fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostDevice")
            .field("options", &self.options)
            .field("checked", &self.checked)
            .finish_non_exhaustive()
    }
}
