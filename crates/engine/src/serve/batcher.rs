//! Which requests are in work, which wait, and what each step gave them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::bound::{Work, steps_until_started};
use crate::engine::{Engine, Progress};
use crate::error::{EngineError, Result};
use crate::options::GenerationOptions;
use crate::run::{FinishReason, Generation, Run};

/// Names a request. Later requests have larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// How a request ended. An error of the device is that of all requests in work, hence shared.
pub type Outcome = std::result::Result<Generation, Arc<EngineError>>;

/// What happened to a request.
#[derive(Clone, Debug)]
pub enum Event {
    /// It is in work, and reaches its end beside all others that are.
    Started {
        /// Which.
        id: RequestId,
        /// Steps taken while it waited.
        waited: u64,
    },
    /// A token was chosen for it.
    Token {
        /// Which.
        id: RequestId,
        /// The token.
        token: u32,
    },
    /// It ended. Nothing follows.
    Ended {
        /// Which.
        id: RequestId,
        /// How.
        outcome: Outcome,
    },
}

/// A request that waits for a seat and for pages.
#[derive(Debug)]
struct Waiting {
    id: RequestId,
    prompt: Vec<u32>,
    options: GenerationOptions,
    /// Most new tokens.
    new: usize,
    /// Steps taken when it came.
    since: u64,
}

/// A request that has a seat.
#[derive(Debug)]
struct Running {
    id: RequestId,
    run: Run,
    /// New tokens that events told of.
    told: usize,
}

/// Continuous generation on one engine, as a state machine without threads or clocks. The engine is lent to each call that needs
/// it, so that others may use it in between.
///
/// Requests start in the order in which they came: a request starts as soon as one of `max_batch` seats is free and the KV pages
/// that it may come to need are promised to nobody else, and none starts before an earlier one. So a request that is in work
/// always reaches its end, and one that waits does so for a bounded number of steps ([`Batcher::waiting_bound`]).
///
/// Every request of a step gets one row at least when it decodes; prompts share what room is left, again in order.
#[derive(Debug, Default)]
pub struct Batcher {
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    events: Vec<Event>,
    next: u64,
    steps: u64,
    /// True if the last step had requests and could start none.
    blocked: bool,
    /// What all requests ever submitted amount to; `prompt_done` without those that run.
    progress: Progress,
}

impl Batcher {
    /// Without requests.
    pub fn new() -> Batcher {
        Batcher::default()
    }

    /// Takes a request, to start when its turn comes.
    ///
    /// # Errors
    /// As [`Engine::start`], but for the pages, for which it waits.
    pub fn submit(&mut self, engine: &Engine, prompt: Vec<u32>, options: GenerationOptions) -> Result<RequestId> {
        let new = engine.limits().check(&prompt, &options)?;
        let id = RequestId(self.next);
        self.next += 1;
        self.progress.prompt_total += prompt.len();
        self.waiting.push_back(Waiting { id, prompt, options, new, since: self.steps });
        Ok(id)
    }

    /// Ends a request, whatever it is at; its pages are free at once. What it gave so far is its result. False if it has ended
    /// already.
    pub fn cancel(&mut self, engine: &mut Engine, id: RequestId) -> bool {
        if let Ok(at) = self.waiting.binary_search_by_key(&id, |w| w.id) {
            if let Some(waiting) = self.waiting.remove(at) {
                self.events.push(Event::Ended { id, outcome: Ok(never_started(&waiting)) });
            }
            return true;
        }
        let Ok(at) = self.running.binary_search_by_key(&id, |r| r.id) else { return false };
        let mut running = self.running.remove(at);
        running.run.finish.get_or_insert(FinishReason::Cancelled);
        self.end(engine, running, None);
        true
    }

    /// One step: starts whom it can, runs the engine once, and returns what happened since the last call. Empty if there is
    /// nothing to do.
    ///
    /// What goes wrong is the outcome of the requests that it went wrong for: a logit that isn't finite ends one request, a
    /// failure of the device those that were in work. The requests that wait go on.
    pub fn step(&mut self, engine: &mut Engine) -> Vec<Event> {
        self.start(engine);
        self.blocked = self.running.is_empty() && !self.waiting.is_empty();
        let mut runs: Vec<&mut Run> = self.running.iter_mut().map(|r| &mut r.run).collect();
        if runs.iter().any(|run| run.finish.is_none()) {
            self.steps += 1;
            let failed = match engine.step_each(&mut runs) {
                Ok(failed) => failed.into_iter().map(|(at, error)| (at, Arc::new(error))).collect(),
                Err(error) => {
                    let error = Arc::new(error);
                    (0..runs.len()).map(|at| (at, error.clone())).collect::<Vec<_>>()
                }
            };
            self.collect(engine, &failed);
        }
        std::mem::take(&mut self.events)
    }

    /// Ends every request with the same error. For a caller whose engine can't go on.
    pub fn abandon(&mut self, engine: &mut Engine, error: EngineError) -> Vec<Event> {
        let error = Arc::new(error);
        for running in std::mem::take(&mut self.running) {
            self.end(engine, running, Some(error.clone()));
        }
        for waiting in self.waiting.drain(..) {
            self.events.push(Event::Ended { id: waiting.id, outcome: Err(error.clone()) });
        }
        std::mem::take(&mut self.events)
    }

    /// True if no request waits or is in work, and no event is to be told.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.events.is_empty()
    }

    /// True if the last step could do nothing for requests that wait: somebody else holds the engine's pages.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Requests that wait, and requests that are in work.
    pub fn requests(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Prompt tokens done and in all, and tokens given, of all requests ever submitted.
    pub fn progress(&self) -> Progress {
        let running: usize = self.running.iter().map(|r| r.run.prompt_progress().0).sum();
        Progress { prompt_done: self.progress.prompt_done + running, ..self.progress }
    }

    /// Most steps that a request which waits goes on waiting, however long the requests before it turn out to be and whoever
    /// comes after it; `None` if it doesn't wait. Holds while nobody else uses the engine's pages, no limit is changed and no
    /// step fails.
    pub fn waiting_bound(&self, engine: &Engine, id: RequestId) -> Option<u64> {
        let at = self.waiting.binary_search_by_key(&id, |w| w.id).ok()?;
        let pages = |positions| engine.pages_for(positions);
        let running = self.running.iter().map(|r| {
            let (done, prompt) = r.run.prompt_progress();
            let new = r.run.max_new - r.run.new_tokens().len();
            Work { prompt: prompt - done, new, pages: pages(prompt + r.run.max_new) }
        });
        let waiting = self.waiting.iter().take(at);
        let work = |w: &Waiting| Work { prompt: w.prompt.len(), new: w.new, pages: pages(w.prompt.len() + w.new) };
        let own = self.waiting.get(at).map(work)?.pages;
        Some(steps_until_started(engine, own, running.chain(waiting.map(work))))
    }

    /// Starts requests from the front of the queue while there are seats and pages.
    fn start(&mut self, engine: &mut Engine) {
        while let Some(head) = self.waiting.front() {
            let positions = head.prompt.len() + head.new;
            if self.running.len() >= engine.options().max_batch || !engine.admits(positions) {
                return;
            }
            let Some(head) = self.waiting.pop_front() else { return };
            let waited = self.steps - head.since;
            match engine.start(&head.prompt, head.options) {
                Ok(mut run) => {
                    self.events.push(Event::Started { id: head.id, waited });
                    match run.finish {
                        None => self.running.push(Running { id: head.id, run, told: 0 }),
                        // Nothing was asked for.
                        Some(_) => {
                            let outcome = Ok(engine.finish(&mut run));
                            self.events.push(Event::Ended { id: head.id, outcome });
                        }
                    }
                }
                Err(error) => self.events.push(Event::Ended { id: head.id, outcome: Err(Arc::new(error)) }),
            }
        }
    }

    /// Tells of new tokens, and ends what has ended or failed.
    fn collect(&mut self, engine: &mut Engine, failed: &[(usize, Arc<EngineError>)]) {
        for (at, mut running) in std::mem::take(&mut self.running).into_iter().enumerate() {
            let error = failed.iter().find(|(index, _)| *index == at).map(|(_, error)| error.clone());
            self.tell(&mut running);
            match error.is_some() || running.run.finish.is_some() {
                true => self.end(engine, running, error),
                false => self.running.push(running),
            }
        }
    }

    fn tell(&mut self, running: &mut Running) {
        let id = running.id;
        let new = &running.run.new_tokens()[running.told..];
        self.events.extend(new.iter().map(|&token| Event::Token { id, token }));
        self.progress.new_tokens += new.len();
        running.told += new.len();
    }

    fn end(&mut self, engine: &mut Engine, mut running: Running, error: Option<Arc<EngineError>>) {
        self.progress.prompt_done += running.run.prompt_progress().0;
        let generation = engine.finish(&mut running.run);
        let outcome = error.map_or(Ok(generation), Err);
        self.events.push(Event::Ended { id: running.id, outcome });
    }
}

/// The result of a request that was cancelled while it waited.
fn never_started(waiting: &Waiting) -> Generation {
    Generation {
        token_ids: Vec::new(),
        finish: FinishReason::Cancelled,
        prompt_tokens: waiting.prompt.len(),
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
        decode_tokens: 0,
        drafted: 0,
        accepted: 0,
        logits: Vec::new(),
    }
}
