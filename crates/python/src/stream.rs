//! `_core.TokenStream`: one generation, a token at a time.

use headrace_engine::serve::SharedEngine;
use headrace_engine::{GenerationOptions, Run};
use headrace_model::tokenizer::DecodeStream;
use pyo3::prelude::*;

use crate::guard::{Signals, Stop, Turn, Waiting, detached};
use crate::logs;

/// What ends with a stream.
struct Work {
    shared: SharedEngine,
    run: Run,
    /// True once its pages were given back.
    finished: bool,
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.finished {
            self.shared.lock().finish(&mut self.run);
        }
    }
}

/// A generation in work. Iterating gives `(text, token id)` as tokens are chosen; `text` is empty until a character is
/// complete. The engine is free for others between two tokens. Dropping it gives its pages back.
#[pyclass(module = "headrace._core")]
pub struct TokenStream {
    work: Waiting<Work>,
    text: Option<DecodeStream>,
    /// New tokens that the iterator has given.
    given: usize,
    /// True once the rest of the text was given.
    flushed: bool,
}

impl TokenStream {
    /// Admits the generation.
    pub fn start(
        py: Python<'_>,
        shared: SharedEngine,
        prompt: &[u32],
        options: GenerationOptions,
    ) -> PyResult<TokenStream> {
        logs::look_again(py);
        detached(py, || {
            let (run, text) = {
                let mut engine = Turn::wait(&shared)?;
                let text = engine.tokenizer().map(|t| t.decode_stream(true));
                (engine.start(prompt, options)?, text)
            };
            let work = Waiting::new(Work { shared, run, finished: false });
            Ok(TokenStream { work, text, given: 0, flushed: false })
        })
    }

    fn step(&mut self) -> Result<(), Stop> {
        let Work { shared, run, .. } = &mut *self.work;
        Ok(Turn::wait(shared)?.step(&mut [run])?)
    }

    fn finish(&mut self) -> Result<(), Stop> {
        let Work { shared, run, finished } = &mut *self.work;
        if !*finished {
            Turn::wait(shared)?.finish(run);
            *finished = true;
        }
        Ok(())
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<(String, Option<u32>)>> {
        detached(py, || {
            let mut signals = Signals::new();
            while self.work.run.new_tokens().len() == self.given && self.work.run.finish_reason().is_none() {
                let looked = signals.check(|_| Ok(()));
                signals.settle(looked)?;
                self.step()?;
            }
            if let Some(&token) = self.work.run.new_tokens().get(self.given) {
                self.given += 1;
                let piece = match &mut self.text {
                    Some(text) => text.push(token).unwrap_or_default(),
                    None => String::new(),
                };
                return Ok(Some((piece, Some(token))));
            }
            self.finish()?;
            if std::mem::replace(&mut self.flushed, true) {
                return Ok(None);
            }
            let rest = self.text.take().map(DecodeStream::finish).unwrap_or_default();
            Ok(if rest.is_empty() { None } else { Some((rest, None)) })
        })
    }

    /// Ends the generation and gives its pages back. A second call changes nothing.
    fn close(&mut self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            self.finish()?;
            self.flushed = true;
            Ok(())
        })
    }

    /// `stop`, `length`, `context`, or `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.work.run.finish_reason().map(|r| r.name())
    }

    /// Tokens chosen so far.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.work.run.new_tokens().to_vec()
    }
}
