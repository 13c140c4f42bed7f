//! Whole generations: steps until every one of them has ended, and a hook between the steps.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::{Engine, Hook, Progress};
use crate::error::{EngineError, Result};
use crate::options::GenerationOptions;
use crate::run::{Generation, Run};
use crate::serve::{Batcher, Event};

/// What errors call a list of requests.
const PROMPTS: &str = "prompts";

impl Engine {
    /// Runs one generation to its end. The hook is called before every step.
    pub fn generate(&mut self, prompt: &[u32], options: GenerationOptions, hook: &mut Hook<'_>) -> Result<Generation> {
        let mut run = self.start(prompt, options)?;
        // A panic in the hook is the caller's: the run's pages are given back all the same.
        let result = catch_unwind(AssertUnwindSafe(|| self.drive(&mut run, hook)));
        let generation = self.finish(&mut run);
        result.unwrap_or_else(|panic| resume_unwind(panic)).map(|()| generation)
    }

    fn drive(&mut self, run: &mut Run, hook: &mut Hook<'_>) -> Result<()> {
        while run.finish.is_none() {
            let (prompt_done, prompt_total) = run.prompt_progress();
            hook(Progress { prompt_done, prompt_total, new_tokens: run.new_tokens().len() })?;
            self.step(&mut [run])?;
        }
        Ok(())
    }

    /// Runs a generation for each of `requests`, up to `max_batch` of them in one step, each as soon as one before it has ended
    /// and left room. Result `i` is what request `i` gives alone. The hook is called before every step.
    ///
    /// # Errors
    /// The first request's that has one, as [`Engine::start`] and [`Engine::step`] have them, in [`EngineError::Of`] if it is that
    /// request's own; all requests are checked before the first is computed.
    pub fn generate_all(
        &mut self,
        requests: Vec<(Vec<u32>, GenerationOptions)>,
        hook: &mut Hook<'_>,
    ) -> Result<Vec<Generation>> {
        for (index, (prompt, options)) in requests.iter().enumerate() {
            self.limits().check(prompt, options).map_err(|error| error.of(PROMPTS, index))?;
        }
        let mut results: Vec<Option<Generation>> = Vec::new();
        results.resize_with(requests.len(), || None);
        let mut batcher = Batcher::new();
        for (prompt, options) in requests {
            batcher.submit(self, prompt, options)?;
        }
        while !batcher.is_idle() {
            let work = || hook(batcher.progress()).and_then(|()| self.batch_step(&mut batcher, &mut results));
            let stopped = catch_unwind(AssertUnwindSafe(work));
            if !matches!(stopped, Ok(Ok(()))) {
                batcher.abandon(self, EngineError::Interrupted);
            }
            stopped.unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn batch_step(&mut self, batcher: &mut Batcher, results: &mut [Option<Generation>]) -> Result<()> {
        for event in batcher.step(self) {
            if let Event::Ended { id, outcome } = event {
                let index = id.0 as usize;
                let result = outcome.map_err(|error| match Arc::try_unwrap(error) {
                    Ok(own @ EngineError::NonFinite { .. }) => own.of(PROMPTS, index),
                    Ok(other) => other,
                    Err(shared) => EngineError::Shared(shared),
                })?;
                if let Some(place) = results.get_mut(index) {
                    *place = Some(result);
                }
            }
        }
        match batcher.is_blocked() {
            true => Err(EngineError::Busy),
            false => Ok(()),
        }
    }

    /// Runs one greedy generation for each prompt, up to `max_batch` of them in one step; row `i` is what the prompt gives
    /// alone. The hook is called before every step.
    ///
    /// # Errors
    /// As [`Engine::generate_all`].
    pub fn decode_greedy_batch(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_tokens: &[u32],
        hook: &mut Hook<'_>,
    ) -> Result<Vec<Generation>> {
        let options =
            GenerationOptions { stop_tokens: stop_tokens.to_vec(), ..GenerationOptions::greedy(max_new_tokens) };
        self.generate_all(prompts.iter().map(|prompt| (prompt.clone(), options.clone())).collect(), hook)
    }
}
