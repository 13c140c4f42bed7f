//! What the plan says about batches is what a device then does: streamed bytes a token, KV bytes, hit rate, the largest batch.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{GRANULE, host, host_options, limits, options, tiny_model};
use headrace_engine::serve::{Batcher, Event};
use headrace_engine::stats::Stats;
use headrace_engine::{Engine, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_numerics::format::Format;
use headrace_testing::{ModelShape, random_model};

const CONTEXT: usize = 192;
const BATCH: usize = 16;
/// Tokens that each sequence decodes, all of them in the last page of its prompt.
const NEW: usize = 9;

fn wide() -> EngineOptions {
    EngineOptions { steps_in_flight: Some(1), ..options(BATCH, BATCH * CONTEXT) }
}

/// The counters of decode steps of `sequences` sequences of `length` positions.
fn decode(engine: &mut Engine, sequences: usize, length: usize) -> Stats {
    let mut batcher = Batcher::new();
    for i in 0..sequences {
        let prompt = (0..length - NEW).map(|at| ((at * 7 + i) % 61) as u32).collect();
        batcher.submit(engine, prompt, GenerationOptions::greedy(NEW)).unwrap();
    }
    // The first step takes all prompts whole.
    let first = batcher.step(engine);
    assert_eq!(first.iter().filter(|e| matches!(e, Event::Token { .. })).count(), sequences);
    engine.reset_stats().unwrap();
    let mut stats = Stats::default();
    while !batcher.is_idle() {
        batcher.step(engine);
        if batcher.requests().1 == sequences {
            stats = engine.stats().unwrap();
        }
    }
    assert_eq!(stats.tokens.emitted as usize, sequences * (NEW - 2));
    stats
}

fn close(measured: f64, predicted: f64, what: &str) {
    let bound = 0.02 * predicted.max(1.0);
    assert!((measured - predicted).abs() <= bound, "{what}: {measured} measured, {predicted} predicted");
}

#[test]
fn streamed_bytes_a_token_fall_as_planned_until_kv_takes_weights() {
    // Weights of some hundred times what a short sequence's KV takes.
    let shape = ModelShape {
        hidden: 256,
        ffn: 2048,
        kv_heads: 1,
        layers: 3,
        formats: vec![Format::Q8_0, Format::Q4_0],
        max_context: CONTEXT,
        ..ModelShape::default()
    };
    let model = Arc::new(random_model(31, &shape));
    let (minimum, _) = limits(&model, &wide());
    let (mut shared, mut taken) = (0, 0);
    for part in [0, 1, 2] {
        let limit = minimum + model.weight_bytes() as u64 * part / 4;
        for length in [28, 96, CONTEXT] {
            let trade = host(&model, wide(), limit).0.trade(Some(length)).unwrap();
            assert_eq!((trade.length, trade.rows[0].sequences), (length, 1));
            let last = trade.rows.last().unwrap();
            assert_eq!(last.sequences, trade.largest);
            for row in &trade.rows {
                let when = format!("limit {limit}, {} sequences of {length}", row.sequences);
                let stats = decode(&mut host(&model, wide(), limit).0, row.sequences, length);
                let per_token = stats.weights.streamed_bytes_per_token.unwrap();
                close(per_token, row.streamed_bytes_per_token, &format!("{when}: streamed bytes a token"));
                close(stats.weights.byte_hit_rate.unwrap(), row.byte_hit_rate, &format!("{when}: byte hit rate"));
                let kv = (stats.kv.bucket_pages * stats.kv.page_bytes).next_multiple_of(common::GRANULE);
                assert_eq!(kv, row.kv_bytes, "{when}");
                let as_shared = trade.rows[0].streamed_bytes as f64 / row.sequences as f64;
                if row.sequences <= trade.before_kv_takes_weights {
                    close(per_token, as_shared, &format!("{when}: 1/N"));
                    shared += usize::from(row.sequences > 1 && per_token > 0.0);
                } else {
                    assert!(per_token > as_shared * 1.01, "{when}");
                    taken += 1;
                }
            }
        }
    }
    assert!(shared > 3 && taken > 3, "{shared} rows before KV takes weights, {taken} after");
}

#[test]
fn as_many_sequences_as_planned_are_in_work_at_once() {
    let model = tiny_model(32, 6, CONTEXT);
    let (minimum, everything) = limits(&model, &wide());
    let mut below = 0;
    for part in [0, 1, 4, 16] {
        let limit = minimum + (everything - minimum) * part / 16;
        let (mut engine, _) = host(&model, wide(), limit);
        for length in [33, 100, CONTEXT] {
            let trade = engine.trade(Some(length)).unwrap();
            let mut batcher = Batcher::new();
            for _ in 0..BATCH + 5 {
                batcher.submit(&engine, vec![1; length - 3], GenerationOptions::greedy(3)).unwrap();
            }
            let mut most = 0;
            while !batcher.is_idle() {
                let events = batcher.step(&mut engine);
                let ended = events.iter().filter(|e| matches!(e, Event::Ended { .. })).count();
                most = most.max(batcher.requests().1 + ended);
            }
            assert_eq!(most, trade.largest, "limit {limit}, length {length}");
            assert!(trade.largest_by_memory >= trade.largest);
            below += usize::from(trade.largest < BATCH);
            if length == CONTEXT {
                assert_eq!(engine.stats().unwrap().kv.largest_batch as usize, trade.largest);
            }
        }
    }
    assert!(below > 2);
}

#[test]
fn what_the_process_takes_once_is_no_room_for_weights_or_kv() {
    let model = tiny_model(33, 6, CONTEXT);
    let (minimum, everything) = limits(&model, &wide());
    let trade = |context: u64| {
        let host = HostOptions { shared_bytes: context, ..host_options(&model) };
        let device = Box::new(HostDevice::new(host).unwrap());
        let limit = (minimum + everything) / 2 + context;
        Engine::on_device(model.clone(), None, wide(), device, limit).unwrap().trade(None).unwrap()
    };
    let without = trade(0);
    assert!(without.rows.iter().any(|row| row.resident_bytes > 0 && row.streamed_bytes > 0), "{without:?}");
    assert_eq!(trade(64 * GRANULE), without);
}
