//! `_core.TextStream`: tokens to text, as they come.

use headrace_model::tokenizer::{DecodeStream, Tokenizer};
use pyo3::prelude::*;

/// A text that comes token by token. What it gives always ends with a whole character.
#[pyclass(module = "headrace._core")]
pub struct TextStream {
    inner: Option<DecodeStream>,
}

impl TextStream {
    /// Without special tokens. A model without a tokenizer has no text: every piece is empty then.
    pub fn new(tokenizer: Option<&Tokenizer>) -> TextStream {
        TextStream { inner: tokenizer.map(|t| t.decode_stream(true)) }
    }
}

#[pymethods]
impl TextStream {
    /// What `token` adds.
    fn push(&mut self, token: u32) -> String {
        self.inner.as_mut().and_then(|text| text.push(token)).unwrap_or_default()
    }

    /// What is left at the end: bytes that never became a character. Afterwards every piece is empty.
    fn finish(&mut self) -> String {
        self.inner.take().map(DecodeStream::finish).unwrap_or_default()
    }
}
