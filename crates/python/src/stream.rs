//! `_core.TokenStream`: one generation, a token at a time.

use headrace_engine::serve::SharedEngine;
use headrace_engine::{EngineError, GenerationOptions, Run};
use headrace_model::tokenizer::DecodeStream;
use pyo3::prelude::*;

use crate::guard::{Signals, detached};

/// A generation in work. Iterating gives `(text, token id)` as tokens are chosen; `text` is empty until a character is
/// complete. The engine is free for others between two tokens. Dropping it gives its pages back.
#[pyclass(module = "headrace._core")]
pub struct TokenStream {
    shared: SharedEngine,
    run: Run,
    text: Option<DecodeStream>,
    /// New tokens that the iterator has given.
    given: usize,
    /// True once the rest of the text was given.
    flushed: bool,
}

impl TokenStream {
    /// Admits the generation.
    pub fn start(shared: SharedEngine, prompt: &[u32], options: GenerationOptions) -> Result<TokenStream, EngineError> {
        let (run, text) = {
            let mut engine = shared.lock();
            let text = engine.tokenizer().map(|t| t.decode_stream(true));
            (engine.start(prompt, options)?, text)
        };
        Ok(TokenStream { shared, run, text, given: 0, flushed: false })
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
            let mut result = Ok(());
            while result.is_ok() && self.run.new_tokens().len() == self.given && self.run.finish_reason().is_none() {
                result = signals.check(|_| Ok(())).and_then(|()| self.shared.lock().step(&mut [&mut self.run]));
            }
            signals.settle(result)?;
            if let Some(&token) = self.run.new_tokens().get(self.given) {
                self.given += 1;
                let piece = match &mut self.text {
                    Some(text) => text.push(token).unwrap_or_default(),
                    None => String::new(),
                };
                return Ok(Some((piece, Some(token))));
            }
            self.shared.lock().finish(&mut self.run);
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
            self.shared.lock().finish(&mut self.run);
            self.flushed = true;
            Ok(())
        })
    }

    /// `stop`, `length`, `context`, or `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.run.finish_reason().map(|r| r.name())
    }

    /// Tokens chosen so far.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.run.new_tokens().to_vec()
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.shared.lock().finish(&mut self.run);
    }
}
