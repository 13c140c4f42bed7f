//! Whole generations: steps until every one of them has ended, and a hook between the steps.

use super::{Engine, Hook, Progress};
use crate::error::Result;
use crate::options::GenerationOptions;
use crate::run::{Generation, Run};

impl Engine {
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
}
