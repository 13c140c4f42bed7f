//! The engine: a loaded model on a device, its limits, and the generations that it admits.

mod counts;
mod flight;
mod generate;
mod limits;
mod load;
mod logits;
mod step;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_model::tokenizer::Tokenizer;
use headrace_provider::{DeviceInfo, DeviceReport, StepInput, StepOutput};

pub use limits::Limits;
pub use logits::Logits;

use flight::Flights;

use crate::error::{EngineError, Result};
use crate::home::Home;
use crate::inventory::Inventory;
use crate::kv_state::KvState;
use crate::laps::Laps;
use crate::options::{EngineOptions, GenerationOptions};
use crate::paged::PagedCounters;
use crate::plan::MemoryReport;
use crate::process::Process;
use crate::residency::TensorTrace;
use crate::run::{FinishReason, Generation, Run, RunTime};
use crate::sampling::Sampler;
use crate::stats::{TimeStats, TokenStats};
use crate::trade::Trade;

/// The text of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
    text.unwrap_or("no message").to_string()
}

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

/// A loaded model on a device.
pub struct Engine {
    model: Arc<ModelSpec>,
    tokenizer: Option<Arc<Tokenizer>>,
    options: EngineOptions,
    max_context: usize,
    home: Home,
    /// What computes.
    device: DeviceInfo,
    /// Where it was loaded.
    process: Process,
    kv: KvState,
    input: StepInput,
    output: StepOutput,
    /// Steps that were submitted and whose results were not taken.
    flights: Flights,
    /// True once it was logged that fewer steps may be in flight than were asked for.
    said_depth: bool,
    counters: Counters,
    /// The home's totals when the window opened.
    before: PagedCounters,
    /// What the device had counted then.
    device_before: DeviceReport,
    /// What loading it took.
    laps: Laps,
    asked_for: String,
}

#[derive(Clone, Debug, Default)]
struct Counters {
    tokens: TokenStats,
    time: TimeStats,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a fork: its threads are not here to be waited for, and its card's context is the parent's.
            std::mem::forget(self.lose("this process is a fork of the engine's".to_string()));
        }
    }
}

impl Engine {
    /// Fails where the engine can't be used any more.
    ///
    /// # Errors
    /// [`EngineError::Forked`], [`EngineError::Failed`].
    pub fn check_usable(&self) -> Result<()> {
        self.process.check()?;
        self.home.check()
    }

    /// Runs `work`, which changes the engine. After a panic nobody knows how far it came: then the engine has failed, what it held
    /// is given back, and every later call gets the same error.
    fn guarded<T>(&mut self, work: impl FnOnce(&mut Engine) -> Result<T>) -> Result<T> {
        self.process.check()?;
        if let Err(error) = self.home.check() {
            if !matches!(self.home, Home::Gone { .. }) {
                return Err(self.fail(error.to_string()));
            }
            return Err(error);
        }
        catch_unwind(AssertUnwindSafe(|| work(self))).unwrap_or_else(|panic| Err(self.fail(panic_text(panic.as_ref()))))
    }

    /// Gives back what the engine held, and has it fail from now on.
    fn fail(&mut self, what: String) -> EngineError {
        log::error!("{}: the engine failed and can't be used any more: {what}", self.device.name);
        let home = self.lose(what.clone());
        if catch_unwind(AssertUnwindSafe(|| drop(home))).is_err() {
            log::error!("{}: its memory may not have been given back: that panicked as well", self.device.name);
        }
        EngineError::Failed(what)
    }

    /// The model's home, which the engine has no more.
    fn lose(&mut self, why: String) -> Home {
        self.flights = Flights::default();
        std::mem::replace(&mut self.home, Home::Gone { info: self.device.clone(), why })
    }

    /// The model.
    pub fn model(&self) -> &Arc<ModelSpec> {
        &self.model
    }

    /// The model's tokenizer; `None` if its files have none.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The options it was loaded with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Most positions of a sequence.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// What every request is checked against.
    pub fn limits(&self) -> Limits {
        Limits {
            vocab: self.model.config.vocab,
            max_context: self.max_context,
            declared: self.model.config.max_context,
        }
    }

    /// True if a generation of at most `positions` positions, prompt and new tokens together, can be started now and reach its
    /// end beside all that were.
    pub fn admits(&self, positions: usize) -> bool {
        self.kv.admits(positions)
    }

    /// KV pages that a sequence of so many positions takes.
    pub fn pages_for(&self, positions: usize) -> usize {
        self.kv.geometry().pages_for(positions)
    }

    /// KV pages that all sequences can be promised together.
    pub fn max_pages(&self) -> usize {
        self.kv.max_pages()
    }

    /// What computes.
    pub fn device(&self) -> DeviceInfo {
        self.device.clone()
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
        self.guarded(|engine| engine.admit(prompt, options))
    }

    fn admit(&mut self, prompt: &[u32], options: GenerationOptions) -> Result<Run> {
        let new = self.limits().check(prompt, &options)?;
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
            draft: Vec::new(),
            kept_logits: Vec::new(),
            drafted: 0,
            accepted: 0,
            time: RunTime::default(),
        })
    }

    /// Gives a generation's pages back and returns its result, kept logits included. A second call changes nothing and
    /// returns the same without the logits. A failed engine has no pages to give back.
    pub fn finish(&mut self, run: &mut Run) -> Generation {
        if !std::mem::replace(&mut run.closed, true) {
            // What is wrong is said by whatever is asked of the engine next.
            let _ = self.guarded(|engine| {
                engine.give_back(run);
                Ok(())
            });
        }
        Generation::of(run)
    }

    fn give_back(&mut self, run: &Run) {
        let dropped = self.flights.drop_sequence(run.sequence);
        self.count_dropped(dropped);
        if self.flights.is_unwanted() {
            self.home.abandon();
        }
        self.kv.free(run.sequence);
        self.counters.tokens.generations += 1;
        self.relax();
    }

    /// Gives KV capacity back that is no longer needed. A device that can't is no reason to lose a result: the capacity stays.
    fn relax(&mut self) {
        if let Some(pages) = self.kv.surplus() {
            self.land();
            if let Err(error) = self.kv.shrink_to(pages, &mut self.home) {
                log::warn!("KV memory was not given back: {error}");
            }
        }
    }

    /// Changes the limit of the live engine, whole or not at all.
    ///
    /// # Errors
    /// `Budget` if the new limit can't hold what is needed; `Kv` if live sequences were promised more than it can hold;
    /// `Argument` on a device without a limit: see [`crate::EngineError`]. Nothing has changed then.
    pub fn set_vram_limit(&mut self, bytes: u64) -> Result<()> {
        self.guarded(|engine| engine.change_limit(bytes))
    }

    fn change_limit(&mut self, bytes: u64) -> Result<()> {
        let plan = self.home.plan_for(bytes)?;
        self.land();
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

    /// What batches of sequences of `length` positions (of `max_context`, where that is less or no length is given) take and
    /// save under the limit; `None` where nothing is limited.
    pub fn trade(&self, length: Option<usize>) -> Option<Trade> {
        self.home.trade(length.unwrap_or(self.max_context))
    }

    /// A checksum of every resident piece's bytes, read back from the device, in read order; `None` for a cold piece. For
    /// tests: it never changes.
    ///
    /// # Errors
    /// The device's.
    pub fn weight_checksums(&self) -> Result<Vec<Option<u64>>> {
        self.check_usable()?;
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
}
