//! Every ONNX export at hand either loads as what it is, or is refused for its own reason.

mod onnx_common;

use headrace_model::onnx;
use headrace_model::spec::{ModelSpec, RopeTables};
use onnx_common::shared;

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
    let Some(dir) = shared(part) else { return };
    let spec = onnx::load(&dir).unwrap();
    check(&spec);
    assert_eq!(summary(&spec), want);
}

#[test]
fn smollm2_cpu() {
    expect(
        "smollm2-onnx-int4/cpu",
        "llama vocab 49152 hidden 576 heads 9/3x64 ffn 1536 layers 30 eps 1e-5 context 8192 | embed int4/32 f32 head \
         int4/32 f32 qkv 1 int4/32 f32 o int4/32 f32 gate_up int4/32 f32 down int4/32 f32 bias false qknorm false tied true",
    );
}
