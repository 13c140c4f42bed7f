//! Ten thousand requests with random arrivals, lengths and cancellations: all right, books flat, nobody waits for ever.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::time::Instant;

use common::{alone, check_books, cpu, host, limits, options, tiny_model};
use headrace_engine::serve::{Batcher, Event, RequestId};
use headrace_engine::{FinishReason, Generation, GenerationOptions};
use headrace_testing::generator;
use rand::Rng;

const REQUESTS: usize = 10_000;
const WAVES: usize = 10;
const CONTEXT: usize = 128;
const LONGEST: usize = 48;

/// What one request is about.
struct Asked {
    prompt: usize,
    new: usize,
    stop: Option<u32>,
    bound: u64,
}

/// The tokens of a request, from what its prompt gives without an end.
fn expected(free: &[u32], asked: &Asked) -> (Vec<u32>, FinishReason) {
    let tokens = &free[..asked.new];
    match tokens.iter().position(|t| Some(*t) == asked.stop) {
        Some(at) => (tokens[..at].to_vec(), FinishReason::Stop),
        None => (tokens.to_vec(), FinishReason::Length),
    }
}

#[test]
fn ten_thousand_requests_are_right_and_none_waits_beyond_its_bound() {
    let started = Instant::now();
    let mut rng = generator(17);
    let model = tiny_model(23, 1, CONTEXT);
    let mut reference = cpu(&model, options(1, 64));
    let prompts: Vec<Vec<u32>> = (0..200)
        .map(|_| {
            let period = rng.random_range(2..40u32);
            let (start, length) = (rng.random_range(0..61u32), rng.random_range(1..=CONTEXT - LONGEST));
            (0..length as u32).map(|i| (start + (i % period) * 13) % 61).collect()
        })
        .collect();
    let free: Vec<Generation> =
        prompts.iter().map(|p| alone(&mut reference, p, &GenerationOptions::greedy(LONGEST))).collect();

    let o = options(12, 40);
    let (minimum, everything) = limits(&model, &o);
    // KV takes weight room, and there is less of it than twelve of the longest requests would take.
    let limit = minimum + (everything - minimum) / 3;
    let (mut engine, probe) = host(&model, o, limit);
    let mut batcher = Batcher::new();
    let mut asked: HashMap<RequestId, Asked> = HashMap::new();
    let mut tokens: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let (mut submitted, mut ended, mut cancelled) = (0, 0, 0);
    let (mut last_started, mut longest_wait, mut closest) = (None, 0u64, 0f64);
    let mut held = Vec::new();
    for wave in 1..=WAVES {
        while submitted < REQUESTS * wave / WAVES || !batcher.is_idle() {
            // Bursts, and pauses in which the queue may empty.
            let burst = if rng.random_bool(0.05) { rng.random_range(0..60) } else { rng.random_range(0..2) };
            for _ in 0..burst.min(REQUESTS * wave / WAVES - submitted) {
                let prompt = rng.random_range(0..prompts.len());
                let new = (LONGEST as f64 * rng.random_range(0.0f64..=1.0).powi(3)) as usize;
                let stop = rng.random_bool(0.2).then(|| rng.random_range(0..61));
                let options = GenerationOptions {
                    stop_tokens: stop.into_iter().collect(),
                    speculation: if rng.random_bool(0.3) { 4 } else { 0 },
                    ..GenerationOptions::greedy(new)
                };
                let id = batcher.submit(&engine, prompts[prompt].clone(), options).unwrap();
                let bound = batcher.waiting_bound(&engine, id).unwrap();
                asked.insert(id, Asked { prompt, new, stop, bound });
                submitted += 1;
            }
            if rng.random_bool(0.1) && submitted > 0 {
                let id = RequestId(rng.random_range(submitted.saturating_sub(80)..submitted) as u64);
                cancelled += usize::from(batcher.cancel(&mut engine, id));
            }
            for event in batcher.step(&mut engine) {
                match event {
                    Event::Started { id, waited } => {
                        assert!(last_started < Some(id), "{id:?} started after {last_started:?}");
                        last_started = Some(id);
                        let bound = asked[&id].bound;
                        assert!(waited <= bound, "{id:?} waited {waited} steps, {bound} at most");
                        longest_wait = longest_wait.max(waited);
                        if bound > 0 {
                            closest = closest.max(waited as f64 / bound as f64);
                        }
                    }
                    Event::Token { id, token } => tokens.entry(id).or_default().push(token),
                    Event::Ended { id, outcome } => {
                        let got = outcome.unwrap();
                        let told = tokens.remove(&id).unwrap_or_default();
                        let asked = asked.remove(&id).expect("ended once");
                        let (all, finish) = expected(&free[asked.prompt].token_ids, &asked);
                        assert_eq!(got.token_ids, told, "{id:?}");
                        match got.finish {
                            FinishReason::Cancelled => assert_eq!(told, all[..told.len()], "{id:?}"),
                            _ => assert_eq!((told, got.finish), (all, finish), "{id:?}"),
                        }
                        ended += 1;
                    }
                }
            }
            assert!(!batcher.is_blocked());
        }
        check_books(&engine, &probe, limit, &format!("after wave {wave}"));
        let stats = engine.stats().unwrap();
        assert_eq!((stats.kv.sequences, stats.kv.pages, stats.kv.tokens), (0, 0, 0));
        held.push(stats.memory[0].used);
    }
    assert_eq!((submitted, ended), (REQUESTS, REQUESTS));
    assert!(asked.is_empty() && tokens.is_empty());
    assert_eq!(held.iter().min(), held.iter().max(), "bytes held after each wave: {held:?}");
    let stats = engine.stats().unwrap();
    assert!(stats.weights.streamed_bytes > 0 && stats.tokens.accepted > 1000);
    assert!(cancelled > 100 && longest_wait > 100, "{cancelled} cancelled, one waited {longest_wait} steps");
    // A bound that is far above everything that happens says little.
    assert!(closest > 0.2, "the closest wait took {closest} of its bound");
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{REQUESTS} requests, {} steps, {cancelled} cancelled, longest wait {longest_wait} steps ({closest:.2} of its \
         bound), {seconds:.1} s",
        batcher.steps()
    );
    assert!(seconds < 60.0, "{seconds} s");
}
