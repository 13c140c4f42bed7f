//! What a request is checked against before anything is reserved for it.

use crate::error::{EngineError, Result};
use crate::options::GenerationOptions;

/// The bounds of a model and an engine that every prompt has to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Most positions of a sequence.
    pub max_context: usize,
    /// Positions that the model declares.
    pub declared: usize,
}

impl Limits {
    /// Most new tokens of the request: what was asked for, or what room there is.
    ///
    /// # Errors
    /// Options out of range, an empty prompt, a token outside the vocabulary, a prompt and `max_new_tokens` that don't fit
    /// `max_context`.
    pub fn check(&self, prompt: &[u32], options: &GenerationOptions) -> Result<usize> {
        options.check()?;
        self.check_tokens(prompt)?;
        let room = self.max_context.saturating_sub(prompt.len());
        let new = options.max_new_tokens.unwrap_or(room);
        if new > room || (options.max_new_tokens.is_none() && room == 0) {
            return Err(self.context_error(prompt.len(), new.max(1)));
        }
        Ok(new)
    }

    /// Checks tokens alone.
    ///
    /// # Errors
    /// No token, or one outside the vocabulary.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(EngineError::argument("prompt", "[]", "must hold at least one token"));
        }
        match tokens.iter().find(|&&t| t as usize >= self.vocab) {
            Some(t) => Err(EngineError::argument("token id", t, format!("the vocabulary has {} tokens", self.vocab))),
            None => Ok(()),
        }
    }

    /// The error of `tokens` that don't fit together with `new` ones.
    pub(crate) fn context_error(&self, tokens: usize, new: usize) -> EngineError {
        EngineError::ContextLength { tokens, new, max_context: self.max_context, declared: self.declared }
    }
}
