//! Compares the CUDA provider with the CPU provider bit for bit, on small random models of every shape that the persistent
//! one-row kernel distinguishes, and holds what the link is measured at to the probe:
//! `cargo test --release -p headrace-ep-cuda --test gpu_provider [-- MODEL [CARD]]`; with MODEL on that file or directory alone.
//!
//! For each KV layout and width of activations: prompts of 1 to 400 tokens in one step and in chunks, then 64 decode steps,
//! with every weight resident. Without a card every test is ignored, and counted so. The binary can be carried to another
//! machine: it needs no file of this one.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_ep_cuda::CudaProvider;
use headrace_ep_cuda::plan::slab;
use headrace_kv::geometry::{KvGeometry, KvLayout};
use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};
use headrace_numerics::rope::RopeStyle;
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{
    Instr, Op, Place, ProgramId, Provider, RangeKind, StepInput, StepOutput, StepProgram, TokenRow,
};
use headrace_testing::{ModelShape, file_program, random_model};
use libtest_mimic::{Arguments, Failed, Trial};

const PROMPTS: [usize; 8] = [1, 2, 5, 31, 64, 129, 257, 400];
const DECODES: usize = 64;
/// A prompt of more than 32 chunks of attention, for random models.
const LONG: usize = 1130;
const MAX_ROWS: usize = 400;
/// Rows of the longest prompt whose logits are compared.
const MAX_WANTED: usize = 8;
const LAYOUTS: [KvLayout; 2] = [KvLayout::HeadMajor, KvLayout::SeqMajor];
const WIDTHS: [ActivationWidth; 2] = [ActivationWidth::Int16, ActivationWidth::Int8];

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The same program with every weight resident; returns it with the bytes of the weights range.
fn resident(model: &ModelSpec, width: ActivationWidth) -> Outcome<(StepProgram, u64)> {
    let mut program = file_program(model, MAX_ROWS, MAX_WANTED, width, 1);
    let mut next = 0;
    for instr in &mut program.instrs {
        let Instr::Op(Op::Linear { segments, .. }) = instr else { continue };
        for segment in segments {
            let (_, bytes) = slab(model.tensor(segment.tensor), segment.rows).ok_or("too many bytes")?;
            segment.place = Place::Resident { offset: next };
            next += bytes.next_multiple_of(PLANE_ALIGN as u64);
        }
    }
    Ok((program, next))
}

fn prepare(provider: &mut dyn Provider, model: &Arc<ModelSpec>, kv: KvGeometry, pages: usize) -> Outcome<()> {
    provider.attach(model.clone(), kv)?;
    provider.resize(RangeKind::Kv, (pages * kv.page_bytes()) as u64)?;
    Ok(())
}

fn record(provider: &mut dyn Provider, model: &ModelSpec, program: StepProgram) -> Outcome<ProgramId> {
    provider.resize(RangeKind::Workspace, program.workspace_bytes(&model.config))?;
    Ok(provider.record(program)?)
}

/// A few tokens that depend on their position alone.
fn token(position: usize, vocab: usize) -> u32 {
    ((position as u64 * 2_654_435_761 + 12_345) % vocab as u64) as u32
}

/// One step of both devices; the outputs must be the same in every bit. Returns the token chosen last.
fn compare(
    cpu: (&mut CpuProvider, ProgramId),
    cuda: (&mut CudaProvider, ProgramId),
    input: &StepInput,
) -> Outcome<Result<u32, String>> {
    let (mut expected, mut got) = (StepOutput::default(), StepOutput::default());
    cpu.0.run(cpu.1, input, &mut expected)?;
    cuda.0.run(cuda.1, input, &mut got)?;
    if expected.tokens != got.tokens {
        return Ok(Err(format!("tokens {:?} instead of {:?}", got.tokens, expected.tokens)));
    }
    if expected.logits.len() != got.logits.len() {
        return Ok(Err(format!("{} logits instead of {}", got.logits.len(), expected.logits.len())));
    }
    let wrong = expected.logits.iter().zip(&got.logits).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    if wrong > 0 {
        return Ok(Err(format!("{wrong} of {} logits differ", got.logits.len())));
    }
    match got.tokens.last() {
        Some(Ok(token)) => Ok(Ok(*token)),
        other => Ok(Err(format!("no token: {other:?}"))),
    }
}

fn step(positions: std::ops::Range<usize>, tokens: impl Fn(usize) -> u32, pages: usize) -> StepInput {
    let rows: Vec<TokenRow> =
        positions.map(|position| TokenRow { sequence: 0, position, token: tokens(position).into() }).collect();
    let count = rows.len();
    StepInput {
        // The last rows, so that several rows' logits are compared.
        wanted: (count.saturating_sub(MAX_WANTED)..count).collect(),
        // Pages in an order that isn't that of their numbers.
        page_tables: vec![(0..pages as u32).rev().collect()],
        rows,
        want_logits: true,
    }
}

/// Heads alone and in groups, windows, caps, norms, biases, both pairings of RoPE, both scale types, odd counts of steps.
fn random_shapes() -> Vec<ModelShape> {
    let format = |scale, zero| Format::Nbits(Nbits { bits: 4, block: 32, scale, zero });
    let half = format(ScaleType::F16, ZeroPoint::Midpoint);
    let base = ModelShape {
        vocab: 1003,
        hidden: 512,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        rope_dims: 64,
        ffn: 1024,
        layers: 3,
        formats: vec![half],
        max_context: 2048,
        ..ModelShape::default()
    };
    vec![
        ModelShape { bias: true, ..base.clone() },
        ModelShape {
            heads: 4,
            kv_heads: 4,
            head_dim: 128,
            rope_dims: 128,
            qk_norm: true,
            window: Some(50),
            ..base.clone()
        },
        ModelShape { heads: 16, kv_heads: 1, head_dim: 32, rope_dims: 16, softcap: 20.0, ffn: 2816, ..base.clone() },
        ModelShape {
            heads: 5,
            kv_heads: 1,
            hidden: 1280,
            head_dim: 256,
            rope_dims: 256,
            rope: RopeStyle::Interleaved,
            tied: true,
            fused: true,
            formats: vec![format(ScaleType::F32, ZeroPoint::TwosComplement)],
            ..base.clone()
        },
        ModelShape {
            heads: 8,
            kv_heads: 4,
            head_dim: 96,
            rope_dims: 96,
            window: Some(333),
            bias: true,
            qk_norm: true,
            ..base.clone()
        },
        // GGUF formats that the device keeps in planes.
        ModelShape { formats: vec![Format::Q4_0], bias: true, ..base.clone() },
        ModelShape { formats: vec![Format::Q4_1], qk_norm: true, ..base.clone() },
        ModelShape { formats: vec![Format::Q4_K], tied: true, ..base.clone() },
        ModelShape { formats: vec![Format::Q6_K], ..base.clone() },
        ModelShape { formats: vec![Format::Q4_K, Format::Q6_K, Format::Q4_1, Format::Q4_0], ..base.clone() },
        // Some matrices in a format that only the other kernels serve.
        ModelShape { formats: vec![half, Format::Q8_0, format(ScaleType::F16, ZeroPoint::TwosComplement)], ..base },
    ]
}

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: Vec<String>,
}

impl Tally {
    fn note(&mut self, what: &str, result: Result<(), String>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(why) => self.failed.push(format!("{what}: {why}")),
        }
    }
}

/// Every prompt and its decode steps on one pair of devices, twice: the second time finds everything captured.
fn configuration(
    model: &Arc<ModelSpec>,
    card: usize,
    layout: KvLayout,
    prompts: &[usize],
    tally: &mut Tally,
) -> Outcome<()> {
    let config = &model.config;
    let kv = KvGeometry {
        layers: model.layers.len(),
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        dtype: KvDtype::F16,
        layout,
        page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
    };
    let pages = kv.pages_for(LONG + DECODES);
    let mut cpu = CpuProvider::new(CpuOptions::default())?;
    let mut cuda = CudaProvider::open(card)?;
    prepare(&mut cpu, model, kv, pages)?;
    // What the device keeps in another layout gives the same bits.
    let arranged = model.arranged(|format| cuda.wanted_format(format));
    prepare(&mut cuda, &arranged, kv, pages)?;
    for width in WIDTHS {
        let (program, bytes) = resident(&arranged, width)?;
        let segments: Vec<_> = program
            .instrs
            .iter()
            .flat_map(|i| match i {
                Instr::Op(Op::Linear { segments, .. }) => &segments[..],
                _ => &[],
            })
            .copied()
            .collect();
        cuda.resize(RangeKind::Weights, bytes)?;
        let started = std::time::Instant::now();
        cuda.load(&segments)?;
        let seconds = started.elapsed().as_secs_f64();
        println!("loaded {bytes} bytes in {seconds:.3} s, {:.1} GB/s", bytes as f64 / seconds / 1e9);
        let on_cuda = record(&mut cuda, &arranged, program)?;
        let file = file_program(model, MAX_ROWS, MAX_WANTED, width, 1);
        let on_cpu = record(&mut cpu, model, file)?;
        for repeat in 0..2 {
            for &prompt in prompts {
                for chunk in [prompt.min(MAX_ROWS), prompt.div_ceil(3)] {
                    let what = format!("{layout:?} {width:?} prompt {prompt} in chunks of {chunk}, time {repeat}");
                    let mut result = Ok(());
                    let mut last = 0;
                    for start in (0..prompt).step_by(chunk) {
                        let end = (start + chunk).min(prompt);
                        let input = step(start..end, |p| token(p, config.vocab), pages);
                        match compare((&mut cpu, on_cpu), (&mut cuda, on_cuda), &input)? {
                            Ok(token) => last = token,
                            Err(why) => result = result.and(Err(format!("positions {start} .. {end}: {why}"))),
                        }
                    }
                    tally.note(&what, result);
                    if chunk != prompt.min(MAX_ROWS) || repeat == 1 && prompt > 64 {
                        continue;
                    }
                    let mut result = Ok(());
                    for position in prompt..prompt + DECODES {
                        let input = step(position..position + 1, |_| last, pages);
                        match compare((&mut cpu, on_cpu), (&mut cuda, on_cuda), &input)? {
                            Ok(token) => last = token,
                            Err(why) => {
                                result = Err(format!("position {position}: {why}"));
                                break;
                            }
                        }
                    }
                    tally.note(&format!("{what}, {DECODES} new tokens"), result);
                }
            }
        }
        // The device's pages are the host's, byte for byte.
        let (mut a, mut b) = (vec![0; pages * kv.page_bytes()], vec![0; pages * kv.page_bytes()]);
        cpu.read(RangeKind::Kv, 0, &mut a)?;
        cuda.read(RangeKind::Kv, 0, &mut b)?;
        let same = if a == b { Ok(()) } else { Err("the pages differ".to_string()) };
        tally.note(&format!("{layout:?} {width:?} pages"), same);
        cuda.discard(on_cuda);
        cpu.discard(on_cpu);
    }
    println!("{:?}: {:?}", cuda.overhead(), cuda.counters());
    Ok(())
}

/// One configuration as a test: every comparison that differs is named.
fn compared(model: &Arc<ModelSpec>, card: usize, layout: KvLayout, prompts: &[usize]) -> Result<(), Failed> {
    let mut tally = Tally::default();
    configuration(model, card, layout, prompts, &mut tally)?;
    println!("{} comparisons equal, {} differ", tally.passed, tally.failed.len());
    if tally.failed.is_empty() && tally.passed > 0 { Ok(()) } else { Err(tally.failed.join("\n").into()) }
}

/// What the link is measured at when the ring is mapped, against the probe; it is measured once.
fn link(card: usize) -> Result<(), Failed> {
    let mut provider = CudaProvider::open(card)?;
    if provider.link_ceilings().is_ok() {
        return Err("a link is measured without a ring".into());
    }
    provider.ready_link_ceilings()?;
    provider.resize(RangeKind::Staging, 64 << 20)?;
    let found = provider.link_ceilings()?;
    let probed = headrace_ep_cuda::probe::probe(card)?;
    let copies = probed.host_to_device.iter().map(|chunk| chunk.1).fold(0.0, f64::max);
    let in_place = probed.zero_copy_read.ok_or("the probe didn't read in place")?;
    println!("{found:?}, the probe: {copies} {in_place}");
    if probed.host_to_device.iter().any(|chunk| chunk.1 < 1e8) || probed.device_copy_read < 1e9 {
        return Err(format!("the probe is too slow to be true: {probed:?}").into());
    }
    if !(0.9..1.1).contains(&(found.copies / copies)) || !(0.9..1.1).contains(&(found.in_place / in_place)) {
        return Err(format!("{found:?}, but the probe says {copies} and {in_place}").into());
    }
    if provider.link_ceilings() != Ok(found) { Err("it is measured anew".into()) } else { Ok(()) }
}

/// `[MODEL [CARD]]` before the arguments that every test binary takes.
fn arguments() -> Result<(Option<String>, usize, Arguments), std::num::ParseIntError> {
    let mut rest: Vec<String> = std::env::args().collect();
    let is_model = |a: &String| a == "random" || Path::new(a).exists();
    let model = rest.get(1).is_some_and(is_model).then(|| rest.remove(1));
    let is_card = |a: &String| model.is_some() && a.bytes().all(|b| b.is_ascii_digit());
    let card = if rest.get(1).is_some_and(is_card) { rest.remove(1).parse()? } else { 0 };
    let mut arguments = Arguments::from_iter(rest);
    // One card, one test at a time.
    arguments.test_threads = Some(1);
    Ok((model.filter(|m| m != "random"), card, arguments))
}

fn main() -> Outcome<ExitCode> {
    let (path, card, arguments) = arguments()?;
    let problem = match CudaProvider::open(card) {
        Ok(provider) => {
            println!("{:?}", provider.info());
            None
        }
        Err(problem) => Some(problem.to_string()),
    };
    let mut trials = Vec::new();
    match path {
        Some(path) if problem.is_none() => {
            let model = Arc::new(headrace_model::load(Path::new(&path))?.spec);
            for layout in LAYOUTS {
                let model = model.clone();
                let run = move || compared(&model, card, layout, &PROMPTS);
                trials.push(Trial::test(format!("model_{layout:?}"), run));
            }
        }
        Some(_) => trials.extend(LAYOUTS.map(|layout| Trial::test(format!("model_{layout:?}"), || Ok(())))),
        None => {
            trials.push(Trial::test("link", move || link(card)));
            for (n, shape) in random_shapes().into_iter().enumerate() {
                let run = move || {
                    println!("{shape:?}");
                    let model = Arc::new(random_model(n as u64 + 1, &shape));
                    compared(&model, card, LAYOUTS[n % 2], &[1, 3, 40, 400, LONG])
                };
                trials.push(Trial::test(format!("random_shape_{n}"), run));
            }
        }
    }
    if let Some(problem) = &problem {
        println!("no usable CUDA device: {problem}");
    }
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(problem.is_some())).collect();
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}
