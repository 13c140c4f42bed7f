//! Decoding: round trips, and streams whose pieces are whole characters and add up to the whole text.

use std::path::Path;

use headrace_model::tokenizer::{DecodeStream, GgufVocab, Tokenizer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::gguf_vocab::{byte_level, sentencepiece};
use crate::golden::random_char;
use crate::shared;

fn made(vocab: &GgufVocab) -> Tokenizer {
    Tokenizer::from_gguf("made.gguf".as_ref(), vocab).unwrap()
}

fn all() -> Vec<Tokenizer> {
    let dirs = ["models/qwen2-int4-cpu", "models/qwen3-int4-cpu", "graphs/gptoss-cpu"];
    let dirs = dirs.into_iter().map(|dir| Tokenizer::from_dir(&shared::file(dir)).unwrap());
    let ggufs = ["models/qwen2-F16.gguf", "models/qwen3-Q8_0.gguf"].into_iter().map(shared::file);
    let ggufs = ggufs.map(|path| Tokenizer::from_gguf(&path, &shared::gguf_vocab(&path)).unwrap());
    [made(&byte_level()), made(&sentencepiece())].into_iter().chain(dirs).chain(ggufs).collect()
}

#[test]
fn byte_level_round_trips() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for tokenizer in [made(&byte_level()), made(&sentencepiece())] {
        for _ in 0..2_000 {
            let text: String = (0..rng.random_range(0..40)).map(|_| random_char(&mut rng)).collect();
            let text = text.replace('\u{2581}', "");
            let ids = tokenizer.encode(&text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
    }
}

#[test]
fn pieces_of_random_ids_add_up_to_the_whole() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for tokenizer in all() {
        for _ in 0..500 {
            let ids: Vec<u32> = (0..rng.random_range(0..60))
                .map(|_| rng.random_range(0..tokenizer.vocab_size() as u32))
                .filter(|&id| tokenizer.id_to_token(id).is_some())
                .collect();
            for skip in [false, true] {
                let mut stream = tokenizer.decode_stream(skip);
                let pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id)).collect();
                assert!(pieces.iter().all(|piece| !piece.is_empty()));
                let streamed = pieces.concat() + &stream.finish();
                assert_eq!(streamed, tokenizer.decode(&ids, skip).unwrap(), "{tokenizer:?} {ids:?}");
            }
        }
    }
}

/// Against the tokenizer library's own decoder, for files that it reads itself.
#[test]
fn decoding_equals_the_librarys() {
    for name in ["models/qwen2-int4-cpu", "graphs/gptoss-cpu"] {
        decodes_as_the_library(&shared::file(name));
    }
}

#[test]
#[ignore = "needs HEADRACE_SMOLLM2_GGUF"]
fn decoding_smollm2_equals_the_librarys() {
    decodes_as_the_library(&shared::smollm2_json().0);
}

fn decodes_as_the_library(dir: &Path) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let ours = Tokenizer::from_dir(dir).unwrap();
    let theirs = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
    for _ in 0..500 {
        let ids: Vec<u32> = (0..40).map(|_| rng.random_range(0..ours.vocab_size() as u32)).collect();
        for skip in [false, true] {
            assert_eq!(ours.decode(&ids, skip).unwrap(), theirs.decode(&ids, skip).unwrap(), "{ids:?}");
        }
    }
}

#[test]
fn characters_are_never_split() {
    // Only single bytes: every character of more than one byte comes in parts.
    let tokenizer = made(&byte_level());
    let text = "é👩‍👧 日\u{10ffff}a";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(ids.len(), text.len());
    let mut stream = tokenizer.decode_stream(true);
    let pieces: Vec<Option<String>> = ids.iter().map(|&id| stream.push(id)).collect();
    let whole: Vec<String> = pieces.iter().flatten().cloned().collect();
    assert_eq!(whole, text.chars().map(String::from).collect::<Vec<_>>());
    assert_eq!(pieces.iter().filter(|p| p.is_none()).count(), text.len() - text.chars().count());
    assert_eq!(stream.finish(), "");

    // Cut within a character: the mark for what is missing comes at the end.
    let mut stream = tokenizer.decode_stream(true);
    assert_eq!(stream.push(ids[0]), None);
    assert_eq!(stream.clone().finish(), "\u{fffd}");
    // A byte that can't go on: the mark comes with the next character.
    let a = *ids.last().unwrap();
    assert_eq!(stream.push(a).as_deref(), Some("\u{fffd}a"));
    // An id that is no token is visible.
    assert_eq!(stream.push(1_000_000).as_deref(), Some("\u{fffd}"));
    assert_eq!(stream.finish(), "");
}

#[test]
fn the_space_before_a_sentencepiece_text_goes_once() {
    let tokenizer = made(&sentencepiece());
    let ids = tokenizer.encode("the water", true).unwrap();
    assert_eq!(ids[0], 1);
    let mut stream = tokenizer.decode_stream(true);
    let text: String = ids.iter().filter_map(|&id| stream.push(id)).collect();
    assert_eq!(text, "the water");
    // A text that goes on after the front keeps its spaces.
    assert_eq!(stream.push(ids[1]).as_deref(), Some(" the"));
}

#[test]
fn streams_move_between_threads() {
    fn movable<T: Send + Sync + 'static>() {}
    movable::<DecodeStream>();
    movable::<Tokenizer>();
}
