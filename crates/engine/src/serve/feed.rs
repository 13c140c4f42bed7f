//! One request as its caller on another thread sees it: tokens as they come, the end, cancellation.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::batcher::Outcome;
use super::server::Command;
use crate::error::EngineError;
use crate::process::Process;

/// Called once when there is news. Runs on the engine's thread: it must be short and never wait.
pub type Wake = Box<dyn FnOnce() + Send>;

/// What a look at a request found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// The token that was asked for.
    Token(u32),
    /// The request has ended, and has no such token.
    Ended,
    /// Not yet.
    Pending,
}

#[derive(Default)]
struct State {
    tokens: Vec<u32>,
    outcome: Option<Outcome>,
    waited: Option<u64>,
    /// The wake of the last poll that found nothing.
    wake: Option<Wake>,
}

/// What the engine's thread writes and a caller reads.
#[derive(Default)]
pub(super) struct Feed {
    state: Mutex<State>,
    changed: Condvar,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held but an allocation that fails.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let wake = {
            let mut state = self.lock();
            change(&mut state);
            state.wake.take()
        };
        self.changed.notify_all();
        if let Some(wake) = wake {
            wake();
        }
    }

    pub(super) fn started(&self, waited: u64) {
        self.change(|state| state.waited = Some(waited));
    }

    pub(super) fn token(&self, token: u32) {
        self.change(|state| state.tokens.push(token));
    }

    /// The first outcome counts.
    pub(super) fn ended(&self, outcome: Outcome) {
        self.change(|state| {
            state.outcome.get_or_insert(outcome);
        });
    }
}

impl State {
    fn news(&self, at: usize) -> News {
        match self.tokens.get(at) {
            Some(&token) => News::Token(token),
            None if self.outcome.is_some() => News::Ended,
            None => News::Pending,
        }
    }
}

/// A request to a [`super::Server`]. Dropping it cancels it.
pub struct Request {
    pub(super) ticket: u64,
    pub(super) feed: Arc<Feed>,
    pub(super) commands: Sender<Command>,
    /// Where its server is. In a fork of that process the server is not, and a lock may stay locked: then it has ended.
    pub(super) process: Process,
}

impl Request {
    /// Its number on its server: later requests have larger ones.
    pub fn number(&self) -> u64 {
        self.ticket
    }

    /// Token `at`, counted from 0, or what else there is to say about it; waits for it for at most `patience`.
    pub fn wait(&self, at: usize, patience: Duration) -> News {
        if !self.process.is_current() {
            return News::Ended;
        }
        self.wait_until(patience, |state| Some(state.news(at)).filter(|news| *news != News::Pending))
            .unwrap_or(News::Pending)
    }

    /// As [`Request::wait`] without waiting. Where the answer is [`News::Pending`], `wake` is called as soon as anything changes,
    /// unless another poll comes first, whose wake is kept in its place, as in `Future::poll`: so whoever polls for several has them
    /// all look again. Else it is dropped.
    pub fn poll(&self, at: usize, wake: impl FnOnce() + Send + 'static) -> News {
        if !self.process.is_current() {
            return News::Ended;
        }
        // What it replaces is dropped without the lock: it is the caller's code.
        let (news, _replaced) = {
            let mut state = self.feed.lock();
            let news = state.news(at);
            let replaced = match news {
                News::Pending => state.wake.replace(Box::new(wake)),
                News::Token(_) | News::Ended => None,
            };
            (news, replaced)
        };
        news
    }

    /// How it ended; waits for that for at most `patience`.
    pub fn outcome(&self, patience: Duration) -> Option<Outcome> {
        match self.process.check() {
            Ok(()) => self.wait_until(patience, |state| state.outcome.clone()),
            Err(error) => Some(Err(Arc::new(error))),
        }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> Vec<u32> {
        if !self.process.is_current() {
            return Vec::new();
        }
        self.feed.lock().tokens.clone()
    }

    /// Steps that it waited for its start; `None` if it hasn't started.
    pub fn waited(&self) -> Option<u64> {
        self.process.check().ok()?;
        self.feed.lock().waited
    }

    /// Asks for its end. What it gave so far is its result.
    pub fn cancel(&self) {
        if !self.process.is_current() {
            return;
        }
        // A server that is gone has ended every request.
        let _ = self.commands.send(Command::Cancel(self.ticket));
    }

    fn wait_until<T>(&self, patience: Duration, look: impl Fn(&State) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + patience;
        let mut state = self.feed.lock();
        loop {
            if let Some(found) = look(&state) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.feed.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.process.is_current() && self.feed.lock().outcome.is_none() {
            self.cancel();
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("number", &self.ticket).finish_non_exhaustive()
    }
}

/// The writing end of a feed. Where it is dropped before the request has ended, nobody will ever write again, and it has.
pub(super) struct Writer(pub(super) Arc<Feed>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.ended(Err(Arc::new(EngineError::Closed)));
    }
}
