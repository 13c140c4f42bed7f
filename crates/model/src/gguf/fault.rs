//! How the GGUF reader words its errors: which file, which tensor or key, which byte.

use std::path::Path;

use crate::error::ModelError;

/// The most characters of a name or value from a file that a message repeats.
const SHOWN: usize = 96;

/// A name or value from a file, made fit for a message: control characters escaped, long text cut.
pub(super) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    out
}

/// The file breaks the format. `item` is the tensor or metadata key concerned, `offset` the byte in the file.
pub(super) fn format(path: &Path, item: Option<&str>, offset: Option<usize>, what: impl Into<String>) -> ModelError {
    ModelError::Format {
        path: path.to_path_buf(),
        tensor: item.map(shown),
        offset: offset.map(|o| o as u64),
        what: what.into(),
    }
}

/// The file asks for something that isn't done. `item` is the tensor or metadata key concerned.
pub(super) fn unsupported(path: &Path, item: &str, what: impl Into<String>) -> ModelError {
    ModelError::Unsupported { path: path.to_path_buf(), item: Some(shown(item)), what: what.into() }
}
