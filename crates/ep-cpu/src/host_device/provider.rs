//! The host device as a [`Provider`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_model::arrange::in_planes;
use headrace_numerics::format::Format;
use headrace_provider::{
    ClockReport, DeviceError, DeviceInfo, DeviceReport, Instr, LinkCeilings, Op, PhysicalFigure, PhysicalSource, Place,
    ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram, Ticket,
};

use super::check::{Needs, check, ring_fits};
use super::copier::{CopyList, Job, Staging};
use super::fault::FaultPoint;
use super::link::NO_LINK;
use super::memory::DeviceMemory;
use super::ring::Running;
use super::source::{DeviceWeights, weight_bytes};
use super::{Attached, HostDevice, MAX_IN_FLIGHT, NAME, PIECE_BYTES, Program};
use crate::exec::RingEvents;
use crate::executor::{Bound, check_config, live, processor};
use crate::rope_table::RopeTable;
use crate::weights::FileWeights;

impl Provider for HostDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: NAME.0.to_string(),
            description: processor(),
            granule: self.memory.granule,
            kernels: self.executor.level().to_string(),
            threads: self.executor.threads(),
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.file.repacked_bytes()),
            piece_bytes: PIECE_BYTES,
        }
    }

    fn wanted_format(&self, format: Format) -> Format {
        if self.options.planes { in_planes(format).unwrap_or(format) } else { format }
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

    fn expect_at_most(&mut self, range: RangeKind, bytes: u64) {
        self.memory.expect_at_most(range, bytes);
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.memory.mapped(range)
    }

    fn fixed_bytes(&self) -> u64 {
        self.attached.as_ref().map_or(0, |a| a.file.vector_bytes() + a.rope.bytes())
    }

    fn memory_key(&self) -> Option<String> {
        self.options.memory_key.map(str::to_string)
    }

    fn shared_bytes(&self) -> u64 {
        self.options.shared_bytes
    }

    fn report(&self) -> DeviceReport {
        let (vectors, tables) = self.attached.as_ref().map_or((0, 0), |a| (a.file.vector_bytes(), a.rope.bytes()));
        DeviceReport {
            physical: vec![PhysicalFigure { source: PhysicalSource::MapCount, bytes: self.probe.total() }],
            fixed: vec![("vectors", vectors), ("rotary tables", tables)],
            graphs: live(&self.graphs, self.programs.values().map(|p| &p.recorded)),
            clock: ClockReport {
                // Every step is known in all parts.
                sampled_steps: self.clock.steps,
                sampled_seconds: self.clock.step_seconds,
                sampled_bytes: self.probe.copied_bytes(),
                copy_seconds: self.probe.copy_time().as_secs_f64(),
                link_ceiling: self.options.link.map(|link| link as f64),
                ..self.clock.clone()
            },
            ..DeviceReport::default()
        }
    }

    fn reads_host_memory(&self) -> Result<(), String> {
        match self.options.pinning {
            true => Ok(()),
            false => Err(PINNING_REFUSED.to_string()),
        }
    }

    fn ready_link_ceilings(&mut self) -> Result<(), String> {
        match self.options.link {
            Some(_) => Ok(()),
            None => Err(NO_LINK.to_string()),
        }
    }

    fn link_ceilings(&mut self) -> Result<LinkCeilings, String> {
        let link = self.options.link.ok_or(NO_LINK)?;
        self.measured_link(link)
    }

    fn fallbacks(&self) -> Vec<String> {
        self.reads_host_memory().err().into_iter().collect()
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
        let in_place = |i: &Instr| matches!(i, Instr::Op(Op::Linear { segments, .. }) if segments.iter().any(on_host));
        if program.instrs.iter().any(in_place) {
            self.reads_host_memory().map_err(|e| NAME.invalid(e))?;
        }
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
        self.graphs.captures += 1;
        let program = Program { recorded, copies: Arc::new(copies), needs, seen: self.unmappings };
        self.programs.insert(id, program);
        Ok(ProgramId(id))
    }

    fn discard(&mut self, id: ProgramId) {
        self.programs.remove(&id.0);
    }

    fn max_in_flight(&self) -> usize {
        MAX_IN_FLIGHT
    }

    fn submit(&mut self, id: ProgramId, input: &StepInput) -> Result<Ticket, DeviceError> {
        let mut output = self.in_flight.output(MAX_IN_FLIGHT).map_err(|e| NAME.invalid(e))?;
        self.step(id, input, &mut output)?;
        Ok(self.in_flight.keep(output))
    }

    fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), DeviceError> {
        self.in_flight.collect(ticket, output).map_err(|e| NAME.invalid(e))
    }
}

impl HostDevice {
    /// Runs one step to its end.
    fn step(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
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
        let computes = !program.recorded.compiled.stages.is_empty();
        let (started, waited) = (AtomicBool::new(false), AtomicU64::new(0));
        if let Some(ring) = ring.as_mut() {
            ring.before.copy_from_slice(&ring.started);
        }
        let source = Arc::clone(&attached.file);
        let staging = Staging(memory.staging.base());
        let running = ring.as_ref().filter(|_| !program.copies.counts.is_empty()).map(|ring| Running {
            copier,
            ring,
            started: &started,
            waited: &waited,
            job: Mutex::new(Some(Job { list: program.copies.clone(), ring: ring.events.clone(), source, staging })),
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
        let (clock, bytes) = (Instant::now(), program.copies.bytes());
        let result = executor.run(&mut program.recorded, bound, input, output);
        let elapsed = clock.elapsed().as_secs_f64();
        let started = started.load(Ordering::Relaxed);
        if started && let Some(ring) = ring.as_mut() {
            for (started, copies) in ring.started.iter_mut().zip(&program.copies.counts) {
                *started += copies;
            }
        }
        let result = self.settle(id.0, started, result);
        if computes && result.is_ok() {
            self.graphs.replays += 1;
            let clock = &mut self.clock;
            clock.steps += 1;
            clock.step_seconds += elapsed;
            clock.copied_bytes += bytes;
            let waited = Duration::from_nanos(waited.load(Ordering::Relaxed));
            clock.compute_seconds += (elapsed - waited.as_secs_f64()).max(0.0);
        }
        result
    }
}

/// What a host that pins no memory says.
const PINNING_REFUSED: &str = "pinning is refused here: kernels read no host memory in place";

fn on_host(segment: &Segment) -> bool {
    segment.place == Place::HostMapped
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
