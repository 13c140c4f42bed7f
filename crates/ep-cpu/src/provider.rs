//! The provider for device `cpu`: weights from the model file's own mapping, steps on the host's cores.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, DeviceInfo, DeviceReport, GraphReport, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput,
    StepProgram, Ticket,
};

use crate::errors::{Named, span};
use crate::executor::{Bound, Executor, Recorded, check_config, live, processor};
use crate::in_flight::InFlight;
use crate::memory::{GRANULE, Region, memory_bytes};
use crate::profile::Profile;
use crate::rope_table::RopeTable;
use crate::simd::SimdLevel;
use crate::weights::FileWeights;

/// Name of the device in errors and stats.
const NAME: Named = Named("cpu");

/// How a [`CpuProvider`] computes. None of it changes a bit of any result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; `None` for one a physical core that the process may use.
    pub threads: Option<usize>,
    /// Instruction set; `None` for what `HEADRACE_SIMD` asks for, or else the best one.
    pub level: Option<SimdLevel>,
}

struct Attached {
    model: Arc<ModelSpec>,
    geometry: KvGeometry,
    weights: FileWeights,
    rope: RopeTable,
    kv: Region,
}

/// Device `cpu`.
pub struct CpuProvider {
    executor: Executor,
    workspace: Region,
    attached: Option<Attached>,
    programs: HashMap<u64, Recorded>,
    next_program: u64,
    in_flight: InFlight,
    graphs: GraphReport,
}

fn no_range(range: RangeKind) -> DeviceError {
    NAME.invalid(format!("{range:?}: this device reads weights from the file's own mapping"))
}

fn not_by_granules(range: RangeKind) -> DeviceError {
    NAME.invalid(format!("{range:?}: this device backs the range from its start, by a new size"))
}

impl CpuProvider {
    /// Starts the threads and reserves address space; no memory is taken yet.
    pub fn new(options: CpuOptions) -> Result<CpuProvider, DeviceError> {
        let executor = Executor::new(NAME, options.threads, options.level)?;
        let most = memory_bytes();
        let workspace =
            Region::later(most, GRANULE).map_err(|e| NAME.no_memory("workspace addresses", most as u64, e))?;
        Ok(CpuProvider {
            executor,
            workspace,
            attached: None,
            programs: HashMap::new(),
            next_program: 0,
            in_flight: InFlight::default(),
            graphs: GraphReport::default(),
        })
    }

    /// Bytes of weights that are kept beside the model file: transposed matrices, vectors as floats.
    pub fn private_weight_bytes(&self) -> u64 {
        self.attached.as_ref().map_or(0, |a| a.weights.repacked_bytes() + a.weights.vector_bytes())
    }

    /// Where the time of the steps so far went; `None` unless `HEADRACE_PROFILE_OPS=1` was set when this was made.
    pub fn profile(&self) -> Option<String> {
        self.executor.profile().map(Profile::to_string)
    }

    fn region(&self, range: RangeKind) -> Result<&Region, DeviceError> {
        match range {
            RangeKind::Workspace => Ok(&self.workspace),
            RangeKind::Kv => self.attached.as_ref().map(|a| &a.kv).ok_or_else(|| NAME.invalid("no model is attached")),
            RangeKind::Weights | RangeKind::Staging => Err(no_range(range)),
        }
    }

    fn region_mut(&mut self, range: RangeKind) -> Result<&mut Region, DeviceError> {
        match range {
            RangeKind::Workspace => Ok(&mut self.workspace),
            RangeKind::Kv => {
                self.attached.as_mut().map(|a| &mut a.kv).ok_or_else(|| NAME.invalid("no model is attached"))
            }
            RangeKind::Weights | RangeKind::Staging => Err(no_range(range)),
        }
    }
}

impl Provider for CpuProvider {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: NAME.0.to_string(),
            description: processor(),
            granule: GRANULE as u64,
            kernels: self.executor.level().to_string(),
            threads: self.executor.threads(),
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.weights.repacked_bytes()),
            piece_bytes: 0,
        }
    }

    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        if self.attached.is_some() {
            return Err(NAME.invalid("a model is attached already"));
        }
        check_config(&model, &kv).map_err(|e| NAME.invalid(e))?;
        let weights = FileWeights::new(model.clone()).map_err(|e| NAME.invalid(e))?;
        if weights.repacked_bytes() > 0 {
            log::info!("{}: {} bytes of column-major weights were transposed", NAME.0, weights.repacked_bytes());
        }
        let rope = RopeTable::new(&model, &weights).map_err(|e| NAME.invalid(e))?;
        let most = memory_bytes();
        let pages = Region::later(most, GRANULE).map_err(|e| NAME.no_memory("KV addresses", most as u64, e))?;
        self.attached = Some(Attached { model, geometry: kv, weights, rope, kv: pages });
        Ok(())
    }

    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        let size = usize::try_from(bytes).map_err(|e| NAME.no_memory("a range", bytes, e))?;
        if bytes == 0 && matches!(range, RangeKind::Weights | RangeKind::Staging) {
            return Ok(0);
        }
        let region = self.region_mut(range)?;
        // No step is running: `run` borrows the provider mutably and returns only when every worker is done.
        let mapped = region.resize(size).map_err(|e| NAME.no_memory(format!("{range:?}"), bytes, e))?;
        Ok(mapped as u64)
    }

    fn expect_at_most(&mut self, range: RangeKind, bytes: u64) {
        if let Ok(region) = self.region_mut(range) {
            region.expect(bytes);
        }
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.region(range).map_or(0, |r| r.mapped() as u64)
    }

    fn fixed_bytes(&self) -> u64 {
        0
    }

    fn report(&self) -> DeviceReport {
        DeviceReport { graphs: live(&self.graphs, self.programs.values()), ..DeviceReport::default() }
    }

    fn map(&mut self, range: RangeKind, _offset: u64, _bytes: u64) -> Result<(), DeviceError> {
        self.region(range)?;
        Err(not_by_granules(range))
    }

    fn unmap(&mut self, range: RangeKind, _offset: u64, _bytes: u64) -> Result<(), DeviceError> {
        self.region(range)?;
        Err(not_by_granules(range))
    }

    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        if segments.is_empty() { Ok(()) } else { Err(no_range(RangeKind::Weights)) }
    }

    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        let all = self.region_mut(range)?.bytes_mut();
        let source = span(from, bytes, all.len()).ok_or_else(|| NAME.outside(range, from, bytes))?;
        let target = span(to, bytes, all.len()).ok_or_else(|| NAME.outside(range, to, bytes))?;
        all.copy_within(source, target.start);
        Ok(())
    }

    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let all = self.region(range)?.bytes();
        let len = into.len() as u64;
        let span = span(offset, len, all.len()).ok_or_else(|| NAME.outside(range, offset, len))?;
        into.copy_from_slice(&all[span]);
        Ok(())
    }

    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let all = self.region_mut(range)?.bytes_mut();
        let len = bytes.len() as u64;
        let span = span(offset, len, all.len()).ok_or_else(|| NAME.outside(range, offset, len))?;
        all[span].copy_from_slice(bytes);
        Ok(())
    }

    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        let attached = self.attached.as_ref().ok_or_else(|| NAME.invalid("no model is attached"))?;
        let recorded = self.executor.record(program, &attached.model, &attached.weights, &self.workspace, false)?;
        let id = self.next_program;
        self.next_program += 1;
        self.graphs.captures += 1;
        self.programs.insert(id, recorded);
        Ok(ProgramId(id))
    }

    fn discard(&mut self, id: ProgramId) {
        self.programs.remove(&id.0);
    }

    fn submit(&mut self, id: ProgramId, input: &StepInput) -> Result<Ticket, DeviceError> {
        let mut output = self.in_flight.output(self.max_in_flight()).map_err(|e| NAME.invalid(e))?;
        self.step(id, input, &mut output)?;
        Ok(self.in_flight.keep(output))
    }

    fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), DeviceError> {
        self.in_flight.collect(ticket, output).map_err(|e| NAME.invalid(e))
    }
}

impl CpuProvider {
    /// Runs one step to its end.
    fn step(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        let CpuProvider { executor, workspace, attached, programs, graphs, .. } = self;
        let attached = attached.as_mut().ok_or_else(|| NAME.invalid("no model is attached"))?;
        let recorded = programs.get_mut(&id.0).ok_or_else(|| NAME.invalid(format!("no program {}", id.0)))?;
        let Attached { model, geometry, weights, rope, kv } = attached;
        let bound = Bound { model, geometry: *geometry, weights, rope, workspace, kv, ring: None, fault: false };
        executor.run(recorded, bound, input, output)?;
        graphs.replays += 1;
        Ok(())
    }
}
