//! Steps in flight: what each of them holds of which generation, and how far a generation is once they have landed.
//!
//! A generation changes only when a result is taken. So any result may be dropped, whenever that is the simplest thing: what
//! it would have said is computed again, and comes out the same.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use headrace_kv::SequenceId;
use headrace_provider::Ticket;

use crate::error::EngineError;
use crate::run::Run;

/// The rows that a step holds of one generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Whose they are.
    pub sequence: SequenceId,
    /// Where the generation was among those of the step.
    pub index: usize,
    /// Position of the first row.
    pub from: usize,
    /// Rows of tokens that are known or being chosen.
    pub count: usize,
    /// Rows behind them that verify a draft.
    pub draft: usize,
    /// The wanted row that gives the next token, if these are the last rows known.
    pub gives: Option<usize>,
    /// False once nobody waits for the result.
    pub live: bool,
}

/// A step that was submitted.
#[derive(Debug)]
pub(super) struct Flight {
    pub ticket: Ticket,
    pub parts: Vec<Part>,
    /// True if nothing can follow it before its results are there: its logits come to the host, or it holds drafts.
    pub alone: bool,
    pub submitted: Instant,
}

impl Flight {
    fn is_live(&self) -> bool {
        self.parts.iter().any(|p| p.live)
    }

    /// Drops the results.
    pub fn drop_all(&mut self) -> Dropped {
        self.drop_where(|_| true)
    }

    fn drop_where(&mut self, mut unwanted: impl FnMut(&mut Part) -> bool) -> Dropped {
        let (was_live, mut rows) = (self.is_live(), 0);
        for part in self.parts.iter_mut().filter(|p| p.live) {
            if unwanted(part) {
                part.live = false;
                rows += (part.count + part.draft) as u64;
            }
        }
        Dropped { steps: u64::from(was_live && !self.is_live()), rows }
    }
}

/// How far a generation is once everything in flight has landed, if no stop token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// Positions stored.
    pub stored: usize,
    /// Tokens, those included that are being chosen.
    pub tokens: usize,
    /// The wanted row of the last step in flight that chooses the last token, if that one does.
    pub chosen: Option<usize>,
    /// True if it goes on.
    pub open: bool,
}

/// Results that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped {
    /// Steps of which nothing is of use any more.
    pub steps: u64,
    /// Rows.
    pub rows: u64,
}

/// Calls in which a generation has to stay away before steps ahead are submitted again.
const PATIENCE: u32 = 8;

/// Why a step could not be submitted behind others. It is said once those have landed.
#[derive(Debug)]
struct Failure {
    error: EngineError,
    /// The generations that the step was for.
    sequences: Vec<SequenceId>,
}

/// Every step in flight, oldest first.
#[derive(Debug, Default)]
pub(super) struct Flights {
    queue: VecDeque<Flight>,
    failure: Option<Failure>,
    /// When the last result came.
    landed: Option<Instant>,
    /// The generations of the last call that went on after it.
    called: Vec<SequenceId>,
    /// Calls to come that submit no step ahead.
    patience: u32,
}

impl Flights {
    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// True if nobody waits for any of the steps in flight.
    pub fn is_unwanted(&self) -> bool {
        self.queue.iter().all(|flight| !flight.is_live())
    }

    /// Adds a step that was submitted.
    pub fn push(&mut self, flight: Flight) {
        self.queue.push_back(flight);
    }

    /// The next step to land.
    pub fn pop(&mut self) -> Option<Flight> {
        self.queue.pop_front()
    }

    /// The next step to land, if nobody waits for its results.
    pub fn pop_unwanted(&mut self) -> Option<Flight> {
        let unwanted = self.queue.front().is_some_and(|flight| !flight.is_live());
        if unwanted { self.queue.pop_front() } else { None }
    }

    /// The time that the results of `flight`, which have just come, took: from when it was submitted, or from when the results
    /// before came, if that was later.
    pub fn landed(&mut self, flight: &Flight) -> Duration {
        let now = Instant::now();
        let before = self.landed.replace(now);
        now - before.map_or(flight.submitted, |t| t.max(flight.submitted))
    }

    /// Takes note of whom a call steps. Callers that take turns with generations of their own would drop each other's steps:
    /// then none is submitted ahead for a while.
    pub fn call(&mut self, runs: &[&mut Run]) {
        let here = |(i, s): (usize, &SequenceId)| {
            runs.get(i).is_some_and(|r| r.sequence == *s) || runs.iter().any(|r| r.sequence == *s)
        };
        self.patience = match self.called.iter().enumerate().all(here) {
            true => self.patience.saturating_sub(1),
            false => PATIENCE,
        };
        self.called.clear();
        self.called.extend(runs.iter().filter(|r| r.finish.is_none()).map(|r| r.sequence));
    }

    /// True if a step may be submitted behind those in flight, of which there are fewer than `depth`.
    pub fn may_follow(&self, depth: usize) -> bool {
        let follows = self.queue.back().is_some_and(|last| !last.alone);
        follows && self.queue.len() < depth && self.patience == 0 && self.failure.is_none()
    }

    /// Keeps the error of a step ahead until what is in flight has landed.
    pub fn fail(&mut self, error: EngineError, runs: &[&mut Run]) {
        let sequences = runs.iter().filter(|r| r.finish.is_none()).map(|r| r.sequence).collect();
        self.failure = Some(Failure { error, sequences });
    }

    /// The error that was kept for a step of some of `runs`.
    pub fn take_failure(&mut self, runs: &[&mut Run]) -> Option<EngineError> {
        let waits = |run: &&mut Run, f: &Failure| run.finish.is_none() && f.sequences.contains(&run.sequence);
        self.failure.take_if(|failure| runs.iter().any(|run| waits(run, failure))).map(|failure| failure.error)
    }

    /// How far `run` is. What is in flight of it was matched.
    pub fn view(&self, run: &Run, max_context: usize) -> View {
        let mut view = View { stored: run.stored, tokens: run.tokens.len(), chosen: None, open: run.finish.is_none() };
        for flight in &self.queue {
            view.chosen = None;
            for part in flight.parts.iter().filter(|p| p.live && p.sequence == run.sequence) {
                view.stored += part.count;
                view.tokens += usize::from(part.gives.is_some());
                view.chosen = part.gives;
            }
        }
        view.open &= view.tokens == run.tokens.len() || run.goes_on_at(view.tokens, max_context);
        view
    }

    /// Drops results that none of `runs` can take: of generations that ended, aren't there or aren't where they were expected
    /// to be.
    pub fn drop_unmatched(&mut self, runs: &[&mut Run]) -> Dropped {
        let mut next: Vec<usize> = runs.iter().map(|run| run.stored).collect();
        self.drop_where(|part| {
            let is_of = |index: &usize| runs.get(*index).is_some_and(|run| run.sequence == part.sequence);
            let at = Some(part.index).filter(is_of).or_else(|| (0..runs.len()).find(is_of));
            match at {
                Some(at) if runs[at].finish.is_none() && next[at] == part.from => {
                    part.index = at;
                    next[at] += part.count;
                    false
                }
                _ => true,
            }
        })
    }

    /// Drops the results of one generation, which ended.
    pub fn drop_sequence(&mut self, sequence: SequenceId) -> Dropped {
        self.called.retain(|s| *s != sequence);
        if let Some(failure) = &mut self.failure {
            failure.sequences.retain(|s| *s != sequence);
        }
        if let Some(Failure { error, .. }) = self.failure.take_if(|failure| failure.sequences.is_empty()) {
            log::warn!("a step that nobody waits for any more could not be submitted: {error}");
        }
        self.drop_where(|part| part.sequence == sequence)
    }

    /// Drops all results.
    pub fn drop_all(&mut self) -> Dropped {
        self.drop_where(|_| true)
    }

    fn drop_where(&mut self, mut unwanted: impl FnMut(&mut Part) -> bool) -> Dropped {
        let mut dropped = Dropped::default();
        for flight in &mut self.queue {
            let of = flight.drop_where(&mut unwanted);
            dropped.steps += of.steps;
            dropped.rows += of.rows;
        }
        dropped
    }
}
