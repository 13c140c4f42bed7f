//! Any bytes as an ONNX graph, or as the `genai_config.json` beside one: a typed error or a model whose every weight
//! can be read, in bounded time and memory.

#![no_main]

use bytes::Bytes;
use headrace_model::onnx::parse_bytes;
use headrace_numerics::block::dequantise_row;
use libfuzzer_sys::fuzz_target;

const CONFIG: &[u8] = br#"{"model": {"type": "qwen3", "vocab_size": 48, "context_length": 8, "bos_token_id": 1,
    "eos_token_id": [2, 3], "decoder": {"filename": "model.onnx", "head_size": 16, "hidden_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1}}}"#;
const GRAPH: &[u8] = include_bytes!("../../crates/model/tests/fixtures/onnx/int4.onnx");
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

fuzz_target!(|data: &[u8]| {
    let (graph, config) = if data.first() == Some(&b'{') {
        (Bytes::from_static(GRAPH), data)
    } else {
        (Bytes::copy_from_slice(data), CONFIG)
    };
    let size = graph.len();
    let spec = match parse_bytes(graph, config, Bytes::from_static(&ZEROS)) {
        Ok(spec) => spec,
        Err(error) => {
            assert!(error.to_string().len() < 4000, "a message longer than it helps");
            return;
        }
    };
    assert!(spec.layers.len() * 8 < size);
    for id in spec.read_order() {
        if let Some(view) = spec.view(id) {
            let mut row = vec![0.0; view.cols];
            dequantise_row(&view, view.rows - 1, &mut row);
        }
    }
    for t in &spec.tensors {
        for e in t.planes.iter().flatten() {
            assert_eq!(spec.extent(*e).len(), e.len);
        }
    }
});
