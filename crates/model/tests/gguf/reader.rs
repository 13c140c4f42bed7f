//! Metadata access, and the speed of large arrays.

use std::time::{Duration, Instant};

use headrace_model::file::ModelFile;
use headrace_model::gguf::{GgufFile, ValueType};

use crate::writer::{Gguf, Val};

fn parse(g: &Gguf) -> GgufFile {
    GgufFile::parse(ModelFile::owned("made.gguf", g.build())).unwrap()
}

#[test]
fn typed_access() {
    let mut g = Gguf::empty();
    g.set("u", Val::U16(7)).set("i", Val::I32(-7)).set("f", Val::F32(0.1)).set("d", Val::F64(0.1));
    g.set("inf", Val::F32(f32::INFINITY)).set("b", Val::Bool(true)).set("s", Val::Str("grüße"));
    g.set("list", Val::Strs(vec!["a".into(), String::new(), "ß".into()])).set("n", Val::I32s(vec![3, -4]));
    // An array of one array of one i32.
    let nested =
        [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &5u32.to_le_bytes(), &1u64.to_le_bytes(), &[0; 4]].concat();
    g.set("nested", Val::Raw(9, nested));
    let f = parse(&g);
    assert_eq!((f.version, f.alignment, f.metadata.len()), (3, 32, 10));
    assert_eq!(f.uint("u").unwrap(), Some(7));
    assert_eq!(f.uint("absent").unwrap(), None);
    assert_eq!(f.float("f").unwrap(), Some(f64::from(0.1f32)));
    assert_eq!(f.float("d").unwrap(), Some(0.1));
    assert_eq!(f.boolean("b").unwrap(), Some(true));
    assert_eq!(f.string("s").unwrap(), Some("grüße"));
    let list = f.array("list").unwrap().unwrap();
    assert_eq!((list.elem(), list.len()), (ValueType::Str, 3));
    assert_eq!(list.strings().collect::<Vec<_>>(), ["a", "", "ß"]);
    let n: Vec<f64> = f.array("n").unwrap().unwrap().scalars().filter_map(|v| v.number()).collect();
    assert_eq!(n, [3.0, -4.0]);
    assert_eq!(f.array("nested").unwrap().unwrap().elem(), ValueType::Array);
    for (error, part) in [
        (f.uint("i").unwrap_err(), "negative"),
        (f.uint("f").unwrap_err(), "should be an integer, but is a float"),
        (f.float("inf").unwrap_err(), "not finite"),
        (f.float("u").unwrap_err(), "but is an unsigned integer"),
        (f.string("list").unwrap_err(), "should be a string, but is an array"),
        (f.boolean("s").unwrap_err(), "should be a bool, but is a string"),
        (f.array("b").unwrap_err(), "should be an array, but is a bool"),
    ] {
        let text = error.to_string();
        assert!(text.contains(part) && text.contains("at byte"), "{text}");
    }
}

#[test]
fn version_2_is_the_same() {
    let mut g = Gguf::tiny("llama");
    g.version = 2;
    assert_eq!(parse(&g).version, 2);
    g.load().unwrap();
}

#[test]
fn other_alignments() {
    for alignment in [8, 64, 4096] {
        let mut g = Gguf::tiny("llama");
        g.alignment = alignment;
        g.set("general.alignment", Val::U32(alignment as u32));
        assert_eq!(parse(&g).data_offset % alignment, 0);
        g.load().unwrap();
    }
}

#[test]
fn a_large_vocabulary_is_quick() {
    let mut g = Gguf::empty();
    g.set("tokenizer.ggml.tokens", Val::Strs((0..200_000).map(|i| format!("token{i}")).collect()));
    g.set("tokenizer.ggml.scores", Val::F32s(vec![0.0; 200_000]));
    let bytes = g.build();
    let start = Instant::now();
    let f = GgufFile::parse(ModelFile::owned("made.gguf", bytes)).unwrap();
    assert_eq!(f.array("tokenizer.ggml.tokens").unwrap().unwrap().strings().last(), Some("token199999"));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}
