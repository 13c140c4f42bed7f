//! Model directories with broken files: typed errors, quickly.

use std::fs;
use std::path::{Path, PathBuf};

use headrace_model::tokenizer::Tokenizer;
use headrace_model::{ChatMessage, ModelError};
use serde_json::{Value, json};

use crate::gguf_vocab::byte_level;

/// A small sound `tokenizer.json`.
fn sound() -> Value {
    let vocab: serde_json::Map<String, Value> =
        byte_level().tokens.into_iter().enumerate().map(|(id, text)| (text, json!(id))).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<|end|>"},
        "added_tokens": [special(0, "<|end|>"), special(1, "<|user|>"), special(2, "<|model|>")],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "<|model|>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]},
                               "<|model|>": {"id": "<|model|>", "ids": [2], "tokens": ["<|model|>"]}}},
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

/// A directory of its own for one case.
fn dir(name: &str, files: &[(&str, Vec<u8>)]) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokenizer").join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    for (file, bytes) in files {
        fs::write(dir.join(file), bytes).unwrap();
    }
    dir
}

fn with(name: &str, config: &[(&str, Value)]) -> Result<Tokenizer, ModelError> {
    let mut files = vec![("tokenizer.json", sound().to_string().into_bytes())];
    files.extend(config.iter().map(|(file, value)| (*file, value.to_string().into_bytes())));
    Tokenizer::from_dir(&dir(name, &files))
}

#[test]
fn the_directory_says_what_goes_around_a_text() {
    let plain = with("plain", &[]).unwrap();
    let a = plain.token_to_id("a").unwrap();
    assert_eq!(plain.encode("aaa", false).unwrap(), [a, a, a], "truncation and padding are the caller's");
    assert_eq!(plain.encode("a", true).unwrap(), [1, a, 2], "as the post-processor has it");
    assert!(!plain.special().add_bos && plain.special().bos.is_none() && !plain.has_chat_template());

    let config = json!({"bos_token": "<|user|>", "eos_token": {"content": "<|end|>"}});
    let named = with("named", &[("tokenizer_config.json", config.clone())]).unwrap();
    assert_eq!((named.special().bos, &named.special().eos[..], named.special().add_bos), (Some(1), &[0][..], true));
    assert_eq!(named.encode("a", true).unwrap(), [1, a, 2]);
    let map = with("map", &[("special_tokens_map.json", config)]).unwrap();
    assert_eq!(map.special(), named.special());

    let config = json!({"bos_token": "<|user|>", "add_bos_token": false});
    let without = with("without", &[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(without.encode("a", true).unwrap(), [a, 2]);
}

#[test]
fn templates_come_from_three_places() {
    let ask = |tokenizer: &Tokenizer| tokenizer.apply_chat_template(&[ChatMessage::new("user", "x")], false).unwrap();
    let config = |template: Value| ("tokenizer_config.json", json!({"chat_template": template}));
    let text = with("text", &[config(json!("text {{ messages[0].content }}"))]).unwrap();
    assert_eq!(ask(&text), "text x");
    let list = json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "list"}]);
    assert_eq!(ask(&with("list", &[config(list)]).unwrap()), "list");
    let other = json!([{"name": "tool_use", "template": "tools"}]);
    assert!(!with("other", &[config(other)]).unwrap().has_chat_template());
    let files = [
        ("tokenizer.json", sound().to_string().into_bytes()),
        ("tokenizer_config.json", json!({"chat_template": "config"}).to_string().into_bytes()),
        ("chat_template.jinja", b"file\n".to_vec()),
    ];
    assert_eq!(ask(&Tokenizer::from_dir(&dir("file", &files)).unwrap()), "file");
}

#[test]
fn broken_directories_are_typed_errors() {
    let e = Tokenizer::from_dir(&dir("empty", &[])).unwrap_err();
    assert!(matches!(&e, ModelError::Io { path, .. } if path.ends_with("tokenizer.json")), "{e}");

    let text = sound().to_string().into_bytes();
    let mut bad_utf8 = text.clone();
    bad_utf8[100] = 0xff;
    let mut inputs: Vec<(String, Vec<u8>)> = vec![
        ("nothing".into(), Vec::new()),
        ("binary".into(), (0..=255).collect()),
        ("utf8".into(), bad_utf8),
        ("list".into(), b"[]".to_vec()),
        ("object".into(), b"{}".to_vec()),
        ("deep".into(), [b"{\"model\":".to_vec(), vec![b'['; 1_000_000]].concat()),
    ];
    for cut in [1, text.len() / 3, text.len() / 2, text.len() - 1] {
        inputs.push((format!("cut{cut}"), text[..cut].to_vec()));
    }
    type Change = fn(&mut Value);
    let changes: &[(&str, Change)] = &[
        ("no_model", |v| v["model"] = Value::Null),
        ("vocab_list", |v| v["model"]["vocab"] = json!(["a"])),
        ("vocab_text", |v| v["model"]["vocab"]["a"] = json!("x")),
        ("vocab_negative", |v| v["model"]["vocab"]["a"] = json!(-1)),
        ("vocab_same_id", |v| v["model"]["vocab"]["a"] = v["model"]["vocab"]["b"].clone()),
        ("vocab_far_id", |v| v["model"]["vocab"]["a"] = json!(u32::MAX)),
        ("merges_number", |v| v["model"]["merges"] = json!([1])),
        ("merges_unknown", |v| v["model"]["merges"] = json!([["a", "nothing"]])),
        ("merges_no_result", |v| v["model"]["merges"] = json!([["a", "b"]])),
        ("merges_too_long", |v| v["model"]["merges"] = json!([["<|model|>", "<|model|>"]])),
        ("added_wrong_id", |v| v["added_tokens"][0]["id"] = json!(77)),
        ("added_no_text", |v| v["added_tokens"][0]["content"] = Value::Null),
        ("pattern", |v| {
            v["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(("},
            "behavior": "Isolated", "invert": false})
        }),
        ("post", |v| v["post_processor"]["special_tokens"] = json!({})),
    ];
    for (name, change) in changes {
        let mut value = sound();
        change(&mut value);
        inputs.push((name.to_string(), value.to_string().into_bytes()));
    }
    for (name, bytes) in inputs {
        let e = Tokenizer::from_dir(&dir(&name, &[("tokenizer.json", bytes)])).unwrap_err();
        println!("{name}: {e}");
        assert!(matches!(&e, ModelError::Format { path, .. } if path.ends_with("tokenizer.json")), "{name}: {e}");
    }

    let unsupported: &[(&str, Change)] = &[
        ("unigram", |v| v["model"]["type"] = json!("Unigram")),
        ("dropout", |v| v["model"]["dropout"] = json!(0.1)),
        ("prefix", |v| v["model"]["continuing_subword_prefix"] = json!("##")),
        ("no_decoder", |v| v["decoder"] = Value::Null),
        ("decoder", |v| v["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        ("half_decoder", |v| v["decoder"] = json!({"type": "Fuse"})),
    ];
    for (name, change) in unsupported {
        let mut value = sound();
        change(&mut value);
        let e = Tokenizer::from_dir(&dir(name, &[("tokenizer.json", value.to_string().into_bytes())])).unwrap_err();
        assert!(matches!(e, ModelError::Unsupported { .. }), "{name}: {e}");
    }
}

#[test]
fn broken_settings_are_typed_errors() {
    let cases = [
        ("bos_number", json!({"bos_token": 1}), "bos_token"),
        ("bos_unknown", json!({"bos_token": "<nobody>"}), "<nobody>"),
        ("bos_missing", json!({"add_bos_token": true}), "add_bos_token"),
        ("flag", json!({"add_bos_token": "yes"}), "add_bos_token"),
        ("template", json!({"chat_template": 7}), "chat_template"),
        ("template_list", json!({"chat_template": [{"name": "default"}]}), "chat_template"),
        ("list", json!([1]), "object"),
    ];
    for (name, config, message) in cases {
        let e = with(name, &[("tokenizer_config.json", config)]).unwrap_err();
        assert!(
            matches!(&e, ModelError::Format { path, .. } if path.ends_with("tokenizer_config.json")),
            "{name}: {e}"
        );
        assert!(e.to_string().contains(message), "{name}: {e}");
    }
    for (name, file) in [("a", "tokenizer_config.json"), ("b", "special_tokens_map.json"), ("c", "chat_template.jinja")]
    {
        let files = [("tokenizer.json", sound().to_string().into_bytes()), (file, vec![b'{', 0xff])];
        let e = Tokenizer::from_dir(&dir(name, &files)).unwrap_err();
        assert!(matches!(&e, ModelError::Format { path, .. } if path.ends_with(file)), "{e}");
    }
    let files =
        [("tokenizer.json", sound().to_string().into_bytes()), ("chat_template.jinja", vec![b'x'; (1 << 20) + 1])];
    let e = Tokenizer::from_dir(&dir("huge", &files)).unwrap_err();
    assert!(e.to_string().contains("longer than"), "{e}");
}

/// A file that never ends is read up to the limit only.
#[cfg(unix)]
#[test]
fn endless_files_are_cut_off() {
    let dir = dir("endless", &[("tokenizer.json", sound().to_string().into_bytes())]);
    std::os::unix::fs::symlink("/dev/zero", dir.join("chat_template.jinja")).unwrap();
    let e = Tokenizer::from_dir(&dir).unwrap_err();
    assert!(e.to_string().contains("longer than"), "{e}");
}

/// Bytes changed at random: an error or a tokenizer, never a panic that gets out, and encoding holds as well.
#[test]
fn mutated_files_never_panic() {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(11);
    let text = sound().to_string().into_bytes();
    let mut loaded = 0;
    for _ in 0..300 {
        let mut bytes = text.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..3) {
                0 => bytes[at] = rng.random_range(b' '..=b'~'),
                1 => {
                    bytes.remove(at);
                }
                _ => bytes.insert(at, b"0123456789\"{}[],:"[rng.random_range(0..17)]),
            }
        }
        if let Ok(tokenizer) = Tokenizer::from_dir(&dir("mutated", &[("tokenizer.json", bytes)])) {
            loaded += 1;
            if let Ok(ids) = tokenizer.encode("Hello <|user|> 🙂", true) {
                tokenizer.decode(&ids, true).unwrap();
            }
        }
    }
    assert!((1..300).contains(&loaded), "{loaded}");
}
