//! Logits of given tokens, without a generation.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use headrace_kv::SequenceId;
use headrace_provider::TokenRow;

use super::step::StepCount;
use super::{Engine, Hook, Progress};
use crate::error::{EngineError, Result};

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

impl Engine {
    /// Logits of the rows of `sequences`, one sequence after the other: of every token, or of each last one.
    ///
    /// # Errors
    /// As [`Engine::start`]; [`EngineError::NonFinite`] if any logit is not finite.
    pub fn logits(&mut self, sequences: &[Vec<u32>], last_only: bool, hook: &mut Hook<'_>) -> Result<Logits> {
        // A panic in the hook is the caller's.
        let mut panicked = None;
        let mut hook = |progress| {
            catch_unwind(AssertUnwindSafe(|| hook(progress))).unwrap_or_else(|panic| {
                panicked = Some(panic);
                Err(EngineError::Interrupted)
            })
        };
        let result = self.guarded(|engine| engine.compute_logits(sequences, last_only, &mut hook));
        match panicked {
            Some(panic) => resume_unwind(panic),
            None => result,
        }
    }

    fn compute_logits(&mut self, sequences: &[Vec<u32>], last_only: bool, hook: &mut Hook<'_>) -> Result<Logits> {
        let vocab = self.model.config.vocab;
        let limits = self.limits();
        for (index, tokens) in sequences.iter().enumerate() {
            let room = match tokens.len() > limits.max_context {
                true => Err(limits.context_error(tokens.len(), 0)),
                false => Ok(()),
            };
            limits.check_tokens(tokens).and(room).map_err(|error| error.of("sequences", index))?;
        }
        self.land();
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
        sequence: SequenceId,
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
            input.rows.extend((first..end).map(|position| TokenRow {
                sequence: 0,
                position,
                token: tokens[position].into(),
            }));
            input.page_tables.resize_with(1, Vec::new);
            self.kv.page_table(sequence, &mut input.page_tables[0])?;
            input.wanted.clear();
            input.wanted.extend((first..end).filter(|p| !last_only || p + 1 == tokens.len()).map(|p| p - first));
            input.want_logits = true;
            let started = Instant::now();
            self.home.run(&self.input, &mut self.output)?;
            self.counters.tokens.steps += 1;
            self.counters.tokens.rows += self.input.rows.len() as u64;
            let count = StepCount { prompt_rows: end - first, ..StepCount::default() };
            self.count_results(started.elapsed(), count);
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
}
