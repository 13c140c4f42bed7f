//! Vocabularies as GGUF files carry them: made ones, the tiny models', and broken ones.

use std::path::Path;
use std::time::{Duration, Instant};

use headrace_model::ModelError;
use headrace_model::tokenizer::{GgufVocab, Tokenizer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::golden::random_char;
use crate::shared;

/// A token for every byte, three control tokens before them, no merges.
pub fn byte_level() -> GgufVocab {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0x100..).zip((0..=255).filter(|&b| !printable(b)));
    let mut bytes: Vec<(u32, u32)> = (0..=255).filter(|&b| printable(b)).map(|b| (b, b)).collect();
    bytes.extend(others.map(|(c, b)| (b, c)));
    bytes.sort();
    let mut tokens: Vec<String> = ["<|end|>", "<|user|>", "<|model|>"].map(String::from).to_vec();
    tokens.extend(bytes.iter().map(|&(_, c)| char::from_u32(c).unwrap().to_string()));
    let mut token_types = vec![1; tokens.len()];
    token_types[..3].fill(3);
    GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types,
        bos: Some(1),
        eos: Some(0),
        ..GgufVocab::default()
    }
}

/// The vocabulary of `make_sentencepiece.py`.
pub fn sentencepiece() -> GgufVocab {
    let mut fixture = shared::data("sentencepiece.json");
    GgufVocab {
        model: "llama".into(),
        tokens: serde_json::from_value(fixture["tokens"].take()).unwrap(),
        token_types: serde_json::from_value(fixture["token_types"].take()).unwrap(),
        scores: serde_json::from_value(fixture["scores"].take()).unwrap(),
        ..GgufVocab::default()
    }
}

fn build(vocab: &GgufVocab) -> Result<Tokenizer, ModelError> {
    Tokenizer::from_gguf(Path::new("made.gguf"), vocab)
}

#[test]
fn tiny_models_encode_alike_from_both_files() {
    let pairs =
        [("models/qwen3-int4-cpu", "models/qwen3-Q8_0.gguf"), ("models/qwen2-int4-cpu", "models/qwen2-F16.gguf")];
    for (dir, gguf) in pairs {
        let (dir, gguf) = (shared::file(dir), shared::file(gguf));
        let json = Tokenizer::from_dir(&dir).unwrap();
        let gguf = Tokenizer::from_gguf(&gguf, &shared::gguf_vocab(&gguf)).unwrap();
        assert_eq!(json.special(), gguf.special());
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        for _ in 0..1_000 {
            let mut text: String = (0..rng.random_range(0..40)).map(|_| random_char(&mut rng)).collect();
            if dir.ends_with("qwen2-int4-cpu") {
                // That `tokenizer.json` normalises, and its GGUF file says `gpt-2`, which does not.
                text.retain(|c| c.is_ascii() || "ßéüÅ日本語한글иעع🙂".contains(c));
            }
            assert_eq!(json.encode(&text, true).unwrap(), gguf.encode(&text, true).unwrap(), "{text:?}");
        }
    }
}

#[test]
fn merges_and_special_tokens_make_tokens() {
    let mut vocab = byte_level();
    let end = vocab.tokens.len() as u32;
    vocab.tokens.extend(["he", "ll", "hell", "Ġhe", "<keep>", "<hidden>"].map(String::from));
    vocab.token_types.extend([1, 1, 1, 1, 4, 5]);
    vocab.merges = ["h e", "l l", "he ll", "Ġ he", "z z", "h e"].map(String::from).to_vec();
    let tokenizer = build(&vocab).unwrap();
    let o = tokenizer.token_to_id("o").unwrap();
    assert_eq!(tokenizer.encode("hello hehe", false).unwrap(), [end + 2, o, end + 3, end]);
    assert_eq!(tokenizer.encode("<keep>he<|user|>", false).unwrap(), [end + 4, end, 1]);
    assert_eq!(tokenizer.encode("<hidden>", false).unwrap().len(), 8, "an unused token is plain text");
    assert_eq!(tokenizer.decode(&[end + 4, end, 1], true).unwrap(), "<keep>he", "only control tokens are left out");
    // A merge whose result is no token ("z z") changes nothing.
    assert_eq!(tokenizer.encode("zz", false).unwrap().len(), 2);
}

#[test]
fn whole_words_are_taken_where_the_rules_say_so() {
    let mut vocab = byte_level();
    let end = vocab.tokens.len() as u32;
    vocab.tokens.push("word".into());
    vocab.token_types.push(1);
    assert_eq!(build(&vocab).unwrap().encode("word", true).unwrap().len(), 4);
    vocab.pre = Some("llama-bpe".into());
    assert_eq!(build(&vocab).unwrap().encode("word", true).unwrap(), [1, end], "and bos comes first");
    vocab.add_bos = Some(false);
    assert_eq!(build(&vocab).unwrap().encode("word", true).unwrap(), [end]);
}

#[test]
fn qwen2_normalises() {
    let vocab = GgufVocab { pre: Some("qwen2".into()), ..byte_level() };
    let tokenizer = build(&vocab).unwrap();
    assert_eq!(tokenizer.encode("e\u{301}", false).unwrap(), tokenizer.encode("é", false).unwrap());
}

#[test]
fn eos_lists_every_token_that_ends_a_generation() {
    let vocab = GgufVocab { extra_eos: vec![2, 0], ..byte_level() };
    assert_eq!(build(&vocab).unwrap().special().eos, [0, 2]);
}

#[test]
fn broken_vocabularies_are_typed_errors() {
    type Change = fn(&mut GgufVocab);
    let format: &[(&str, Change)] = &[
        ("there must be 1 to", |v| v.tokens.clear()),
        ("tokens 3 and 40 are both", |v| v.tokens[40] = v.tokens[3].clone()),
        ("258 entries for 259 tokens", |v| v.token_types.truncate(258)),
        ("1 entries for 259 tokens", |v| v.scores = vec![0.0]),
        ("token 7 has the unknown type 9", |v| v.token_types[7] = 9),
        ("token 259 of 259", |v| v.bos = Some(259)),
        ("eos_token_id: token 4294967295", |v| v.eos = Some(u32::MAX)),
        ("token 300 of", |v| v.extra_eos = vec![300]),
        ("token 300 of", |v| v.pad = Some(300)),
        ("merge 1, \"ab\", is not two tokens", |v| v.merges = vec!["a b".into(), "ab".into()]),
        ("is not two tokens", |v| v.merges = vec!["".into()]),
        ("is not two tokens", |v| v.merges = vec![" ".into()]),
        ("names \"xyz\", which is no token", |v| v.merges = vec!["a xyz".into()]),
        ("names \"b c\", which is no token", |v| v.merges = vec!["a b c".into()]),
        ("names no such token", |v| (v.bos, v.add_bos) = (None, Some(true))),
    ];
    for (message, change) in format {
        let mut vocab = byte_level();
        change(&mut vocab);
        let e = build(&vocab).unwrap_err();
        assert!(matches!(e, ModelError::Format { .. }), "{e}");
        assert!(e.to_string().contains(message) && e.to_string().starts_with("made.gguf"), "{message}: {e}");
    }
    let unsupported: &[(&str, Change)] =
        &[("no rules called `klingon`", |v| v.pre = Some("klingon".into())), ("kind `t5`", |v| v.model = "t5".into())];
    for (message, change) in unsupported {
        let mut vocab = byte_level();
        change(&mut vocab);
        let e = build(&vocab).unwrap_err();
        assert!(matches!(e, ModelError::Unsupported { .. }) && e.to_string().contains(message), "{message}: {e}");
    }
    let pieces: &[(&str, Change)] = &[
        ("0 entries for 600 tokens", |v| v.scores.clear()),
        ("score of token 300 is not a number", |v| v.scores[300] = f32::NAN),
        ("bytes long; at most", |v| v.tokens[300] = "a".repeat(100_000)),
    ];
    for (message, change) in pieces {
        let mut vocab = sentencepiece();
        change(&mut vocab);
        let e = build(&vocab).unwrap_err();
        assert!(matches!(e, ModelError::Format { .. }) && e.to_string().contains(message), "{message}: {e}");
    }
}

/// 150,000 tokens and merges load at once: the bound holds for optimised code.
#[test]
fn a_large_vocabulary_loads_quickly() {
    let mut vocab = byte_level();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut last = letters.clone();
    while vocab.tokens.len() < 150_000 {
        let mut next = Vec::new();
        for left in last.iter().take(5_800) {
            for right in &letters {
                vocab.tokens.push(format!("{left}{right}"));
                vocab.token_types.push(1);
                vocab.merges.push(format!("{left} {right}"));
                next.push(format!("{left}{right}"));
            }
        }
        last = next;
    }
    let start = Instant::now();
    let tokenizer = build(&vocab).unwrap();
    let took = start.elapsed();
    println!("{} tokens in {took:?}", tokenizer.vocab_size());
    assert!(took < Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 2 }), "{took:?}");
    assert_eq!(tokenizer.encode("abc", false).unwrap().len(), 1);
}
