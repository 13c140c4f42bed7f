//! `_core.TextStream`: tokens to text, as they come.

use headrace_model::tokenizer::{DecodeStream, Tokenizer};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// A text that comes token by token. What it gives always ends with a whole character.
#[pyclass(module = "headrace._core", frozen)]
pub struct TextStream {
    /// Held for moments only, and never while Python code runs.
    inner: Mutex<Option<DecodeStream>>,
}

impl TextStream {
    /// Without special tokens. A model without a tokenizer has no text: every piece is empty then.
    pub fn new(tokenizer: Option<&Tokenizer>) -> TextStream {
        TextStream { inner: Mutex::new(tokenizer.map(|t| t.decode_stream(true))) }
    }
}

#[pymethods]
impl TextStream {
    /// What `token` adds.
    fn push(&self, token: u32) -> String {
        self.inner.lock().as_mut().and_then(|text| text.push(token)).unwrap_or_default()
    }

    /// What is left at the end: bytes that never became a character. Afterwards every piece is empty.
    fn finish(&self) -> String {
        self.inner.lock().take().map(DecodeStream::finish).unwrap_or_default()
    }
}
