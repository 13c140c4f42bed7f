//! Any bytes as a GGUF file: a typed error or a model whose every weight can be read, in bounded time and memory.

#![no_main]

use headrace_model::gguf::parse_bytes;
use headrace_numerics::block::dequantise_row;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let model = match parse_bytes("fuzz.gguf", data.to_vec()) {
        Ok(model) => model,
        Err(error) => {
            assert!(error.to_string().len() < 2000, "a message longer than it helps");
            return;
        }
    };
    let spec = &model.spec;
    assert!(spec.weight_bytes() <= data.len());
    assert!(spec.layers.len() * 8 < data.len());
    for id in spec.read_order() {
        let view = spec.view(id).expect("a tensor without its bytes");
        let mut row = vec![0.0; view.cols];
        dequantise_row(&view, view.rows - 1, &mut row);
    }
});
