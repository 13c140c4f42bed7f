//! Every placement mode on the host device: the same tokens as on the CPU, bytes read from where the plan says, a limit that
//! holds, and changes of the limit that happen whole or not at all.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{GRANULE, host_options, small_model};
use headrace_engine::stats::PoolStats;
use headrace_engine::{DeviceChoice, Engine, EngineError, EngineOptions, GenerationOptions, PlacementMode, Result};
use headrace_ep_cpu::host_device::{DeviceProbe, Fault, FaultPoint, HostDevice, HostOptions};
use headrace_model::ModelSpec;

const CONTEXT: usize = 192;
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];
const BUDGET: u64 = 40 << 10;

fn model() -> Arc<ModelSpec> {
    small_model(11, 4, CONTEXT)
}

fn options(placement: PlacementMode) -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::HostDevice,
        placement,
        host_mapped_budget: placement.reads_in_place().then_some(BUDGET),
        max_batch: 1,
        prefill_chunk: 16,
        piece_bytes: Some(4096),
        ring_slots: 2,
        steps_in_flight: Some(2),
        threads: Some(1),
        ..EngineOptions::default()
    }
}

fn load(
    model: &Arc<ModelSpec>,
    options: EngineOptions,
    limit: u64,
    capacity: Option<u64>,
) -> (Result<Engine>, DeviceProbe) {
    let device = HostDevice::new(HostOptions { capacity, ..host_options(model) }).unwrap();
    let probe = device.probe();
    (Engine::on_device(model.clone(), None, options, Box::new(device), limit), probe)
}

fn generate(engine: &mut Engine, tokens: usize) -> Result<Vec<u32>> {
    Ok(engine.generate(&PROMPT, GenerationOptions::greedy(tokens), &mut |_| Ok(()))?.token_ids)
}

fn expected(model: &Arc<ModelSpec>, tokens: usize) -> Vec<u32> {
    let options = EngineOptions { device: DeviceChoice::Cpu, host_mapped_budget: None, ..options(PlacementMode::Auto) };
    generate(&mut Engine::from_spec(model.clone(), None, options).unwrap(), tokens).unwrap()
}

fn pool(engine: &Engine) -> PoolStats {
    engine.stats().unwrap().memory.remove(0)
}

fn check_books(engine: &Engine, probe: &DeviceProbe, limit: u64, when: &str) {
    check_ledger(engine, limit, when);
    assert!(probe.peak_total() <= limit, "{when}");
}

fn check_ledger(engine: &Engine, limit: u64, when: &str) {
    let pool = pool(engine);
    assert_eq!(pool.used, pool.holders.iter().map(|h| h.used).sum::<u64>(), "{when}");
    assert_eq!(pool.used, pool.mapped, "{when}: the ledger against the device's own count\n{pool:?}");
    assert_eq!((pool.unaccounted, pool.oversubscribed, pool.underflows), (0, 0, 0), "{when}");
    assert!(pool.limit == limit && pool.peak <= limit, "{when}");
}

/// The smallest limit of a mode, and the one from which on nothing is cold.
fn limits(model: &Arc<ModelSpec>, placement: PlacementMode) -> (u64, u64) {
    let Err(EngineError::Budget(breakdown)) = load(model, options(placement), GRANULE, None).0 else {
        panic!("a limit of one granule is refused with its breakdown")
    };
    (breakdown.minimum(), breakdown.everything)
}

#[test]
fn every_mode_gives_the_cpus_tokens_and_reads_from_where_it_says() {
    let model = model();
    let (short, long) = (expected(&model, 8), expected(&model, CONTEXT - PROMPT.len()));
    for placement in PlacementMode::ALL.into_iter().filter(|m| *m != PlacementMode::Unmanaged) {
        let (least, most) = limits(&model, placement);
        assert!(least <= most && (least == most) == (placement == PlacementMode::Resident), "{placement:?}");
        for limit in [least, (least + most) / 2, most] {
            let when = format!("{placement:?} at {limit} of {least} .. {most}");
            let (engine, probe) = load(&model, options(placement), limit, Some(limit));
            let mut engine = engine.unwrap();
            let before = engine.weight_checksums().unwrap();
            for _ in 0..2 {
                engine.reset_stats().unwrap();
                assert_eq!(generate(&mut engine, 8).unwrap(), short, "{when}");
                assert_eq!(generate(&mut engine, CONTEXT - PROMPT.len()).unwrap(), long, "{when}");
                check_books(&engine, &probe, limit, &when);
            }
            let (stats, plan) = (engine.stats().unwrap(), engine.memory().unwrap());
            let weights = &stats.weights;
            // Embedding rows come from the host in every mode.
            let embedding = model.tensor(model.embedding);
            let rows = (embedding.bytes() / embedding.rows) as u64 * stats.tokens.rows;
            let mapped = weights.host_mapped_bytes - rows;
            let cold = limit < most;
            assert_eq!(mapped > 0, cold && placement.reads_in_place(), "{when}: {mapped}");
            let streams = cold && matches!(placement, PlacementMode::Auto | PlacementMode::Stream);
            match placement {
                // Between, it depends on how far KV has grown.
                PlacementMode::Hybrid if limit != least && cold => {}
                PlacementMode::Hybrid => assert_eq!(weights.streamed_bytes > 0, cold, "{when}"),
                _ => assert_eq!(weights.streamed_bytes > 0, streams, "{when}"),
            }
            assert!(mapped <= stats.tokens.steps * BUDGET, "{when}: more than the budget in a step");
            assert_eq!(probe.copied_bytes() > 0, weights.streamed_bytes > 0, "{when}: the device's own count");
            let choice = stats.placement.unwrap();
            assert_eq!((choice.asked_for.as_str(), choice.mode == "auto"), (placement.name(), false), "{when}");
            assert_eq!(plan.placement, choice);
            for (before, now) in before.iter().zip(engine.weight_checksums().unwrap()) {
                assert!(before.is_none() || now.is_none() || *before == now, "{when}: a resident piece has changed");
            }
        }
    }
}

#[test]
fn auto_says_what_it_chose_and_why() {
    let model = model();
    let (least, most) = limits(&model, PlacementMode::Auto);
    for (limit, mode, word) in
        [(most, "resident", "fit"), ((least + most) / 2, "stream", "ring"), (least, "stream", "ring")]
    {
        let engine = load(&model, options(PlacementMode::Auto), limit, None).0.unwrap();
        let choice = engine.stats().unwrap().placement.unwrap();
        assert_eq!(choice.mode, mode, "{limit}");
        assert!(choice.reason.contains(word) && choice.reason.contains(&limit.to_string()), "{}", choice.reason);
    }
    // Too small a model for a ring.
    let wide = EngineOptions { ring_slots: 64, ..options(PlacementMode::Auto) };
    let Err(EngineError::Budget(least)) = load(&model, wide.clone(), GRANULE, None).0 else { panic!("too little") };
    let choice = load(&model, wide, least.minimum(), None).0.unwrap().stats().unwrap().placement.unwrap();
    assert!(choice.mode == "resident" && choice.reason.contains("fit"), "{choice:?}");
}

#[test]
fn a_limit_that_a_mode_cannot_keep_is_refused_with_figures_and_advice() {
    let model = model();
    let (stream, everything) = limits(&model, PlacementMode::Stream);
    for (placement, words) in [
        (PlacementMode::Resident, ["all of them", "placement = stream"]),
        (PlacementMode::ZeroCopy, ["host_mapped_budget = 40960 bytes", "placement = hybrid"]),
    ] {
        let (least, most) = limits(&model, placement);
        assert!(least > stream && most == everything, "{placement:?}");
        let Err(error) = load(&model, options(placement), least - GRANULE, None).0 else { panic!("{placement:?}") };
        let text = error.to_string();
        assert!(matches!(error, EngineError::Budget(_)), "{text}");
        assert!(words.iter().all(|w| text.contains(w)) && text.contains(&least.to_string()), "{text}");
        assert!(load(&model, options(placement), least, Some(least)).0.is_ok(), "{placement:?}");
    }
    // A larger budget asks for less.
    let wide = EngineOptions { host_mapped_budget: Some(1 << 30), ..options(PlacementMode::ZeroCopy) };
    let Err(EngineError::Budget(breakdown)) = load(&model, wide, GRANULE, None).0 else { panic!("too little") };
    assert!(breakdown.minimum() < stream, "no ring, no weights: only KV, workspace and what is fixed");
}

#[test]
fn a_host_that_pins_nothing_is_told_so() {
    let model = model();
    let host = HostOptions { pinning: false, granule: GRANULE, threads: Some(1), ..HostOptions::default() };
    let device = || Box::new(HostDevice::new(host).unwrap());
    for placement in [PlacementMode::ZeroCopy, PlacementMode::Hybrid] {
        let Err(error) = Engine::on_device(model.clone(), None, options(placement), device(), 1 << 30) else {
            panic!("{placement:?} without reads in place")
        };
        assert!(error.to_string().contains("pinning"), "{error}");
    }
    let (least, _) = limits(&model, PlacementMode::Stream);
    let options = options(PlacementMode::Stream);
    let mut engine = Engine::on_device(model.clone(), None, options, device(), least).unwrap();
    assert_eq!(generate(&mut engine, 8).unwrap(), expected(&model, 8));
    assert!(engine.stats().unwrap().device.fallbacks[0].contains("pinning"));
}

#[test]
fn headroom_stays_free() {
    let model = model();
    let (least, most) = limits(&model, PlacementMode::Stream);
    let headroom = 16 * GRANULE;
    let options = EngineOptions { headroom: Some(headroom), ..options(PlacementMode::Stream) };
    assert!(load(&model, options.clone(), least + headroom - GRANULE, None).0.is_err());
    for limit in [least + headroom, most] {
        let (engine, probe) = load(&model, options.clone(), limit, None);
        let mut engine = engine.unwrap();
        assert_eq!(generate(&mut engine, CONTEXT - PROMPT.len()).unwrap(), expected(&model, CONTEXT - PROMPT.len()));
        check_books(&engine, &probe, limit, "headroom");
        assert!(engine.stats().unwrap().weights.streamed_bytes > 0);
        assert!(pool(&engine).peak <= limit - headroom && probe.peak_total() <= limit - headroom);
        assert!(engine.memory().unwrap().needs.iter().any(|n| n.name == "headroom" && n.bytes == headroom));
    }
}

#[test]
fn unmanaged_counts_and_limits_nothing() {
    let model = model();
    let unmanaged = options(PlacementMode::Unmanaged);
    let (engine, probe) = load(&model, unmanaged.clone(), 1 << 46, None);
    let mut engine = engine.unwrap();
    let at_load = probe.total();
    assert_eq!(generate(&mut engine, CONTEXT - PROMPT.len()).unwrap(), expected(&model, CONTEXT - PROMPT.len()));
    let pool = pool(&engine);
    assert_eq!((pool.unmanaged, pool.unaccounted, pool.underflows), (probe.total(), 0, 0), "{pool:?}");
    assert!(pool.unmanaged > 0);
    // All of KV from the beginning, as without a governor; nothing has grown.
    assert_eq!((probe.peak_total(), engine.stats().unwrap().kv.growth_events), (at_load, 0));
    let stats = engine.stats().unwrap();
    assert_eq!((stats.weights.streamed_bytes, engine.memory().unwrap().streamed_bytes), (0, 0));
    assert!(matches!(engine.set_vram_limit(1 << 30), Err(EngineError::Argument { name: "vram_limit", .. })));
    let limited = EngineOptions { vram_limit: Some(1 << 30), ..unmanaged.clone() };
    assert!(matches!(load(&model, limited, 1 << 30, None).0, Err(EngineError::Argument { name: "vram_limit", .. })));
    // The device itself still has only what it has.
    assert!(matches!(load(&model, unmanaged, 1 << 46, Some(32 * GRANULE)).0, Err(EngineError::Device(_))));
}

#[test]
fn a_changed_limit_holds_in_every_mode() {
    let model = model();
    let long = expected(&model, CONTEXT - PROMPT.len());
    for placement in PlacementMode::ALL.into_iter().filter(|m| *m != PlacementMode::Unmanaged) {
        let (least, most) = limits(&model, placement);
        let (engine, probe) = load(&model, options(placement), most, None);
        let mut engine = engine.unwrap();
        for limit in [least, most, (least + most) / 2, least] {
            let when = format!("{placement:?} to {limit}");
            engine.set_vram_limit(limit).unwrap();
            engine.reset_stats().unwrap();
            assert_eq!(generate(&mut engine, CONTEXT - PROMPT.len()).unwrap(), long, "{when}");
            assert!(pool(&engine).peak <= limit && probe.total() <= limit, "{when}");
            let error = engine.set_vram_limit(least - GRANULE).unwrap_err();
            assert!(matches!(error, EngineError::Budget(_)), "{when}: {error}");
            assert_eq!(engine.memory().unwrap().limit, limit, "{when}");
        }
    }
}

#[test]
fn a_limit_changes_whole_or_not_at_all() {
    let model = model();
    let short = expected(&model, 8);
    for placement in [PlacementMode::Stream, PlacementMode::ZeroCopy, PlacementMode::Hybrid] {
        let (least, most) = limits(&model, placement);
        for (from, to) in [(most, least), (least, most)] {
            for at in [FaultPoint::Map, FaultPoint::Unmap, FaultPoint::Resize, FaultPoint::Load] {
                for nth in 1.. {
                    let when = format!("{placement:?} from {from} to {to}, {at:?} number {nth}");
                    let (engine, probe) = load(&model, options(placement), from, None);
                    let mut engine = engine.unwrap();
                    assert_eq!(generate(&mut engine, 8).unwrap(), short);
                    probe.inject(Fault { at, nth });
                    let changed = engine.set_vram_limit(to);
                    let struck = probe.fired() > 0;
                    let limit = if changed.is_ok() { to } else { from };
                    assert_eq!(engine.memory().unwrap().limit, limit, "{when}");
                    engine.reset_stats().unwrap();
                    check_ledger(&engine, limit, &when);
                    assert_eq!(generate(&mut engine, 8).unwrap(), short, "{when}: the engine afterwards");
                    engine.set_vram_limit(to).unwrap();
                    assert_eq!(generate(&mut engine, 8).unwrap(), short, "{when}: the change made again");
                    engine.reset_stats().unwrap();
                    assert!(probe.total() <= to, "{when}");
                    if !struck {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn each_engine_has_a_host_device_of_its_own() {
    let options = |limit| EngineOptions {
        device: DeviceChoice::HostDevice,
        vram_limit: Some(limit),
        max_batch: 1,
        threads: Some(1),
        ..EngineOptions::default()
    };
    let model = common::small_model(5, 2, 64);
    let limits = [60 << 20, 61 << 20, 60 << 20, 8 << 20];
    let engines = limits.map(|limit| Engine::from_spec(model.clone(), None, options(limit)).unwrap());
    for (engine, limit) in engines.iter().zip(limits) {
        let pools = engine.stats().unwrap().memory;
        assert_eq!((pools.len(), pools[0].limit), (1, limit), "nobody else's limit");
        let others: Vec<_> = pools[0].holders.iter().filter(|h| h.name.contains("engine")).collect();
        assert!(others.is_empty(), "{others:?}");
        assert!(pools[0].used > 0 && pools[0].used <= limit);
    }
}
