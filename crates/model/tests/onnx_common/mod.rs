//! What the ONNX tests share: where the models are, directories to build models in, data files of the right size.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder or file of the workspace's `tests/data`.
pub fn data(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(part)
}

/// A directory that goes when dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("headrace-onnx-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// A file of `len` zeros that takes no space.
    pub fn sparse(&self, name: &str, len: u64) {
        std::fs::File::create(self.0.join(name)).unwrap().set_len(len).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A `genai_config.json` with the given sizes.
#[allow(clippy::too_many_arguments)]
pub fn genai_config(
    arch: &str,
    vocab: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    context: usize,
) -> String {
    format!(
        r#"{{"model": {{"type": "{arch}", "vocab_size": {vocab}, "context_length": {context}, "bos_token_id": 1,
        "eos_token_id": [2, 3, 2], "pad_token_id": 0, "decoder": {{"filename": "model.onnx", "head_size": {head_dim},
        "hidden_size": {hidden}, "num_attention_heads": {heads}, "num_hidden_layers": {layers},
        "num_key_value_heads": {kv_heads}}}}}, "search": {{}}}}"#
    )
}

/// That of SmolLM2-135M.
pub fn smollm2_config() -> String {
    genai_config("llama", 49152, 576, 9, 3, 64, 30, 8192)
}
