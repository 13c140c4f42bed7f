//! Steps for many generations: which rows the next one holds, how many are in flight, what their results mean.

use std::time::{Duration, Instant};

use headrace_provider::{Token, TokenRow};

use super::Engine;
use super::flight::{Dropped, Flight, Part, View};
use crate::error::{EngineError, Result};
use crate::run::Run;

impl Engine {
    /// One step for all of `runs` that are not finished: the next token of those whose prompt is done, and a chunk of
    /// prompt rows of those whose isn't.
    ///
    /// Where the device allows it and no logits have to come to the host, steps behind it are submitted before its results
    /// are waited for; the next call then finds them on their way. What is in flight for a generation that has ended, that
    /// isn't among `runs` or that was changed in between is dropped: it costs its time and changes nothing.
    ///
    /// # Errors
    /// The device's, or [`EngineError::NonFinite`]. The runs keep what they had before the step.
    pub fn step(&mut self, runs: &mut [&mut Run]) -> Result<()> {
        self.flights.call(runs);
        let dropped = self.flights.drop_unmatched(runs);
        self.count_dropped(dropped);
        while let Some(flight) = self.flights.pop_unwanted() {
            self.discard(&flight);
        }
        if self.flights.is_empty() {
            if let Some(error) = self.flights.take_failure(runs) {
                return Err(error);
            }
            if !self.submit_next(runs)? {
                return Ok(());
            }
        }
        let depth = self.steps_in_flight();
        while self.flights.may_follow(depth) {
            match self.submit_next(runs) {
                Ok(true) => {}
                Ok(false) => break,
                // What is in flight gives its tokens first.
                Err(error) => self.flights.fail(error, runs),
            }
        }
        match self.flights.pop() {
            Some(flight) => self.take(flight, runs),
            None => Ok(()),
        }
    }

    /// Steps that may be in flight: what was asked for, or what the device allows if that is less.
    pub(super) fn steps_in_flight(&mut self) -> usize {
        let (asked, allowed) = (self.options.steps_in_flight, self.home.max_in_flight());
        if allowed < asked && !std::mem::replace(&mut self.said_depth, true) {
            log::info!("{}: {allowed} steps in flight, not the {asked} that were asked for", self.home.info().name);
        }
        asked.min(allowed)
    }

    /// Waits until nothing is in flight, and drops what it gave.
    pub(super) fn land(&mut self) {
        let dropped = self.flights.drop_all();
        self.count_dropped(dropped);
        while let Some(flight) = self.flights.pop() {
            self.discard(&flight);
        }
    }

    /// Collects a step that nobody waits for.
    fn discard(&mut self, flight: &Flight) {
        if let Err(error) = self.home.collect(flight.ticket, &mut self.output) {
            log::warn!("a step that nobody waits for failed: {error}");
        }
        self.flights.landed(flight);
    }

    /// Submits the next step, if there is one: behind others, only one whose tokens the device knows by then and whose pages
    /// are there.
    fn submit_next(&mut self, runs: &mut [&mut Run]) -> Result<bool> {
        let Some(parts) = self.compose(runs)? else { return Ok(false) };
        let submitted = Instant::now();
        let ticket = self.home.submit(&self.input)?;
        self.counters.tokens.steps += 1;
        self.counters.tokens.rows += self.input.rows.len() as u64;
        self.flights.push(Flight { ticket, parts, wants_logits: self.input.want_logits, submitted });
        Ok(true)
    }

    /// Fills `self.input` with the rows of the next step; `None` if there is none.
    fn compose(&mut self, runs: &mut [&mut Run]) -> Result<Option<Vec<Part>>> {
        let views: Vec<View> = runs.iter().map(|run| self.flights.view(run, self.max_context)).collect();
        let mut parts: Vec<Part> = Vec::new();
        let mut left = self.options.max_rows();
        // Decode rows first: a long prompt may not keep the others waiting.
        for decode in [true, false] {
            for (index, (run, view)) in runs.iter().zip(&views).enumerate() {
                let pending = view.tokens - view.stored;
                let known = view.tokens == run.tokens.len() || view.chosen.is_some();
                if !view.open || !known || pending == 0 || (pending == 1) != decode || left == 0 {
                    continue;
                }
                let count = pending.min(left);
                left -= count;
                parts.push(Part { sequence: run.sequence, index, from: view.stored, count, gives: None, live: true });
            }
        }
        if parts.is_empty() {
            return Ok(None);
        }
        for part in &parts {
            let end = part.from + part.count;
            if self.flights.is_empty() {
                self.kv.extend(part.sequence, part.from, end, &mut self.home)?;
            } else if !self.kv.extend_within(part.sequence, part.from, end)? {
                // Growth unmaps and maps: what is in flight lands first.
                return Ok(None);
            }
        }
        let input = &mut self.input;
        input.rows.clear();
        input.wanted.clear();
        input.want_logits = false;
        input.page_tables.resize_with(parts.len(), Vec::new);
        for (slot, part) in parts.iter_mut().enumerate() {
            let (run, view) = (&*runs[part.index], views[part.index]);
            self.kv.page_table(part.sequence, &mut input.page_tables[slot])?;
            for position in part.from..part.from + part.count {
                let token = match (run.tokens.get(position), view.chosen) {
                    (Some(&id), _) => Token::Id(id),
                    (None, Some(wanted)) => Token::Chosen(wanted),
                    // `known` says that there is no such row.
                    (None, None) => return Ok(None),
                };
                input.rows.push(TokenRow { sequence: slot, position, token });
            }
            if part.from + part.count == view.tokens {
                part.gives = Some(input.wanted.len());
                input.wanted.push(input.rows.len() - 1);
                input.want_logits |= run.sampler.is_some();
            }
        }
        Ok(Some(parts))
    }

    /// Waits for the results of a step and gives each generation what is its.
    fn take(&mut self, flight: Flight, runs: &mut [&mut Run]) -> Result<()> {
        let collected = self.home.collect(flight.ticket, &mut self.output);
        let elapsed = self.flights.landed(&flight);
        collected?;
        let live = || flight.parts.iter().filter(|p| p.live);
        for part in live() {
            if let Some(Err(index)) = part.gives.and_then(|wanted| self.output.tokens.get(wanted)) {
                let position = part.from + part.count - 1;
                return Err(EngineError::NonFinite { position, index: *index as usize });
            }
        }
        let vocab = self.model.config.vocab;
        let (mut prompt_rows, mut given) = (0, 0);
        for part in live() {
            let run = &mut *runs[part.index];
            let prompt_before = run.stored.min(run.prompt_len);
            run.stored += part.count;
            let prompt = run.stored.min(run.prompt_len) - prompt_before;
            prompt_rows += prompt;
            let Some(wanted) = part.gives else {
                run.time.prefill += elapsed;
                continue;
            };
            let greedy = self.output.tokens.get(wanted).and_then(|t| t.ok()).unwrap_or_default();
            let token = match &mut run.sampler {
                Some(s) => s.draw(&self.output.logits[wanted * vocab..(wanted + 1) * vocab]),
                None => greedy,
            };
            given += 1;
            if prompt > 0 {
                run.time.prefill += elapsed;
            } else {
                run.time.decode += elapsed;
                run.time.decode_tokens += 1;
            }
            run.take(token, self.max_context);
        }
        self.count_results(elapsed, prompt_rows, given);
        Ok(())
    }

    /// Counts the results of a step that were taken.
    pub(super) fn count_results(&mut self, elapsed: Duration, prompt_rows: usize, given: usize) {
        let c = &mut self.counters;
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

    /// Counts results that were dropped.
    pub(super) fn count_dropped(&mut self, dropped: Dropped) {
        self.counters.tokens.discarded_steps += dropped.steps;
        self.counters.tokens.discarded_rows += dropped.rows;
    }
}
