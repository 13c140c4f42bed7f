//! `_core.TokenStream`: one generation, a token at a time.
//!
//! The work is behind a lock that is only ever tried: a thread that finds it taken is told so in words. What other threads may
//! ask at any time (the tokens so far, the end) is kept beside it.

use std::sync::atomic::{AtomicBool, Ordering};

use headrace_engine::serve::SharedEngine;
use headrace_engine::{FinishReason, GenerationOptions, Run};
use headrace_model::tokenizer::DecodeStream;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::HeadraceError;
use crate::guard::{Signals, Stop, Turn, Waiting, detached};
use crate::logs;

/// What ends with a stream.
struct Work {
    shared: SharedEngine,
    run: Run,
    /// True once its pages were given back.
    finished: bool,
    text: Option<DecodeStream>,
    /// New tokens that the iterator has given.
    given: usize,
    /// True once the rest of the text was given.
    flushed: bool,
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.finished {
            self.shared.lock().finish(&mut self.run);
        }
    }
}

impl Work {
    fn step(&mut self) -> Result<(), Stop> {
        Ok(Turn::wait_for(&self.shared)?.step(&mut [&mut self.run])?)
    }

    /// Gives the pages back, once.
    fn finish(&mut self) -> Result<(), Stop> {
        if !self.finished {
            Turn::wait_for(&self.shared)?.finish(&mut self.run);
            self.finished = true;
        }
        Ok(())
    }
}

/// What can be asked while a step runs.
struct Told {
    tokens: Vec<u32>,
    finish: Option<FinishReason>,
}

/// A generation in work. Iterating gives `(text, token id)` as tokens are chosen; `text` is empty until a character is
/// complete. The engine is free for others between two tokens. Dropping it gives its pages back.
#[pyclass(module = "headrace._core", frozen)]
pub struct TokenStream {
    work: Waiting<Mutex<Work>>,
    told: Mutex<Told>,
    /// True once it was closed: no further step begins.
    closed: AtomicBool,
    /// Called with `(prompt tokens done, prompt tokens)` between the steps of a prompt.
    progress: Option<Py<PyAny>>,
}

impl TokenStream {
    /// Admits the generation.
    pub fn start(
        py: Python<'_>,
        shared: &Waiting<SharedEngine>,
        prompt: &[u32],
        options: GenerationOptions,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<TokenStream> {
        logs::look_again(py);
        detached(py, || {
            let (run, text) = {
                let mut engine = Turn::wait(shared)?;
                let text = engine.tokenizer().map(|t| t.decode_stream(true));
                (engine.start(prompt, options)?, text)
            };
            let told = Told { tokens: Vec::new(), finish: run.finish_reason() };
            let work = Work { shared: shared.get()?.clone(), run, finished: false, text, given: 0, flushed: false };
            Ok(TokenStream {
                work: Waiting::new(Mutex::new(work)),
                told: Mutex::new(told),
                closed: AtomicBool::new(false),
                progress,
            })
        })
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Ends the generation, unless a call is at work on it: that one does it then.
    fn end_if_free(&self) -> Result<(), Stop> {
        // In a fork there is nothing to give back.
        let Ok(work) = self.work.get() else { return Ok(()) };
        work.try_lock().map_or(Ok(()), |mut work| work.finish())
    }

    /// What the next call of the iterator gives.
    fn next(&self, work: &mut Work) -> Result<Option<(String, Option<u32>)>, Stop> {
        let mut signals = Signals::new();
        while work.run.new_tokens().len() == work.given && work.run.finish_reason().is_none() && !self.is_closed() {
            let (done, total) = work.run.prompt_progress();
            let looked = signals.check(|py| match &self.progress {
                Some(callback) => callback.call1(py, (done, total)).map(drop),
                None => Ok(()),
            });
            signals.settle(looked)?;
            work.step()?;
            let mut told = self.told.lock();
            let new = &work.run.new_tokens()[told.tokens.len()..];
            told.tokens.extend_from_slice(new);
            told.finish = work.run.finish_reason();
        }
        if self.is_closed() {
            work.finish()?;
            return Ok(None);
        }
        if let Some(&token) = work.run.new_tokens().get(work.given) {
            work.given += 1;
            let piece = match &mut work.text {
                Some(text) => text.push(token).unwrap_or_default(),
                None => String::new(),
            };
            return Ok(Some((piece, Some(token))));
        }
        work.finish()?;
        if std::mem::replace(&mut work.flushed, true) {
            return Ok(None);
        }
        let rest = work.text.take().map(DecodeStream::finish).unwrap_or_default();
        Ok(if rest.is_empty() { None } else { Some((rest, None)) })
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(String, Option<u32>)>> {
        detached(py, || {
            let result = match self.work.get()?.try_lock() {
                Some(mut work) => self.next(&mut work),
                None if self.is_closed() => return Ok(None),
                None => return Err(in_use()),
            };
            // Closed by another thread after this one had looked for the last time, and before it let go.
            if self.is_closed() {
                self.end_if_free()?;
            }
            result
        })
    }

    /// Ends the generation and gives its pages back; while another thread waits for a token, that happens once the step in work
    /// is over. A second call changes nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.closed.store(true, Ordering::SeqCst);
        detached(py, || self.end_if_free())
    }

    /// `stop`, `length`, `context`, or `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.told.lock().finish.map(FinishReason::name)
    }

    /// Tokens chosen so far.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.told.lock().tokens.clone()
    }
}

/// What a thread is told that finds another one at work on the same stream.
fn in_use() -> Stop {
    let what = "this stream is in use: another thread (or the call that a signal handler interrupted) is taking a piece of it. A \
                stream is for one thread at a time: put a lock around it, or start a stream for each thread";
    Stop::Python(HeadraceError::new_err(what))
}
