//! Everything that can go wrong between a model file and a token, for people and for the Python exceptions.

use headrace_kv::KvError;
use headrace_memory_governor::GovernorError;
use headrace_model::ModelError;
use headrace_provider::DeviceError;

use crate::plan::Breakdown;

/// Result of the engine.
pub type Result<T> = std::result::Result<T, EngineError>;

/// What went wrong, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The limit is too small: what must fit, and what is missing.
    #[error("{0}")]
    Budget(Box<Breakdown>),
    /// The ledger refused a change.
    #[error(transparent)]
    Governor(#[from] GovernorError),
    /// A request doesn't fit the context length.
    #[error(
        "{tokens} tokens of prompt and {new} new ones exceed max_context = {max_context}; \
         shorten the prompt, ask for fewer tokens, or load with a larger max_context (the model declares {declared})"
    )]
    ContextLength {
        /// Tokens of the prompt.
        tokens: usize,
        /// New tokens asked for.
        new: usize,
        /// The engine's limit.
        max_context: usize,
        /// The model's own limit.
        declared: usize,
    },
    /// A logit is not a finite number.
    #[error(
        "logit {index} of the row at position {position} is not finite: the weights or an activation overflowed; \
         no token was chosen"
    )]
    NonFinite {
        /// Position of the row in its sequence.
        position: usize,
        /// Vocabulary index of the first non-finite logit.
        index: usize,
    },
    /// An argument is out of range.
    #[error("{name} = {value}: {what}")]
    Argument {
        /// Name of the argument.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        what: String,
    },
    /// Text was given or asked for, and the model's files have no tokenizer.
    #[error("the model's files have no tokenizer.json: give and take token ids instead of text")]
    NoTokenizer,
    /// The KV pages: a bug if a caller ever sees it.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// Generations of others hold the KV pages that a batch needs.
    #[error("generations that were started elsewhere hold the KV pages that this one needs: end or close them first")]
    Busy,
    /// What is wrong with one request of a list.
    #[error("{list}[{index}]: {error}")]
    Of {
        /// Name of the list.
        list: &'static str,
        /// Place in it, from 0.
        index: usize,
        /// What is wrong.
        error: Box<EngineError>,
    },
    /// An error that several requests have in common.
    #[error(transparent)]
    Shared(std::sync::Arc<EngineError>),
    /// The server was closed, or its thread has ended.
    #[error("the server is closed")]
    Closed,
    /// A panic inside the engine, which is a bug: what it held was given back.
    #[error(
        "this engine failed inside and can't be used any more: {0}; its memory was given back, load the model again (and please \
         report it with headrace.build_info())"
    )]
    Failed(String),
    /// The engine belongs to another process.
    #[error(
        "this engine was loaded in process {loaded_in}, of which this process is a fork: its threads, and the card's context, are \
         not here. Start processes with multiprocessing's method \"spawn\", or load an engine in the child"
    )]
    Forked {
        /// That process.
        loaded_in: u32,
    },
    /// A bug.
    #[error("internal error, please report it with headrace.build_info(): {0}")]
    Internal(String),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl EngineError {
    /// The error itself, where several requests have it in common or it names one of a list.
    pub fn root(&self) -> &EngineError {
        match self {
            EngineError::Shared(error) => error.root(),
            EngineError::Of { error, .. } => error.root(),
            other => other,
        }
    }

    /// The error of request `index` of `list`.
    pub fn of(self, list: &'static str, index: usize) -> EngineError {
        EngineError::Of { list, index, error: Box::new(self) }
    }

    /// An argument that is out of range.
    pub fn argument(name: &'static str, value: impl ToString, what: impl Into<String>) -> EngineError {
        EngineError::Argument { name, value: value.to_string(), what: what.into() }
    }
}
