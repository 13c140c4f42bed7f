//! Where test files are, and the vocabulary that a GGUF file carries.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use headrace_model::tokenizer::GgufVocab;

/// A file of `tests/data/tokenizer`, as JSON.
pub fn data(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A folder or file of the workspace's `tests/data`.
pub fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(name)
}

/// SmolLM2's GGUF file: `HEADRACE_SMOLLM2_GGUF`. Tests that need it are ignored unless they are asked for.
pub fn smollm2_gguf() -> PathBuf {
    let path = std::env::var_os("HEADRACE_SMOLLM2_GGUF");
    path.expect("HEADRACE_SMOLLM2_GGUF must be the path that `headrace fetch smollm2-135m` prints").into()
}

/// A directory with SmolLM2's `tokenizer.json`, made from the vocabulary of its GGUF file, and with its chat template.
pub fn smollm2_json() -> Scratch {
    let vocab = gguf_vocab(&smollm2_gguf());
    let frame = std::fs::read(file("graphs/smollm2-cpu/tokenizer.frame.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&frame).unwrap();
    let ids = vocab.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into()));
    tokenizer["model"]["vocab"] = serde_json::Value::Object(ids.collect());
    tokenizer["model"]["merges"] =
        vocab.merges.iter().map(|merge| serde_json::json!(merge.split_once(' ').unwrap())).collect();
    let scratch = Scratch::new();
    std::fs::write(scratch.0.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for name in ["tokenizer_config.json", "chat_template.jinja", "genai_config.json"] {
        std::fs::copy(file("graphs/smollm2-cpu").join(name), scratch.0.join(name)).unwrap();
    }
    scratch
}

/// A directory that goes when dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("headrace-tokenizer-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The vocabulary that a GGUF file carries.
pub fn gguf_vocab(path: &Path) -> GgufVocab {
    headrace_model::gguf::load(path).unwrap().vocab
}
