//! Drafts change how many steps a generation takes, and nothing else: tokens, logits and the reason for the end are those of
//! plain decode.

#![allow(clippy::unwrap_used)]

mod common;

use common::{alone, cpu, host, limits, options, tiny_model};
use headrace_engine::{Engine, FinishReason, Generation, GenerationOptions};
use headrace_kv::KvGeometry;
use headrace_testing::bits;

const CONTEXT: usize = 160;

fn with_drafts(engine: &mut Engine, prompt: &[u32], o: &GenerationOptions, speculation: usize) -> Generation {
    let o = GenerationOptions { speculation, keep_logits: true, ..o.clone() };
    engine.generate(prompt, o, &mut |_| Ok(())).unwrap()
}

fn assert_same(plain: &Generation, drafted: &Generation, when: &str) {
    assert_eq!(plain.token_ids, drafted.token_ids, "{when}");
    assert_eq!(plain.finish, drafted.finish, "{when}");
    assert_eq!(bits(&plain.logits), bits(&drafted.logits), "{when}");
}

/// A prompt that says the same thing again and again.
fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i % 5) * 7 + 1).collect()
}

#[test]
fn tokens_logits_and_ends_are_those_of_plain_decode() {
    let (mut accepted, mut rejected, mut saved) = (0, 0, 0);
    for seed in 0..6 {
        let model = tiny_model(seed, 2, CONTEXT);
        let mut engine = cpu(&model, options(4, 32));
        for length in [1, 3, 20, 47] {
            let prompt = prompt(length);
            for new in [Some(1), Some(2), Some(3), Some(40), None] {
                let o = GenerationOptions { max_new_tokens: new, ..GenerationOptions::default() };
                let plain = alone(&mut engine, &prompt, &o);
                for speculation in [1, 3, 8] {
                    engine.reset_stats().unwrap();
                    let drafted = with_drafts(&mut engine, &prompt, &o, speculation);
                    assert_same(&plain, &drafted, &format!("seed {seed}, {length} + {new:?}, drafts of {speculation}"));
                    let stats = engine.stats().unwrap();
                    let t = &stats.tokens;
                    assert_eq!((t.drafted, t.accepted), (drafted.drafted as u64, drafted.accepted as u64));
                    assert_eq!(t.emitted, plain.token_ids.len() as u64);
                    // Every accepted token saved a step.
                    let prefill = (length as u64).div_ceil(32);
                    assert_eq!(t.steps + t.accepted, prefill + t.emitted - 1);
                    accepted += drafted.accepted;
                    rejected += drafted.drafted - drafted.accepted;
                    saved += t.accepted;
                }
            }
        }
        assert_eq!(engine.stats().unwrap().kv.pages, 0);
    }
    assert!(accepted > 500 && rejected > 500 && saved > 0, "{accepted} accepted, {rejected} rejected");
}

#[test]
fn a_stop_token_inside_an_accepted_draft_ends_the_generation_there() {
    let mut inside = 0;
    for seed in 0..20 {
        let model = tiny_model(seed, 2, CONTEXT);
        let mut engine = cpu(&model, options(4, 32));
        // A prompt that holds what the model goes on to say, the stop token with it: only then is that one ever drafted.
        let mut prompt = prompt(11);
        prompt.extend(alone(&mut engine, &prompt, &GenerationOptions::greedy(40)).token_ids);
        let free = alone(&mut engine, &prompt, &GenerationOptions::greedy(60));
        for stop in (0..61).filter(|t| free.token_ids.contains(t)) {
            let o = GenerationOptions { stop_tokens: vec![stop], ..GenerationOptions::greedy(60) };
            let plain = alone(&mut engine, &prompt, &o);
            assert_eq!(plain.finish, FinishReason::Stop);
            let drafted = with_drafts(&mut engine, &prompt, &o, 8);
            assert_same(&plain, &drafted, &format!("seed {seed}, stop {stop}"));
            inside += usize::from(prompt.contains(&stop) && drafted.accepted > 0);
        }
    }
    assert!(inside > 10, "{inside}");
}

#[test]
fn drafts_cross_page_boundaries_and_reach_the_last_position() {
    let page = KvGeometry::DEFAULT_PAGE_TOKENS;
    let model = tiny_model(3, 2, CONTEXT);
    let o = options(2, 16);
    let (minimum, _) = limits(&model, &o);
    let (mut engine, _) = host(&model, o, minimum);
    for start in [page - 3, page - 2, page - 1, page, page + 1, CONTEXT - 9] {
        for new in [1, 2, 8, CONTEXT - start] {
            let prompt = prompt(start);
            let o = GenerationOptions::greedy(new.min(CONTEXT - start));
            let plain = alone(&mut engine, &prompt, &o);
            for speculation in [1, 2, 7, 40] {
                let drafted = with_drafts(&mut engine, &prompt, &o, speculation);
                assert_same(&plain, &drafted, &format!("{start} + {new}, drafts of {speculation}"));
            }
        }
    }
    assert!(engine.stats().unwrap().weights.streamed_bytes > 0);
    assert!(engine.stats().unwrap().tokens.accepted > 100);
}

#[test]
fn drafts_and_draws_do_not_go_together() {
    let model = tiny_model(1, 1, 64);
    let mut engine = cpu(&model, options(1, 8));
    let drawn = GenerationOptions { temperature: 1.0, speculation: 2, ..GenerationOptions::greedy(4) };
    assert!(engine.start(&[1], drawn).unwrap_err().to_string().contains("speculation"));
    let long = GenerationOptions { speculation: 1000, ..GenerationOptions::greedy(4) };
    assert!(engine.start(&[1], long).is_err());
}
