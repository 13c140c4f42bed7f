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
mod link;
mod memory;
mod provider;
mod ring;
mod source;

use std::collections::HashMap;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::{ClockReport, DeviceError, GraphReport, Place, RangeKind, Segment};

pub use check::ScheduleError;
pub use fault::{DeviceProbe, Fault, FaultPoint};

use self::check::{Needs, ring_fits};
use self::copier::{Copier, CopyList};
use self::memory::DeviceMemory;
use self::ring::HostRing;
use self::source::{segment_bytes, slab};
use crate::errors::Named;
use crate::executor::{Executor, Recorded};
use crate::in_flight::InFlight;
use crate::rope_table::RopeTable;
use crate::simd::SimdLevel;
use crate::weights::{FileWeights, WeightSource};

/// Name of the device in errors and stats.
const NAME: Named = Named("host-device");

/// Bytes of a piece of weights, unless somebody asks for another size.
const PIECE_BYTES: u64 = 1 << 20;

/// Steps that may be submitted and not collected. Each runs when it is submitted, so that running ahead gains nothing here: it
/// is there so that whoever runs ahead on a card can be tested without one.
const MAX_IN_FLIGHT: usize = 4;

/// How a [`HostDevice`] is made. None of it changes a bit of any result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Threads; `None` for one a physical core that the process may use.
    pub threads: Option<usize>,
    /// Instruction set; `None` for what `HEADRACE_SIMD` asks for, or else the best one.
    pub level: Option<SimdLevel>,
    /// Mapping unit in bytes, a multiple of the system's page.
    pub granule: u64,
    /// Bytes of its physical memory; `None` for all that this process may take.
    pub capacity: Option<u64>,
    /// Positions that rotary tables are kept for; `None` for the context that the model declares. A step beyond is refused.
    pub positions: Option<usize>,
    /// Fill new memory, and slots before each copy, with bytes of ones, a NaN in every float format.
    pub poison: bool,
    /// Name of the memory: devices of one name share it, as providers of one card do. A test instrument.
    pub memory_key: Option<&'static str>,
    /// Bytes of that memory that the process takes once, as a context is. A test instrument.
    pub shared_bytes: u64,
    /// Bytes per second of the link that slots are filled over; `None` for as fast as memory is.
    pub link: Option<u64>,
    /// Bytes per second at which kernels read the host's memory in place, by the word of the device, which holds nobody up; `None`
    /// for as fast as memory is. Means something where `link` is given. A test instrument.
    pub in_place: Option<u64>,
    /// False to refuse kernels the host's memory in place, as a card's driver does where pinning is refused.
    pub pinning: bool,
    /// True to keep GGUF matrices in planes, as a card does. A test instrument: the kernels here are slower for it.
    pub planes: bool,
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
            memory_key: None,
            shared_bytes: 0,
            link: None,
            in_place: None,
            pinning: true,
            planes: false,
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

/// Device `host-device`.
pub struct HostDevice {
    // First, so that its thread is gone before the memory that it writes is.
    copier: Copier,
    executor: Executor,
    memory: DeviceMemory,
    attached: Option<Attached>,
    programs: HashMap<u64, Program>,
    next_program: u64,
    graphs: GraphReport,
    clock: ClockReport,
    ring: Option<HostRing>,
    unmappings: u64,
    options: HostOptions,
    checked: bool,
    probe: DeviceProbe,
    in_flight: InFlight,
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
            graphs: GraphReport::default(),
            clock: ClockReport::default(),
            ring: None,
            unmappings: 0,
            options,
            checked: true,
            probe,
            in_flight: InFlight::default(),
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
            Place::File | Place::HostMapped => return Err(NAME.invalid("a segment on the host is where it is")),
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

impl std::fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostDevice")
            .field("options", &self.options)
            .field("checked", &self.checked)
            .finish_non_exhaustive()
    }
}
