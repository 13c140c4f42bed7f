//! Damaged and hostile files: each is refused by its own typed error, at once and without much memory.
//!
//! They lie in `tests/hostile/gguf`, so that other readers can be tried on them. `HEADRACE_WRITE_HOSTILE=1` writes them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use headrace_model::gguf::load;

use crate::writer::Kind::{Format, Unsupported};
use crate::writer::{Gguf, Kind, VOCAB, Val, expect, string};

type Case = (&'static str, Vec<u8>, Kind, &'static [&'static str]);

fn tiny() -> Gguf {
    Gguf::tiny("llama")
}

/// The tiny model after `change`.
fn with(change: impl Fn(&mut Gguf)) -> Vec<u8> {
    let mut g = tiny();
    change(&mut g);
    g.build()
}

/// The tiny model with the key `x` as a value of type `id` and these bytes, then nothing.
fn value(id: u32, bytes: Vec<u8>) -> Vec<u8> {
    let mut g = Gguf::empty();
    g.entries.push((b"x".to_vec(), Val::Raw(id, bytes)));
    g.build()
}

/// Type number and count of an array.
fn array(elem: u32, count: u64) -> Vec<u8> {
    [&elem.to_le_bytes()[..], &count.to_le_bytes()].concat()
}

const HUGE: u64 = 1 << 60;

fn file_cases() -> Vec<Case> {
    let whole = tiny().build();
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n".to_vec();
    let mut big = whole.clone();
    big[4..8].reverse();
    vec![
        ("lfs-pointer", lfs, Format, &["Git LFS pointer", "git lfs pull"]),
        ("empty", vec![], Format, &["not a GGUF file", "0 bytes"]),
        ("three-bytes", b"GGU".to_vec(), Format, &["not a GGUF file", "3 bytes"]),
        ("magic-only", b"GGUF".to_vec(), Format, &["ends too early", "at byte 4"]),
        ("wrong-magic", b"PK\x03\x04 something else".to_vec(), Format, &["not a GGUF file", "50, 4b, 03, 04"]),
        ("old-ggml", b"tjgg\x03\0\0\0".to_vec(), Format, &["before GGUF"]),
        ("version-1", with(|g| g.version = 1), Unsupported, &["GGUF version 1"]),
        ("version-4", with(|g| g.version = 4), Unsupported, &["GGUF version 4"]),
        ("big-endian", big, Unsupported, &["big-endian"]),
        ("cut-in-metadata", whole[..500].to_vec(), Format, &["tokenizer.ggml.tokens", "cut short"]),
        ("cut-in-tensors", whole[..1000].to_vec(), Format, &["bytes of text", "cut short"]),
        ("cut-in-data", whole[..whole.len() - 1].to_vec(), Format, &["output_norm.weight", "outside the file"]),
        (
            "huge-tensor-count",
            with(|g| g.tensor_count = Some(HUGE)),
            Format,
            &["1152921504606846976 tensors", "at byte 8"],
        ),
        (
            "huge-entry-count",
            with(|g| g.entry_count = Some(HUGE)),
            Format,
            &["1152921504606846976 metadata", "at byte 16"],
        ),
        ("tensor-count-off-by-one", with(|g| g.tensor_count = Some(12)), Format, &["tensor name of 0 bytes"]),
    ]
}

fn metadata_cases() -> Vec<Case> {
    let nested = [array(9, 1), array(9, 1), array(9, 1), array(9, 1), array(9, 1), array(0, 0)].concat();
    let mut bad_string = array(8, 2);
    string(&mut bad_string, b"fine");
    string(&mut bad_string, b"\xc3(");
    let key = |name: &[u8]| {
        let mut g = Gguf::empty();
        g.entries.push((name.to_vec(), Val::U32(1)));
        g.build()
    };
    let mut long_key = Gguf::empty().build();
    long_key[16] = 1;
    long_key.extend(HUGE.to_le_bytes());
    long_key.extend([b'k'; 20]);
    vec![
        ("huge-array-of-u8", value(9, array(0, HUGE)), Format, &[": x", "1152921504606846976 array elements"]),
        ("huge-array-of-u64", value(9, array(10, HUGE)), Format, &[": x", "array elements"]),
        ("huge-array-of-strings", value(9, array(8, u64::MAX)), Format, &[": x", "18446744073709551615 array"]),
        ("huge-array-of-arrays", value(9, array(9, HUGE)), Format, &[": x", "array elements"]),
        ("huge-string", value(8, HUGE.to_le_bytes().to_vec()), Format, &[": x", "bytes of text"]),
        ("huge-key", long_key, Format, &["bytes of text", "at byte 24"]),
        ("nested-arrays", value(9, nested), Format, &[": x", "nested more than 4 deep"]),
        ("unknown-value-type", value(13, vec![0; 8]), Format, &[": x", "type number 13"]),
        ("unknown-element-type", value(9, array(77, 0)), Format, &[": x", "type number 77"]),
        ("bool-of-2", value(7, vec![2]), Format, &[": x", "neither 0 nor 1"]),
        ("bool-of-2-in-array", value(9, [array(7, 2), vec![1, 2]].concat()), Format, &[": x", "neither 0 nor 1"]),
        ("not-utf8", value(8, [&1u64.to_le_bytes()[..], b"\xff"].concat()), Format, &[": x", "UTF-8"]),
        ("not-utf8-in-array", value(9, bad_string), Format, &[": x", "UTF-8"]),
        ("not-utf8-key", key(b"a\xff"), Format, &["UTF-8"]),
        ("empty-key", key(b""), Format, &["metadata key of 0 bytes"]),
        (
            "duplicate-key",
            with(|g| g.entries.push((b"llama.block_count".to_vec(), Val::U32(2)))),
            Format,
            &["llama.block_count", "twice"],
        ),
        (
            "alignment-0",
            with(|g| {
                g.set("general.alignment", Val::U32(0));
            }),
            Format,
            &["general.alignment", "is 0"],
        ),
        (
            "alignment-48",
            with(|g| {
                g.set("general.alignment", Val::U32(48));
            }),
            Format,
            &["general.alignment", "48"],
        ),
        (
            "alignment-huge",
            with(|g| {
                g.set("general.alignment", Val::U64(1 << 63));
            }),
            Format,
            &["general.alignment"],
        ),
        (
            "alignment-string",
            with(|g| {
                g.set("general.alignment", Val::Str("32"));
            }),
            Format,
            &["general.alignment", "a string"],
        ),
    ]
}

fn tensor_cases() -> Vec<Case> {
    const NAME: &str = "blk.0.attn_q.weight";
    let on = |change: fn(&mut crate::writer::Tensor)| with(|g| change(g.tensor(NAME)));
    vec![
        (
            "duplicate-tensor",
            with(|g| {
                g.f16(NAME, &[8, 8]);
            }),
            Format,
            &[NAME, "described twice"],
        ),
        ("empty-tensor-name", with(|g| g.tensor(NAME).name.clear()), Format, &["tensor name of 0 bytes"]),
        ("long-tensor-name", with(|g| g.tensor(NAME).name = vec![b'n'; 65]), Format, &["tensor name of 65 bytes"]),
        ("tensor-name-not-utf8", with(|g| g.tensor(NAME).name = vec![0xc0; 4]), Format, &["UTF-8"]),
        ("no-dims", on(|t| t.dims.clear()), Format, &[NAME, "0 dimensions"]),
        ("five-dims", on(|t| t.dims = vec![8, 8, 1, 1, 1]), Format, &[NAME, "5 dimensions"]),
        ("zero-dim", on(|t| t.dims = vec![8, 0]), Format, &[NAME, "a dimension is 0"]),
        ("dims-overflow", on(|t| t.dims = vec![1 << 32, 1 << 32]), Format, &[NAME, "more than 2^64"]),
        ("zero-after-overflow", on(|t| t.dims = vec![1 << 32, 1 << 32, 0]), Format, &[NAME, "more than 2^64"]),
        ("bytes-overflow", on(|t| t.dims = vec![1 << 62, 2]), Format, &[NAME, "more than 2^64 bytes"]),
        ("data-outside", on(|t| t.dims = vec![8, 1 << 40]), Format, &[NAME, "outside the file"]),
        ("offset-outside", on(|t| t.offset = Some(1 << 40)), Format, &[NAME, "outside the file"]),
        ("offset-overflow", on(|t| t.offset = Some(u64::MAX - 31)), Format, &[NAME, "outside the file"]),
        ("offset-misaligned", on(|t| t.offset = Some(8)), Format, &[NAME, "offset 8 is not a multiple"]),
        ("overlap", on(|t| t.offset = Some(0)), Format, &[NAME, "overlaps", "token_embd.weight"]),
        ("overlap-partly", on(|t| t.offset = Some(128)), Format, &[NAME, "overlaps", "token_embd.weight"]),
        ("type-iq4-nl", on(|t| t.type_id = 20), Unsupported, &[NAME, "IQ4_NL"]),
        ("type-q2-k", on(|t| t.type_id = 10), Unsupported, &[NAME, "Q2_K"]),
        ("type-removed", on(|t| t.type_id = 4), Unsupported, &[NAME, "number 4"]),
        ("type-unknown", on(|t| t.type_id = u32::MAX), Unsupported, &[NAME, "number 4294967295"]),
        ("partial-block", on(|t| t.type_id = 2), Format, &[NAME, "8 columns", "32", "Q4_0"]),
    ]
}

fn model_cases() -> Vec<Case> {
    let key = |name: &'static str, val: Val| {
        with(|g| {
            g.set(name, val.clone());
        })
    };
    vec![
        (
            "no-architecture",
            with(|g| {
                g.unset("general.architecture");
            }),
            Format,
            &["general.architecture", "missing"],
        ),
        ("other-architecture", Gguf::tiny("mamba").build(), Unsupported, &["general.architecture", "mamba"]),
        ("no-heads", key("llama.attention.head_count", Val::U32(0)), Format, &["head_count", "is 0"]),
        (
            "head-dim-1024",
            key("llama.attention.key_length", Val::U32(1024)),
            Unsupported,
            &["key_length", "1024", "512"],
        ),
        ("eps-nan", key("llama.attention.layer_norm_rms_epsilon", Val::F32(f32::NAN)), Format, &["epsilon", "NaN"]),
        ("layers-too-many", key("llama.block_count", Val::U64(u64::MAX)), Format, &["block_count"]),
        ("layers-more-than-tensors", key("llama.block_count", Val::U32(65_536)), Format, &["blk.1.", "missing"]),
        ("experts", key("llama.expert_count", Val::U32(8)), Unsupported, &["expert_count", "mixture-of-experts"]),
        ("yarn", key("llama.rope.scaling.type", Val::Str("yarn")), Unsupported, &["rope.scaling.type", "yarn"]),
        (
            "softcap",
            key("llama.attn_logit_softcapping", Val::F32(50.0)),
            Unsupported,
            &["attn_logit_softcapping", "50"],
        ),
        (
            "vocabulary-short",
            key("tokenizer.ggml.tokens", Val::Strs(vec!["a".into(); 3])),
            Format,
            &["3 tokens", "10 rows"],
        ),
        (
            "eos-outside",
            key("tokenizer.ggml.eos_token_id", Val::U32(VOCAB as u32)),
            Format,
            &["eos_token_id", "token id 10"],
        ),
        (
            "unused-tensor",
            with(|g| {
                g.f32("blk.0.stray.weight", 8);
            }),
            Unsupported,
            &["blk.0.stray.weight", "no use"],
        ),
        (
            "shard-alone",
            with(|g| {
                g.set("split.count", Val::U16(2)).set("split.no", Val::U16(0));
            }),
            Format,
            &["split.no", "-00001-of-00002.gguf"],
        ),
    ]
}

fn all() -> Vec<Case> {
    [file_cases(), metadata_cases(), tensor_cases(), model_cases()].concat()
}

#[test]
fn each_is_refused_with_its_own_error() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/gguf");
    let write = std::env::var_os("HEADRACE_WRITE_HOSTILE").is_some();
    let mut failed = Vec::new();
    for (name, bytes, kind, parts) in all() {
        let path = dir.join(format!("{name}.gguf"));
        if write {
            std::fs::write(&path, &bytes).unwrap();
        }
        assert!(bytes.len() < 4096, "{name}: {}", bytes.len());
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name}: write it again with HEADRACE_WRITE_HOSTILE=1");
        let start = Instant::now();
        let file = format!("{name}.gguf");
        let parts = [parts, &[file.as_str()]].concat();
        if std::panic::catch_unwind(|| expect(load(&path), kind, &parts)).is_err() {
            failed.push(name);
        }
        assert!(start.elapsed() < Duration::from_secs(1), "{name}: {:?}", start.elapsed());
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn no_file_without_a_case() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/gguf");
    let have: BTreeSet<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let cases = all();
    let want: BTreeSet<String> = cases.iter().map(|(name, ..)| format!("{name}.gguf")).collect();
    assert_eq!(want.len(), cases.len(), "a name given twice");
    assert_eq!(have, want);
}
