//! The engine: loads a model, admits generations, runs steps, keeps the books.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headrace_model::tokenizer::Tokenizer;
use headrace_model::{Model, ModelSpec};
use headrace_numerics::CONTRACT_VERSION;
use headrace_provider::{DeviceInfo, Provider, StepInput, StepOutput, TokenRow};

use crate::error::{EngineError, Result};
use crate::home::Home;
use crate::inventory::Inventory;
use crate::kv_state::KvState;
use crate::options::{EngineOptions, GenerationOptions};
use crate::paged::PagedCounters;
use crate::plan::MemoryReport;
use crate::residency::{PolicyKind, Simulation, TensorTrace, simulate};
use crate::run::{FinishReason, Generation, Run, RunTime};
use crate::sampling::Sampler;
use crate::setup::{Chosen, Device, Setup};
use crate::stats::{DeviceStats, GraphStats, PoolStats, Stats, TimeStats, TokenStats, WeightStats};

/// Called between steps; `Err` stops the work, whose pages are given back.
pub type Hook<'a> = dyn FnMut(Progress) -> Result<()> + 'a;

/// What a call has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Prompt tokens that went through a step.
    pub prompt_done: usize,
    /// Prompt tokens of the call.
    pub prompt_total: usize,
    /// Tokens given.
    pub new_tokens: usize,
}

/// Logits of some token rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// `[rows, vocab]`.
    pub values: Vec<f32>,
    /// Number of rows.
    pub rows: usize,
    /// Vocabulary.
    pub vocab: usize,
}

/// A loaded model on a device.
pub struct Engine {
    model: Arc<ModelSpec>,
    tokenizer: Option<Tokenizer>,
    options: EngineOptions,
    max_context: usize,
    home: Home,
    kv: KvState,
    input: StepInput,
    output: StepOutput,
    counters: Counters,
    /// The home's totals when the window opened.
    before: PagedCounters,
    load_time: Duration,
    asked_for: String,
}

#[derive(Clone, Debug, Default)]
struct Counters {
    tokens: TokenStats,
    time: TimeStats,
}

impl Engine {
    /// Loads the model at `path` (a GGUF file, an ONNX directory or its `.onnx` file) onto a device.
    pub fn load(path: &Path, options: EngineOptions) -> Result<Engine> {
        let start = Instant::now();
        options.check()?;
        let Model { spec, tokenizer } = headrace_model::load(path)?;
        let mut engine = Engine::from_spec(Arc::new(spec), tokenizer, options)?;
        engine.load_time = start.elapsed();
        Ok(engine)
    }

    /// An engine for a model that is in memory already.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn from_spec(model: Arc<ModelSpec>, tokenizer: Option<Tokenizer>, options: EngineOptions) -> Result<Engine> {
        let setup = Setup::new(&model, &options)?;
        let chosen = setup.device(&options)?;
        Engine::assemble(model, tokenizer, options, setup, chosen)
    }

    /// An engine on a device of the caller's making, with memory of its own, of which `limit` bytes may be used. The device of
    /// `options` is not looked at.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn on_device(
        model: Arc<ModelSpec>,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
        device: Box<dyn Provider>,
        limit: u64,
    ) -> Result<Engine> {
        let setup = Setup::new(&model, &options)?;
        let chosen = Chosen { device: Device::Paged(device, limit), asked_for: String::new() };
        Engine::assemble(model, tokenizer, options, setup, chosen)
    }

    fn assemble(
        model: Arc<ModelSpec>,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
        setup: Setup,
        chosen: Chosen,
    ) -> Result<Engine> {
        let home = match chosen.device {
            Device::InPlace(provider) => Home::in_place(provider, &model, setup.geometry, &options)?,
            Device::Paged(provider, limit) => Home::paged(provider, &model, &options, setup.sizes(&options, limit))?,
        };
        let kv = KvState::new(setup.geometry, setup.max_context, options.max_batch, &home)?;
        Ok(Engine {
            model,
            tokenizer,
            options,
            max_context: setup.max_context,
            home,
            kv,
            input: StepInput::default(),
            output: StepOutput::default(),
            counters: Counters::default(),
            before: PagedCounters::default(),
            load_time: Duration::ZERO,
            asked_for: chosen.asked_for,
        })
    }

    /// What the model at `path` holds, and what the limit of `options` would mean for it, without loading anything.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn plan(path: &Path, options: &EngineOptions) -> Result<(Inventory, Option<MemoryReport>)> {
        let model = Arc::new(headrace_model::load(path)?.spec);
        let setup = Setup::new(&model, options)?;
        let memory = match setup.device(options)?.device {
            Device::InPlace(_) => None,
            Device::Paged(provider, limit) => {
                Some(Home::plan_paged(provider, &model, options, &setup.sizes(options, limit))?)
            }
        };
        Ok((Inventory::of(&model), memory))
    }

    /// What each policy of `kinds` would move for the model at `path` under the limit of `options`, over `steps` steps, without
    /// loading anything.
    ///
    /// # Errors
    /// As [`Engine::load`]; [`EngineError::Argument`] on a device that reads weights in place.
    pub fn simulate(path: &Path, options: &EngineOptions, kinds: &[PolicyKind], steps: u64) -> Result<Simulation> {
        if !(2..=10_000).contains(&steps) {
            return Err(EngineError::argument("steps", steps, "must be 2 to 10000"));
        }
        // What is checked is what one of the policies would be loaded with.
        let options = EngineOptions { policy: kinds.first().copied(), ..options.clone() };
        let model = Arc::new(headrace_model::load(path)?.spec);
        let setup = Setup::new(&model, &options)?;
        match setup.device(&options)?.device {
            Device::InPlace(_) => {
                Err(EngineError::argument("policy", "", "this device reads weights in place and has no residency"))
            }
            Device::Paged(provider, limit) => {
                let scenario = Home::scenario(provider, &model, &options, &setup.sizes(&options, limit))?;
                Ok(simulate(&scenario, kinds, steps))
            }
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<ModelSpec> {
        &self.model
    }

    /// The model's tokenizer; `None` if its files have none.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// [`EngineError::NoTokenizer`] if its files have none.
    pub fn require_tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or(EngineError::NoTokenizer)
    }

    /// The options it was loaded with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Most positions of a sequence.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// What computes.
    pub fn device(&self) -> DeviceInfo {
        self.home.info()
    }

    /// What the model's files hold.
    pub fn inventory(&self) -> Inventory {
        Inventory::of(&self.model)
    }

    /// Admits a generation. Nothing is computed yet.
    ///
    /// # Errors
    /// An empty prompt, a token outside the vocabulary, a prompt and `max_new_tokens` that don't fit `max_context`, or more
    /// than `max_batch` generations in work.
    pub fn start(&mut self, prompt: &[u32], options: GenerationOptions) -> Result<Run> {
        options.check()?;
        self.check_tokens(prompt)?;
        let room = self.max_context.saturating_sub(prompt.len());
        let new = options.max_new_tokens.unwrap_or(room);
        if new > room || (options.max_new_tokens.is_none() && room == 0) {
            return Err(self.context_error(prompt.len(), new.max(1)));
        }
        let sequence = self.kv.create(prompt.len() + new)?;
        let sampler = Sampler::new(&options);
        let finish = (new == 0).then_some(FinishReason::Length);
        Ok(Run {
            sequence,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            stored: 0,
            max_new: new,
            options,
            sampler,
            finish,
            closed: false,
            time: RunTime::default(),
        })
    }

    /// Gives a generation's pages back and returns its result. A second call changes nothing.
    pub fn finish(&mut self, run: &mut Run) -> Generation {
        if !std::mem::replace(&mut run.closed, true) {
            self.kv.free(run.sequence);
            self.counters.tokens.generations += 1;
            self.relax();
        }
        Generation::of(run)
    }

    /// Gives KV capacity back that is no longer needed. A device that can't is no reason to lose a result: the capacity stays.
    fn relax(&mut self) {
        if let Err(error) = self.kv.relax(&mut self.home) {
            log::warn!("KV memory was not given back: {error}");
        }
    }

    /// Changes the limit of the live engine, whole or not at all.
    ///
    /// # Errors
    /// [`EngineError::Budget`] if the new limit can't hold what is needed; [`EngineError::Kv`] if live sequences were promised
    /// more than it can hold; [`EngineError::Argument`] on a device without a limit. Nothing has changed then.
    pub fn set_vram_limit(&mut self, bytes: u64) -> Result<()> {
        let plan = self.home.plan_for(bytes)?;
        let old = self.home.buckets(self.kv.geometry(), self.max_context, self.options.max_batch)?;
        self.kv.shrink_to_used(&mut self.home)?;
        self.kv.set_buckets(plan.buckets.clone())?;
        if let Err(error) = self.home.set_plan(plan) {
            self.kv.set_buckets(old)?;
            return Err(error);
        }
        Ok(())
    }

    /// What the limit means for the model now; `None` where nothing is limited.
    pub fn memory(&self) -> Option<MemoryReport> {
        let budget = self.home.budget()?;
        let weights = budget.weights();
        Some(MemoryReport::of(&self.model, weights.layout(), budget.plan(), weights.placement()))
    }

    /// A checksum of every resident piece's bytes, read back from the device, in read order; `None` for a cold piece. For
    /// tests: it never changes.
    ///
    /// # Errors
    /// The device's.
    pub fn weight_checksums(&self) -> Result<Vec<Option<u64>>> {
        match self.home.budget() {
            Some(budget) => Ok(budget.weights().checksums()?),
            None => Ok(Vec::new()),
        }
    }

    /// What a residency policy made of each tensor's reads since [`Engine::reset_stats`], in read order; empty under the
    /// static schedule.
    pub fn residency_trace(&self) -> Vec<TensorTrace> {
        self.home.budget().map_or_else(Vec::new, |budget| budget.weights().residency_trace())
    }

    /// One step for all of `runs` that are not finished: the next token of those whose prompt is done, and a chunk of
    /// prompt rows of those whose isn't.
    ///
    /// # Errors
    /// The device's, or [`EngineError::NonFinite`]. The runs keep what they had before the step.
    pub fn step(&mut self, runs: &mut [&mut Run]) -> Result<()> {
        let chunks = self.compose(runs)?;
        if chunks.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        self.home.run(&self.input, &mut self.output)?;
        let elapsed = started.elapsed();
        let vocab = self.model.config.vocab;
        for (wanted, &row) in self.input.wanted.iter().enumerate() {
            if let Err(index) = self.output.tokens[wanted] {
                let position = self.input.rows[row].position;
                return Err(EngineError::NonFinite { position, index: index as usize });
            }
        }
        let (mut wanted, mut prompt_rows, mut given) = (0, 0, 0);
        for &(index, count) in &chunks {
            let run = &mut *runs[index];
            let prompt_before = run.stored.min(run.prompt_len);
            run.stored += count;
            let prompt = run.stored.min(run.prompt_len) - prompt_before;
            prompt_rows += prompt;
            if run.pending() > 0 {
                run.time.prefill += elapsed;
                continue;
            }
            let greedy = self.output.tokens[wanted].unwrap_or_default();
            let token = match &mut run.sampler {
                Some(s) => s.draw(&self.output.logits[wanted * vocab..(wanted + 1) * vocab]),
                None => greedy,
            };
            wanted += 1;
            given += 1;
            if prompt > 0 {
                run.time.prefill += elapsed;
            } else {
                run.time.decode += elapsed;
                run.time.decode_tokens += 1;
            }
            run.take(token, self.max_context);
        }
        self.count_step(elapsed, prompt_rows, given);
        Ok(())
    }

    /// Fills `self.input` with the rows of the next step, and returns the runs that take part, as `(index, rows)`.
    fn compose(&mut self, runs: &mut [&mut Run]) -> Result<Vec<(usize, usize)>> {
        let mut chunks: Vec<(usize, usize)> = Vec::new();
        let mut left = self.options.max_rows();
        // Decode rows first: a long prompt may not keep the others waiting.
        for decode in [true, false] {
            for (index, run) in runs.iter().enumerate() {
                let pending = run.pending();
                if run.finish.is_some() || pending == 0 || (pending == 1) != decode || left == 0 {
                    continue;
                }
                let rows = pending.min(left);
                left -= rows;
                chunks.push((index, rows));
            }
        }
        for &(index, count) in &chunks {
            let run = &*runs[index];
            self.kv.extend(run.sequence, run.stored, run.stored + count, &mut self.home)?;
        }
        let input = &mut self.input;
        input.rows.clear();
        input.wanted.clear();
        input.want_logits = false;
        input.page_tables.resize_with(chunks.len(), Vec::new);
        for (slot, &(index, count)) in chunks.iter().enumerate() {
            let run = &*runs[index];
            self.kv.page_table(run.sequence, &mut input.page_tables[slot])?;
            for position in run.stored..run.stored + count {
                input.rows.push(TokenRow { sequence: slot, position, token: run.tokens[position] });
            }
            if count == run.pending() {
                input.wanted.push(input.rows.len() - 1);
                input.want_logits |= run.sampler.is_some();
            }
        }
        Ok(chunks)
    }

    fn count_step(&mut self, elapsed: Duration, prompt_rows: usize, given: usize) {
        let c = &mut self.counters;
        c.tokens.steps += 1;
        c.tokens.rows += self.input.rows.len() as u64;
        c.tokens.prompt += prompt_rows as u64;
        c.tokens.emitted += given as u64;
        if prompt_rows > 0 {
            c.time.prefill_seconds += elapsed.as_secs_f64();
        } else {
            c.time.decode_seconds += elapsed.as_secs_f64();
            c.time.decode_steps += 1;
            c.time.decode_tokens += given as u64;
        }
    }

    /// Runs one generation to its end. The hook is called before every step.
    pub fn generate(&mut self, prompt: &[u32], options: GenerationOptions, hook: &mut Hook<'_>) -> Result<Generation> {
        let mut run = self.start(prompt, options)?;
        let result = self.drive(&mut [&mut run], hook);
        let generation = self.finish(&mut run);
        result.map(|()| generation)
    }

    /// Runs one greedy generation for each prompt, up to `max_batch` of them in one step; row `i` is what the prompt gives
    /// alone. The hook is called before every step.
    pub fn decode_greedy_batch(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_tokens: &[u32],
        hook: &mut Hook<'_>,
    ) -> Result<Vec<Generation>> {
        let options =
            GenerationOptions { stop_tokens: stop_tokens.to_vec(), ..GenerationOptions::greedy(max_new_tokens) };
        // All are checked before the first is computed.
        for prompt in prompts {
            self.check_tokens(prompt)?;
            if prompt.len() + max_new_tokens > self.max_context {
                return Err(self.context_error(prompt.len(), max_new_tokens));
            }
        }
        let mut done = Vec::with_capacity(prompts.len());
        for group in prompts.chunks(self.options.max_batch) {
            let mut runs = Vec::with_capacity(group.len());
            let mut result = Ok(());
            for prompt in group {
                match self.start(prompt, options.clone()) {
                    Ok(run) => runs.push(run),
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
            }
            if result.is_ok() {
                result = self.drive(&mut runs.iter_mut().collect::<Vec<_>>(), hook);
            }
            done.extend(runs.iter_mut().map(|run| self.finish(run)));
            result?;
        }
        Ok(done)
    }

    fn drive(&mut self, runs: &mut [&mut Run], hook: &mut Hook<'_>) -> Result<()> {
        while runs.iter().any(|r| r.finish.is_none()) {
            let mut progress = Progress::default();
            for run in runs.iter() {
                let (done, total) = run.prompt_progress();
                progress.prompt_done += done;
                progress.prompt_total += total;
                progress.new_tokens += run.new_tokens().len();
            }
            hook(progress)?;
            self.step(runs)?;
        }
        Ok(())
    }

    /// Logits of the rows of `sequences`, one sequence after the other: of every token, or of each last one.
    ///
    /// # Errors
    /// As [`Engine::start`]; [`EngineError::NonFinite`] if any logit is not finite.
    pub fn logits(&mut self, sequences: &[Vec<u32>], last_only: bool, hook: &mut Hook<'_>) -> Result<Logits> {
        let vocab = self.model.config.vocab;
        for tokens in sequences {
            self.check_tokens(tokens)?;
            if tokens.len() > self.max_context {
                return Err(self.context_error(tokens.len(), 0));
            }
        }
        let mut out = Logits { values: Vec::new(), rows: 0, vocab };
        for tokens in sequences {
            let sequence = self.kv.create(tokens.len())?;
            let result = self.logits_of(sequence, tokens, last_only, hook, &mut out);
            self.kv.free(sequence);
            self.relax();
            result?;
        }
        Ok(out)
    }

    fn logits_of(
        &mut self,
        sequence: headrace_kv::SequenceId,
        tokens: &[u32],
        last_only: bool,
        hook: &mut Hook<'_>,
        out: &mut Logits,
    ) -> Result<()> {
        let chunk = match last_only {
            true => self.options.max_rows(),
            false => self.options.max_wanted(self.model.config.vocab),
        };
        let mut first = 0;
        while first < tokens.len() {
            hook(Progress { prompt_done: first, prompt_total: tokens.len(), new_tokens: 0 })?;
            let end = tokens.len().min(first + chunk);
            self.kv.extend(sequence, first, end, &mut self.home)?;
            let input = &mut self.input;
            input.rows.clear();
            input.rows.extend((first..end).map(|position| TokenRow { sequence: 0, position, token: tokens[position] }));
            input.page_tables.resize_with(1, Vec::new);
            self.kv.page_table(sequence, &mut input.page_tables[0])?;
            input.wanted.clear();
            input.wanted.extend((first..end).filter(|p| !last_only || p + 1 == tokens.len()).map(|p| p - first));
            input.want_logits = true;
            let started = Instant::now();
            self.home.run(&self.input, &mut self.output)?;
            self.count_step(started.elapsed(), end - first, 0);
            for (wanted, &row) in self.input.wanted.iter().enumerate() {
                if let Err(index) = self.output.tokens[wanted] {
                    return Err(EngineError::NonFinite { position: first + row, index: index as usize });
                }
            }
            out.values.extend_from_slice(&self.output.logits);
            out.rows += self.input.wanted.len();
            first = end;
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.model.config.vocab;
        if tokens.is_empty() {
            return Err(EngineError::argument("prompt", "[]", "must hold at least one token"));
        }
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(t) => Err(EngineError::argument("token id", t, format!("the vocabulary has {vocab} tokens"))),
            None => Ok(()),
        }
    }

    fn context_error(&self, tokens: usize, new: usize) -> EngineError {
        EngineError::ContextLength {
            tokens,
            new,
            max_context: self.max_context,
            declared: self.model.config.max_context,
        }
    }

    /// Everything counted since [`Engine::reset_stats`], and the gauges.
    ///
    /// # Errors
    /// The governor's, if its books were wrong.
    pub fn stats(&self) -> Result<Stats> {
        let info = self.home.info();
        let weights = self.home.counters();
        let mut stats = Stats {
            contract_version: CONTRACT_VERSION,
            device: DeviceStats {
                name: info.name,
                description: info.description,
                kernels: info.kernels,
                threads: info.threads as u64,
                asked_for: self.asked_for.clone(),
            },
            tokens: self.counters.tokens.clone(),
            weights: WeightStats::between(&self.before, &weights),
            memory: self.home.report()?.iter().flat_map(|r| &r.pools).map(PoolStats::of).collect(),
            kv: self.kv.stats(),
            graph: GraphStats::between(&self.before, &weights),
            time: TimeStats { load_seconds: self.load_time.as_secs_f64(), ..self.counters.time.clone() },
        };
        stats.weights.referenced_bytes = self.model.weight_bytes() as u64;
        stats.weights.repacked_bytes = info.repacked_bytes;
        Ok(stats)
    }

    /// Opens a new window: totals and peaks start again, gauges stay.
    pub fn reset_stats(&mut self) {
        self.counters = Counters::default();
        self.before = self.home.counters();
        self.home.reset_peaks();
        self.kv.reset_stats();
    }
}
