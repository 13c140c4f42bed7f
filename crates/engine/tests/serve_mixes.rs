//! Random mixes of requests that join and leave at random steps: every request's tokens and logits are those of running alone.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;

use common::{alone, cpu, host, limits, options, tiny_model};
use headrace_engine::serve::{Batcher, Event, RequestId};
use headrace_engine::{DeviceChoice, Engine, EngineOptions, FinishReason, Generation, GenerationOptions};
use headrace_kv::KvLayout;
use headrace_testing::{bits, generator};
use rand::Rng;
use rand::seq::IndexedRandom;

const CONTEXT: usize = 400;
const VOCAB: u32 = 61;

/// A request, when it comes and, if it is cancelled, when that is.
struct Planned {
    prompt: Vec<u32>,
    options: GenerationOptions,
    arrival: u64,
    cancelled: Option<u64>,
}

/// What a mix is made of. Steps whose logits are kept are never followed by others in flight, so some are not.
#[derive(Clone, Copy, Debug)]
struct Kind {
    speculation: bool,
    logits: bool,
}

const KINDS: [Kind; 4] = [
    Kind { speculation: false, logits: true },
    Kind { speculation: true, logits: true },
    Kind { speculation: false, logits: false },
    Kind { speculation: true, logits: false },
];

/// 1 to 32 requests of 1 to 400 positions. Half of the prompts repeat themselves, so that drafts are found.
fn plan(rng: &mut impl Rng, kind: Kind) -> Vec<Planned> {
    let count = rng.random_range(1..=32);
    let spread = *[0, 20, 200].choose(rng).unwrap();
    let one = |rng: &mut _| planned(rng, kind, spread);
    (0..count).map(|_| one(rng)).collect()
}

fn planned(rng: &mut impl Rng, kind: Kind, spread: u64) -> Planned {
    let length = (CONTEXT as f64).powf(rng.random_range(0.2..=1.0)) as usize;
    let prompt = rng.random_range(1..length.max(2)).min(CONTEXT - 1);
    let period = *[2, 7, 1000].choose(rng).unwrap();
    let start = rng.random_range(0..VOCAB);
    let prompt: Vec<u32> = (0..prompt as u32).map(|i| (start + (i % period) * 17) % VOCAB).collect();
    let max_new_tokens = Some(rng.random_range(0..=length.saturating_sub(prompt.len())));
    let drawn = kind.logits && rng.random_bool(0.2);
    let options = GenerationOptions {
        max_new_tokens,
        temperature: if drawn { 0.8 } else { 0.0 },
        seed: rng.random(),
        stop_tokens: if rng.random_bool(0.3) { vec![rng.random_range(0..VOCAB)] } else { vec![] },
        speculation: if kind.speculation && !drawn { rng.random_range(0..=8) } else { 0 },
        keep_logits: kind.logits,
        ..GenerationOptions::default()
    };
    let arrival = rng.random_range(0..=spread);
    let cancelled = rng.random_bool(0.2).then(|| arrival + rng.random_range(0..60));
    Planned { prompt, options, arrival, cancelled }
}

/// Runs the mix; what each request gave, in the order of the plan, and its tokens as the events told them.
fn run(engine: &mut Engine, plan: &[Planned]) -> Vec<(Generation, Vec<u32>)> {
    let mut batcher = Batcher::new();
    let mut ids: BTreeMap<usize, RequestId> = BTreeMap::new();
    let mut told: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    let mut done: BTreeMap<RequestId, Generation> = BTreeMap::new();
    let mut now = 0;
    while ids.len() < plan.len() || !batcher.is_idle() {
        for (i, p) in plan.iter().enumerate() {
            if p.arrival == now {
                ids.insert(i, batcher.submit(engine, p.prompt.clone(), p.options.clone()).unwrap());
            }
            if p.cancelled == Some(now) {
                batcher.cancel(engine, ids[&i]);
            }
        }
        for event in batcher.step(engine) {
            match event {
                Event::Started { .. } => {}
                Event::Token { id, token } => told.entry(id).or_default().push(token),
                Event::Ended { id, outcome } => {
                    assert!(done.insert(id, outcome.unwrap()).is_none(), "ended twice");
                }
            }
        }
        now += 1;
    }
    ids.values().map(|id| (done.remove(id).unwrap(), told.remove(id).unwrap_or_default())).collect()
}

fn check(engine: &mut Engine, reference: &mut Engine, plan: &[Planned], when: &str) {
    for (i, ((got, told), p)) in run(engine, plan).iter().zip(plan).enumerate() {
        let when = format!("{when}, request {i}: {} + {:?}", p.prompt.len(), p.options);
        assert_eq!(&got.token_ids, told, "{when}");
        let expected = alone(reference, &p.prompt, &p.options);
        let vocab = VOCAB as usize;
        if got.finish == FinishReason::Cancelled {
            assert!(p.cancelled.is_some(), "{when}");
            assert_eq!(got.token_ids, expected.token_ids[..got.token_ids.len()], "{when}");
            let end = got.token_ids.len() * vocab * usize::from(p.options.keep_logits);
            assert_eq!(bits(&got.logits), bits(&expected.logits[..end]), "{when}");
        } else {
            assert_eq!((&got.token_ids, got.finish), (&expected.token_ids, expected.finish), "{when}");
            let end = expected.logits.len() * usize::from(p.options.keep_logits);
            assert_eq!(bits(&got.logits), bits(&expected.logits[..end]), "{when}");
        }
    }
    let stats = engine.stats().unwrap();
    assert_eq!((stats.kv.sequences, stats.kv.pages), (0, 0), "{when}");
    for pool in &stats.memory {
        assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{when}");
        assert!(pool.peak <= pool.limit, "{when}");
    }
}

#[test]
fn on_the_cpu_every_request_is_as_if_alone() {
    let mut rng = generator(1);
    for (round, chunk) in [1, 3, 17, 64, 200, 512].into_iter().enumerate() {
        let model = tiny_model(round as u64, 2, CONTEXT);
        let mut reference = cpu(&model, options(1, 64));
        for (batch, layout) in [(1, KvLayout::HeadMajor), (5, KvLayout::SeqMajor), (32, KvLayout::HeadMajor)] {
            let o = EngineOptions { kv_layout: layout, ..options(batch, chunk) };
            let mut engine = cpu(&model, o);
            for kind in KINDS {
                let plan = plan(&mut rng, kind);
                check(&mut engine, &mut reference, &plan, &format!("chunk {chunk}, batch {batch}, {kind:?}"));
            }
        }
    }
}

#[test]
fn on_the_host_device_every_request_is_as_if_alone() {
    let mut rng = generator(2);
    let (mut streamed, mut accepted, mut discarded) = (0, 0, 0);
    for (round, chunk) in [1, 9, 32, 100, 512].into_iter().enumerate() {
        let model = tiny_model(10 + round as u64, 3, CONTEXT);
        let mut reference = cpu(&model, options(1, 64));
        for (batch, layout) in [(3, KvLayout::HeadMajor), (16, KvLayout::SeqMajor), (32, KvLayout::HeadMajor)] {
            let o = EngineOptions {
                kv_layout: layout,
                steps_in_flight: (round < 4).then_some(1 + round),
                ..options(batch, chunk)
            };
            let (minimum, everything) = limits(&model, &o);
            for limit in [minimum, (minimum + everything) / 2, everything] {
                let (mut engine, _) = host(&model, o.clone(), limit);
                for kind in KINDS {
                    let plan = plan(&mut rng, kind);
                    let when = format!("chunk {chunk}, batch {batch}, limit {limit} of {everything}, {kind:?}");
                    check(&mut engine, &mut reference, &plan, &when);
                }
                let stats = engine.stats().unwrap();
                streamed += stats.weights.streamed_bytes;
                accepted += stats.tokens.accepted;
                discarded += stats.tokens.discarded_rows;
                if limit == everything {
                    assert_eq!(stats.weights.streamed_bytes, 0);
                }
            }
        }
    }
    assert!(streamed > 0 && accepted > 100, "{streamed} bytes streamed, {accepted} drafted tokens accepted");
    // Steps were in flight while requests left.
    assert!(discarded > 100, "{discarded}");
}

#[test]
fn a_list_of_requests_gives_what_each_gives_alone_in_order() {
    let model = tiny_model(4, 2, CONTEXT);
    let mut engine = cpu(&model, EngineOptions { device: DeviceChoice::Cpu, ..options(3, 20) });
    let mut rng = generator(3);
    let requests: Vec<_> = (0..40).map(|_| planned(&mut rng, KINDS[1], 0)).map(|p| (p.prompt, p.options)).collect();
    let expected: Vec<_> = requests.iter().map(|(prompt, o)| alone(&mut engine, prompt, o)).collect();
    let prompts: usize = requests.iter().map(|(prompt, _)| prompt.len()).sum();
    let mut last = (0, 0);
    let mut hook = |p: headrace_engine::Progress| {
        assert_eq!(p.prompt_total, prompts);
        assert!(p.prompt_done >= last.0 && p.new_tokens >= last.1);
        last = (p.prompt_done, p.new_tokens);
        Ok(())
    };
    let results = engine.generate_all(requests, &mut hook).unwrap();
    for (result, expected) in results.iter().zip(&expected) {
        assert_eq!((&result.token_ids, result.finish), (&expected.token_ids, expected.finish));
    }
    assert!(last.0 > prompts / 2);
    // A hook that stops leaves nothing behind.
    let requests = vec![(vec![1, 2], GenerationOptions::greedy(20)); 9];
    let mut calls = 0;
    let mut stop = |_| {
        calls += 1;
        if calls > 7 { Err(headrace_engine::EngineError::Interrupted) } else { Ok(()) }
    };
    assert!(engine.generate_all(requests, &mut stop).is_err());
    assert_eq!(engine.stats().unwrap().kv.sequences, 0);
}
