//! What `auto` chooses on links of known speed, that it says why, and that no choice changes a token or a byte of the books.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{check_books, cpu, host_options, limits, options, small_model};
use headrace_engine::mode::PlacementChoice;
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions, PlacementMode, PolicyKind, Result};
use headrace_ep_cpu::host_device::{DeviceProbe, Fault, FaultPoint, HostDevice, HostOptions};
use headrace_model::ModelSpec;

const CONTEXT: usize = 192;

/// A link that copies 2 MB/s: slower than any host reads its memory.
fn slow() -> HostOptions {
    HostOptions { link: Some(2_000_000), ..host_options(&model()) }
}

/// The same, and reads in place are slower still.
fn slower_in_place() -> HostOptions {
    HostOptions { in_place: Some(1_000_000), ..slow() }
}

fn model() -> Arc<ModelSpec> {
    small_model(29, 4, CONTEXT)
}

fn load(model: &Arc<ModelSpec>, host: HostOptions, options: EngineOptions, limit: u64) -> (Engine, DeviceProbe) {
    let (engine, probe) = try_load(model, host, options, limit, None);
    (engine.unwrap(), probe)
}

fn try_load(
    model: &Arc<ModelSpec>,
    host: HostOptions,
    options: EngineOptions,
    limit: u64,
    fault: Option<Fault>,
) -> (Result<Engine>, DeviceProbe) {
    let device = HostDevice::new(HostOptions { capacity: Some(limit), ..host }).unwrap();
    let probe = device.probe();
    fault.into_iter().for_each(|fault| probe.inject(fault));
    (Engine::on_device(model.clone(), None, options, Box::new(device), limit), probe)
}

fn tokens(engine: &mut Engine) -> Vec<u32> {
    engine.generate(&[3, 1, 4], GenerationOptions::greedy(12), &mut |_| Ok(())).unwrap().token_ids
}

fn choice(engine: &Engine) -> PlacementChoice {
    let (planned, said) = (engine.memory().unwrap().placement, engine.stats().unwrap().placement.unwrap());
    assert_eq!((planned.asked_for.as_str(), &planned), ("auto", &said));
    said
}

#[test]
fn cold_weights_are_read_in_place_where_that_is_measured_to_be_faster() {
    let model = model();
    let (least, most) = limits(&model, &options(1, 16));
    let expected = tokens(&mut cpu(&model, options(1, 16)));
    for (host, mode) in [(slow(), "hybrid"), (slower_in_place(), "stream")] {
        for limit in [least, least + (most - least) / 4] {
            let when = format!("{mode} at {limit}");
            let (mut engine, probe) = load(&model, host, options(1, 16), limit);
            let choice = choice(&engine);
            assert_eq!(choice.mode, mode, "{when}: {}", choice.reason);
            for word in ["copies were measured at 0.0 GB/s", "reads in place at", &limit.to_string()] {
                assert!(choice.reason.contains(word), "{when}: {}", choice.reason);
            }
            assert_eq!(choice.host_mapped_budget > 0, mode == "hybrid", "{when}");
            engine.reset_stats().unwrap();
            assert_eq!((tokens(&mut engine), tokens(&mut engine)), (expected.clone(), expected.clone()), "{when}");
            let weights = engine.stats().unwrap().weights;
            // Of embedding rows alone a step reads far less in place.
            let in_place = weights.host_mapped_bytes > weights.resident_bytes_read / 10;
            assert_eq!(
                (weights.streamed_bytes > 0, in_place),
                (mode == "stream", mode == "hybrid"),
                "{when}: {weights:?}"
            );
            check_books(&engine, &probe, limit, &when);
            // What everything cold is read in place beside needs no ring.
            let staging = engine.stats().unwrap().memory[0].holders.iter().find(|h| h.name == "staging").unwrap().used;
            assert_eq!(staging > 0, mode == "stream", "{when}");
        }
    }
}

#[test]
fn a_budget_of_reads_in_place_is_kept_and_0_forbids_them() {
    let model = model();
    let (least, _) = limits(&model, &options(1, 16));
    let expected = tokens(&mut cpu(&model, options(1, 16)));
    for (budget, mode) in [(40 << 10, "hybrid"), (0, "stream")] {
        let budgeted = EngineOptions { host_mapped_budget: Some(budget), ..options(1, 16) };
        let (mut engine, probe) = load(&model, slow(), budgeted, least);
        let choice = choice(&engine);
        assert_eq!((choice.mode.as_str(), choice.host_mapped_budget), (mode, budget), "{}", choice.reason);
        assert_eq!(tokens(&mut engine), expected);
        let plan = engine.memory().unwrap();
        assert!(plan.streamed_bytes > 0 && plan.host_mapped_bytes <= budget, "{budget}");
        assert_eq!(plan.host_mapped_bytes > 0, budget > 0);
        check_books(&engine, &probe, least, mode);
    }
}

#[test]
fn nothing_is_measured_where_nothing_can_be_chosen() {
    let model = model();
    let (least, most) = limits(&model, &options(1, 16));
    let policy = EngineOptions { policy: Some(PolicyKind::Lru), ..options(1, 16) };
    for (host, options, limit, mode, word) in [
        (slow(), options(1, 16), most, "resident", "fit"),
        (HostOptions { pinning: false, ..slow() }, options(1, 16), least, "stream", "nothing may be read in place"),
        (HostOptions { link: None, ..slow() }, options(1, 16), least, "stream", "not known"),
        (slow(), policy, least, "stream", "nothing may be read in place"),
    ] {
        let (engine, probe) = load(&model, host, options, limit);
        let choice = choice(&engine);
        assert_eq!((choice.mode.as_str(), choice.host_mapped_budget), (mode, 0), "{}", choice.reason);
        assert!(choice.reason.contains(word) && !choice.reason.contains("GB/s"), "{}", choice.reason);
        assert!(probe.peak_total() <= limit, "{mode}");
    }
}

#[test]
fn a_budget_where_nothing_can_be_read_in_place_is_refused() {
    let budget = EngineOptions { host_mapped_budget: Some(1 << 20), ..options(1, 16) };
    assert!(budget.check().is_ok());
    for (options, word) in [
        (EngineOptions { policy: Some(PolicyKind::Lru), ..budget.clone() }, "policy"),
        (EngineOptions { placement: PlacementMode::Stream, ..budget.clone() }, "placement"),
    ] {
        let Err(EngineError::Argument { name: "host_mapped_budget", what, .. }) = options.check() else {
            panic!("{word}: accepted")
        };
        assert!(what.contains(word), "{what}");
    }
}

#[test]
fn a_limit_that_is_lowered_below_what_fitted_has_the_link_measured_then() {
    let model = model();
    let (least, most) = limits(&model, &options(1, 16));
    let expected = tokens(&mut cpu(&model, options(1, 16)));
    for (host, mode) in [(slow(), "hybrid"), (slower_in_place(), "stream")] {
        let (mut engine, probe) = load(&model, host, options(1, 16), most);
        for (limit, mode) in [(least, mode), (most, "resident"), ((least + most) / 2, mode)] {
            assert_eq!(tokens(&mut engine), expected, "{limit}");
            engine.set_vram_limit(limit).unwrap();
            let choice = choice(&engine);
            assert_eq!(choice.mode, mode, "{limit}: {}", choice.reason);
            assert_eq!(choice.reason.contains("GB/s"), mode != "resident", "{limit}: {}", choice.reason);
            engine.reset_stats().unwrap();
            assert_eq!(tokens(&mut engine), expected, "{limit}");
            let copied = engine.stats().unwrap().weights.streamed_bytes;
            assert_eq!(copied > 0, mode == "stream" && limit == least, "{limit}");
            check_books(&engine, &probe, most, mode);
            assert!(engine.stats().unwrap().memory[0].used <= limit);
        }
    }
}

#[test]
fn a_refusal_on_the_way_to_a_choice_is_typed_and_changes_nothing() {
    let model = model();
    let (least, most) = limits(&model, &options(1, 16));
    let expected = tokens(&mut cpu(&model, options(1, 16)));
    let mut refused = 0;
    for at in [FaultPoint::Resize, FaultPoint::Map, FaultPoint::Load] {
        for nth in 1.. {
            let (loaded, probe) = try_load(&model, slow(), options(1, 16), least, Some(Fault { at, nth }));
            if probe.fired() == 0 {
                break;
            }
            refused += 1;
            assert!(matches!(loaded, Err(EngineError::Device(_))), "{at:?} {nth}");
        }
    }
    assert!(refused >= 3, "{refused}: the workspace, the ring to measure with, and pieces");
    for at in [FaultPoint::Resize, FaultPoint::Map, FaultPoint::Load, FaultPoint::Unmap] {
        for nth in 1.. {
            let (mut engine, probe) = load(&model, slow(), options(1, 16), most);
            assert_eq!(tokens(&mut engine), expected);
            probe.inject(Fault { at, nth });
            let changed = engine.set_vram_limit(least);
            let when = format!("{at:?} {nth}: {changed:?}");
            // The first change stands or falls as a whole; a failure to take up what was measured leaves it standing.
            let in_force = if changed.is_ok() { least } else { most };
            assert_eq!(engine.memory().unwrap().limit, in_force, "{when}");
            assert_eq!(tokens(&mut engine), expected, "{when}");
            assert!(engine.stats().unwrap().memory[0].used <= in_force, "{when}");
            if probe.fired() == 0 {
                break;
            }
        }
    }
}
