//! Engines of one process that share a device: one limit over all of them, weights that give way to another engine and come
//! back, what the process takes once counted once, and tokens that are the same as alone.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{GRANULE, small_model};
use headrace_engine::stats::PoolStats;
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{HostDevice, HostOptions};

const CONTEXT: u64 = 10 * GRANULE;
const PROMPT: [u32; 4] = [3, 1, 4, 1];

fn engine(key: &'static str, limit: u64) -> Result<Engine, EngineError> {
    let options = EngineOptions {
        max_batch: 1,
        prefill_chunk: 8,
        piece_bytes: Some(4096),
        ring_slots: 2,
        steps_in_flight: Some(2),
        threads: Some(1),
        ..EngineOptions::default()
    };
    let host = HostOptions {
        threads: Some(1),
        granule: GRANULE,
        memory_key: Some(key),
        shared_bytes: CONTEXT,
        ..HostOptions::default()
    };
    let device = Box::new(HostDevice::new(host).unwrap());
    Engine::on_device(small_model(7, 4, 64), None, options, device, limit)
}

fn tokens(engine: &mut Engine) -> Vec<u32> {
    engine.generate(&PROMPT, GenerationOptions::greedy(12), &mut |_| Ok(())).unwrap().token_ids
}

fn pool(engine: &Engine) -> PoolStats {
    engine.stats().unwrap().memory.remove(0)
}

fn used(pool: &PoolStats, name: &str) -> Option<u64> {
    pool.holders.iter().find(|h| h.name == name).map(|h| h.used)
}

/// The smallest limit of one engine alone, and the one that holds all of it.
fn alone(key: &'static str) -> (u64, u64) {
    let Err(EngineError::Budget(breakdown)) = engine(key, GRANULE) else { panic!("a granule is refused") };
    (breakdown.minimum(), breakdown.everything)
}

fn check(pool: &PoolStats, limit: u64) {
    assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{pool:?}");
    assert!(pool.peak <= limit && pool.mapped_peak <= limit && pool.limit == limit, "{pool:?}");
    assert_eq!(pool.used, pool.mapped, "{pool:?}");
    let parts = pool.fixed_parts.iter().map(|part| part.1).sum::<u64>();
    assert_eq!(Some(parts), used(pool, "fixed"), "neither the context nor another engine's");
}

#[test]
fn a_second_engine_takes_its_needs_from_the_first_one_s_weights_and_gives_them_back() {
    let (minimum, everything) = alone("two-engines");
    let mut first = engine("two-engines", everything).unwrap();
    let expected = tokens(&mut first);
    assert_eq!(used(&pool(&first), "context"), Some(CONTEXT));
    let whole = used(&pool(&first), "weights").unwrap();
    assert_eq!(first.stats().unwrap().weights.streamed_bytes, 0);

    // What the second one needs has to come from somewhere: the limit holds the first one exactly.
    let mut second = engine("two-engines", everything).unwrap();
    let both = pool(&second);
    check(&both, everything);
    assert_eq!(used(&both, "context"), Some(CONTEXT), "counted once");
    let left = used(&both, "weights of engine 1").unwrap();
    assert!(left < whole && used(&both, "kv").is_some() && used(&both, "kv of engine 1").is_some(), "{both:?}");
    assert_eq!(used(&pool(&first), "weights"), Some(left), "both see the same books");
    assert!(both.used > minimum);
    for _ in 0..2 {
        assert_eq!((tokens(&mut first), tokens(&mut second)), (expected.clone(), expected.clone()));
    }
    let stats = first.stats().unwrap();
    assert!(stats.weights.streamed_bytes > 0);
    check(&pool(&first), everything);

    drop(second);
    assert_eq!(tokens(&mut first), expected);
    first.reset_stats().unwrap();
    assert_eq!(tokens(&mut first), expected);
    assert_eq!(first.stats().unwrap().weights.streamed_bytes, 0, "everything is back");
    check(&pool(&first), everything);
}

#[test]
fn a_second_engine_that_cannot_fit_is_refused_with_the_first_one_s_bytes_and_changes_nothing() {
    let (minimum, _) = alone("too-small");
    let mut first = engine("too-small", minimum).unwrap();
    let expected = tokens(&mut first);
    let before = pool(&first);
    let Err(EngineError::Budget(breakdown)) = engine("too-small", minimum) else { panic!("there is no room for two") };
    let text = breakdown.to_string();
    assert!(text.contains("others") && text.contains("kv of engine 1"), "{text}");
    // A lower limit than the first one was promised is refused as well, whatever the second one needs.
    assert!(engine("too-small", minimum - GRANULE).is_err());
    assert_eq!(tokens(&mut first), expected);
    let after = pool(&first);
    assert_eq!((before.limit, before.used), (after.limit, after.used));
    check(&after, minimum);
    // With what the breakdown asks for it fits.
    let mut second = engine("too-small", breakdown.minimum()).unwrap();
    assert_eq!(tokens(&mut second), expected);
    check(&pool(&first), breakdown.minimum());
}

#[test]
fn the_limit_is_the_process_s_and_any_engine_changes_it() {
    let (minimum, everything) = alone("one-limit");
    let mut first = engine("one-limit", everything).unwrap();
    let expected = tokens(&mut first);
    let mut second = engine("one-limit", 2 * everything).unwrap();
    assert_eq!(pool(&first).limit, 2 * everything);
    second.set_vram_limit(everything).unwrap();
    assert_eq!(pool(&first).limit, everything);
    first.reset_stats().unwrap();
    assert_eq!((tokens(&mut first), tokens(&mut second)), (expected.clone(), expected.clone()));
    check(&pool(&first), everything);
    assert!(first.set_vram_limit(minimum).is_err(), "the other one's promises don't fit");
    assert_eq!(pool(&second).limit, everything);
    assert_eq!((tokens(&mut first), tokens(&mut second)), (expected.clone(), expected));
}

#[test]
fn a_step_that_a_stop_token_made_useless_keeps_nobody_waiting() {
    let (_, everything) = alone("stopped");
    let mut first = engine("stopped", everything).unwrap();
    let expected = tokens(&mut first);
    let options = GenerationOptions { stop_tokens: vec![expected[5]], ..GenerationOptions::greedy(12) };
    first.generate(&PROMPT, options, &mut |_| Ok(())).unwrap();
    let start = Instant::now();
    let mut second = engine("stopped", everything).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "the step behind the stop token was waited for");
    for _ in 0..2 {
        assert_eq!((tokens(&mut first), tokens(&mut second)), (expected.clone(), expected.clone()));
    }
    check(&pool(&first), everything);
}

#[test]
fn steps_in_flight_that_are_not_collected_keep_nobody_waiting_and_are_computed_again() {
    let (_, everything) = alone("uncollected");
    let mut first = engine("uncollected", everything).unwrap();
    let expected = tokens(&mut first);
    let mut run = first.start(&PROMPT, GenerationOptions::greedy(12)).unwrap();
    let mut guests = 0;
    while run.finish_reason().is_none() {
        first.step(&mut [&mut run]).unwrap();
        if guests == 0 && run.new_tokens().len() % 4 == 2 {
            // A stream that is not read on: a step of it is in flight.
            first.reset_stats().unwrap();
            let start = Instant::now();
            let mut guest = engine("uncollected", everything).unwrap();
            assert!(start.elapsed() < Duration::from_secs(10), "it was waited for");
            assert_eq!(tokens(&mut guest), expected);
            first.step(&mut [&mut run]).unwrap();
            let discarded = first.stats().unwrap().tokens;
            assert_eq!((discarded.discarded_steps, discarded.discarded_rows), (1, 1), "one was in flight");
            guests += 1;
        }
    }
    assert_eq!((first.finish(&mut run).token_ids, guests), (expected.clone(), 1));
    assert_eq!(tokens(&mut first), expected);
    check(&pool(&first), everything);
}

#[test]
fn weights_give_way_between_the_steps_of_a_running_generation() {
    let (_, everything) = alone("running");
    let mut first = engine("running", everything).unwrap();
    let expected = tokens(&mut first);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Also when the other side fails.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stopper = Stop(&stop);
        let running = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) || rounds < 3 {
                assert_eq!(tokens(&mut first), expected);
                rounds += 1;
            }
        });
        for _ in 0..8 {
            let mut guest = engine("running", everything).unwrap();
            assert_eq!(tokens(&mut guest), expected);
            check(&pool(&guest), everything);
        }
        drop(stopper);
        running.join().unwrap();
    });
    check(&pool(&first), everything);
    // The last guest has left: its bytes come back with the next step.
    assert_eq!(tokens(&mut first), expected);
    let epochs = first.stats().unwrap().graph.epochs;
    assert!(epochs.iter().any(|(reason, _)| reason == "other-engine"), "{epochs:?}");
}
