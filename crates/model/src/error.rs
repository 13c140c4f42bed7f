//! What can be wrong with a model file, and where.

use std::path::PathBuf;

/// Result of everything that reads model files.
pub type Result<T> = std::result::Result<T, ModelError>;

/// A fault of a model file or directory. Every variant says what was wrong and where.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file could not be opened, read or mapped.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file breaks its own format: damaged, truncated, hostile, or not that format at all.
    #[error("{path}{at}: {what}", path = path.display(), at = place(.tensor, .offset))]
    Format {
        /// File.
        path: PathBuf,
        /// Tensor, node or metadata key concerned, where there is one.
        tensor: Option<String>,
        /// Byte offset in the file, where it is known.
        offset: Option<u64>,
        /// What is wrong, and what to do about it where that is known.
        what: String,
    },
    /// The file is sound, but asks for something Headrace doesn't do.
    #[error("{path}{at}: {what}", path = path.display(), at = place(.item, &None))]
    Unsupported {
        /// File.
        path: PathBuf,
        /// Node, operator, attribute, tensor or metadata key concerned.
        item: Option<String>,
        /// What is not supported, and what to do instead where that is known.
        what: String,
    },
    /// A chat template failed: it does not parse, refuses the messages it got, or goes beyond its limits.
    #[error("{path}: chat template `{template}`{at}: {what}", path = path.display(), at = at_line(.line))]
    Template {
        /// File that the template came from.
        path: PathBuf,
        /// Name of the template.
        template: String,
        /// Line of the template, counted from 1, where it is known.
        line: Option<usize>,
        /// What went wrong.
        what: String,
    },
    /// The messages of a conversation, or what goes to the template with them, are not in order.
    #[error("{what}")]
    Conversation {
        /// Which message and field, and what is wrong with it.
        what: String,
    },
}

fn at_line(line: &Option<usize>) -> String {
    line.map(|line| format!(", line {line}")).unwrap_or_default()
}

fn place(item: &Option<String>, offset: &Option<u64>) -> String {
    let mut text = String::new();
    if let Some(item) = item {
        text.push_str(&format!(": {item}"));
    }
    if let Some(offset) = offset {
        text.push_str(&format!(" (at byte {offset})"));
    }
    text
}
