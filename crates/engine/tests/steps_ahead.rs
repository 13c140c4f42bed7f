//! Steps submitted before the tokens of the one before are known: the same tokens at every depth, under every limit, layout and
//! batch; a stop token, a growth of the KV, a limit, an interrupt and a failure in mid-flight.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::{Arc, Mutex};

use common::{GRANULE, host_options, small_model};
use headrace_engine::stats::Stats;
use headrace_engine::{Engine, EngineError, EngineOptions, GenerationOptions};
use headrace_ep_cpu::host_device::{Fault, FaultPoint, HostDevice};
use headrace_kv::{KvGeometry, KvLayout};
use headrace_model::ModelSpec;
use headrace_provider::{
    DeviceError, DeviceInfo, DeviceReport, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput, StepProgram,
    Ticket, Token,
};

const CONTEXT: usize = 192;
const DEPTHS: [usize; 3] = [1, 2, 4];
const PROMPTS: [&[u32]; 3] = [&[3, 1, 4, 1, 5], &[9, 2], &[6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]];

/// What a device was asked.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    in_flight: usize,
    most: usize,
    fed_back: usize,
    /// Operations that change memory or programs while a step was in flight.
    moved: usize,
}

/// A host device that looks at what it is asked.
struct Watched {
    device: HostDevice,
    seen: Arc<Mutex<Seen>>,
    allowed: usize,
}

impl Watched {
    fn moves(&self) {
        let mut seen = self.seen.lock().unwrap();
        seen.moved += usize::from(seen.in_flight > 0);
    }
}

impl Provider for Watched {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }
    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        self.device.attach(model, kv)
    }
    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        self.moves();
        self.device.resize(range, bytes)
    }
    fn mapped(&self, range: RangeKind) -> u64 {
        self.device.mapped(range)
    }
    fn fixed_bytes(&self) -> u64 {
        self.device.fixed_bytes()
    }
    fn report(&self) -> DeviceReport {
        self.device.report()
    }
    fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.moves();
        self.device.map(range, offset, bytes)
    }
    fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.moves();
        self.device.unmap(range, offset, bytes)
    }
    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        self.moves();
        self.device.load(segments)
    }
    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        self.moves();
        self.device.copy_within(range, from, to, bytes)
    }
    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read(range, offset, into)
    }
    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.write(range, offset, bytes)
    }
    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        self.device.record(program)
    }
    fn discard(&mut self, id: ProgramId) {
        self.moves();
        self.device.discard(id);
    }
    fn max_in_flight(&self) -> usize {
        self.allowed
    }
    fn submit(&mut self, id: ProgramId, input: &StepInput) -> Result<Ticket, DeviceError> {
        let ticket = self.device.submit(id, input)?;
        let mut seen = self.seen.lock().unwrap();
        seen.in_flight += 1;
        seen.most = seen.most.max(seen.in_flight);
        seen.fed_back += input.rows.iter().filter(|row| matches!(row.token, Token::Chosen(_))).count();
        Ok(ticket)
    }
    fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), DeviceError> {
        self.seen.lock().unwrap().in_flight -= 1;
        self.device.collect(ticket, output)
    }
}

fn model() -> Arc<ModelSpec> {
    small_model(12, 3, CONTEXT)
}

fn options(depth: usize) -> EngineOptions {
    EngineOptions {
        max_batch: 3,
        prefill_chunk: 8,
        steps_in_flight: Some(depth),
        piece_bytes: Some(4096),
        ring_slots: 2,
        threads: Some(1),
        ..EngineOptions::default()
    }
}

type Made = (headrace_engine::Result<Engine>, Arc<Mutex<Seen>>, headrace_ep_cpu::host_device::DeviceProbe);

fn make(model: &Arc<ModelSpec>, options: EngineOptions, limit: u64, allowed: usize) -> Made {
    let device = HostDevice::new(host_options(model)).unwrap();
    let (seen, probe) = (Arc::new(Mutex::new(Seen::default())), device.probe());
    let watched = Box::new(Watched { device, seen: seen.clone(), allowed });
    (Engine::on_device(model.clone(), None, options, watched, limit), seen, probe)
}

fn engine(model: &Arc<ModelSpec>, depth: usize, limit: u64) -> (Engine, Arc<Mutex<Seen>>) {
    let (engine, seen, _) = make(model, options(depth), limit, 4);
    (engine.unwrap(), seen)
}

/// Limits at which everything is resident whatever happens, at which KV takes pieces from the weights, and at which as much as
/// possible is streamed.
fn limits(model: &Arc<ModelSpec>) -> [u64; 3] {
    let Err(EngineError::Budget(breakdown)) = make(model, options(1), GRANULE, 4).0 else {
        panic!("a limit of one granule is refused with its breakdown")
    };
    let (most, least) = (breakdown.everything, breakdown.minimum());
    [most, least + (most - least) / 2, least]
}

fn generate(engine: &mut Engine, prompt: &[u32], options: &GenerationOptions) -> Vec<u32> {
    engine.generate(prompt, options.clone(), &mut |_| Ok(())).unwrap().token_ids
}

fn greedy(engine: &mut Engine, tokens: usize) -> Vec<u32> {
    generate(engine, PROMPTS[0], &GenerationOptions::greedy(tokens))
}

/// A token of `tokens` and where it comes first: as late as possible, but not the last one.
fn stop(tokens: &[u32]) -> (u32, usize) {
    let firsts = tokens.iter().enumerate().filter(|(i, t)| !tokens[..*i].contains(t));
    firsts.map(|(i, &t)| (t, i)).rfind(|&(_, i)| i + 5 < tokens.len()).unwrap()
}

fn stats(engine: &Engine) -> Stats {
    engine.stats().unwrap()
}

#[test]
fn tokens_and_bytes_are_the_same_at_every_depth() {
    let model = model();
    for layout in [KvLayout::HeadMajor, KvLayout::SeqMajor] {
        for (n, limit) in limits(&model).into_iter().enumerate() {
            let mut seen_first = None;
            for depth in DEPTHS {
                let (engine, seen, _) = make(&model, EngineOptions { kv_layout: layout, ..options(depth) }, limit, 4);
                let mut engine = engine.unwrap();
                let long = greedy(&mut engine, CONTEXT - PROMPTS[0].len());
                let prompts = PROMPTS.map(<[u32]>::to_vec);
                let batch = engine.decode_greedy_batch(&prompts, 24, &[], &mut |_| Ok(())).unwrap();
                let batch: Vec<_> = batch.into_iter().map(|g| (g.token_ids, g.finish, g.decode_tokens)).collect();
                let s = stats(&engine);
                let case = format!("{layout:?}, limit {n}, depth {depth}");
                assert_eq!((s.tokens.discarded_steps, s.tokens.discarded_rows), (0, 0), "{case}");
                assert_eq!(s.weights.streamed_bytes > 0, n > 0, "{case}");
                assert!(s.kv.growth_events > 0, "{case}");
                let taken = s.graph.epochs.iter().any(|(reason, _)| reason == "kv-growth");
                assert_eq!(taken, n > 0, "{case}: {:?}", s.graph.epochs);
                let seen = *seen.lock().unwrap();
                assert_eq!((seen.most, seen.in_flight, seen.moved), (depth, 0, 0), "{case}");
                assert_eq!(seen.fed_back > 150, depth > 1, "{case}: {seen:?}");
                assert_eq!(s.device.steps_in_flight, depth as u64);
                let counted = (s.tokens, s.weights.streamed_bytes, s.weights.host_mapped_bytes, s.graph.replays);
                let this = (long, batch, counted);
                assert_eq!(*seen_first.get_or_insert(this.clone()), this, "{case}");
            }
        }
    }
}

#[test]
fn what_follows_a_stop_token_is_dropped_and_counted() {
    let model = model();
    let [resident, _, smallest] = limits(&model);
    let all = greedy(&mut engine(&model, 1, resident).0, 60);
    let (token, at) = stop(&all);
    let options = GenerationOptions { stop_tokens: vec![token], ..GenerationOptions::greedy(60) };
    for limit in [resident, smallest] {
        let mut bytes = None;
        for depth in DEPTHS {
            let (mut engine, seen) = engine(&model, depth, limit);
            // The ring is filled; what is counted from here on are steps alone.
            greedy(&mut engine, 1);
            engine.reset_stats().unwrap();
            for round in 1..=3u64 {
                assert_eq!(generate(&mut engine, PROMPTS[0], &options), all[..at], "depth {depth}");
                let s = stats(&engine);
                assert_eq!(s.tokens.discarded_steps, round * (depth as u64 - 1));
                assert_eq!(s.tokens.discarded_rows, s.tokens.discarded_steps);
                assert_eq!(s.tokens.steps, round * (at as u64 + 1) + s.tokens.discarded_steps);
                assert_eq!(s.graph.replays, s.tokens.steps);
                let step = s.weights.streamed_bytes / s.tokens.steps;
                assert_eq!((s.weights.streamed_bytes, *bytes.get_or_insert(step)), (step * s.tokens.steps, step));
                assert_eq!(s.kv.sequences, 0);
            }
            assert_eq!(greedy(&mut engine, 60), all, "depth {depth}: the engine afterwards");
            assert_eq!(seen.lock().unwrap().in_flight, 0);
        }
        assert_eq!(bytes.unwrap() > 0, limit == smallest);
    }
}

#[test]
fn one_of_a_batch_stops_and_the_others_go_on() {
    let model = model();
    let [resident, _, smallest] = limits(&model);
    let prompts = PROMPTS.map(<[u32]>::to_vec);
    for limit in [resident, smallest] {
        let (mut plain, _) = engine(&model, 1, limit);
        let all = plain.decode_greedy_batch(&prompts, 40, &[], &mut |_| Ok(())).unwrap();
        let (token, _) = stop(&all[1].token_ids);
        let ends = |tokens: &[u32]| tokens.iter().position(|&t| t == token).unwrap_or(tokens.len());
        let expected: Vec<Vec<u32>> = all.iter().map(|g| g.token_ids[..ends(&g.token_ids)].to_vec()).collect();
        assert!(expected.iter().any(|t| t.len() == 40) && expected.iter().any(|t| t.len() < 35));
        for depth in DEPTHS {
            let (mut engine, _) = engine(&model, depth, limit);
            let got = engine.decode_greedy_batch(&prompts, 40, &[token], &mut |_| Ok(())).unwrap();
            let got: Vec<Vec<u32>> = got.into_iter().map(|g| g.token_ids).collect();
            assert_eq!(got, expected, "depth {depth}");
            let s = stats(&engine);
            assert_eq!(s.tokens.discarded_rows > 0, depth > 1, "depth {depth}");
            assert_eq!(s.tokens.discarded_steps, 0, "the others went on");
        }
    }
}

#[test]
fn tokens_come_one_by_one_and_an_interrupt_leaves_a_sound_engine() {
    let model = model();
    let [resident, _, smallest] = limits(&model);
    let expected = greedy(&mut engine(&model, 1, resident).0, 50);
    for depth in DEPTHS {
        let (mut engine, seen) = engine(&model, depth, smallest);
        let mut run = engine.start(PROMPTS[0], GenerationOptions::greedy(50)).unwrap();
        for n in 1..=50 {
            engine.step(&mut [&mut run]).unwrap();
            assert_eq!(run.new_tokens(), &expected[..n], "depth {depth}");
        }
        engine.finish(&mut run);
        let mut calls = 0;
        let interrupted = engine.generate(PROMPTS[0], GenerationOptions::greedy(50), &mut |progress| {
            assert_eq!(progress.new_tokens, calls);
            calls += 1;
            if calls == 17 { Err(EngineError::Interrupted) } else { Ok(()) }
        });
        assert!(matches!(interrupted, Err(EngineError::Interrupted)));
        let s = stats(&engine);
        assert_eq!((s.kv.sequences, s.tokens.discarded_steps), (0, depth as u64 - 1));
        assert_eq!(greedy(&mut engine, 50), expected, "depth {depth}");
        assert_eq!(seen.lock().unwrap().in_flight, 0);
    }
}

#[test]
fn a_limit_and_logits_in_mid_flight_change_no_token() {
    let model = model();
    let [resident, middle, smallest] = limits(&model);
    let expected = greedy(&mut engine(&model, 1, resident).0, 40);
    let (mut engine, seen) = engine(&model, 4, resident);
    let mut run = engine.start(PROMPTS[0], GenerationOptions::greedy(40)).unwrap();
    for n in 0..40 {
        match n {
            10 => engine.set_vram_limit(smallest).unwrap(),
            20 => drop(engine.logits(&[vec![1, 2, 3]], true, &mut |_| Ok(())).unwrap()),
            30 => engine.set_vram_limit(middle).unwrap(),
            _ => {}
        }
        engine.step(&mut [&mut run]).unwrap();
    }
    assert_eq!(engine.finish(&mut run).token_ids, expected);
    let s = stats(&engine);
    assert_eq!(s.tokens.discarded_steps, 9);
    assert!(s.weights.streamed_bytes > 0);
    let seen = *seen.lock().unwrap();
    assert_eq!((seen.most, seen.moved), (4, 0));
}

#[test]
fn generations_join_leave_and_take_turns() {
    let model = model();
    let [.., smallest] = limits(&model);
    let (mut plain, _) = engine(&model, 1, smallest);
    let expected = PROMPTS.map(|p| generate(&mut plain, p, &GenerationOptions::greedy(40)));
    let (mut engine, _) = engine(&model, 4, smallest);
    let mut runs: Vec<_> = PROMPTS.iter().map(|p| engine.start(p, GenerationOptions::greedy(40)).unwrap()).collect();
    let [a, b, c] = &mut runs[..] else { panic!() };
    for _ in 0..9 {
        engine.step(&mut [a]).unwrap();
    }
    for _ in 0..9 {
        engine.step(&mut [c, a]).unwrap();
    }
    assert_eq!(stats(&engine).tokens.discarded_rows, 0, "joining costs nothing");
    engine.finish(a);
    assert_eq!(stats(&engine).tokens.discarded_rows, 3, "what was in flight of the one that left");
    for n in 0..30 {
        // Two callers take turns, and the steps of one drop nothing of the other's for ever.
        engine.step(&mut [if n % 2 == 0 { b } else { c }]).unwrap();
    }
    let dropped = stats(&engine).tokens.discarded_rows;
    assert!(dropped <= 6, "{dropped}");
    while b.finish_reason().is_none() || c.finish_reason().is_none() {
        engine.step(&mut [b, c]).unwrap();
    }
    assert_eq!(b.new_tokens(), expected[1]);
    assert_eq!(c.new_tokens(), expected[2]);
    assert_eq!(a.new_tokens(), &expected[0][..a.new_tokens().len()]);
}

#[test]
fn draws_are_the_same_and_nothing_follows_them() {
    let model = model();
    let [resident, ..] = limits(&model);
    let options = GenerationOptions { temperature: 0.8, seed: 5, ..GenerationOptions::greedy(30) };
    let drawn = DEPTHS.map(|depth| {
        let (mut engine, seen) = engine(&model, depth, resident);
        let tokens = generate(&mut engine, PROMPTS[2], &options);
        let seen = *seen.lock().unwrap();
        // The chunks of the prompt follow one another.
        assert_eq!((seen.most, seen.fed_back), (depth.min(3), 0));
        tokens
    });
    assert_eq!(drawn[0], drawn[1]);
    assert_eq!(drawn[0], drawn[2]);
}

#[test]
fn a_failure_of_a_step_ahead_is_said_after_the_tokens_before_it() {
    let model = model();
    let [.., smallest] = limits(&model);
    let given = DEPTHS.map(|depth| {
        let (engine, seen, probe) = make(&model, options(depth), smallest, 4);
        let mut engine = engine.unwrap();
        let expected = greedy(&mut engine, 30);
        probe.inject(Fault { at: FaultPoint::Run, nth: 12 });
        let mut run = engine.start(PROMPTS[0], GenerationOptions::greedy(30)).unwrap();
        let error = loop {
            if let Err(error) = engine.step(&mut [&mut run]) {
                break error;
            }
        };
        assert!(matches!(error, EngineError::Device(_)), "{error}");
        let before = run.new_tokens().len();
        // The run has what it had, and can go on.
        while run.finish_reason().is_none() {
            engine.step(&mut [&mut run]).unwrap();
        }
        assert_eq!(engine.finish(&mut run).token_ids, expected);
        // A failure that nobody waits for is nobody's.
        let (token, at) = stop(&expected);
        probe.inject(Fault { at: FaultPoint::Run, nth: at as u64 + 2 });
        let options = GenerationOptions { stop_tokens: vec![token], ..GenerationOptions::greedy(30) };
        assert_eq!(generate(&mut engine, PROMPTS[0], &options), expected[..at]);
        assert_eq!(probe.fired(), if depth > 1 { 2 } else { 1 });
        if depth == 1 {
            assert!(engine.generate(PROMPTS[0], GenerationOptions::greedy(30), &mut |_| Ok(())).is_err());
        }
        seen.lock().unwrap().most = 0;
        assert_eq!(greedy(&mut engine, 30), expected);
        assert_eq!(seen.lock().unwrap().most, depth, "and keeps no later step back");
        before
    });
    assert_eq!(given, [given[0]; 3]);
}

#[test]
fn a_device_that_allows_fewer_is_not_asked_for_more() {
    let model = model();
    let [resident, ..] = limits(&model);
    let (engine, seen, _) = make(&model, options(4), resident, 2);
    let mut engine = engine.unwrap();
    greedy(&mut engine, 20);
    assert_eq!((seen.lock().unwrap().most, stats(&engine).device.steps_in_flight), (2, 2));
    for wrong in [0, 9] {
        assert!(matches!(make(&model, options(wrong), resident, 2).0, Err(EngineError::Argument { .. }) | Ok(_)));
        assert!(options(wrong).check().is_err());
    }
}
