//! Every ONNX export at hand either loads as what it is, or is refused for its own reason.

#![allow(clippy::unwrap_used, clippy::panic)]

mod onnx_common;

use headrace_model::error::ModelError;
use headrace_model::onnx;
use headrace_model::spec::{Layout, ModelSpec, RopeTables};
use onnx_common::{Scratch, data, smollm2_config};

fn format_name(spec: &ModelSpec, id: headrace_model::spec::TensorId) -> String {
    spec.tensor(id).format.name()
}

fn summary(spec: &ModelSpec) -> String {
    let c = &spec.config;
    let l = &spec.layers[0];
    format!(
        "{} vocab {} hidden {} heads {}/{}x{} ffn {} layers {} eps {:e} context {} | embed {} head {} qkv {} {} o {} \
         gate_up {} down {} bias {} qknorm {} tied {}",
        c.arch,
        c.vocab,
        c.hidden,
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.ffn,
        spec.layers.len(),
        c.norm_eps,
        c.max_context,
        format_name(spec, spec.embedding),
        format_name(spec, spec.lm_head.weight),
        l.qkv.len(),
        format_name(spec, l.qkv[0].weight),
        format_name(spec, l.o.weight),
        format_name(spec, l.gate_up[0].weight),
        format_name(spec, l.down.weight),
        l.qkv[0].bias.is_some(),
        l.q_norm.is_some(),
        spec.embedding == spec.lm_head.weight,
    )
}

/// What must hold of every spec, whatever it came from.
fn check(spec: &ModelSpec) {
    for t in &spec.tensors {
        for (p, plane) in t.planes.iter().enumerate() {
            let need = t.format.row_bytes(p, t.cols) * t.rows;
            match plane {
                Some(e) => {
                    assert_eq!(e.len, need, "{} plane {p}", t.name);
                    assert!(e.offset + e.len <= spec.files[e.file].bytes.len(), "{}", t.name);
                }
                None => assert_eq!(need, 0, "{} plane {p}", t.name),
            }
        }
    }
    assert_eq!(spec.container, "onnx");
    let order = spec.read_order();
    let RopeTables::Stored { .. } = spec.config.rope.tables else { panic!("tables are in the file") };
    assert_eq!(order.len() + 2, spec.tensors.len(), "read order plus cosines and sines is every tensor");
}

fn expect(part: &str, want: &str) {
    let spec = onnx::load(&data(part)).unwrap();
    check(&spec);
    assert_eq!(summary(&spec), want);
}

/// The graphs of SmolLM2's exports, beside a data file of zeros that is as long as theirs.
fn smollm2(part: &str, graphs: &[&str], bytes: u64) -> Scratch {
    let dir = data(&format!("graphs/smollm2-{part}"));
    let s = Scratch::new();
    for name in graphs.iter().chain(&["genai_config.json"]) {
        s.write(name, std::fs::read(dir.join(name)).unwrap());
    }
    s.sparse("model.onnx.data", bytes);
    s
}

const SMOLLM2: &str = "llama vocab 49152 hidden 576 heads 9/3x64 ffn 1536 layers 30 eps 1e-5 context 8192 | embed int4/32 \
                       F head int4/32 F qkv 1 int4/32 F o int4/32 F gate_up int4/32 F down int4/32 F bias false qknorm \
                       false tied true";

#[test]
fn smollm2_exports_are_packed_without_gaps() {
    for (part, scales, bytes) in [("cpu", "f32", 86_287_616), ("cuda", "f16", 76_763_776)] {
        let s = smollm2(part, &["model.onnx"], bytes);
        let spec = onnx::load(&s.0).unwrap();
        check(&spec);
        assert_eq!(summary(&spec), SMOLLM2.replace('F', scales), "{part}");
        assert_eq!(spec.weight_bytes() as u64, bytes, "{part}: every byte of the data file is referenced");
    }
}

/// Another graph beside the same weights: the path of the `.onnx` file itself.
#[test]
fn a_file_instead_of_a_directory() {
    let s = smollm2("cpu", &["model.onnx", "model.accuracy_level1.onnx"], 86_287_616);
    let a = onnx::load(&s.0.join("model.accuracy_level1.onnx")).unwrap();
    let b = onnx::load(&s.0).unwrap();
    assert_eq!(summary(&a), summary(&b));
    assert_eq!(a.weight_bytes(), b.weight_bytes());
    assert!(b.files.len() == 1 && b.files[0].mapped);
}

#[test]
fn tiny_models() {
    let qwen2 = |f: &str| {
        format!(
            "qwen2 vocab 288 hidden 128 heads 4/2x32 ffn 384 layers 4 eps 1e-6 context 1024 | embed int4/32 {f} head \
             int4/32 {f} qkv 1 int4/32 {f} o int4/32 {f} gate_up int4/32 {f} down int4/32 {f} bias true qknorm false tied true"
        )
    };
    let qwen3 = |f: &str| {
        qwen2(f)
            .replace("qwen2", "qwen3")
            .replace("x32", "x64")
            .replace("bias true qknorm false", "bias false qknorm true")
    };
    expect("models/qwen2-int4-cpu", &qwen2("f32"));
    expect("models/qwen2-int4-cuda", &qwen2("f16"));
    expect("models/qwen2-kquant-nofuse-cpu", &qwen2("f32 zp").replace("qkv 1", "qkv 3"));
    expect("models/qwen3-int4-cpu", &qwen3("f32"));
    expect("models/qwen3-int4-cuda", &qwen3("f16"));
}

#[test]
fn gpt_oss_is_refused_as_mixture_of_experts() {
    for part in ["graphs/gptoss-cpu", "graphs/gptoss-cuda"] {
        let e = onnx::load(&data(part)).unwrap_err();
        assert!(matches!(e, ModelError::Unsupported { .. }));
        assert!(e.to_string().contains("GPT-OSS mixture-of-experts"), "{e}");
    }
}

/// A graph without weights, beside a data file of zeros that is long enough.
fn graph_alone(name: &str) -> (Scratch, headrace_model::Result<ModelSpec>) {
    let dir = data(&format!("graphs/{name}"));
    let s = Scratch::new();
    s.write("model.onnx", std::fs::read(dir.join("model.onnx")).unwrap());
    s.write("genai_config.json", smollm2_config());
    s.sparse("model.onnx.data", 1 << 30);
    let spec = onnx::load(&s.0);
    (s, spec)
}

#[test]
fn graphs_of_other_export_options() {
    let same = |embed: &str, head: &str, qkv: usize, first: &str, rest: &str, down: &str, tied: bool| {
        format!(
            "llama vocab 49152 hidden 576 heads 9/3x64 ffn 1536 layers 30 eps 1e-5 context 8192 | embed {embed} head \
             {head} qkv {qkv} {first} o {rest} gate_up {rest} down {down} bias false qknorm false tied {tied}"
        )
    };
    let all = |f: &str, embed: &str, tied: bool| same(embed, f, 1, f, f, f, tied);
    let cases = [
        ("builder0.9.2-cpu", all("int4/32 f32", "F32", false)),
        ("builder0.9.2-cuda", all("int4/32 f16", "F16", false)),
        ("fp16-cuda", all("F16", "F16", true)),
        ("fp32-cpu", all("F32", "F32", true)),
        (
            "kquant_mixed-cpu",
            same("int8/32 f32 zp", "int8/32 f32 zp", 1, "int8/32 f32 zp", "int4/32 f32 zp", "int8/32 f32 zp", true),
        ),
        ("nofuse_qkv-cpu", same("int4/32 f32", "int4/32 f32", 3, "int4/32 f32", "int4/32 f32", "int4/32 f32", true)),
        ("rtn_last-cpu", same("int8/32 f32", "int8/32 f32", 1, "int4/32 f32", "int4/32 f32", "int4/32 f32", true)),
        ("untied-cpu", all("int4/32 f32", "F32", false)),
        ("untied_asym-cpu", all("int4/32 f32 zp", "F32", false)),
        ("untied_qdq-cpu", all("int4/32 f32", "F32", false)),
    ];
    for (name, want) in cases {
        let (_dir, spec) = graph_alone(name);
        let spec = spec.unwrap_or_else(|e| panic!("{name}: {e}"));
        check(&spec);
        assert_eq!(summary(&spec), want, "{name}");
        if name.starts_with("fp") {
            assert_eq!(spec.tensor(spec.lm_head.weight).layout, Layout::ColMajor);
        }
    }
}

/// The builder shared the embedding with an unquantised head that it then quantised: the gather has no scales. ONNX
/// Runtime refuses the file because a required input is missing.
#[test]
fn the_invalid_tied_export_is_refused_for_its_missing_scales() {
    let (_dir, spec) = graph_alone("tied_asym-INVALID");
    let e = spec.unwrap_err();
    assert!(matches!(e, ModelError::Format { .. }), "{e}");
    assert!(
        e.to_string()
            .contains("/model/embed_tokens/GatherBlockQuantized (GatherBlockQuantized): has no input 2 (scales)"),
        "{e}"
    );
}

/// Stored rotary tables are plain ones; how far they are from tables computed in binary64
/// is known: a binary32 angle of 1024 positions is off by up to 4e-5, a binary16 entry by 2.5e-4.
#[test]
fn stored_rotary_tables_are_plain_ones() {
    for (part, base, most) in [
        ("models/qwen2-int4-cpu", 1e6, 4e-5),
        ("models/qwen2-int4-cuda", 1e6, 2.6e-4),
        ("models/qwen3-int4-cpu", 1e6, 4e-5),
        ("models/qwen3-int4-cuda", 1e6, 2.6e-4),
    ] {
        let fit = onnx::rope_fit(&onnx::load(&data(part)).unwrap()).unwrap();
        println!("{part}: {fit:?}");
        assert_eq!(fit.base, base, "{part}");
        assert!(fit.max_error <= most, "{part}: {fit:?}");
    }
}
