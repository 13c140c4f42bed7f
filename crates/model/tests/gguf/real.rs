//! Real files: the tiny ones of the workspace's `tests/data`, and SmolLM2's, whose path is `HEADRACE_SMOLLM2_GGUF`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use headrace_model::gguf::{GgufFile, LoadedGguf, load};
use headrace_model::spec::RopeTables;
use headrace_numerics::format::Format;
use headrace_numerics::rope::RopeStyle;

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models").join(name)
}

/// Every tensor of the file is referenced, and nothing but padding lies between them.
fn check_bytes(path: &Path, m: &LoadedGguf) {
    let file = GgufFile::open(path).unwrap();
    assert_eq!(m.spec.tensors.len(), file.tensors.len());
    let padded: usize = file.tensors.iter().map(|t| t.len.next_multiple_of(file.alignment)).sum();
    let rest = file.file.bytes.len() - file.data_offset;
    assert!(padded.next_multiple_of(file.alignment) - rest < file.alignment, "{padded} of {rest}");
    assert_eq!(m.spec.weight_bytes(), file.tensors.iter().map(|t| t.len).sum::<usize>());
    assert_eq!(m.spec.read_order().len(), m.spec.tensors.len());
    assert!(m.spec.files.len() == 1 && m.spec.files[0].mapped);
}

#[test]
fn tiny_qwen2() {
    for (name, format, embedding) in
        [("qwen2-F16.gguf", Format::F16, Format::F16), ("qwen2-Q4_0.gguf", Format::Q4_0, Format::Q8_0)]
    {
        let path = tiny(name);
        let m = load(&path).unwrap();
        check_bytes(&path, &m);
        let c = &m.spec.config;
        assert_eq!((c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn), (288, 128, 4, 2, 32, 384));
        assert_eq!((c.rope.style, m.spec.layers.len()), (RopeStyle::Half, 4));
        assert_eq!(m.spec.tensor(m.spec.embedding).format, embedding);
        for layer in &m.spec.layers {
            assert_eq!(m.spec.tensor(layer.down.weight).format, format);
            assert!(layer.qkv.iter().all(|l| l.bias.is_some()) && layer.q_norm.is_none());
        }
    }
}

#[test]
fn tiny_qwen3() {
    for (name, format) in [("qwen3-Q4_1.gguf", Format::Q4_1), ("qwen3-Q8_0.gguf", Format::Q8_0)] {
        let path = tiny(name);
        let m = load(&path).unwrap();
        check_bytes(&path, &m);
        let c = &m.spec.config;
        assert_eq!((c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn), (288, 128, 4, 2, 64, 384));
        for layer in &m.spec.layers {
            assert_eq!(m.spec.tensor(layer.o.weight).format, format);
            assert_eq!(m.spec.tensor(layer.q_norm.unwrap()).cols, 64);
            assert!(layer.k_norm.is_some() && layer.qkv.iter().all(|l| l.bias.is_none()));
        }
    }
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn smollm2() {
    let path = std::env::var_os("HEADRACE_SMOLLM2_GGUF");
    let path = path.expect("HEADRACE_SMOLLM2_GGUF must be the path that `headrace fetch smollm2-135m` prints");
    let path = PathBuf::from(path);
    let start = Instant::now();
    let m = load(&path).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    check_bytes(&path, &m);
    let c = &m.spec.config;
    assert_eq!((c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn), (49_152, 576, 9, 3, 64, 1536));
    assert_eq!((c.max_context, c.norm_eps, m.spec.layers.len(), m.spec.tensors.len()), (8192, 1e-5, 30, 272));
    assert_eq!(c.rope.tables, RopeTables::Computed { base: 1e5, factors: None, position_scale: 1.0 });
    assert_eq!(c.rope.style, RopeStyle::Interleaved);
    let count = |f| m.spec.tensors.iter().filter(|t| t.format == f).count();
    assert_eq!((count(Format::Q4_1), count(Format::Q8_0), count(Format::F32)), (210, 1, 61));
    assert_eq!(m.spec.lm_head.weight, m.spec.embedding);
    let v = &m.vocab;
    assert_eq!((v.model.as_str(), v.pre.as_deref()), ("gpt2", Some("smollm")));
    assert_eq!((v.tokens.len(), v.merges.len(), v.token_types.len(), v.scores.len()), (49_152, 48_900, 49_152, 0));
    assert_eq!((v.bos, v.eos, v.unk, v.pad), (Some(1), Some(2), Some(0), Some(2)));
    assert_eq!((v.add_bos, v.add_space_prefix), (Some(false), Some(false)));
    assert_eq!(v.tokens[2], "<|im_end|>");
    assert!(v.chat_template.as_deref().is_some_and(|t| t.starts_with("{% for message in messages %}")));
    assert_eq!((m.spec.special.bos, m.spec.special.eos.as_slice(), m.spec.special.add_bos), (Some(1), &[2][..], false));
}
