//! The exceptions, and which engine error becomes which of them.

use headrace_engine::EngineError;
use headrace_kv::KvError;
use headrace_memory_governor::GovernorError;
use headrace_model::ModelError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyFileNotFoundError, PyKeyboardInterrupt, PyOSError, PyValueError};
use pyo3::prelude::*;

create_exception!(headrace, HeadraceError, PyException, "Base of every error that Headrace raises itself.");
create_exception!(
    headrace,
    ModelFormatError,
    HeadraceError,
    "A model file is damaged, truncated, or not what it says it is. The text names file, tensor and offset."
);
create_exception!(
    headrace,
    UnsupportedModelError,
    HeadraceError,
    "A sound model asks for something that Headrace doesn't do. The text names the node, operator, attribute or key."
);
create_exception!(
    headrace,
    BudgetError,
    HeadraceError,
    "The memory limit is too small. The text lists what is needed and what is missing."
);
create_exception!(headrace, ContextLengthError, HeadraceError, "A prompt and its new tokens don't fit max_context.");
create_exception!(headrace, DeviceError, HeadraceError, "A device refused memory, or failed.");
create_exception!(
    headrace,
    NonFiniteError,
    HeadraceError,
    "A logit is not a finite number, so that no token can be chosen honestly."
);

create_exception!(
    headrace,
    EngineFailedError,
    HeadraceError,
    "This engine can't be used any more: it failed inside, or it belongs to the process that this one is a fork of."
);

/// The Python exception for an engine error.
pub fn to_py(error: &EngineError) -> PyErr {
    let text = error.to_string();
    match error.root() {
        EngineError::Model(ModelError::Io { source, .. }) => match source.kind() {
            std::io::ErrorKind::NotFound => PyFileNotFoundError::new_err(text),
            _ => PyOSError::new_err(text),
        },
        EngineError::Model(ModelError::Unsupported { .. }) => UnsupportedModelError::new_err(text),
        EngineError::Model(ModelError::Conversation { .. }) => PyValueError::new_err(text),
        EngineError::Model(_) => ModelFormatError::new_err(text),
        EngineError::Budget(_) | EngineError::Governor(GovernorError::Budget(_)) => BudgetError::new_err(text),
        EngineError::Device(_) | EngineError::Kv(KvError::Store(_)) => DeviceError::new_err(text),
        EngineError::ContextLength { .. } => ContextLengthError::new_err(text),
        EngineError::NonFinite { .. } => NonFiniteError::new_err(text),
        EngineError::Failed(_) | EngineError::Forked { .. } => EngineFailedError::new_err(text),
        EngineError::Argument { .. } => PyValueError::new_err(text),
        EngineError::Interrupted => PyKeyboardInterrupt::new_err(""),
        _ => HeadraceError::new_err(text),
    }
}
