//! Tiny models and engines for the tests of this crate.

#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use headrace_engine::{DeviceChoice, Engine, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{DeviceProbe, HostDevice, HostOptions};
use headrace_model::ModelSpec;
use headrace_numerics::format::Format;
use headrace_testing::{ModelShape, random_model};

/// Mapping unit of the host devices made here.
pub const GRANULE: u64 = 4096;

/// A model of `layers` layers, 32 wide, for `context` positions.
pub fn tiny_model(seed: u64, layers: usize, context: usize) -> Arc<ModelSpec> {
    let sizes = ModelShape { vocab: 61, hidden: 32, heads: 2, kv_heads: 1, ffn: 64, ..ModelShape::default() };
    model(seed, layers, context, sizes)
}

/// A model of `layers` layers, 64 wide, that has a token for every byte.
pub fn small_model(seed: u64, layers: usize, context: usize) -> Arc<ModelSpec> {
    let sizes = ModelShape { vocab: 260, hidden: 64, heads: 4, kv_heads: 2, ffn: 128, ..ModelShape::default() };
    model(seed, layers, context, sizes)
}

fn model(seed: u64, layers: usize, context: usize, sizes: ModelShape) -> Arc<ModelSpec> {
    let formats = vec![Format::Q4_0, Format::Q8_0, Format::Q4_1];
    Arc::new(random_model(seed, &ModelShape { head_dim: 16, layers, formats, max_context: context, ..sizes }))
}

/// Options with small pieces and one thread.
pub fn options(max_batch: usize, prefill_chunk: usize) -> EngineOptions {
    EngineOptions {
        max_batch,
        prefill_chunk,
        piece_bytes: Some(4096),
        ring_slots: 2,
        steps_in_flight: Some(2),
        threads: Some(1),
        ..EngineOptions::default()
    }
}

/// An engine that reads weights in place.
pub fn cpu(model: &Arc<ModelSpec>, options: EngineOptions) -> Engine {
    Engine::from_spec(model.clone(), None, EngineOptions { device: DeviceChoice::Cpu, ..options }).unwrap()
}

/// A host device of small granules for `model`.
pub fn host_options(model: &ModelSpec) -> HostOptions {
    let positions = Some(model.config.max_context);
    HostOptions { threads: Some(1), granule: GRANULE, positions, ..HostOptions::default() }
}

/// An engine on a host device of small granules under `limit` bytes, and a look at the device.
pub fn host(model: &Arc<ModelSpec>, options: EngineOptions, limit: u64) -> (Engine, DeviceProbe) {
    let device = HostDevice::new(HostOptions { capacity: Some(limit), ..host_options(model) }).unwrap();
    let probe = device.probe();
    (Engine::on_device(model.clone(), None, options, Box::new(device), limit).unwrap(), probe)
}

/// The smallest limit that works for these options on such a device, and the one from which on nothing is streamed.
pub fn limits(model: &Arc<ModelSpec>, options: &EngineOptions) -> (u64, u64) {
    let device = Box::new(HostDevice::new(host_options(model)).unwrap());
    match Engine::on_device(model.clone(), None, options.clone(), device, GRANULE) {
        Err(headrace_engine::EngineError::Budget(breakdown)) => (breakdown.minimum(), breakdown.everything),
        Err(other) => unreachable!("{other}"),
        Ok(_) => unreachable!("a limit of one granule is too small"),
    }
}

/// The tokens and logits of one plain generation, alone on `engine`.
pub fn alone(engine: &mut Engine, prompt: &[u32], options: &GenerationOptions) -> headrace_engine::Generation {
    let plain = GenerationOptions { speculation: 0, keep_logits: true, ..options.clone() };
    engine.generate(prompt, plain, &mut |_| Ok(())).unwrap()
}

/// The ledger agrees with the device's own count, and neither ever exceeded `limit`.
pub fn check_books(engine: &Engine, probe: &DeviceProbe, limit: u64, when: &str) {
    let stats = engine.stats().unwrap();
    let pool = &stats.memory[0];
    let held: u64 = pool.holders.iter().map(|h| h.used).sum();
    assert_eq!(pool.used, held, "{when}");
    assert_eq!(pool.used, pool.mapped, "{when}: the ledger against the device's own count\n{pool:?}");
    assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{when}");
    assert!(pool.peak <= limit && probe.peak_total() <= limit, "{when}");
}
