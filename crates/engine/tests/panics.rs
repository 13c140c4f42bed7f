//! A panic in every operation of the device, in the middle of whatever the engine does: the engine has failed then, every later call
//! says so, and what it held is given back.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{GRANULE, host_options, small_model};
use headrace_engine::books::Books;
use headrace_engine::serve::{Server, SharedEngine};
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{DeviceProbe, Fault, FaultPoint, HostDevice, HostOptions};

const CONTEXT: usize = 192;
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

/// Copies run on a thread of their own, where a panic is caught and becomes the error of a step.
const POINTS: [FaultPoint; 6] =
    [FaultPoint::Map, FaultPoint::Unmap, FaultPoint::Resize, FaultPoint::Load, FaultPoint::Record, FaultPoint::Run];

fn engine(key: &'static str, limit: u64) -> (Result<Engine, EngineError>, DeviceProbe) {
    let options = EngineOptions {
        max_batch: 2,
        prefill_chunk: 16,
        piece_bytes: Some(4096),
        ring_slots: 2,
        steps_in_flight: Some(2),
        threads: Some(1),
        ..EngineOptions::default()
    };
    let model = small_model(11, 4, CONTEXT);
    let host = HostOptions { memory_key: Some(key), ..host_options(&model) };
    let device = HostDevice::new(host).unwrap();
    let probe = device.probe();
    (Engine::on_device(model, None, options, Box::new(device), limit), probe)
}

fn generate(engine: &mut Engine, tokens: usize) -> Result<Vec<u32>, EngineError> {
    Ok(engine.generate(&PROMPT, GenerationOptions::greedy(tokens), &mut |_| Ok(()))?.token_ids)
}

/// A limit at which a long generation takes pieces from the weights, and the smallest one.
fn limits(key: &'static str) -> (u64, u64) {
    let Err(EngineError::Budget(breakdown)) = engine(key, GRANULE).0 else { panic!("a granule is refused") };
    (breakdown.everything - 24 * GRANULE, breakdown.minimum())
}

fn failed<T: std::fmt::Debug>(result: Result<T, EngineError>) -> bool {
    matches!(result, Err(EngineError::Failed(ref what)) if what.contains("a panic that was asked for"))
}

/// What a long generation needs, with a panic at `fault`; then everything that is asked of the failed engine. `None` if the panic
/// never came. Both engines at most that live on the device hold `limit` bytes together.
fn after(fault: Fault, key: &'static str, limit: u64, expected: &[Vec<u32>], look: &dyn Fn(&str)) -> Option<()> {
    let (made, probe) = engine(key, limit);
    let mut engine = made.unwrap();
    let mut run = engine.start(&PROMPT, GenerationOptions::greedy(3)).unwrap();
    engine.finish(&mut run);
    probe.inject_panic(fault);
    let lengths = [8, CONTEXT - PROMPT.len(), 8, 8, 8];
    let result = lengths.into_iter().map(|n| generate(&mut engine, n)).collect::<Result<Vec<_>, _>>();
    let when = format!("{fault:?}");
    if probe.fired() == 0 {
        assert_eq!(result.unwrap()[..2], *expected, "{when}");
        return None;
    }
    // A result that is there already is not lost to a panic in giving its pages back.
    assert!(result.err().is_none_or(|e| failed(Err::<(), _>(e))), "{when}");
    assert!(failed(engine.step(&mut [&mut run])) && failed(engine.stats()), "{when}");
    assert!(failed(engine.start(&PROMPT, GenerationOptions::greedy(1))), "{when}");
    assert!(failed(engine.logits(&[PROMPT.to_vec()], true, &mut |_| Ok(()))), "{when}");
    assert!(failed(engine.set_vram_limit(limit)) && failed(engine.reset_stats()), "{when}");
    assert!(failed(engine.weight_checksums()), "{when}");
    engine.finish(&mut run);
    // The failed engine is still there, and holds nothing: by the device's word, and by the ledger.
    assert_eq!(probe.total(), 0, "{when}: memory of a device that is gone");
    look(&when);
    Some(())
}

fn expected(key: &'static str, limit: u64) -> Vec<Vec<u32>> {
    let mut alone = engine(key, limit).0.unwrap();
    [8, CONTEXT - PROMPT.len()].map(|n| generate(&mut alone, n).unwrap()).to_vec()
}

#[test]
fn after_a_panic_every_call_says_so_and_everything_is_given_back() {
    let (limit, _) = limits("panics");
    let expected = expected("panics", limit);
    let mut points = std::collections::BTreeMap::new();
    for at in POINTS {
        for nth in 1..60 {
            // Books end with the last engine that has a part in them.
            let look = |when: &str| assert_eq!(Books::limit_of("panics"), None, "{when}");
            let Some(()) = after(Fault { at, nth }, "panics", limit, &expected, &look) else { break };
            *points.entry(format!("{at:?}")).or_insert(0) += 1;
        }
    }
    assert!(points["Run"] > 5 && POINTS.iter().all(|at| points.contains_key(&format!("{at:?}"))), "{points:?}");
}

#[test]
fn another_engine_on_the_device_goes_on_and_sees_the_bytes_of_the_failed_one_free() {
    let (limit, _) = limits("panics-beside");
    let expected = expected("panics-beside", limit);
    let mut witness = engine("panics-beside", 2 * limit).0.unwrap();
    for nth in [1, 4, 9] {
        for at in [FaultPoint::Run, FaultPoint::Resize] {
            let look = |when: &str| {
                let pool = witness.stats().unwrap().memory.remove(0);
                let others: Vec<_> = pool.holders.iter().filter(|h| h.name.contains(" of engine ")).collect();
                assert!(others.is_empty(), "{when}: {others:?}");
                assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{when}");
                assert_eq!(pool.used, pool.mapped, "{when}");
            };
            after(Fault { at, nth }, "panics-beside", 2 * limit, &expected, &look);
        }
    }
    assert_eq!(generate(&mut witness, 8).unwrap(), expected[0]);
}

#[test]
fn a_server_tells_every_request_of_a_failed_engine_and_goes_on_saying_so() {
    let (limit, _) = limits("panics-served");
    let (made, probe) = engine("panics-served", limit);
    let shared = SharedEngine::new(parking_lot::Mutex::new(made.unwrap()));
    let server = Server::start(shared.clone()).unwrap();
    probe.inject_panic(Fault { at: FaultPoint::Run, nth: 3 });
    let requests: Vec<_> =
        (0..3).map(|_| server.submit(PROMPT.to_vec(), GenerationOptions::greedy(8)).unwrap()).collect();
    let later = |request: &headrace_engine::serve::Request| {
        let outcome = request.outcome(std::time::Duration::from_secs(60)).expect("an end");
        matches!(outcome, Err(ref error) if matches!(error.root(), EngineError::Failed(_)))
    };
    assert!(requests.iter().all(later));
    assert!(later(&server.submit(PROMPT.to_vec(), GenerationOptions::greedy(1)).unwrap()));
    assert!(failed(shared.lock().stats()));
}

#[test]
fn a_caller_s_panic_in_a_hook_is_the_caller_s_and_the_engine_goes_on() {
    let (limit, _) = limits("panics-hook");
    let mut engine = engine("panics-hook", limit).0.unwrap();
    let mut steps = 0;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        engine.generate(&PROMPT, GenerationOptions::greedy(8), &mut |_| {
            steps += 1;
            assert!(steps < 4, "the caller's");
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(engine.stats().unwrap().kv.sequences, 0, "its pages were given back");
    assert_eq!(generate(&mut engine, 8).unwrap().len(), 8);
}
