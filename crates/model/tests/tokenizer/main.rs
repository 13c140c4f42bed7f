//! Tokenizers and chat templates against other implementations' results, real vocabularies, and hostile files.

#![allow(clippy::unwrap_used, clippy::panic)]

mod apart;
mod chat;
mod gguf_vocab;
mod golden;
mod hostile;
mod sentencepiece;
mod shared;
mod stream;
