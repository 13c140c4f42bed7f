//! Model files to a [`ModelSpec`]: GGUF files, ONNX directories, tokenizers, chat templates. No compute.
//!
//! Weights stay where they are, in read-only mappings; a tensor is a format, a shape and the extents it references.

pub mod arrange;
pub mod chat;
pub mod error;
pub mod families;
pub mod file;
pub mod gguf;
pub mod load;
pub mod onnx;
pub mod spec;
mod stop;
pub mod tokenizer;

pub use chat::{ChatMessage, Conversation};
pub use error::{ModelError, Result};
pub use load::{Model, load};
pub use spec::ModelSpec;
pub use tokenizer::Tokenizer;
