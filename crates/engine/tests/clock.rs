//! The device's clock over a link of known speed: what steps, copies and kernels took, which figures are broken, and
//! what the reason of a placement says of the link.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{GRANULE, small_model};
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions, PlacementMode, PolicyKind};
use headrace_ep_cpu::host_device::{HostDevice, HostOptions};

const LINK: u64 = 2_000_000;

fn engine(limit: u64, link: Option<u64>) -> Result<Engine, EngineError> {
    engine_with(limit, link, None)
}

fn engine_with(limit: u64, link: Option<u64>, policy: Option<PolicyKind>) -> Result<Engine, EngineError> {
    let options = EngineOptions {
        placement: PlacementMode::Stream,
        max_batch: 1,
        prefill_chunk: 8,
        piece_bytes: Some(4096),
        ring_slots: 2,
        threads: Some(1),
        policy,
        ..EngineOptions::default()
    };
    let host = HostOptions { threads: Some(1), granule: GRANULE, link, ..HostOptions::default() };
    let device = Box::new(HostDevice::new(host).unwrap());
    Engine::on_device(small_model(7, 4, 64), None, options, device, limit)
}

#[test]
fn streamed_steps_are_timed_against_the_link_and_resident_ones_have_no_copies() {
    let Err(EngineError::Budget(breakdown)) = engine(GRANULE, Some(LINK)) else { panic!("a granule is refused") };
    let mut streaming = engine(breakdown.minimum(), Some(LINK)).unwrap();
    let run = |engine: &mut Engine| {
        engine.generate(&[1, 2, 3], GenerationOptions::greedy(2), &mut |_| Ok(())).unwrap();
        engine.reset_stats().unwrap();
        engine.generate(&[1, 2, 3], GenerationOptions::greedy(8), &mut |_| Ok(())).unwrap();
        engine.stats().unwrap()
    };
    let stats = run(&mut streaming);
    let clock = &stats.clock;
    assert_eq!((clock.steps, clock.sampled_steps), (stats.tokens.steps, stats.tokens.steps));
    assert_eq!(clock.copied_bytes, stats.weights.streamed_bytes);
    assert!(clock.copied_bytes > 0 && clock.step_seconds > 0.0);
    // The link is what everything waits for, and no copy is faster than it.
    let link = LINK as f64;
    assert_eq!(clock.link_ceiling, Some(link));
    assert!(clock.copy_rate.unwrap() <= link && clock.link_utilisation.unwrap() > 0.1, "{clock:?}");
    assert!(clock.compute_seconds < clock.step_seconds, "{clock:?}");
    assert!(clock.copy_seconds >= clock.copied_bytes as f64 / link * 0.5, "{clock:?}");
    assert_eq!(clock.broken_instruments, Vec::<String>::new());

    let stats = run(&mut engine(breakdown.everything, Some(LINK)).unwrap());
    let clock = &stats.clock;
    assert_eq!((clock.copied_bytes, clock.copy_rate, clock.link_utilisation), (0, None, None));
    assert_eq!((clock.steps, clock.compute_seconds), (stats.tokens.steps, clock.step_seconds));
    assert!(clock.read_rate.unwrap() > 0.0);
}

#[test]
fn page_ins_of_a_policy_are_counted_and_timed_in_whole_steps() {
    let Err(EngineError::Budget(breakdown)) = engine(GRANULE, None) else { panic!("a granule is refused") };
    for policy in [PolicyKind::Lru, PolicyKind::Mru] {
        let limit = (breakdown.minimum() + breakdown.everything) / 2;
        let mut engine = engine_with(limit, None, Some(policy)).unwrap();
        let mut loaded = 0;
        for tokens in [2, 8] {
            engine.reset_stats().unwrap();
            engine.generate(&[1, 2, 3], GenerationOptions::greedy(tokens), &mut |_| Ok(())).unwrap();
            let stats = engine.stats().unwrap();
            let clock = &stats.clock;
            assert_eq!((clock.steps, clock.sampled_steps), (stats.tokens.steps, stats.tokens.steps), "{policy:?}");
            assert_eq!(clock.copied_bytes, stats.weights.streamed_bytes, "{policy:?}");
            assert!(clock.copy_seconds > 0.0 && clock.copy_rate.is_some_and(|rate| rate > 0.0), "{clock:?}");
            assert!(clock.compute_seconds > 0.0 && clock.compute_seconds < clock.step_seconds, "{clock:?}");
            assert!(clock.copy_seconds + clock.compute_seconds <= clock.step_seconds * 1.01, "{clock:?}");
            loaded += stats.weights.streamed_bytes - stats.weights.bypassed_bytes;
        }
        assert!(loaded > 0, "some page-ins stayed");
    }
}

#[test]
fn the_reason_of_a_mode_that_streams_says_what_the_link_was_measured_at() {
    let Err(EngineError::Budget(breakdown)) = engine(GRANULE, None) else { panic!("a granule is refused") };
    let reason = |limit, link| {
        let engine = engine(limit, link).unwrap();
        let (plan, stats) = (engine.memory().unwrap().placement, engine.stats().unwrap().placement.unwrap());
        assert!(!plan.reason.contains("this link"), "a plan measures nothing: {}", plan.reason);
        assert!(stats.reason.starts_with(&plan.reason), "{}", stats.reason);
        assert_eq!((plan.reason.as_str(), stats.mode.as_str()), ("asked for", "stream"));
        stats.reason[plan.reason.len()..].to_string()
    };
    let (least, most) = (breakdown.minimum(), breakdown.everything);
    for limit in [least, most] {
        assert_eq!(reason(limit, Some(55_140_000_000)), "; this link was measured at 55.1 GB/s");
        assert_eq!(reason(limit, None), "");
    }
}
