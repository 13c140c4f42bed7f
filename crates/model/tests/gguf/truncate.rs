//! A file cut short at any byte, and a file with any one byte changed: an error or a model, never a panic.

use headrace_model::ModelError;
use headrace_model::gguf::parse_bytes;

use crate::writer::Gguf;

#[test]
fn cut_anywhere() {
    let whole = Gguf::tiny("qwen3").build();
    for len in 0..whole.len() {
        match parse_bytes("cut.gguf", whole[..len].to_vec()) {
            Err(ModelError::Format { .. }) => {}
            Err(other) => panic!("cut at {len}: {other}"),
            Ok(_) => panic!("cut at {len}: loaded"),
        }
    }
}

#[test]
fn any_byte_changed() {
    let whole = Gguf::tiny("llama").build();
    let mut loaded = 0;
    for at in 0..whole.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            loaded += usize::from(parse_bytes("changed.gguf", bytes).is_ok());
        }
    }
    // Changes of weights and of token texts are nobody's to notice; most changes of the header are noticed.
    assert!(loaded > 0 && loaded < whole.len() * 3);
}
