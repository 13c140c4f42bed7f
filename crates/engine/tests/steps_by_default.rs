//! How many steps are in flight if nobody said: two while everything is resident, one while weights are cold, as it is at each
//! step; and what a stop token drops then.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{host, limits, options, tiny_model};
use headrace_engine::{Engine, EngineOptions, GenerationOptions, PlacementMode};
use headrace_model::ModelSpec;

const CONTEXT: usize = 160;
const NEW: usize = 40;
const PROMPT: [u32; 4] = [7, 3, 50, 21];

fn by_default(placement: PlacementMode) -> EngineOptions {
    let host_mapped_budget = placement.reads_in_place().then_some(1 << 20);
    EngineOptions { steps_in_flight: None, placement, host_mapped_budget, ..options(1, 16) }
}

fn made(model: &Arc<ModelSpec>, options: &EngineOptions, limit: u64) -> Engine {
    host(model, options.clone(), limit).0
}

fn in_force(engine: &Engine) -> u64 {
    engine.stats().unwrap().device.steps_in_flight
}

fn generate(engine: &mut Engine, options: &GenerationOptions) -> Vec<u32> {
    engine.generate(&PROMPT, options.clone(), &mut |_| Ok(())).unwrap().token_ids
}

/// A token and where it comes first: as late as possible, but so that `after` more come behind it.
fn stop(tokens: &[u32], after: usize) -> (u32, usize) {
    let firsts = tokens.iter().enumerate().filter(|(i, t)| !tokens[..*i].contains(t));
    firsts.map(|(i, &t)| (t, i)).rfind(|&(_, i)| i + after < tokens.len()).unwrap()
}

#[test]
fn two_while_everything_is_resident_and_one_while_weights_are_cold() {
    // So short a context that all KV leaves no room for the weights under the smallest limit, even before it is used.
    let model = tiny_model(5, 6, 48);
    for placement in [PlacementMode::Auto, PlacementMode::Stream, PlacementMode::ZeroCopy, PlacementMode::Hybrid] {
        let options = by_default(placement);
        let (least, most) = limits(&model, &options);
        let all = generate(&mut made(&model, &options, most), &GenerationOptions::greedy(NEW));
        let (token, at) = stop(&all, 5);
        let stopped = GenerationOptions { stop_tokens: vec![token], ..GenerationOptions::greedy(NEW) };
        for (limit, cold, asked) in [(most, false, None), (least, true, None), (least, true, Some(2))] {
            let when = format!("{placement:?}, cold: {cold}, {asked:?} asked for");
            let mut engine = made(&model, &EngineOptions { steps_in_flight: asked, ..options.clone() }, limit);
            let depth = asked.unwrap_or(if cold { 1 } else { 2 }) as u64;
            assert_eq!(in_force(&engine), depth, "{when}: before the first step");
            assert_eq!(generate(&mut engine, &stopped), all[..at], "{when}");
            let stats = engine.stats().unwrap();
            assert_eq!(stats.device.steps_in_flight, depth, "{when}");
            assert_eq!(stats.tokens.discarded_steps, depth - 1, "{when}");
            assert_eq!(stats.tokens.steps, at as u64 + depth, "{when}");
            assert_eq!(stats.weights.byte_hit_rate.unwrap() < 0.9, cold, "{when}: {:?}", stats.weights);
            // All that is cold fits the budget for reads in place.
            let streams = cold && !placement.reads_in_place();
            assert_eq!(stats.weights.streamed_bytes > 0, streams, "{when}");
        }
    }
}

#[test]
fn weights_that_become_cold_in_a_generation_end_the_second_step() {
    let model = tiny_model(5, 4, CONTEXT);
    let options = by_default(PlacementMode::Auto);
    let (_, most) = limits(&model, &options);
    let all = generate(&mut made(&model, &options, most), &GenerationOptions::greedy(CONTEXT - PROMPT.len()));
    // The last granule that KV comes to need is not there.
    let mut engine = made(&model, &options, most - common::GRANULE);
    let mut seen = vec![in_force(&engine)];
    let mut run = engine.start(&PROMPT, GenerationOptions::greedy(all.len())).unwrap();
    while run.finish_reason().is_none() {
        let streamed = engine.stats().unwrap().weights.streamed_bytes;
        engine.step(&mut [&mut run]).unwrap();
        seen.push(in_force(&engine));
        let streams = engine.stats().unwrap().weights.streamed_bytes > streamed;
        assert_eq!(streams, seen.last() == Some(&1), "after {} steps", seen.len() - 1);
    }
    assert_eq!(run.new_tokens(), all);
    seen.dedup();
    assert_eq!(seen, [2, 1]);
    engine.finish(&mut run);
    let tokens = engine.stats().unwrap().tokens;
    assert_eq!((tokens.steps, tokens.discarded_steps), (all.len() as u64, 0));
}
