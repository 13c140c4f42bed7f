//! Runs recorded programs on the host's cores: what every device of this crate shares, wherever its weights are.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_model::spec::DecoderConfig;
use headrace_provider::{Buffer, DeviceError, GraphReport, StepInput, StepOutput, StepProgram};

use crate::activations::Activations;
use crate::buffers::StepBuffers;
use crate::compile::{Compiled, compile};
use crate::errors::Named;
use crate::exec::{NON_FINITE, RingEvents, Scratch, Step, prepare};
use crate::kv_pages::KvPages;
use crate::memory::Region;
use crate::pool::{Barrier, Team, default_threads};
use crate::profile::{Profile, STEP};
use crate::rope_table::RopeTable;
use crate::rows::RowPlan;
use crate::simd::SimdLevel;
use crate::weights::WeightSource;

/// A program with the activations that its steps reuse.
pub struct Recorded {
    /// The program, in stages.
    pub compiled: Compiled,
    codes: Vec<Activations>,
    floats: Vec<Vec<f32>>,
    choices: Vec<AtomicUsize>,
}

/// `graphs` with the gauges of the programs that live.
pub fn live<'a>(graphs: &GraphReport, programs: impl Iterator<Item = &'a Recorded>) -> GraphReport {
    let (live, nodes) = programs.fold((0, 0), |(n, ops), p| (n + 1, ops + p.compiled.stages.len() as u64));
    GraphReport { live, nodes, ..graphs.clone() }
}

/// What a step reads and writes.
pub struct Bound<'a> {
    /// Model.
    pub model: &'a ModelSpec,
    /// Geometry of the pages.
    pub geometry: KvGeometry,
    /// Where weights are.
    pub weights: &'a dyn WeightSource,
    /// Angles.
    pub rope: &'a mut RopeTable,
    /// Buffers of a step.
    pub workspace: &'a mut Region,
    /// Pages.
    pub kv: &'a mut Region,
    /// The staging ring, where there is one.
    pub ring: Option<&'a dyn RingEvents>,
    /// True to fail in the middle of the step; for tests.
    pub fault: bool,
}

/// The team, and what it keeps from step to step.
pub struct Executor {
    name: Named,
    team: Team,
    level: SimdLevel,
    plan: RowPlan,
    scratch: Vec<Mutex<Scratch>>,
    profile: Option<Profile>,
}

impl Executor {
    /// Starts the threads: `None` for one a physical core; `level`: `None` for what `HEADRACE_SIMD` asks for, or else
    /// the best one.
    ///
    /// # Errors
    /// If the processor lacks the level, or no threads are wanted or can be started.
    pub fn new(name: Named, threads: Option<usize>, level: Option<SimdLevel>) -> Result<Executor, DeviceError> {
        let level = match level {
            Some(level) => level,
            None => SimdLevel::detect().map_err(|e| name.invalid(e.to_string()))?,
        };
        if !level.is_available() {
            return Err(name.invalid(format!("this processor lacks {level}")));
        }
        let threads = threads.unwrap_or_else(default_threads);
        if threads == 0 {
            return Err(name.invalid("0 threads"));
        }
        let team = Team::new(threads).map_err(|e| name.failed(format!("{threads} threads: {e}")))?;
        let scratch = (0..team.threads()).map(|_| Mutex::default()).collect();
        Ok(Executor { name, team, level, plan: RowPlan::default(), scratch, profile: Profile::from_environment() })
    }

    /// Workers.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Instruction set.
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// Where the time went, if somebody asked for it.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// Checks a program against the model and splits it into stages. `ring`: the device has a staging ring.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] names the instruction and what is wrong with it.
    pub fn record(
        &self,
        program: StepProgram,
        model: &ModelSpec,
        weights: &dyn WeightSource,
        workspace: &Region,
        ring: bool,
    ) -> Result<Recorded, DeviceError> {
        let need = program.workspace_bytes(&model.config);
        if need > workspace.mapped() as u64 {
            return Err(self.name.invalid(format!("the program needs {need} bytes of workspace; map them first")));
        }
        let compiled = compile(program, model, weights, self.team.threads(), ring).map_err(|e| self.name.invalid(e))?;
        Ok(Recorded {
            codes: compiled.shapes.iter().map(|_| Activations::new()).collect(),
            floats: compiled.shapes.iter().map(|_| Vec::new()).collect(),
            choices: (0..compiled.program.max_wanted).map(|_| AtomicUsize::new(0)).collect(),
            compiled,
        })
    }

    /// Runs one step. A program without operations has no step: it starts its copies.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] before anything was computed or copied; [`DeviceError::Failed`] if a worker or the ring
    /// failed in the middle.
    pub fn run(
        &mut self,
        recorded: &mut Recorded,
        bound: Bound<'_>,
        input: &StepInput,
        output: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let Executor { name, team, level, plan, scratch, profile } = self;
        let mut clock = Instant::now();
        let Bound { model, geometry, weights, rope, workspace, kv, ring, fault } = bound;
        let Recorded { compiled, codes, floats, choices } = recorded;
        if compiled.stages.is_empty() {
            if fault {
                return Err(name.failed("a fault that was asked for"));
            }
            if let Some(ring) = ring {
                ring.start();
                compiled.last_frees.iter().for_each(|&slot| ring.free(slot));
            }
            return Ok(());
        }
        let config = &model.config;
        let kv = KvPages::new(kv, geometry);
        plan.plan(input, &compiled.program, &geometry, kv.pages(), config.vocab).map_err(|e| name.invalid(e))?;
        if compiled.has_argmax() {
            plan.chosen.clear();
        }
        rope.grow_to(model, weights, plan.last_position).map_err(|e| name.invalid(e))?;
        let wanted = input.wanted.len();
        let buffers = StepBuffers::new(workspace, &compiled.program, config, input.rows.len(), wanted);
        let buffers = buffers.ok_or_else(|| name.invalid("the workspace was unmapped under the program"))?;
        let mut shared = Vec::with_capacity(compiled.shapes.len());
        prepare(compiled, input, compiled.program.activations, codes, floats, &mut shared);
        for counter in compiled.stages.iter().flat_map(|s| &s.next) {
            counter.store(0, Ordering::Relaxed);
        }
        let step = Step {
            model,
            weights,
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
            ring,
            fault: fault.then_some(compiled.stages.len() / 2),
        };
        let work = |index: usize, barrier: &Barrier| match scratch.get(index) {
            // A worker that panicked left its scratch in some state; every step overwrites what it reads of it.
            Some(scratch) => step.work(index, &mut scratch.lock().unwrap_or_else(|e| e.into_inner()), barrier),
            None => Err(format!("there is no worker {index}")),
        };
        if let Some(ring) = ring {
            ring.start();
        }
        team.run(work).map_err(|e| name.failed(e))?;
        if let Some(ring) = ring {
            compiled.last_frees.iter().for_each(|&slot| ring.free(slot));
        }
        if compiled.has_argmax() {
            output.tokens.extend(step.choices.iter().map(|c| match c.load(Ordering::Relaxed) {
                bad if bad & NON_FINITE != 0 => Err((bad & !NON_FINITE) as u32),
                token => Ok(token as u32),
            }));
            plan.chosen.extend(output.tokens.iter().map(|t| t.unwrap_or_default()));
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

impl Drop for Executor {
    fn drop(&mut self) {
        if let Some(profile) = &self.profile {
            log::info!("{}: {profile}", self.name.0);
        }
    }
}

/// Checks what the executor relies on: sizes that aren't zero, heads that divide, pages of this model.
pub fn check_config(model: &ModelSpec, kv: &KvGeometry) -> Result<(), String> {
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
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or(std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}
