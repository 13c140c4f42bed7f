//! Steps for many generations: which rows the next one holds, how many are in flight, what their results mean.

use std::time::{Duration, Instant};

use headrace_provider::{Token, TokenRow};

use super::Engine;
use super::flight::{Dropped, Flight, Part, View};
use crate::error::{EngineError, Result};
use crate::run::Run;
use crate::serve::draft;

/// What became of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is in flight.
    Submitted,
    /// There is none to submit now.
    Nothing,
    /// What it would have followed was dropped for another engine.
    Overtaken,
}

/// What a step's results were, for the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepCount {
    pub(super) prompt_rows: usize,
    pub(super) given: usize,
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    pub(super) drafts: usize,
}

impl Engine {
    /// One step for all of `runs` that are not finished: the next token of those whose prompt is done (with a draft that is
    /// right, the next tokens), and a chunk of prompt rows of those whose isn't.
    ///
    /// Where the device allows it and no logits have to come to the host, steps behind it are submitted before its results
    /// are waited for; the next call then finds them on their way. What is in flight for a generation that has ended, that
    /// isn't among `runs` or that was changed in between is dropped: it costs its time and changes nothing.
    ///
    /// # Errors
    /// The device's: the runs keep what they had before the step. [`EngineError::NonFinite`]: the run at fault does.
    pub fn step(&mut self, runs: &mut [&mut Run]) -> Result<()> {
        match self.step_each(runs)?.into_iter().next() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// As [`Engine::step`], but what is wrong with single runs comes as `(index, error)` beside the others' success.
    ///
    /// # Errors
    /// The device's; [`EngineError::Failed`] after a panic.
    pub(crate) fn step_each(&mut self, runs: &mut [&mut Run]) -> Result<Vec<(usize, EngineError)>> {
        self.guarded(|engine| {
            loop {
                match engine.try_step(runs)? {
                    Some(failed) => return Ok(failed),
                    // Another engine took weights in the middle of it: from the beginning, with nothing in flight.
                    None => engine.land(),
                }
            }
        })
    }

    /// One attempt; `None` if another engine has had dropped what was in flight.
    fn try_step(&mut self, runs: &mut [&mut Run]) -> Result<Option<Vec<(usize, EngineError)>>> {
        if self.home.take_overtaken() {
            self.land();
        }
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
            match self.submit_next(runs)? {
                Next::Submitted => {}
                Next::Nothing => return Ok(Some(Vec::new())),
                Next::Overtaken => return Ok(None),
            }
        }
        let depth = self.steps_in_flight();
        while self.flights.may_follow(depth) {
            match self.submit_next(runs) {
                Ok(Next::Submitted) => {}
                Ok(Next::Nothing) => break,
                Ok(Next::Overtaken) => return Ok(None),
                // What is in flight gives its tokens first.
                Err(error) => self.flights.fail(error, runs),
            }
        }
        match self.flights.pop() {
            Some(flight) => self.take(flight, runs),
            None => Ok(Some(Vec::new())),
        }
    }

    /// Steps that may be in flight behind the one that was submitted last, whose weights are where they are now.
    fn steps_in_flight(&mut self) -> usize {
        let (wanted, allowed) = (self.in_flight(), self.home.max_in_flight());
        let asked = self.options.steps_in_flight.is_some();
        if asked && allowed < wanted && !std::mem::replace(&mut self.said_depth, true) {
            log::info!("{}: {allowed} steps in flight, not the {wanted} that were asked for", self.home.info().name);
        }
        wanted.min(allowed)
    }

    /// Steps that may be in flight by the options and by where the weights are now, whatever the device allows.
    pub(super) fn in_flight(&self) -> usize {
        self.options.in_flight(self.home.has_cold())
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
    fn submit_next(&mut self, runs: &mut [&mut Run]) -> Result<Next> {
        let Some(parts) = self.compose(runs)? else { return Ok(Next::Nothing) };
        let submitted = Instant::now();
        let Some(ticket) = self.home.submit(&self.input)? else { return Ok(Next::Overtaken) };
        self.counters.tokens.steps += 1;
        self.counters.tokens.rows += self.input.rows.len() as u64;
        // A draft is made of known tokens: nothing can be drafted behind a step whose tokens aren't.
        let drafting = |part: &Part| part.gives.is_some() && runs[part.index].options.speculation > 0;
        let alone = self.input.want_logits || parts.iter().any(drafting);
        self.flights.push(Flight { ticket, parts, alone, submitted });
        Ok(Next::Submitted)
    }

    /// Fills `self.input` with the rows of the next step; `None` if there is none. Rows of runs that decode come first: a long
    /// prompt may not keep them waiting. Then prompts, in the order of `runs`; then drafts, as room is left.
    fn compose(&mut self, runs: &mut [&mut Run]) -> Result<Option<Vec<Part>>> {
        let views: Vec<View> = runs.iter().map(|run| self.flights.view(run, self.max_context)).collect();
        let mut parts: Vec<Part> = Vec::new();
        let mut left = self.options.max_rows();
        for decode in [true, false] {
            for (index, (run, view)) in runs.iter().zip(&views).enumerate() {
                let pending = view.tokens - view.stored;
                let known = view.tokens == run.tokens.len() || view.chosen.is_some();
                if !view.open || !known || pending == 0 || (pending == 1) != decode || left == 0 {
                    continue;
                }
                let count = pending.min(left);
                left -= count;
                parts.push(Part {
                    sequence: run.sequence,
                    index,
                    from: view.stored,
                    count,
                    draft: 0,
                    gives: None,
                    live: true,
                });
            }
        }
        if parts.is_empty() {
            return Ok(None);
        }
        self.draft(runs, &views, &mut parts, left);
        for part in &parts {
            let end = part.from + part.count + part.draft;
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
                let end = part.from + part.count;
                let row = |(at, &id)| TokenRow { sequence: slot, position: end + at, token: Token::Id(id) };
                part.gives = Some(input.wanted.len());
                input.rows.extend(run.draft[..part.draft].iter().enumerate().map(row));
                input.wanted.extend(input.rows.len() - 1 - part.draft..input.rows.len());
                input.want_logits |= run.sampler.is_some() || run.options.keep_logits;
            }
        }
        Ok(Some(parts))
    }

    /// Drafts what the runs that decode may say next, as far as there is room for `left` more rows.
    fn draft(&self, runs: &mut [&mut Run], views: &[View], parts: &mut [Part], mut left: usize) {
        let complete = parts.iter().filter(|p| p.from + p.count == views[p.index].tokens).count();
        let mut wanted = self.options.max_wanted(self.model.config.vocab).saturating_sub(complete);
        for part in parts {
            let (run, view) = (&mut *runs[part.index], views[part.index]);
            if run.options.speculation == 0 || view.tokens != run.tokens.len() || part.from < run.prompt_len {
                continue;
            }
            // The row after the last drafted token gives one token more.
            let room = run.max_new.saturating_sub(run.new_tokens().len() + 1);
            let most = run.options.speculation.min(room).min(left).min(wanted);
            run.draft.clear();
            run.draft.extend_from_slice(draft::look_up(&run.tokens, most));
            part.draft = run.draft.len();
            left -= part.draft;
            wanted -= part.draft;
        }
    }

    /// Waits for the results of a step and gives each generation what is its. What is wrong with single ones is returned; `None`
    /// if the results were dropped for another engine.
    fn take(&mut self, mut flight: Flight, runs: &mut [&mut Run]) -> Result<Option<Vec<(usize, EngineError)>>> {
        let collected = self.home.collect(flight.ticket, &mut self.output);
        let elapsed = self.flights.landed(&flight);
        if !collected? {
            let dropped = flight.drop_all();
            self.count_dropped(dropped);
            return Ok(None);
        }
        let mut failed = Vec::new();
        let mut count = StepCount::default();
        for part in flight.parts.iter().filter(|p| p.live) {
            let run = &mut *runs[part.index];
            let prompt = part.count.min(run.prompt_len.saturating_sub(run.stored));
            let given = match part.gives {
                Some(first) => match self.take_tokens(run, part, first, &mut count) {
                    Ok(given) => given,
                    Err(error) => {
                        failed.push((part.index, error));
                        continue;
                    }
                },
                None => {
                    run.stored += part.count;
                    0
                }
            };
            count.prompt_rows += prompt;
            count.given += given;
            if prompt > 0 {
                run.time.prefill += elapsed;
            } else {
                run.time.decode += elapsed;
                run.time.decode_tokens += given;
            }
        }
        self.count_results(elapsed, count);
        Ok(Some(failed))
    }

    /// Gives `run` the tokens that the step chose for it, whose results begin at wanted row `first`: one, and one more for each
    /// drafted token that was right. Returns how many.
    fn take_tokens(&self, run: &mut Run, part: &Part, first: usize, count: &mut StepCount) -> Result<usize> {
        let vocab = self.model.config.vocab;
        let (mut given, mut accepted) = (0, 0);
        for (at, choice) in self.output.tokens[first..=first + part.draft].iter().enumerate() {
            let greedy = match *choice {
                Ok(token) => token,
                Err(index) if at == 0 => {
                    let position = part.from + part.count - 1;
                    return Err(EngineError::NonFinite { position, index: index as usize });
                }
                // The token before it stands. Its own row comes again as the next step's first, and fails there.
                Err(_) => {
                    accepted -= 1;
                    break;
                }
            };
            let logits = || &self.output.logits[(first + at) * vocab..(first + at + 1) * vocab];
            let token = run.sampler.as_mut().map_or(greedy, |sampler| sampler.draw(logits()));
            if run.options.keep_logits {
                run.kept_logits.extend_from_slice(logits());
            }
            run.take(token, self.max_context);
            given += 1;
            if run.finish.is_some() || at == part.draft || run.draft[at] != token {
                break;
            }
            accepted += 1;
        }
        // Positions of drafted tokens that were wrong are not counted as stored: the next rows are written over them.
        run.stored += part.count + accepted;
        run.drafted += part.draft;
        run.accepted += accepted;
        count.drafted += part.draft;
        count.accepted += accepted;
        count.drafts += usize::from(part.draft > 0);
        Ok(given)
    }

    /// Counts the results of a step that were taken.
    pub(super) fn count_results(&mut self, elapsed: Duration, count: StepCount) {
        let StepCount { prompt_rows, given, .. } = count;
        let c = &mut self.counters;
        c.tokens.prompt += prompt_rows as u64;
        c.tokens.emitted += given as u64;
        c.tokens.drafted += count.drafted as u64;
        c.tokens.accepted += count.accepted as u64;
        c.tokens.drafts += count.drafts as u64;
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
