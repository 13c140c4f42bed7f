//! GGUF matrices that a device keeps in planes give the bits of the file's own layout: the same tokens and logits at every limit.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{GRANULE, alone, cpu, options};
use headrace_engine::{Engine, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_model::ModelSpec;
use headrace_numerics::format::Format;
use headrace_testing::{ModelShape, random_model};

fn model(seed: u64, tied: bool, formats: &[Format]) -> Arc<ModelSpec> {
    let shape = ModelShape {
        vocab: 61,
        hidden: 256,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 512,
        max_context: 64,
        formats: formats.to_vec(),
        tied,
        ..ModelShape::default()
    };
    Arc::new(random_model(seed, &shape))
}

fn device() -> HostDevice {
    let host =
        HostOptions { threads: Some(1), granule: GRANULE, positions: Some(64), planes: true, ..HostOptions::default() };
    HostDevice::new(host).unwrap()
}

fn limits(model: &Arc<ModelSpec>, options: &EngineOptions) -> (u64, u64) {
    match Engine::on_device(model.clone(), None, options.clone(), Box::new(device()), GRANULE) {
        Err(headrace_engine::EngineError::Budget(breakdown)) => (breakdown.minimum(), breakdown.everything),
        Err(other) => unreachable!("{other}"),
        Ok(_) => unreachable!("a limit of one granule is too small"),
    }
}

#[test]
fn planes_change_no_bit_at_any_limit() {
    let prompt: Vec<u32> = (0..11).map(|i| i * 5 % 61).collect();
    let generation = GenerationOptions { max_new_tokens: Some(9), ..GenerationOptions::default() };
    for (seed, formats) in [
        &[Format::Q4_0][..],
        &[Format::Q4_1],
        &[Format::Q4_K],
        &[Format::Q4_0, Format::Q4_1, Format::Q4_K, Format::Q8_0, Format::Q6_K],
    ]
    .into_iter()
    .enumerate()
    {
        for tied in [false, true] {
            let model = model(seed as u64, tied, formats);
            let expected = alone(&mut cpu(&model, options(2, 4)), &prompt, &generation);
            let (minimum, everything) = limits(&model, &options(2, 4));
            for limit in [minimum, (minimum + everything) / 2, everything] {
                let mut engine =
                    Engine::on_device(model.clone(), None, options(2, 4), Box::new(device()), limit).unwrap();
                let got = alone(&mut engine, &prompt, &generation);
                assert_eq!(got.token_ids, expected.token_ids, "{formats:?}, tied {tied}, {limit}");
                let bits =
                    |g: &headrace_engine::Generation| -> Vec<u32> { g.logits.iter().map(|x| x.to_bits()).collect() };
                assert_eq!(bits(&got), bits(&expected), "{formats:?}, tied {tied}, {limit}");
                let stats = engine.stats().unwrap();
                assert!(stats.weights.repacked_bytes > 0, "nothing was laid out in planes");
                assert_eq!(stats.weights.streamed_bytes > 0, limit < everything, "{formats:?}, tied {tied}, {limit}");
            }
        }
    }
}
