//! Hostile and unsupported ONNX files: each gives its own typed error, quickly.
//!
//! `tests/hostile/onnx` is made by `tests/fixtures/make_onnx.py`; `EXPECTED` has a line for every file in it.

#![allow(clippy::unwrap_used, clippy::panic)]

mod onnx_common;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use headrace_model::error::ModelError;
use headrace_model::onnx;
use onnx_common::{Scratch, genai_config};

#[derive(Debug, PartialEq, Clone, Copy)]
enum Kind {
    Format,
    Unsupported,
    Io,
}
use Kind::{Format, Io, Unsupported};

fn kind(e: &ModelError) -> Kind {
    match e {
        ModelError::Format { .. } => Format,
        ModelError::Unsupported { .. } => Unsupported,
        _ => Io,
    }
}

/// File, kind of error, and how its message ends after the name of the model file (or contains).
const EXPECTED: &[(&str, Kind, &str)] = &[
    ("attention-bias", Unsupported, "n/attn.out (GroupQueryAttention): input attention_bias (\"extra\")"),
    (
        "attention-sinks",
        Unsupported,
        "n/attn.out (GroupQueryAttention): input head_sink: attention sinks, as in GPT-OSS",
    ),
    ("attribute-type", Format, "n/attn.out (GroupQueryAttention): attribute num_heads has type 3, not 2"),
    ("bias-width", Format, "n/gate.out (MatMulNBits): bias extra has 3 elements, but the layer 64 outputs"),
    ("bits-2", Unsupported, "n/gate.out (MatMulNBits): attribute bits = 2"),
    ("block-48", Unsupported, "n/gate.out (MatMulNBits): attribute block_size = 48"),
    ("cache-not-input", Format, "input \"past_key_values.0.key\" is made by no node and is no initializer"),
    ("cache-swapped", Format, "past_key_values.0.value: layer 0 keeps its cache here"),
    ("control-flow", Unsupported, "n/silu (Mul): attribute body holds a graph"),
    ("cycle", Format, "a cycle of the graph"),
    ("deep-nesting", Unsupported, "holds a graph: control flow is not supported"),
    ("duplicate-initializer", Format, "norm1: two initializers have this name"),
    ("duplicate-value", Format, "x3: this value is defined twice"),
    ("empty", Format, "the file is empty"),
    ("endless-number", Format, "(at byte 1): not a protobuf number"),
    ("epsilon-differs", Unsupported, "n/x2 (SkipSimplifiedLayerNormalization): attribute epsilon = 1e-6, but n/x3"),
    ("external-absolute", Format, "norm1: external data location \"/etc/passwd\" is absolute or leaves"),
    ("external-backslash", Format, "norm1: external data location \"..\\\\model.data\" has a character"),
    ("external-directory", Io, "folder: not a regular file"),
    ("external-lfs", Format, "pointer.data: this is a Git LFS pointer"),
    ("external-link-outside", Format, "link.data: norm1: external data is a link to /etc/passwd"),
    ("external-missing", Format, "absent.data: norm1: the file that holds this tensor's data is missing"),
    ("external-negative", Format, "norm1: external data offset \"-1\" is not a number"),
    ("external-no-location", Format, "norm1: external data without a location"),
    ("external-not-a-number", Format, "norm1: external data offset \"0x10\" is not a number"),
    ("external-nothing", Format, "norm1: external data location \"\" is not a file name"),
    ("external-overflow", Format, "model.data: norm1 (at byte 18446744073709551552): 128 bytes from here end past"),
    ("external-overlap", Format, "model.data: norm2 (at byte 64): overlaps the bytes of norm1"),
    ("external-parent", Format, "norm1: external data location \"../model.data\" is absolute or leaves"),
    (
        "external-truncated",
        Format,
        "model.data: norm1 (at byte 1000): 128 bytes from here end past the file, which has 1064",
    ),
    ("external-unknown-key", Unsupported, "norm1: external data key \"basepath\""),
    ("external-wrong-length", Format, "norm1 (at byte 0): 64 bytes are declared, but the shape [32] needs 128"),
    ("float-zero-points", Unsupported, "n/gate.out (MatMulNBits): zero points extra of element type F32"),
    ("function", Unsupported, "functions: models with functions of their own"),
    ("g-idx", Unsupported, "n/logits (MatMulNBits): input g_idx"),
    ("gate-and-up-differ", Unsupported, "n/up.out (MatMulNBits): gate and up read different values"),
    ("gather-other-ids", Unsupported, "n/x0 (GatherBlockQuantized): gathers by \"attention_mask\", not by input_ids"),
    ("gelu", Unsupported, "n/silu (Mul): is no x * Sigmoid(x)"),
    ("git-lfs-pointer", Format, "model.onnx: this is a Git LFS pointer"),
    ("heads-not-divisible", Format, "2 query heads are no multiple of 3 key heads"),
    ("huge-dimension", Format, "norm1: a shape of [4611686018427387904] is too large to exist"),
    ("input-and-initializer", Unsupported, "norm1: a graph input that is also an initializer"),
    ("ir-version-99", Unsupported, "ir_version: 99"),
    ("many-dimensions", Format, "norm1: 10 dimensions"),
    ("mask-minus-two", Unsupported, "not the constant 1"),
    ("mask-not-cast", Unsupported, "less: a length of attention that is not made from attention_mask by Cast and Sub"),
    ("mask-not-mask", Unsupported, "n/sum (ReduceSum): reads \"input_ids\", not attention_mask"),
    ("mixture-of-experts", Unsupported, "layers.0/moe (QMoE): GPT-OSS mixture-of-experts models"),
    ("nan-scale", Format, "n/attn.out (GroupQueryAttention): attribute scale = NaN"),
    ("negative-dimension", Format, "norm1: negative dimension in [-32]"),
    ("negative-k", Format, "n/gate.out (MatMulNBits): attribute K = Some(-32)"),
    ("no-graph", Format, "no graph: is this an ONNX file?"),
    ("no-logits", Format, "logits: the graph has no such output"),
    ("no-rotary", Unsupported, "n/attn.out (GroupQueryAttention): input \"cos\", but attribute do_rotary = 0"),
    ("norm-axis", Unsupported, "n/x1 (SimplifiedLayerNormalization): attribute axis = 1"),
    ("norm-of-queries-only", Unsupported, "a norm over the query heads without one over the key heads"),
    ("norm-width", Format, "n/x2 (SkipSimplifiedLayerNormalization): 16 weights, but the layer that reads it has 32"),
    ("not-protobuf", Format, "(at byte 0): protobuf wire type 7: is this an ONNX file?"),
    ("not-utf8", Format, "Node.name: GraphProto.node: Model.graph: invalid string value: data is not UTF-8 encoded"),
    ("opset-12", Unsupported, "opset_import: domain \"\" version 12"),
    ("opset-microsoft-2", Unsupported, "opset_import: domain \"com.microsoft\" version 2"),
    ("opset-missing", Format, "opset_import: nodes use domain \"com.microsoft\", which is not imported"),
    (
        "other-residual",
        Unsupported,
        "n/x3 (SkipSimplifiedLayerNormalization): adds to another value of the residual stream",
    ),
    ("overflowing-shape", Format, "norm1: a shape of [2147483648, 2147483648, 2147483648] is too large to exist"),
    ("prepacked", Unsupported, "n/logits (MatMulNBits): attribute weight_prepacked = 1"),
    ("qdq-axis", Unsupported, "n/gate.w (DequantizeLinear): attribute axis = 1"),
    ("qdq-per-tensor", Unsupported, "n/gate.w (DequantizeLinear): attribute block_size = 0"),
    ("quantised-cache", Unsupported, "attribute k_quant_type = \"PER_TENSOR\": a quantised KV cache"),
    ("quantised-cache-input", Unsupported, "past_key_values.0.value: a KV cache of ONNX element type 3"),
    ("shape-not-data", Format, "norm1: holds 128 bytes, but its shape [31] needs 124"),
    ("smooth-softmax", Unsupported, "n/attn.out (GroupQueryAttention): attribute smooth_softmax = 1"),
    ("sparse-initializer", Unsupported, "sparse_initializer: sparse weights"),
    ("split-sizes", Format, "n/q (Split): splits into [16, 32, 16], but the heads need [32, 16, 16]"),
    ("tied-without-scales", Format, "n/x0 (GatherBlockQuantized): has no input 2 (scales)"),
    ("total-of-ids", Unsupported, "n/shape (Shape): reads \"input_ids\", not attention_mask"),
    ("truncated", Format, "(at byte 2): a field of"),
    ("undefined-input", Format, "n/silu (Mul): input \"nowhere\" is made by no node"),
    ("unknown-attribute", Unsupported, "n/logits (MatMulNBits): attribute magic is not understood"),
    ("unknown-attribute-mul", Unsupported, "n/silu (Mul): attribute magic is not understood"),
    ("unknown-element-type", Unsupported, "norm1: initializer of ONNX element type 11"),
    ("unknown-input", Unsupported, "mystery: a graph input that is not understood"),
    ("unknown-output", Unsupported, "x1: a graph output that is not understood"),
    ("unreached-node", Unsupported, "lonely (Sigmoid): has no part in the decoder"),
    ("unused-initializer", Unsupported, "leftover: an initializer that nothing in the decoder uses"),
    ("weight-not-constant", Unsupported, "n/gate.out (MatMulNBits): its codes, \"x0\", is not an initializer"),
    ("window-zero", Format, "n/attn.out (GroupQueryAttention): attribute local_window_size = 0"),
    ("wrong-n", Format, "n/gate.out (MatMulNBits): B gate.q is U8 [64, 1, 16], not U8 [65, 1, 16]"),
];

fn tiny_config() -> String {
    genai_config("llama", 48, 32, 2, 1, 16, 1, 8)
}

fn sound(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/onnx").join(name)).unwrap()
}

#[test]
fn every_hostile_file_is_refused_for_its_own_reason() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/onnx");
    let files: BTreeSet<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    let listed: BTreeSet<String> = EXPECTED.iter().map(|(n, ..)| n.to_string()).collect();
    assert_eq!(files, listed);
    for &(name, want, text) in EXPECTED {
        let s = Scratch::new();
        s.write("model.onnx", std::fs::read(folder.join(format!("{name}.onnx"))).unwrap());
        s.write("genai_config.json", tiny_config());
        s.write("model.data", [0; 1064]);
        s.write("pointer.data", "version https://git-lfs.github.com/spec/v1\n");
        s.write("folder/x", "");
        #[cfg(unix)]
        std::os::unix::fs::symlink("/etc/passwd", s.0.join("link.data")).unwrap();
        let start = Instant::now();
        let e = onnx::load(&s.0).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(1), "{name} took {:?}", start.elapsed());
        assert_eq!(kind(&e), want, "{name}: {e}");
        assert!(e.to_string().contains(text), "{name}: {e}");
    }
}

fn refused(s: &Scratch, want: Kind, text: &str) {
    let e = onnx::load(&s.0).unwrap_err();
    assert_eq!(kind(&e), want, "{e}");
    assert!(e.to_string().contains(text), "{e}");
}

#[test]
fn configs_that_are_missing_broken_or_disagree() {
    let s = Scratch::new();
    s.write("model.onnx", sound("int4.onnx"));
    refused(&s, Format, "genai_config.json: missing");
    s.write("genai_config.json", "{\"model\": {");
    refused(&s, Format, "genai_config.json: not a valid genai_config.json: EOF while parsing");
    s.write("genai_config.json", format!("{{\"model\": {{\"vision\": {}", "[".repeat(100_000)));
    refused(&s, Format, "recursion limit");
    s.write("genai_config.json", "{\"model\": {\"type\": \"llama\"}}");
    refused(&s, Format, "missing field `context_length`");
    s.write("genai_config.json", " ".repeat((4 << 20) + 1));
    refused(&s, Format, "is no genai_config.json");
    for (from, to, want, text) in [
        ("\"type\": \"llama\"", "\"type\": \"gemma\"", Unsupported, "model.type: architecture \"gemma\""),
        ("\"vocab_size\": 48", "\"vocab_size\": 49", Format, "model.vocab_size: is 49, but the graph"),
        ("\"hidden_size\": 32", "\"hidden_size\": 64", Format, "model.decoder.hidden_size: is 64"),
        ("\"head_size\": 16", "\"head_size\": 8", Format, "model.decoder.head_size: is 8"),
        ("_heads\": 2", "_heads\": 4", Format, "model.decoder.num_attention_heads: is 4"),
        ("value_heads\": 1", "value_heads\": 2", Format, "model.decoder.num_key_value_heads: is 2"),
        ("layers\": 1", "layers\": 2", Format, "model.decoder.num_hidden_layers: is 2"),
        ("\"context_length\": 8", "\"context_length\": 9", Format, "is 9, but the rotary table cos of"),
        ("\"context_length\": 8", "\"context_length\": 0", Format, "model.context_length: is 0"),
        ("[2, 3, 2]", "[2, 48]", Format, "model.eos_token_id: is 48, but the vocabulary has 48 tokens"),
        ("[2, 3, 2]", "-7", Format, "model.eos_token_id: is -7"),
        ("\"model.onnx\"", "\"../model.onnx\"", Format, "model.decoder.filename: external data location"),
        ("\"model.onnx\"", "\"other.onnx\"", Format, "other.onnx, which is missing"),
        ("\"search\"", "\"s\": 0, \"search\"", Io, ""),
        ("\"decoder\": {", "\"vision\": {}, \"decoder\": {", Unsupported, "model.vision: models of several parts"),
    ] {
        let config = tiny_config();
        assert!(config.contains(from), "{from}");
        s.write("genai_config.json", config.replace(from, to));
        if text.is_empty() {
            onnx::load(&s.0).unwrap();
        } else {
            refused(&s, want, text);
        }
    }
}

#[test]
fn special_tokens_and_file_names() {
    let s = Scratch::new();
    let other = s.write("other.onnx", sound("int4.onnx"));
    s.write("genai_config.json", tiny_config());
    refused(&s, Format, "model.onnx, which is missing");
    let spec = onnx::load(&other).unwrap();
    assert_eq!((spec.special.bos, spec.special.pad), (Some(1), Some(0)));
    assert_eq!(spec.special.eos, [2, 3]);
    assert!(!spec.special.add_bos);
    s.write("tokenizer_config.json", "{\"add_bos_token\": true}");
    assert!(onnx::load(&other).unwrap().special.add_bos);
    s.write(
        "genai_config.json",
        tiny_config().replace("[2, 3, 2]", "7").replace("\"bos_token_id\": 1", "\"bos_token_id\": -1"),
    );
    let spec = onnx::load(&other).unwrap();
    assert_eq!((spec.special.bos, &spec.special.eos[..]), (None, &[7][..]));
}

/// Two million empty nodes in four megabytes must not become gigabytes.
#[test]
fn a_file_of_empty_messages_is_refused_before_it_is_decoded() {
    let mut graph = [0x0au8, 0x00].repeat(2_000_000);
    let mut bytes = vec![0x08, 0x0a, 0x3a];
    let mut len = graph.len();
    while len >= 0x80 {
        bytes.push((len & 0x7f) as u8 | 0x80);
        len >>= 7;
    }
    bytes.push(len as u8);
    bytes.append(&mut graph);
    let e = onnx::parse_bytes(bytes.into(), tiny_config().as_bytes(), Bytes::new()).unwrap_err();
    assert!(e.to_string().contains("more than 1000000 fields"), "{e}");
}

/// Cut anywhere, a sound file gives an error and no panic.
#[test]
fn every_truncation_of_a_sound_file_is_an_error() {
    let whole = Bytes::from(sound("int4.onnx"));
    for len in 0..whole.len() {
        let e = onnx::parse_bytes(whole.slice(..len), tiny_config().as_bytes(), Bytes::new());
        assert!(e.is_err(), "{len} of {} bytes", whole.len());
    }
    onnx::parse_bytes(whole, tiny_config().as_bytes(), Bytes::new()).unwrap();
}

/// A link beside a model that is itself a link into the same place: how download caches lay files out.
#[cfg(unix)]
#[test]
fn links_of_a_download_cache_are_followed() {
    let s = Scratch::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/onnx");
    s.write("blobs/one", std::fs::read(folder.join("external-wrong-length.onnx")).unwrap());
    s.write("blobs/two", [0; 1064]);
    s.write("snapshot/genai_config.json", tiny_config());
    std::os::unix::fs::symlink("../blobs/one", s.0.join("snapshot/model.onnx")).unwrap();
    std::os::unix::fs::symlink("../blobs/two", s.0.join("snapshot/model.data")).unwrap();
    // The data file is reached: what is wrong is the length that the graph declares.
    let e = onnx::load(&s.0.join("snapshot")).unwrap_err();
    assert!(e.to_string().contains("64 bytes are declared"), "{e}");
}
