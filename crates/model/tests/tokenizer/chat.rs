//! Chat templates against jinja2's results (`make_chat.py`), and hostile ones.

use std::time::{Duration, Instant};

use headrace_model::tokenizer::{GgufVocab, Tokenizer};
use headrace_model::{ChatMessage, ModelError};

use crate::gguf_vocab::byte_level;
use crate::shared;

/// A vocabulary with the special tokens that the templates name.
fn with_template(source: &str) -> Tokenizer {
    let mut vocab = byte_level();
    let end = vocab.tokens.len() as u32;
    vocab.tokens.extend(["<s>", "</s>", "<pad>", "<unk>"].map(String::from));
    vocab.token_types.extend([3; 4]);
    let vocab = GgufVocab {
        bos: Some(end),
        eos: Some(end + 1),
        pad: Some(end + 2),
        unk: Some(end + 3),
        chat_template: Some(source.into()),
        ..vocab
    };
    Tokenizer::from_gguf("made.gguf".as_ref(), &vocab).unwrap()
}

fn user(text: &str) -> Vec<ChatMessage> {
    vec![ChatMessage::new("user", text)]
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let fixture = shared::data("chat.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 60);
    for case in cases {
        let [name, talk] = ["template", "talk"].map(|key| case[key].as_str().unwrap());
        let talk: Vec<(String, String)> = serde_json::from_value(fixture["talks"][talk].clone()).unwrap();
        let messages: Vec<_> = talk.into_iter().map(|(role, content)| ChatMessage { role, content }).collect();
        let tokenizer = with_template(fixture["templates"][name].as_str().unwrap());
        let result = tokenizer.apply_chat_template(&messages, case["prompt"].as_bool().unwrap());
        match case["error"].as_str() {
            None => assert_eq!(result.unwrap(), case["text"].as_str().unwrap(), "{case}"),
            Some(error) => {
                let e = result.unwrap_err();
                assert!(matches!(&e, ModelError::Template { line: Some(_), .. }), "{e}");
                assert!(e.to_string().contains(error), "{e}");
            }
        }
    }
}

#[test]
fn errors_say_which_template_and_where() {
    let broken = "line one\n{% for m in messages %}\n{{ m.content";
    let e = with_template(broken).apply_chat_template(&user("x"), true).unwrap_err();
    assert!(matches!(&e, ModelError::Template { template, line: Some(3), .. } if template == "default"), "{e}");
    let refuses = "\n\n{{ raise_exception('only one <tool>') }}";
    let e = with_template(refuses).apply_chat_template(&user("x"), true).unwrap_err();
    assert!(matches!(&e, ModelError::Template { line: Some(3), .. }), "{e}");
    assert!(e.to_string().contains("only one <tool>"), "{e}");
    let unknown = "{{ messages | no_such_filter }}";
    let e = with_template(unknown).apply_chat_template(&user("x"), true).unwrap_err();
    assert!(e.to_string().contains("no_such_filter"), "{e}");
    let file = "{% include '/etc/passwd' %}";
    assert!(with_template(file).apply_chat_template(&user("x"), true).is_err());
}

#[test]
fn a_model_without_a_template_says_so() {
    let tokenizer = Tokenizer::from_gguf("made.gguf".as_ref(), &byte_level()).unwrap();
    assert!(!tokenizer.has_chat_template());
    let e = tokenizer.apply_chat_template(&user("x"), true).unwrap_err();
    assert!(matches!(e, ModelError::Unsupported { .. }), "{e}");
}

#[test]
fn the_date_is_todays() {
    let tokenizer = with_template("{{ strftime_now('%Y|%d %b') }}");
    let text = tokenizer.apply_chat_template(&[], false).unwrap();
    let year: i32 = text.split('|').next().unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year), "{text}");
    assert!(with_template("{{ strftime_now('%') }}").apply_chat_template(&[], false).is_err());
}

#[test]
fn hostile_templates_end_soon_with_an_error() {
    let endless = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ];
    for source in endless {
        let shown: String = source.chars().take(80).collect();
        let start = Instant::now();
        let result = with_template(source).apply_chat_template(&user("x"), true);
        let took = start.elapsed();
        println!("{took:?} {shown}: {}", result.as_ref().err().map(|e| e.to_string()).unwrap_or_default());
        let e = result.map(|text| text.len()).unwrap_err();
        assert!(matches!(e, ModelError::Template { .. }), "{shown}: {e}");
        assert!(took < Duration::from_secs(10), "{shown}: {took:?}");
    }
    let long = with_template(&"x".repeat((1 << 20) + 1)).apply_chat_template(&[], false).unwrap_err();
    assert!(long.to_string().contains("longer than"), "{long}");
}

#[test]
fn long_conversations_fit_the_limits() {
    let fixture = shared::data("chat.json");
    let mut messages = Vec::new();
    for i in 0..2_000 {
        messages.push(ChatMessage::new("user", format!("question {i}")));
        messages.push(ChatMessage::new("assistant", format!("<think>\nhm {i}\n</think>\n\nanswer {i}")));
    }
    messages.push(ChatMessage::new("user", "long ".repeat(1_000_000)));
    for (name, source) in fixture["templates"].as_object().unwrap() {
        let text = with_template(source.as_str().unwrap()).apply_chat_template(&messages, true).unwrap();
        assert!(name == "python" || text.len() > 5_000_000, "{name}");
    }
}
