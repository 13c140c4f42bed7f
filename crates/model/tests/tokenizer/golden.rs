//! The golden strings, on the vocabulary of a `tokenizer.json` and on that of a GGUF file.

use headrace_model::tokenizer::Tokenizer;
use headrace_model::{ChatMessage, ModelError};

use crate::shared;

fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let gguf = shared::smollm2_gguf();
    let json = shared::smollm2_json();
    vec![
        ("json", Tokenizer::from_dir(&json.0).unwrap()),
        ("gguf", Tokenizer::from_gguf(&gguf, &shared::gguf_vocab(&gguf)).unwrap()),
    ]
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn golden_strings_have_their_ids() {
    let golden = shared::data("smollm2_golden.json");
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 72);
    for (name, tokenizer) in tokenizers() {
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{name} puts nothing around a text: {text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{name}");
        }
    }
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn special_tokens_are_known() {
    for (name, tokenizer) in tokenizers() {
        let special = tokenizer.special();
        assert_eq!((special.bos, special.pad, special.add_bos), (Some(1), Some(2), false), "{name}");
        assert_eq!(special.eos, [2], "{name}");
        assert_eq!(tokenizer.vocab_size(), 49_152, "{name}");
        assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(2), "{name}");
        assert_eq!(tokenizer.id_to_token(2).as_deref(), Some("<|im_end|>"), "{name}");
        assert_eq!(tokenizer.decode(&[1, 504, 2], true).unwrap(), "The", "{name}");
        assert_eq!(tokenizer.decode(&[1, 504, 2], false).unwrap(), "<|im_start|>The<|im_end|>", "{name}");
        assert!(matches!(tokenizer.decode(&[49_152], false), Err(ModelError::Format { .. })), "{name}");
    }
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn special_ids_can_be_replaced() {
    for (name, tokenizer) in tokenizers() {
        let tokenizer = tokenizer.with_special_ids(Some(5), &[2, 0], None).unwrap();
        let special = tokenizer.special().clone();
        assert_eq!((special.bos, special.eos, special.pad), (Some(5), vec![2, 0], Some(2)), "{name}");
        let e = tokenizer.with_special_ids(None, &[2, 50_000], None).unwrap_err();
        assert!(e.to_string().contains("50000"), "{name}: {e}");
    }
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn the_chat_prompt_is_the_golden_one() {
    let golden = std::fs::read(shared::file("golden/gguf-q4_1-exact-fp64.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&golden).unwrap();
    let chat = &golden["prompts"]["chat"];
    let ids: Vec<u32> = serde_json::from_value(chat["prompt_ids"].clone()).unwrap();
    let messages = [
        ChatMessage::new("system", "You are a helpful assistant."),
        ChatMessage::new("user", "Give me three tips for learning to play the guitar."),
    ];
    for (name, tokenizer) in tokenizers() {
        assert!(tokenizer.has_chat_template());
        let text = tokenizer.apply_chat_template(&messages, true).unwrap();
        assert_eq!(text, chat["text"].as_str().unwrap(), "{name}");
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{name}");
        let text = tokenizer.apply_chat_template(&messages[1..], false).unwrap();
        assert!(text.starts_with("<|im_start|>system\nYou are a helpful AI assistant named SmolLM"), "{name}: {text}");
        assert!(text.ends_with("guitar.<|im_end|>\n"), "{name}: {text}");
    }
}

/// Every token of the two files' vocabularies is the same, and so are the ids of text of every kind.
#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn both_files_of_one_model_agree() {
    use rand::{Rng, SeedableRng};
    let all = tokenizers();
    let [(_, json), (_, gguf)] = &all[..] else { return };
    for id in 0..49_152 {
        assert_eq!(json.id_to_token(id), gguf.id_to_token(id));
        assert_eq!(json.decode(&[id], true).unwrap(), gguf.decode(&[id], true).unwrap());
    }
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    for _ in 0..2_000 {
        let text: String = (0..rng.random_range(1..40)).map(|_| random_char(&mut rng)).collect();
        let ids = json.encode(&text, false).unwrap();
        assert_eq!(gguf.encode(&text, false).unwrap(), ids, "{text:?}");
        let back = json.decode(&ids, false).unwrap();
        assert_eq!(gguf.decode(&ids, false).unwrap(), back, "{text:?}");
    }
}

/// A character of one of several kinds: letters, digits, white space, punctuation, any.
pub fn random_char(rng: &mut impl rand::Rng) -> char {
    let of = |rng: &mut _, set: &str| {
        let chars: Vec<char> = set.chars().collect();
        chars[rand::Rng::random_range(rng, 0..chars.len())]
    };
    match rng.random_range(0..8) {
        0..=2 => rng.random_range('a'..='z'),
        3 => of(rng, "0123456789٣Ⅷ²"),
        4 => of(rng, "  \n\t\r\u{a0}"),
        5 => of(rng, ".,;:!?'\"<>|_-/\\"),
        6 => of(rng, "ABCßéüÅ日本語한글иעع🙂👍🏽\u{200d}\u{301}"),
        _ => rng.random(),
    }
}
