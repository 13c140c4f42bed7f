//! One step for many generations: which rows it holds, what its results mean for each of them.

use std::time::{Duration, Instant};

use headrace_provider::TokenRow;

use super::Engine;
use crate::error::{EngineError, Result};
use crate::run::Run;

impl Engine {
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

    pub(super) fn count_step(&mut self, elapsed: Duration, prompt_rows: usize, given: usize) {
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
}
