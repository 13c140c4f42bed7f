//! Every map, unmap, resize, load, copy, recording and run of the host device fails once, in every order. After each failure
//! the call has finished with the right tokens or raised a typed error, the books agree with the device's own count, and the
//! next generation on the same engine is right.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{GRANULE, host_options, small_model};
use headrace_engine::stats::PoolStats;
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions, Result};
use headrace_ep_cpu::host_device::{DeviceProbe, Fault, FaultPoint, HostDevice, HostOptions};
use headrace_model::ModelSpec;

const CONTEXT: usize = 192;
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

const POINTS: [FaultPoint; 7] = [
    FaultPoint::Map,
    FaultPoint::Unmap,
    FaultPoint::Resize,
    FaultPoint::Load,
    FaultPoint::Copy,
    FaultPoint::Record,
    FaultPoint::Run,
];

fn model() -> Arc<ModelSpec> {
    small_model(11, 4, CONTEXT)
}

fn options() -> EngineOptions {
    EngineOptions {
        max_batch: 2,
        prefill_chunk: 16,
        piece_bytes: Some(4096),
        ring_slots: 2,
        steps_in_flight: Some(2),
        threads: Some(1),
        ..EngineOptions::default()
    }
}

fn engine(model: &Arc<ModelSpec>, limit: u64, faults: &[Fault]) -> (Result<Engine>, DeviceProbe) {
    engine_with(model, limit, Some(limit), faults)
}

fn engine_with(
    model: &Arc<ModelSpec>,
    limit: u64,
    capacity: Option<u64>,
    faults: &[Fault],
) -> (Result<Engine>, DeviceProbe) {
    let device = HostDevice::new(HostOptions { capacity, ..host_options(model) }).unwrap();
    let probe = device.probe();
    faults.iter().for_each(|f| probe.inject(*f));
    (Engine::on_device(model.clone(), None, options(), Box::new(device), limit), probe)
}

fn generate(engine: &mut Engine, tokens: usize) -> Result<Vec<u32>> {
    Ok(engine.generate(&PROMPT, GenerationOptions::greedy(tokens), &mut |_| Ok(()))?.token_ids)
}

fn pool(engine: &Engine) -> PoolStats {
    let mut stats = engine.stats().unwrap();
    assert_eq!(stats.memory.len(), 1);
    stats.memory.remove(0)
}

fn check_books(engine: &Engine, probe: &DeviceProbe, limit: u64, when: &str) {
    let pool = pool(engine);
    let held: u64 = pool.holders.iter().map(|h| h.used).sum();
    assert_eq!(pool.used, held, "{when}");
    assert_eq!(pool.used, pool.mapped, "{when}: the ledger against the device's own count\n{pool:?}");
    assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{when}");
    assert!(pool.peak <= limit && probe.peak_total() <= limit, "{when}");
}

/// A limit at which everything is resident while KV is small and a long generation takes pieces from the weights, and the
/// smallest limit that works.
fn limits(model: &Arc<ModelSpec>) -> (u64, u64) {
    let Err(EngineError::Budget(breakdown)) = engine_with(model, GRANULE, None, &[]).0 else {
        panic!("a limit of one granule is refused with its breakdown")
    };
    (breakdown.everything - 24 * GRANULE, breakdown.minimum())
}

/// What every test here runs: a short generation, a long one that takes bytes from the weights, short ones that give them
/// back. Returns the first error; the engine is left as that error left it.
fn scenario(engine: &mut Engine) -> Result<Vec<Vec<u32>>> {
    [8, CONTEXT - PROMPT.len(), 8, 8, 8].into_iter().map(|n| generate(engine, n)).collect()
}

#[test]
fn without_a_failure_bytes_go_to_kv_and_come_back() {
    let model = model();
    let (limit, smallest) = limits(&model);
    let expected = {
        let mut cpu = Engine::from_spec(
            model.clone(),
            None,
            EngineOptions { device: headrace_engine::DeviceChoice::Cpu, ..options() },
        )
        .unwrap();
        scenario(&mut cpu).unwrap()
    };
    for limit in [limit, smallest] {
        let (engine, probe) = engine(&model, limit, &[]);
        let mut engine = engine.unwrap();
        assert_eq!(scenario(&mut engine).unwrap(), expected);
        check_books(&engine, &probe, limit, "after the scenario");
        assert!(engine.stats().unwrap().weights.streamed_bytes > 0);
        assert!(probe.copies() > 0 && probe.fences() > 0);
    }
    let (engine, _) = engine(&model, limit, &[]);
    let mut engine = engine.unwrap();
    scenario(&mut engine).unwrap();
    let epochs = engine.stats().unwrap().graph.epochs;
    assert!(epochs.iter().any(|(reason, _)| reason == "kv-growth"), "{epochs:?}");
    assert!(epochs.iter().any(|(reason, _)| reason == "kv-shrink"), "{epochs:?}");
    assert_eq!(engine.memory().unwrap().streamed_bytes, 0, "everything is resident again");
}

#[test]
fn a_failure_while_loading_is_typed() {
    let model = model();
    let (limit, smallest) = limits(&model);
    for limit in [limit, smallest] {
        for at in [FaultPoint::Map, FaultPoint::Resize, FaultPoint::Load] {
            let mut fired = 0;
            for nth in 1.. {
                let (result, probe) = engine(&model, limit, &[Fault { at, nth }]);
                if probe.fired() == 0 {
                    break;
                }
                fired += 1;
                match result {
                    Err(EngineError::Device(_)) => {}
                    Err(other) => panic!("{at:?} {nth}: {other}"),
                    Ok(_) => panic!("{at:?} {nth}: the failure was swallowed"),
                }
            }
            // At the smallest limit nothing is resident, so nothing is mapped or loaded piece by piece.
            assert!(fired > 0 || limit == smallest, "{at:?} never happened");
        }
    }
}

#[test]
fn every_operation_may_fail_once() {
    let model = model();
    let (limit, smallest) = limits(&model);
    let expected = scenario(&mut engine(&model, limit, &[]).0.unwrap()).unwrap();
    let mut typed = 0;
    for limit in [limit, smallest] {
        for at in POINTS {
            for nth in (1..).step_by(if matches!(at, FaultPoint::Copy | FaultPoint::Run) { 23 } else { 1 }) {
                let (engine, probe) = engine(&model, limit, &[]);
                let mut engine = engine.unwrap();
                let when = format!("limit {limit}, {at:?} number {nth}");
                probe.inject(Fault { at, nth });
                match scenario(&mut engine) {
                    Ok(tokens) => assert_eq!(tokens, expected, "{when}"),
                    Err(EngineError::Device(_) | EngineError::Kv(_) | EngineError::Governor(_)) => typed += 1,
                    Err(other) => panic!("{when}: {other}"),
                }
                assert_eq!(engine.stats().unwrap().kv.sequences, 0, "{when}");
                check_books(&engine, &probe, limit, &when);
                if probe.fired() == 0 {
                    break;
                }
                assert_eq!(scenario(&mut engine).unwrap(), expected, "{when}: the engine afterwards");
                check_books(&engine, &probe, limit, &when);
            }
        }
    }
    assert!(typed > 20, "only {typed} failures were seen");
}
