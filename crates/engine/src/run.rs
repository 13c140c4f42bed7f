//! One generation in work: its tokens, how far its prompt is, why it ended.

use std::time::Duration;

use headrace_kv::SequenceId;

use crate::options::GenerationOptions;
use crate::sampling::Sampler;

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was chosen.
    Stop,
    /// `max_new_tokens` were given.
    Length,
    /// The sequence reached `max_context`.
    Context,
    /// The caller cancelled it.
    Cancelled,
}

impl FinishReason {
    /// `stop`, `length`, `context` or `cancelled`.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// A generation in work. Made by [`crate::Engine::start`], moved on by [`crate::Engine::step`], and to be given back with
/// [`crate::Engine::finish`].
#[derive(Debug)]
pub struct Run {
    pub(crate) sequence: SequenceId,
    /// Prompt, then what was chosen.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Positions whose keys and values are stored.
    pub(crate) stored: usize,
    pub(crate) options: GenerationOptions,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) max_new: usize,
    pub(crate) finish: Option<FinishReason>,
    /// True once its pages were given back.
    pub(crate) closed: bool,
    /// What the step in work verifies beyond the pending tokens.
    pub(crate) draft: Vec<u32>,
    /// `[choices, vocab]`, if the options ask for it.
    pub(crate) kept_logits: Vec<f32>,
    /// Drafted tokens that were verified, and those of them that were right.
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    pub(crate) time: RunTime,
}

/// Where a run's time went: whole steps that it took part in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunTime {
    pub(crate) prefill: Duration,
    pub(crate) decode: Duration,
    pub(crate) decode_tokens: usize,
}

impl Run {
    /// Tokens chosen so far, stop token excluded.
    pub fn new_tokens(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Prompt tokens that went through a step, and how many there are.
    pub fn prompt_progress(&self) -> (usize, usize) {
        (self.stored.min(self.prompt_len), self.prompt_len)
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// True if it goes on once it has `tokens` tokens, none of them a stop token.
    pub(crate) fn goes_on_at(&self, tokens: usize, max_context: usize) -> bool {
        tokens - self.prompt_len < self.max_new && tokens < max_context
    }

    /// Takes a chosen token; decides whether the generation ends with it.
    pub(crate) fn take(&mut self, token: u32, max_context: usize) {
        if self.options.stop_tokens.contains(&token) {
            self.finish = Some(FinishReason::Stop);
            return;
        }
        self.tokens.push(token);
        if self.new_tokens().len() >= self.max_new {
            self.finish = Some(match self.options.max_new_tokens {
                Some(_) => FinishReason::Length,
                None => FinishReason::Context,
            });
        } else if self.tokens.len() >= max_context {
            self.finish = Some(FinishReason::Context);
        }
    }
}

/// The result of one generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Tokens chosen, stop token excluded.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time of the steps that held its prompt's rows.
    pub prefill: Duration,
    /// Time of its later steps.
    pub decode: Duration,
    /// Tokens that the later steps gave: all but the first.
    pub decode_tokens: usize,
    /// Drafted tokens that were verified.
    pub drafted: usize,
    /// Those of them that were right.
    pub accepted: usize,
    /// `[choices, vocab]` if [`GenerationOptions::keep_logits`] is set, else empty. A stop token is a choice too.
    pub logits: Vec<f32>,
}

impl Generation {
    pub(crate) fn of(run: &mut Run) -> Generation {
        Generation {
            token_ids: run.new_tokens().to_vec(),
            finish: run.finish.unwrap_or(FinishReason::Length),
            prompt_tokens: run.prompt_len,
            prefill: run.time.prefill,
            decode: run.time.decode,
            decode_tokens: run.time.decode_tokens,
            drafted: run.drafted,
            accepted: run.accepted,
            logits: std::mem::take(&mut run.kept_logits),
        }
    }
}
