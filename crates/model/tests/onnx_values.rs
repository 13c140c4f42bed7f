//! Every way an export stores weights gives the values that an independent dequantisation gives.
//!
//! `tests/fixtures/make_onnx.py` makes the models and computes `values.json` with numpy and onnx's own evaluator.

#![allow(clippy::unwrap_used, clippy::panic)]

mod onnx_common;

use std::path::Path;

use bytes::Bytes;
use headrace_model::onnx;
use headrace_model::spec::{Layout, ModelSpec, TensorId};
use headrace_numerics::block::{dequantise_row, float_element};
use headrace_numerics::format::Format;
use onnx_common::genai_config;

fn row(spec: &ModelSpec, id: TensorId, r: usize) -> Vec<f32> {
    let t = spec.tensor(id);
    let mut out = vec![0.0; t.cols];
    match spec.view(id) {
        Some(view) => dequantise_row(&view, r, &mut out),
        None => {
            let bytes = spec.extent(t.planes[0].unwrap());
            for (c, o) in out.iter_mut().enumerate() {
                *o = float_element(t.format, bytes, c * t.rows + r);
            }
        }
    }
    out
}

/// The tensor that a name of the script stands for.
fn find(spec: &ModelSpec, name: &str) -> TensorId {
    let l = &spec.layers[0];
    match name {
        "qkv" | "q" => l.qkv[0].weight,
        "k" => l.qkv[1].weight,
        "v" => l.qkv[2].weight,
        "o" => l.o.weight,
        "gate" => l.gate_up[0].weight,
        "up" => l.gate_up[1].weight,
        "down" => l.down.weight,
        "head" => spec.lm_head.weight,
        "embedding" => spec.embedding,
        other => panic!("{other}"),
    }
}

fn load(name: &str) -> ModelSpec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/onnx").join(format!("{name}.onnx"));
    let config = genai_config("llama", 48, 32, 2, 1, 16, 1, 8);
    onnx::parse_bytes(std::fs::read(path).unwrap().into(), config.as_bytes(), Bytes::new())
        .unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn rows_equal_an_independent_dequantisation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/onnx/values.json");
    let values: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut compared = 0;
    for (variant, matrices) in values.as_object().unwrap() {
        let spec = load(variant);
        for (name, want) in matrices.as_object().unwrap() {
            let id = find(&spec, name);
            assert_eq!(spec.tensor(id).rows as u64, want["rows"].as_u64().unwrap(), "{variant} {name}");
            for pair in want["some"].as_array().unwrap() {
                let r = pair[0].as_u64().unwrap() as usize;
                let want: Vec<f32> = pair[1].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
                assert_eq!(row(&spec, id, r), want, "{variant} {name} row {r}");
                compared += 1;
            }
        }
    }
    assert!(compared > 300, "{compared}");
}

#[test]
fn structure_of_the_variants() {
    let name = |v: &str| {
        let s = load(v);
        s.tensor(s.layers[0].o.weight).format.name()
    };
    assert_eq!(name("int4"), "int4/32 f32");
    assert_eq!(name("int4-f16"), "int4/32 f16");
    assert_eq!(name("int8-zp"), "int8/32 f32 zp");
    assert_eq!(name("int4-block16"), "int4/16 f32");
    assert_eq!(name("int4-block64-partial"), "int4/64 f32");
    assert_eq!(name("qdq-axis0-u4"), "int4/16 f32 zp");

    let s = load("int4");
    assert_eq!(s.embedding, s.lm_head.weight);
    assert!(s.files.len() == 1 && s.files[0].path.ends_with("model.onnx"), "weights stay in the model's own bytes");
    let s = load("int4-untied");
    assert_ne!(s.embedding, s.lm_head.weight);
    assert_eq!(s.tensor(s.embedding).format, Format::F32);
    let s = load("float16");
    assert_eq!(s.tensor(s.lm_head.weight).layout, Layout::ColMajor);
    assert_eq!(s.tensor(s.embedding).layout, Layout::RowMajor);
    // Codes whose layout is ours already stay where they are.
    let s = load("qdq-axis1-i4");
    assert_eq!(s.files.len(), 1);
    assert!(load("qdq-axis0-i4").files.len() > 1);

    let s = load("qkv-bias");
    let bias = s.layers[0].qkv[0].bias.unwrap();
    assert_eq!((s.tensor(bias).rows, s.tensor(bias).cols), (1, 64));
    assert_eq!(load("split-bias-rope-nodes").layers[0].qkv.iter().filter(|l| l.bias.is_some()).count(), 3);
    for v in ["qk-norm-nodes", "qk-norm-fused", "qk-norm-rope-nodes"] {
        let s = load(v);
        let l = &s.layers[0];
        assert_eq!(s.tensor(l.q_norm.unwrap()).name, "q_norm", "{v}");
        assert_eq!(s.tensor(l.k_norm.unwrap()).name, "k_norm", "{v}");
        assert_eq!(l.qkv.len(), 1, "{v}");
    }
    assert_eq!(load("window").layers[0].attention.window, Some(5));
    assert_eq!(load("int4").layers[0].attention.window, None);
    assert_eq!(load("int4").layers[0].attention.scale, 0.25);
}
