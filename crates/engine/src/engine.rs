//! The engine: a loaded model on a device, its limits, and the generations that it admits.

mod counts;
mod flight;
mod generate;
mod limits;
mod load;
mod logits;
mod step;

use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_model::tokenizer::Tokenizer;
use headrace_provider::{DeviceInfo, DeviceReport, StepInput, StepOutput};

pub use limits::Limits;
pub use logits::Logits;

use flight::Flights;

use crate::error::Result;
use crate::home::Home;
use crate::inventory::Inventory;
use crate::kv_state::KvState;
use crate::laps::Laps;
use crate::options::{EngineOptions, GenerationOptions};
use crate::paged::PagedCounters;
use crate::plan::MemoryReport;
use crate::residency::TensorTrace;
use crate::run::{FinishReason, Generation, Run, RunTime};
use crate::sampling::Sampler;
use crate::stats::{TimeStats, TokenStats};
use crate::trade::Trade;

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

impl Engine {
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
    /// returns the same without the logits.
    pub fn finish(&mut self, run: &mut Run) -> Generation {
        if !std::mem::replace(&mut run.closed, true) {
            let dropped = self.flights.drop_sequence(run.sequence);
            self.count_dropped(dropped);
            if self.flights.is_unwanted() {
                self.home.abandon();
            }
            self.kv.free(run.sequence);
            self.counters.tokens.generations += 1;
            self.relax();
        }
        Generation::of(run)
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
