//! A sentencepiece vocabulary in GGUF's terms, against sentencepiece's own results (`make_sentencepiece.py`).

use headrace_model::ModelError;
use headrace_model::tokenizer::{GgufVocab, Tokenizer};

use crate::gguf_vocab::sentencepiece;
use crate::shared;

fn made(vocab: &GgufVocab) -> Tokenizer {
    Tokenizer::from_gguf("made.gguf".as_ref(), vocab).unwrap()
}

#[test]
fn ids_and_texts_are_sentencepieces() {
    let fixture = shared::data("sentencepiece.json");
    let tokenizer = made(&sentencepiece());
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() > 300);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"].as_str().unwrap(), "{text:?}");
    }
}

#[test]
fn special_tokens_go_around_a_text() {
    let vocab = sentencepiece();
    let tokenizer = made(&vocab);
    let plain = tokenizer.encode("the mill", false).unwrap();
    assert_eq!(tokenizer.encode("the mill", true).unwrap(), [&[1], &plain[..]].concat(), "bos unless the file says no");
    assert_eq!(tokenizer.special().eos, [2]);
    let none = made(&GgufVocab { add_bos: Some(false), ..vocab.clone() });
    assert_eq!(none.encode("the mill", true).unwrap(), plain);
    let both = made(&GgufVocab { add_bos: Some(true), add_eos: Some(true), ..vocab.clone() });
    assert_eq!(both.encode("the mill", true).unwrap(), [&[1], &plain[..], &[2]].concat());
    assert_eq!(both.encode("<s>the mill</s>", false).unwrap(), [&[1], &plain[..], &[2]].concat());
    assert_eq!(both.decode(&both.encode("the mill", true).unwrap(), true).unwrap(), "the mill");
}

#[test]
fn the_space_before_a_text_can_be_left_out() {
    let tokenizer = made(&GgufVocab { add_space_prefix: Some(false), ..sentencepiece() });
    let tokens = |text: &str| -> Vec<String> {
        tokenizer.encode(text, false).unwrap().iter().map(|&id| tokenizer.id_to_token(id).unwrap()).collect()
    };
    assert_eq!(tokens("the"), ["t", "he"]);
    assert_eq!(tokens(" the"), ["▁the"]);
    assert_eq!(tokenizer.decode(&tokenizer.encode(" the", false).unwrap(), false).unwrap(), " the");
}

#[test]
fn bytes_stand_in_for_what_no_token_covers() {
    let tokenizer = made(&sentencepiece());
    let ids = tokenizer.encode("日", false).unwrap();
    let tokens: Vec<String> = ids.iter().map(|&id| tokenizer.id_to_token(id).unwrap()).collect();
    assert_eq!(tokens, ["▁", "<0xE6>", "<0x97>", "<0xA5>"]);
    // Without byte tokens, the unknown token does.
    let mut vocab = sentencepiece();
    for (token, kind) in vocab.tokens.iter_mut().zip(&mut vocab.token_types) {
        if *kind == 6 {
            *kind = 5;
            *token = token.replace("0x", "no ");
        }
    }
    assert_eq!(made(&vocab).encode("日", false).unwrap(), [ids[0], 0]);
    // With only some of them, the vocabulary is broken.
    let mut vocab = sentencepiece();
    vocab.token_types[100] = 5;
    let e = Tokenizer::from_gguf("made.gguf".as_ref(), &vocab).unwrap_err();
    assert!(matches!(e, ModelError::Format { .. }) && e.to_string().contains("255 of 256"), "{e}");
}
