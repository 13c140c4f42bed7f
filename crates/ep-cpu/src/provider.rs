//! The provider for device `cpu`: weights from the model file's own mapping, steps on the host's cores.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_model::spec::DecoderConfig;
use headrace_provider::{
    Buffer, DeviceError, DeviceInfo, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram,
};

use crate::activations::Activations;
use crate::buffers::StepBuffers;
use crate::compile::{Compiled, compile};
use crate::exec::{NON_FINITE, Scratch, Step, prepare};
use crate::kv_pages::KvPages;
use crate::memory::{GRANULE, Region, physical_bytes};
use crate::pool::{Team, default_threads};
use crate::profile::{Profile, STEP};
use crate::rope_table::RopeTable;
use crate::rows::RowPlan;
use crate::simd::SimdLevel;
use crate::weights::FileWeights;

/// Name of the device in errors and stats.
const NAME: &str = "cpu";

/// How a [`CpuProvider`] computes. None of it changes a bit of any result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; `None` for one a physical core that the process may use.
    pub threads: Option<usize>,
    /// Instruction set; `None` for what `HEADRACE_SIMD` asks for, or else the best one.
    pub level: Option<SimdLevel>,
}

/// A program with the activations that its steps reuse.
struct Recorded {
    compiled: Compiled,
    codes: Vec<Activations>,
    floats: Vec<Vec<f32>>,
    choices: Vec<AtomicUsize>,
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
    team: Team,
    level: SimdLevel,
    workspace: Region,
    attached: Option<Attached>,
    programs: HashMap<u64, Recorded>,
    next_program: u64,
    plan: RowPlan,
    scratch: Vec<Mutex<Scratch>>,
    profile: Option<Profile>,
}

fn invalid(what: impl Into<String>) -> DeviceError {
    DeviceError::Invalid { device: NAME.to_string(), what: what.into() }
}

fn failed(what: impl Into<String>) -> DeviceError {
    DeviceError::Failed { device: NAME.to_string(), what: what.into() }
}

fn no_range(range: RangeKind) -> DeviceError {
    invalid(format!("{range:?}: this device reads weights from the file's own mapping"))
}

fn not_by_granules(range: RangeKind) -> DeviceError {
    invalid(format!("{range:?}: this device backs the range from its start, by a new size"))
}

fn outside(range: RangeKind, offset: u64, bytes: u64) -> DeviceError {
    invalid(format!("{range:?}: bytes {offset} + {bytes} are not mapped"))
}

/// `offset .. offset + len` within `mapped` bytes.
fn span(offset: u64, len: u64, mapped: usize) -> Option<std::ops::Range<usize>> {
    let (from, end) = (usize::try_from(offset).ok()?, usize::try_from(offset.checked_add(len)?).ok()?);
    (end <= mapped).then_some(from..end)
}

fn no_memory(what: &str, bytes: u64, reason: impl ToString) -> DeviceError {
    DeviceError::OutOfMemory { device: NAME.to_string(), what: what.to_string(), bytes, reason: reason.to_string() }
}

impl CpuProvider {
    /// Starts the threads and reserves address space; no memory is taken yet.
    pub fn new(options: CpuOptions) -> Result<CpuProvider, DeviceError> {
        let level = match options.level {
            Some(level) => level,
            None => SimdLevel::detect().map_err(|e| invalid(e.to_string()))?,
        };
        if !level.is_available() {
            return Err(invalid(format!("this processor lacks {level}")));
        }
        let threads = options.threads.unwrap_or_else(default_threads);
        if threads == 0 {
            return Err(invalid("0 threads"));
        }
        let team = Team::new(threads).map_err(|e| failed(format!("{threads} threads: {e}")))?;
        let reserve = physical_bytes();
        let workspace = Region::reserve(reserve).map_err(|e| no_memory("workspace addresses", reserve as u64, e))?;
        Ok(CpuProvider {
            scratch: (0..team.threads()).map(|_| Mutex::default()).collect(),
            team,
            level,
            workspace,
            attached: None,
            programs: HashMap::new(),
            next_program: 0,
            plan: RowPlan::default(),
            profile: Profile::from_environment(),
        })
    }

    /// Bytes of weights that are kept beside the model file: transposed matrices, vectors as floats.
    pub fn private_weight_bytes(&self) -> u64 {
        self.attached.as_ref().map_or(0, |a| a.weights.transposed_bytes() + a.weights.vector_bytes())
    }

    /// Where the time of the steps so far went; `None` unless `HEADRACE_PROFILE_OPS=1` was set when this was made.
    pub fn profile(&self) -> Option<String> {
        self.profile.as_ref().map(Profile::to_string)
    }

    fn region(&self, range: RangeKind) -> Result<&Region, DeviceError> {
        match range {
            RangeKind::Workspace => Ok(&self.workspace),
            RangeKind::Kv => self.attached.as_ref().map(|a| &a.kv).ok_or_else(|| invalid("no model is attached")),
            RangeKind::Weights | RangeKind::Staging => Err(no_range(range)),
        }
    }

    fn region_mut(&mut self, range: RangeKind) -> Result<&mut Region, DeviceError> {
        match range {
            RangeKind::Workspace => Ok(&mut self.workspace),
            RangeKind::Kv => self.attached.as_mut().map(|a| &mut a.kv).ok_or_else(|| invalid("no model is attached")),
            RangeKind::Weights | RangeKind::Staging => Err(no_range(range)),
        }
    }
}

impl Drop for CpuProvider {
    fn drop(&mut self) {
        if let Some(profile) = &self.profile {
            log::info!("{NAME}: {profile}");
        }
    }
}

impl Provider for CpuProvider {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: NAME.to_string(),
            description: processor(),
            granule: GRANULE as u64,
            kernels: self.level.to_string(),
            threads: self.team.threads(),
            repacked_bytes: self.attached.as_ref().map_or(0, |a| a.weights.transposed_bytes()),
            piece_bytes: 0,
        }
    }

    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        if self.attached.is_some() {
            return Err(invalid("a model is attached already"));
        }
        check_config(&model, &kv).map_err(invalid)?;
        let weights = FileWeights::new(model.clone()).map_err(invalid)?;
        if weights.transposed_bytes() > 0 {
            log::info!("{NAME}: {} bytes of column-major weights were transposed", weights.transposed_bytes());
        }
        let rope = RopeTable::new(&model, &weights).map_err(invalid)?;
        let reserve = physical_bytes();
        let pages = Region::reserve(reserve).map_err(|e| no_memory("KV addresses", reserve as u64, e))?;
        self.attached = Some(Attached { model, geometry: kv, weights, rope, kv: pages });
        Ok(())
    }

    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        let size = usize::try_from(bytes).map_err(|e| no_memory("a range", bytes, e))?;
        if bytes == 0 && matches!(range, RangeKind::Weights | RangeKind::Staging) {
            return Ok(0);
        }
        let region = self.region_mut(range)?;
        // No step is running: `run` borrows the provider mutably and returns only when every worker is done.
        let mapped = region.resize(size).map_err(|e| no_memory(&format!("{range:?}"), bytes, e))?;
        Ok(mapped as u64)
    }

    fn mapped(&self, range: RangeKind) -> u64 {
        self.region(range).map_or(0, |r| r.mapped() as u64)
    }

    fn fixed_bytes(&self) -> u64 {
        0
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
        let source = span(from, bytes, all.len()).ok_or_else(|| outside(range, from, bytes))?;
        let target = span(to, bytes, all.len()).ok_or_else(|| outside(range, to, bytes))?;
        all.copy_within(source, target.start);
        Ok(())
    }

    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let all = self.region(range)?.bytes();
        let len = into.len() as u64;
        let span = span(offset, len, all.len()).ok_or_else(|| outside(range, offset, len))?;
        into.copy_from_slice(&all[span]);
        Ok(())
    }

    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let all = self.region_mut(range)?.bytes_mut();
        let len = bytes.len() as u64;
        let span = span(offset, len, all.len()).ok_or_else(|| outside(range, offset, len))?;
        all[span].copy_from_slice(bytes);
        Ok(())
    }

    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        let attached = self.attached.as_ref().ok_or_else(|| invalid("no model is attached"))?;
        let need = program.workspace_bytes(&attached.model.config);
        if need > self.workspace.mapped() as u64 {
            return Err(invalid(format!("the program needs {need} bytes of workspace; map them first")));
        }
        let compiled = compile(program, &attached.model, &attached.weights, self.team.threads()).map_err(invalid)?;
        let recorded = Recorded {
            codes: compiled.shapes.iter().map(|_| Activations::new()).collect(),
            floats: compiled.shapes.iter().map(|_| Vec::new()).collect(),
            choices: (0..compiled.program.max_wanted).map(|_| AtomicUsize::new(0)).collect(),
            compiled,
        };
        let id = self.next_program;
        self.next_program += 1;
        self.programs.insert(id, recorded);
        Ok(ProgramId(id))
    }

    fn discard(&mut self, id: ProgramId) {
        self.programs.remove(&id.0);
    }

    fn run(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        output.tokens.clear();
        output.logits.clear();
        let CpuProvider { team, level, workspace, attached, programs, plan, scratch, profile, .. } = self;
        let mut clock = Instant::now();
        let attached = attached.as_mut().ok_or_else(|| invalid("no model is attached"))?;
        let Attached { model, geometry, weights, rope, kv } = attached;
        let recorded = programs.get_mut(&id.0).ok_or_else(|| invalid(format!("no program {}", id.0)))?;
        let Recorded { compiled, codes, floats, choices } = recorded;
        let config = &model.config;
        let kv = KvPages::new(kv, *geometry);
        plan.plan(input, &compiled.program, geometry, kv.pages(), config.vocab).map_err(invalid)?;
        rope.grow_to(model, weights, plan.last_position).map_err(invalid)?;
        let wanted = input.wanted.len();
        let buffers = StepBuffers::new(workspace, &compiled.program, config, input.rows.len(), wanted);
        let buffers = buffers.ok_or_else(|| invalid("the workspace was unmapped under the program"))?;
        let mut shared = Vec::with_capacity(compiled.shapes.len());
        prepare(compiled, input, compiled.program.activations, codes, floats, &mut shared);
        for counter in compiled.stages.iter().flat_map(|s| &s.next) {
            counter.store(0, Ordering::Relaxed);
        }
        let step = Step {
            model,
            weights: &*weights,
            compiled,
            input,
            plan,
            buffers: &buffers,
            kv: &kv,
            rope,
            shared: &shared,
            choices: choices.get(..wanted).unwrap_or_default(),
            level: *level,
            workers: team.threads(),
            profile: profile.as_ref(),
        };
        let work = |index: usize, barrier: &crate::pool::Barrier| match scratch.get(index) {
            // A worker that panicked left its scratch in some state; every step overwrites what it reads of it.
            Some(scratch) => step.work(index, &mut scratch.lock().unwrap_or_else(|e| e.into_inner()), barrier),
            None => Err(format!("there is no worker {index}")),
        };
        team.run(work).map_err(failed)?;
        if compiled.has_argmax() {
            output.tokens.extend(step.choices.iter().map(|c| match c.load(Ordering::Relaxed) {
                bad if bad & NON_FINITE != 0 => Err((bad & !NON_FINITE) as u32),
                token => Ok(token as u32),
            }));
        }
        if input.want_logits {
            // SAFETY: every worker has left the step.
            output.logits.extend_from_slice(unsafe { buffers.all(Buffer::Logits) });
        }
        if let Some(profile) = profile {
            profile.lap(STEP, &mut clock);
        }
        Ok(())
    }
}

/// Checks what the executor relies on: sizes that aren't zero, heads that divide, pages of this model.
fn check_config(model: &ModelSpec, kv: &KvGeometry) -> Result<(), String> {
    let DecoderConfig { vocab, hidden, heads, kv_heads, head_dim, ffn, .. } = model.config;
    if [vocab, hidden, heads, kv_heads, head_dim, ffn].contains(&0) || !heads.is_multiple_of(kv_heads) {
        return Err(format!("vocab {vocab}, hidden {hidden}, heads {heads}, {kv_heads}, {head_dim}, ffn {ffn}"));
    }
    if (kv.layers, kv.kv_heads, kv.head_dim) != (model.layers.len(), kv_heads, head_dim) {
        return Err(format!("a KV geometry for {} layers of {} x {}", kv.layers, kv.kv_heads, kv.head_dim));
    }
    let chunk = headrace_numerics::attention::CHUNK;
    if kv.page_tokens == 0 || !kv.page_tokens.is_multiple_of(chunk) {
        return Err(format!("pages of {} positions; a multiple of {chunk} is needed", kv.page_tokens));
    }
    Ok(())
}

/// The processor's name, from Linux's `/proc/cpuinfo`, else its architecture.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or(std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}
