//! Text to token ids and back.

pub mod gguf_vocab;

pub use gguf_vocab::GgufVocab;
