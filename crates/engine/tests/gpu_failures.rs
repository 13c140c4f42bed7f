//! What a card's driver may refuse, and what becomes of it: `cargo test --release -p headrace-engine --features cuda --test
//! gpu_failures [-- CARD]`.
//!
//! Registration, pinning and memory are refused at every point of a load and of a growth, as a driver out of resources or
//! another process would have it. Each time there is a typed error or a reported fallback; afterwards the same engine gives
//! the CPU's tokens, and its books are right. Without a card every test is ignored, and counted so. The binary can be
//! carried to another machine.

use std::process::ExitCode;
use std::sync::Arc;

use headrace_engine::stats::PoolStats;
use headrace_engine::{DeviceChoice, Engine, EngineError, EngineOptions, GenerationOptions, PlacementMode};
use headrace_ep_cuda::CudaProvider;
use headrace_ep_cuda::faults::{FaultPoint, Faults};
use headrace_model::ModelSpec;
use headrace_numerics::format::Format;
use headrace_testing::{ModelShape, random_model};
use libtest_mimic::{Arguments, Failed, Trial};

const CONTEXT: usize = 1024;
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];
const LONG: usize = 1000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn options(placement: PlacementMode) -> EngineOptions {
    EngineOptions {
        placement,
        host_mapped_budget: placement.reads_in_place().then_some(1 << 30),
        max_batch: 1,
        prefill_chunk: 16,
        piece_bytes: Some(1 << 20),
        ring_slots: 2,
        steps_in_flight: Some(2),
        ..EngineOptions::default()
    }
}

fn generate(engine: &mut Engine, tokens: usize) -> headrace_engine::Result<Vec<u32>> {
    Ok(engine.generate(&PROMPT, GenerationOptions::greedy(tokens), &mut |_| Ok(()))?.token_ids)
}

/// The checks, and what they need.
struct Rig {
    ordinal: usize,
    model: Arc<ModelSpec>,
    short: Vec<u32>,
    long: Vec<u32>,
    passed: usize,
    failed: Vec<String>,
}

impl Rig {
    fn new(ordinal: usize) -> Outcome<Rig> {
        let shape = ModelShape {
            vocab: 1024,
            hidden: 512,
            heads: 8,
            kv_heads: 4,
            head_dim: 64,
            ffn: 1536,
            layers: 12,
            formats: vec![Format::Q4_0, Format::Q8_0],
            max_context: CONTEXT,
            ..ModelShape::default()
        };
        let model = Arc::new(random_model(5, &shape));
        let cpu = EngineOptions { device: DeviceChoice::Cpu, ..options(PlacementMode::Auto) };
        let mut cpu = Engine::from_spec(model.clone(), None, cpu)?;
        let (short, long) = (generate(&mut cpu, 8)?, generate(&mut cpu, LONG)?);
        Ok(Rig { ordinal, model, short, long, passed: 0, failed: Vec::new() })
    }

    fn load(&self, placement: PlacementMode, limit: u64, faults: &Faults) -> headrace_engine::Result<Engine> {
        let provider = CudaProvider::open_refusing(self.ordinal, faults.clone());
        let provider = provider.map_err(|e| EngineError::argument("device", self.ordinal, e.to_string()))?;
        Engine::on_device(self.model.clone(), None, options(placement), Box::new(provider), limit)
    }

    /// The smallest limit of a mode, and the one that holds everything.
    fn limits(&self, placement: PlacementMode) -> Outcome<(u64, u64)> {
        match self.load(placement, 1, &Faults::default()) {
            Err(EngineError::Budget(breakdown)) => Ok((breakdown.minimum(), breakdown.everything)),
            Err(other) => Err(other.into()),
            Ok(_) => Err("a limit of one byte was accepted".into()),
        }
    }

    fn check(&mut self, what: &str, held: bool, detail: impl std::fmt::Display) {
        match held {
            true => self.passed += 1,
            false => self.failed.push(format!("{what}: {detail}")),
        }
    }

    /// The engine after a failure: the right tokens and books.
    fn usable(&mut self, what: &str, engine: &mut Engine, long: bool) {
        let expected = if long { self.long.clone() } else { self.short.clone() };
        match generate(engine, expected.len()) {
            Ok(tokens) => self.check(what, tokens == expected, "other tokens"),
            Err(error) => self.check(what, false, error),
        }
        match engine.stats() {
            Ok(stats) => {
                let right =
                    |p: &PoolStats| p.peak <= p.limit && (p.unaccounted, p.oversubscribed, p.underflows) == (0, 0, 0);
                self.check(what, stats.memory.iter().all(right), format!("{:?}", stats.memory));
            }
            Err(error) => self.check(what, false, error),
        }
    }

    /// Weights that are no file's mapping, pinned or not.
    fn sources(&mut self) -> Outcome<()> {
        let (least, _) = self.limits(PlacementMode::Stream)?;
        let mut engine = self.load(PlacementMode::Stream, least, &Faults::default())?;
        self.usable("pinned copies", &mut engine, false);
        let stats = engine.stats()?;
        self.check("pinned copies", stats.weights.streamed_bytes > 0, "nothing was streamed");
        self.check("pinned copies", stats.sources.pinned_copy_bytes > 0, "nothing was pinned");
        self.check("pinned copies", !stats.device.fallbacks.is_empty(), "no fallback was reported");
        drop(engine);
        // Pinning is refused from some piece on: the rest goes through the pool. The pool's buffers are 32 MiB, planes of
        // pieces 1 MiB; what a program pins for itself is smaller than 256 KiB.
        for after in [0, 3] {
            let what = format!("pinning refused after {after} pieces");
            let faults = Faults::default();
            let mut engine = self.load(PlacementMode::Stream, least, &faults)?;
            faults.refuse(FaultPoint::Pin, after, 1, 256 << 10);
            self.usable(&what, &mut engine, false);
            self.usable(&what, &mut engine, true);
            let stats = engine.stats()?;
            self.check(&what, faults.fired() == 1, format!("{} refusals", faults.fired()));
            let said = stats.device.fallbacks.iter().any(|f| f.contains("pool"));
            self.check(&what, said, format!("{:?}", stats.device.fallbacks));
            self.check(&what, stats.weights.streamed_bytes > 0, "nothing was streamed");
            println!("{what}: {:?}", stats.device.fallbacks);
        }
        // Not even the pool can be pinned.
        let faults = Faults::default();
        faults.refuse(FaultPoint::Pin, 0, u64::MAX, 256 << 10);
        let loaded = self.load(PlacementMode::Stream, least, &faults);
        let typed = matches!(loaded, Err(EngineError::Device(_)));
        self.check("no pinning at all", typed && faults.fired() > 0, "the load went through");
        drop(loaded);
        faults.clear();
        let mut engine = self.load(PlacementMode::Stream, least, &faults)?;
        self.usable("no pinning at all", &mut engine, false);
        Ok(())
    }

    /// Reads in place: pinned copies serve; where pinning is refused there is no such mode.
    fn in_place(&mut self) -> Outcome<()> {
        for placement in [PlacementMode::ZeroCopy, PlacementMode::Hybrid] {
            let (least, _) = self.limits(placement)?;
            let mut engine = self.load(placement, least, &Faults::default())?;
            self.usable(placement.name(), &mut engine, false);
            self.usable(placement.name(), &mut engine, true);
            let plan = engine.memory().ok_or("no plan")?;
            self.check(placement.name(), plan.host_mapped_bytes > 0, "nothing was read in place");
        }
        let (_, everything) = self.limits(PlacementMode::ZeroCopy)?;
        let faults = Faults::default();
        faults.refuse(FaultPoint::Pin, 0, u64::MAX, 0);
        let refused = self.load(PlacementMode::ZeroCopy, everything, &faults).err();
        let said = refused.as_ref().is_some_and(|e| e.to_string().contains("pinning"));
        self.check("zero-copy without pinning", said, format!("{refused:?}"));
        Ok(())
    }

    /// Granules are refused at points of a load, and of a growth at a limit at which the weights give way.
    fn memory(&mut self) -> Outcome<()> {
        let (least, everything) = self.limits(PlacementMode::Stream)?;
        for nth in (0..).step_by(7) {
            let faults = Faults::default();
            faults.refuse(FaultPoint::Granule, nth, 1, 0);
            let loaded = self.load(PlacementMode::Stream, everything, &faults);
            if faults.fired() == 0 {
                break;
            }
            let typed = matches!(loaded, Err(EngineError::Device(_)));
            self.check("memory refused in a load", typed, "the load went through");
        }
        let limit = everything - (everything - least) / 3;
        for nth in (0..).step_by(3) {
            let what = format!("memory refused in a growth, call {nth}");
            let faults = Faults::default();
            let mut engine = self.load(PlacementMode::Stream, limit, &faults)?;
            generate(&mut engine, 8)?;
            faults.refuse(FaultPoint::Granule, nth, 1, 0);
            match generate(&mut engine, LONG) {
                Ok(tokens) => {
                    let right = tokens == self.long;
                    self.check(&what, right, "other tokens");
                }
                Err(EngineError::Device(_) | EngineError::Kv(_) | EngineError::Governor(_)) => self.passed += 1,
                Err(other) => self.check(&what, false, other),
            }
            let fired = faults.fired() > 0;
            faults.clear();
            self.usable(&what, &mut engine, false);
            self.usable(&what, &mut engine, true);
            if !fired {
                break;
            }
        }
        // Another process has taken the card's memory: every granule is refused though the ledger has room.
        let faults = Faults::default();
        let mut engine = self.load(PlacementMode::Stream, everything, &faults)?;
        generate(&mut engine, 8)?;
        faults.refuse(FaultPoint::Granule, 0, u64::MAX, 0);
        let error = generate(&mut engine, LONG);
        let refused = error.is_err() && faults.fired() > 0;
        self.check("another process", refused, format!("{:?}", error.map(|t| t.len())));
        faults.clear();
        self.usable("another process", &mut engine, true);
        Ok(())
    }
}

type Part = (&'static str, fn(&mut Rig) -> Outcome<()>);

const PARTS: [Part; 3] =
    [("sources", Rig::sources), ("reads_in_place", Rig::in_place), ("memory_refused", Rig::memory)];

/// One part on a rig of its own: every check that doesn't hold is named.
fn checked(ordinal: usize, part: fn(&mut Rig) -> Outcome<()>) -> Result<(), Failed> {
    let mut rig = Rig::new(ordinal)?;
    part(&mut rig)?;
    println!("{} checks hold, {} don't", rig.passed, rig.failed.len());
    if rig.failed.is_empty() && rig.passed > 0 { Ok(()) } else { Err(rig.failed.join("\n").into()) }
}

fn main() -> Outcome<ExitCode> {
    let mut rest: Vec<String> = std::env::args().collect();
    let is_card = |a: &String| a.bytes().all(|b| b.is_ascii_digit());
    let ordinal = if rest.get(1).is_some_and(is_card) { rest.remove(1).parse()? } else { 0 };
    let mut arguments = Arguments::from_iter(rest);
    // One card, one test at a time.
    arguments.test_threads = Some(1);
    let problem = CudaProvider::open(ordinal).err();
    if let Some(problem) = &problem {
        println!("no usable CUDA device: {problem}");
    }
    let trial =
        |(name, part): Part| Trial::test(name, move || checked(ordinal, part)).with_ignored_flag(problem.is_some());
    Ok(libtest_mimic::run(&arguments, PARTS.map(trial).into()).exit_code())
}
