//! Where test files are, and the vocabulary that a GGUF file carries.

use std::path::{Path, PathBuf};

use headrace_model::tokenizer::GgufVocab;

/// A file of `tests/data/tokenizer`, as JSON.
pub fn data(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A folder or file below the shared models: `HEADRACE_SHARED`, else `../shared` beside the workspace. `None`, with a
/// line, if it is not there.
pub fn model(name: &str) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let shared = std::env::var_os("HEADRACE_SHARED").map_or(beside, PathBuf::from);
    there(shared.join("models").join(name))
}

/// SmolLM2's GGUF file: `HEADRACE_SMOLLM2_GGUF`.
pub fn smollm2_gguf() -> Option<PathBuf> {
    match std::env::var_os("HEADRACE_SMOLLM2_GGUF") {
        Some(path) => there(path.into()),
        None => {
            println!("skipped: HEADRACE_SMOLLM2_GGUF is not set");
            None
        }
    }
}

fn there(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is missing", path.display());
    None
}

/// The vocabulary that a GGUF file carries.
pub fn gguf_vocab(path: &Path) -> GgufVocab {
    headrace_model::gguf::load(path).unwrap().vocab
}
