//! GGUF files to a [`ModelSpec`] and a vocabulary.
//!
//! *Bytes -> [`GgufFile`] (metadata, tensors and their extents, checked) -> hyperparameters -> [`ModelSpec`].*
//! Versions 2 and 3, little-endian; architectures `llama`, `qwen2`, `qwen3`; one file or several shards. A file that
//! asks for anything else is refused: nothing in it is left out silently. Weights stay in the files' mappings.

mod access;
mod assemble;
mod fault;
mod ggml_type;
mod header;
mod hparams;
mod keys;
mod reader;
mod split;
mod tensors;
mod value;
mod vocab;

use std::path::{Path, PathBuf};

use bytes::Bytes;

pub use access::{ArrayView, Strings};
pub use header::{Entry, GgufFile, TensorInfo};
pub use value::{Array, Value, ValueType};

use crate::error::Result;
use crate::file::ModelFile;
use crate::spec::ModelSpec;
use crate::tokenizer::GgufVocab;

/// What a GGUF model consists of.
#[derive(Clone, Debug)]
pub struct LoadedGguf {
    /// The decoder.
    pub spec: ModelSpec,
    /// The vocabulary, as the file gives it; without tokens if the file has none.
    pub vocab: GgufVocab,
}

/// Opens the model at `path`: a GGUF file, or any shard of a model in several, whose other shards lie beside it.
///
/// # Errors
/// [`crate::ModelError::Io`] if a file can't be read, [`crate::ModelError::Format`] if one is damaged, missing or
/// contradicts itself, [`crate::ModelError::Unsupported`] if the model asks for something that isn't done.
pub fn load(path: &Path) -> Result<LoadedGguf> {
    build(&split::open(path)?)
}

/// Reads a model from the bytes of a single GGUF file. `name` stands for its path in messages.
///
/// # Errors
/// As [`load`]; one shard of several is refused.
pub fn parse_bytes(name: impl Into<PathBuf>, bytes: impl Into<Bytes>) -> Result<LoadedGguf> {
    build(&split::single(GgufFile::parse(ModelFile::owned(name, bytes))?)?)
}

fn build(shards: &[GgufFile]) -> Result<LoadedGguf> {
    let vocab = match shards.first() {
        Some(first) => vocab::read(first)?,
        None => GgufVocab::default(),
    };
    let spec = assemble::assemble(shards, vocab.special(), vocab.tokens.len())?;
    Ok(LoadedGguf { spec, vocab })
}
