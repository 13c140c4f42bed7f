//! Seeds for the fuzz target, written to `fuzz/corpus/gguf`: small sound models, the hostile files, and the headers of
//! real files.

use std::path::Path;

use crate::writer::{Gguf, HIDDEN, VOCAB, Val};

#[test]
#[ignore = "writes files; for the fuzz target"]
fn write_fuzz_seeds() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gguf");
    std::fs::create_dir_all(&dir).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
    for arch in ["llama", "qwen2", "qwen3"] {
        write(arch, &Gguf::tiny(arch).build());
    }
    let mut full = Gguf::tiny("llama");
    full.f16("output.weight", &[HIDDEN, VOCAB]).f32("output.bias", VOCAB).f32("rope_freqs.weight", 2);
    full.f32("blk.0.attn_output.bias", 8).set("llama.attention.head_count_kv", Val::I32s(vec![1]));
    full.set("llama.rope.scaling.type", Val::Str("linear")).set("llama.rope.scaling.factor", Val::F32(2.0));
    full.set("tokenizer.ggml.token_type", Val::I32s(vec![1; 10])).set("general.alignment", Val::U32(32));
    full.set("tokenizer.ggml.scores", Val::F32s(vec![0.5; 10]));
    full.set("tokenizer.ggml.merges", Val::Strs(vec!["t 1".into()]));
    full.load().unwrap();
    write("full", &full.build());
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    std::fs::copy(tests.join("data/gguf_values.gguf"), dir.join("values")).unwrap();
    for entry in std::fs::read_dir(tests.join("hostile/gguf")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    for entry in std::fs::read_dir(tests.join("../../../tests/data/models")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "gguf") {
            let bytes = std::fs::read(&path).unwrap();
            write(&format!("cut-{}", path.file_name().unwrap().to_string_lossy()), &bytes[..16_000]);
        }
    }
}
