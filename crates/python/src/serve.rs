//! `_core.Server` and `_core.Request`: continuous generation for Python's threads and event loops.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headrace_engine::EngineError;
use headrace_engine::serve::{News, Outcome, SharedEngine};
use pyo3::prelude::*;

use crate::arguments::GenerateArguments;
use crate::guard::{Inside, Signals, Stop, Waiting, detached, may_wait};
use crate::logs;
use crate::result::{GenerationTuple, to_tuple};

/// How long a wait goes on before it looks for signals.
const PATIENCE: Duration = Duration::from_millis(50);

/// Numbers of requests that have news, for the one thread that wakes event loops; `None` ends it.
type Woken = Sender<Option<u64>>;

/// Continuous generation on an engine: requests join and leave while others decode.
#[pyclass(module = "headrace._core", frozen)]
pub struct Server {
    inner: Waiting<headrace_engine::serve::Server>,
    vocab: usize,
    woken: Woken,
    wakes: Mutex<Receiver<Option<u64>>>,
}

impl Server {
    /// A server of its own thread.
    pub fn start(py: Python<'_>, engine: &Waiting<SharedEngine>, vocab: usize) -> PyResult<Server> {
        logs::look_again(py);
        // Waits for whoever has the engine, to learn its limits.
        let inner = detached(py, || {
            may_wait()?;
            Ok(headrace_engine::serve::Server::start(engine.get()?.clone()))
        })??;
        let (woken, wakes) = channel();
        Ok(Server { inner: Waiting::new(inner), vocab, woken, wakes: Mutex::new(wakes) })
    }
}

#[pymethods]
impl Server {
    /// Takes a request.
    fn submit(&self, py: Python<'_>, prompt: Vec<u32>, options: GenerateArguments) -> PyResult<Request> {
        logs::look_again(py);
        let inner = detached(py, || Ok(self.inner.get()?.submit(prompt, options.into())?))?;
        Ok(Request { inner, vocab: self.vocab, woken: self.woken.clone() })
    }

    /// Takes no further request, and returns once all have ended; `cancel` ends them now, and so does a signal. Called while this
    /// thread is at work for an engine (Python's collector does so) it can't wait for the end.
    fn close(&self, py: Python<'_>, cancel: bool) -> PyResult<()> {
        let Ok(inner) = self.inner.get() else {
            // In a fork there is nothing to end.
            return Ok(());
        };
        detached(py, || {
            inner.close(cancel);
            let mut signals = Signals::new();
            let mut result = Ok(());
            while !Inside::is() && !inner.wait_closed(PATIENCE) {
                if result.is_ok() {
                    result = signals.check(|_| Ok(()));
                    if result.is_err() {
                        inner.close(true);
                    }
                }
            }
            let _ = self.woken.send(None);
            signals.settle(result)
        })
    }

    /// True once it takes no further request.
    #[getter]
    fn closed(&self) -> bool {
        // In a fork it takes no further request.
        self.inner.get().map_or(true, |inner| inner.is_closed())
    }

    /// Waits for news of requests that were polled in vain, and returns their numbers; `None` once the server is closed.
    fn next_woken(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        detached(py, || {
            self.inner.get()?;
            let wakes = self.wakes.lock().unwrap_or_else(PoisonError::into_inner);
            let first = wakes.recv().ok().flatten();
            Ok(first.map(|first| {
                let mut all = vec![first];
                for number in wakes.try_iter() {
                    match number {
                        Some(number) => all.push(number),
                        // Said again, for the next call.
                        None => drop(self.woken.send(None)),
                    }
                }
                all
            }))
        })
    }
}

/// One request. Dropping it cancels it.
#[pyclass(module = "headrace._core", frozen)]
pub struct Request {
    inner: headrace_engine::serve::Request,
    vocab: usize,
    woken: Woken,
}

impl Request {
    /// The outcome, where its end is known.
    fn ended(&self) -> Result<headrace_engine::Generation, Stop> {
        let outcome = self.inner.outcome(Duration::ZERO);
        outcome.unwrap_or_else(|| Err(Arc::new(EngineError::Closed))).map_err(shared)
    }
}

fn shared(error: Arc<EngineError>) -> Stop {
    Stop::Engine(EngineError::Shared(error))
}

#[pymethods]
impl Request {
    /// Its number on its server.
    #[getter]
    fn number(&self) -> u64 {
        self.inner.number()
    }

    /// Tokens so far.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.inner.tokens()
    }

    /// Steps that it waited for its start; `None` if it hasn't started.
    #[getter]
    fn waited_steps(&self) -> Option<u64> {
        self.inner.waited()
    }

    /// True once it has ended.
    #[getter]
    fn done(&self) -> bool {
        self.inner.outcome(Duration::ZERO).is_some()
    }

    /// Asks for its end.
    fn cancel(&self) {
        self.inner.cancel();
    }

    /// Waits for token `at`; `None` if the request ends without it. Raises what it failed with.
    fn wait(&self, py: Python<'_>, at: usize) -> PyResult<Option<u32>> {
        detached(py, || {
            may_wait()?;
            let mut signals = Signals::new();
            loop {
                match self.inner.wait(at, PATIENCE) {
                    News::Token(token) => return Ok(Some(token)),
                    News::Ended => return self.ended().map(|_| None),
                    News::Pending => {
                        let looked = signals.check(|_| Ok(()));
                        signals.settle(looked)?;
                    }
                }
            }
        })
    }

    /// As `wait` without waiting: `(True, what wait returns)`, or `(False, None)`, and then `next_woken` tells of its news.
    fn poll(&self, py: Python<'_>, at: usize) -> PyResult<(bool, Option<u32>)> {
        let (woken, number) = (self.woken.clone(), self.inner.number());
        detached(py, || {
            // Fails only once the server is gone, and then the request has ended.
            let wake = move || {
                let _ = woken.send(Some(number));
            };
            match self.inner.poll(at, wake) {
                News::Token(token) => Ok((true, Some(token))),
                News::Ended => self.ended().map(|_| (true, None)),
                News::Pending => Ok((false, None)),
            }
        })
    }

    /// Waits for its end and returns what it gave, or raises what it failed with. `None` after `seconds`, if given.
    #[pyo3(signature = (seconds))]
    fn result<'py>(&self, py: Python<'py>, seconds: Option<f64>) -> PyResult<Option<GenerationTuple<'py>>> {
        let deadline = seconds
            .map(|s| std::time::Instant::now() + Duration::try_from_secs_f64(s.max(0.0)).unwrap_or(Duration::MAX / 4));
        let outcome: Option<Outcome> = detached(py, || {
            if self.inner.outcome(Duration::ZERO).is_none() {
                may_wait()?;
            }
            let mut signals = Signals::new();
            loop {
                let left =
                    deadline.map_or(PATIENCE, |d| d.saturating_duration_since(std::time::Instant::now()).min(PATIENCE));
                if let Some(outcome) = self.inner.outcome(left) {
                    return Ok(Some(outcome));
                }
                if deadline.is_some_and(|d| std::time::Instant::now() >= d) {
                    return Ok(None);
                }
                let looked = signals.check(|_| Ok(()));
                signals.settle(looked)?;
            }
        })?;
        match outcome {
            None => Ok(None),
            Some(outcome) => {
                let generation = detached(py, || outcome.map_err(shared))?;
                to_tuple(py, generation, self.vocab).map(Some)
            }
        }
    }
}
