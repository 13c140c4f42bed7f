//! Every tensor type against values of an independent reader (`tests/data/make_gguf_values.py`).

use std::path::Path;

use headrace_model::gguf::load;
use headrace_numerics::block::dequantise_row;
use headrace_numerics::format::Format;

/// In the order of the values.
const TENSORS: [(&str, Format); 11] = [
    ("token_embd.weight", Format::Q8_0),
    ("output.weight", Format::Q6_K),
    ("blk.0.attn_q.weight", Format::Q4_0),
    ("blk.0.attn_k.weight", Format::Q4_1),
    ("blk.0.attn_v.weight", Format::Q5_0),
    ("blk.0.ffn_gate.weight", Format::Q5_1),
    ("blk.0.ffn_up.weight", Format::Q4_K),
    ("blk.1.attn_q.weight", Format::Q5_K),
    ("blk.1.attn_k.weight", Format::F32),
    ("blk.1.attn_v.weight", Format::F16),
    ("blk.1.ffn_gate.weight", Format::BF16),
];

#[test]
fn every_type_reads_as_elsewhere() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let m = load(&data.join("gguf_values.gguf")).unwrap();
    let raw = std::fs::read(data.join("gguf_values.f32")).unwrap();
    let values: Vec<f32> = raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(values.len(), TENSORS.len() * 256);
    let mut row = vec![0.0; 256];
    for ((name, format), want) in TENSORS.iter().zip(values.chunks(256)) {
        let id = m.spec.read_order().into_iter().find(|&id| m.spec.tensor(id).name == *name).unwrap();
        let view = m.spec.view(id).unwrap();
        assert_eq!((view.format, view.rows, view.cols), (*format, 2, 256), "{name}");
        dequantise_row(&view, 1, &mut row);
        // With a float minimum the contract rounds once where the other reader rounds twice.
        let with_min = matches!(format, Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K);
        let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let slack = if with_min { largest * f32::EPSILON } else { 0.0 };
        assert!(largest > 1.0, "{name}");
        for (i, (got, want)) in row.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= slack, "{name}[1, {i}]: {got} instead of {want}");
        }
    }
}
