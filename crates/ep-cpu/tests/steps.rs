//! Whole steps against the scalar oracle, bit for bit: any shape, any split, any number of threads.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

use std::sync::Arc;

use headrace_ep_cpu::simd::SimdLevel;
use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_kv::KvGeometry;
use headrace_kv::geometry::KvLayout;
use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::argmax::argmax;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};
use headrace_numerics::rope::RopeStyle;
use headrace_provider::{ProgramId, Provider, RangeKind, StepInput, StepOutput, TokenRow};
use headrace_testing::{ModelShape, Oracle, bits, file_program, generator, random_model};
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};

const MAX_ROWS: usize = 80;

/// How a model is run.
#[derive(Clone, Copy, Debug)]
struct Run {
    threads: usize,
    level: SimdLevel,
    layout: KvLayout,
    dtype: KvDtype,
    page_tokens: usize,
    activations: ActivationWidth,
    cuts: usize,
}

impl Run {
    fn plain() -> Run {
        Run {
            threads: 2,
            level: SimdLevel::best(),
            layout: KvLayout::HeadMajor,
            dtype: KvDtype::F16,
            page_tokens: 32,
            activations: ActivationWidth::Int16,
            cuts: 1,
        }
    }
}

struct Device {
    provider: CpuProvider,
    program: ProgramId,
    geometry: KvGeometry,
}

fn device(model: &Arc<ModelSpec>, run: Run, pages: usize) -> Device {
    let mut provider = CpuProvider::new(CpuOptions { threads: Some(run.threads), level: Some(run.level) }).unwrap();
    let geometry = KvGeometry {
        layers: model.layers.len(),
        kv_heads: model.config.kv_heads,
        head_dim: model.config.head_dim,
        dtype: run.dtype,
        layout: run.layout,
        page_tokens: run.page_tokens,
    };
    provider.attach(model.clone(), geometry).unwrap();
    let program = file_program(model, MAX_ROWS, MAX_ROWS, run.activations, run.cuts);
    provider.resize(RangeKind::Workspace, program.workspace_bytes(&model.config)).unwrap();
    provider.resize(RangeKind::Kv, (pages * geometry.page_bytes()) as u64).unwrap();
    let program = provider.record(program).unwrap();
    Device { provider, program, geometry }
}

fn tokens(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    let mut rng = generator(seed);
    (0..n).map(|_| rng.random_range(0..vocab as u32)).collect()
}

/// Logits of every position of every sequence, by the oracle.
fn expected(model: &ModelSpec, run: Run, sequences: &[Vec<u32>]) -> Vec<Vec<Vec<f32>>> {
    let oracle = Oracle::new(model, run.activations, run.dtype);
    let one = |tokens: &Vec<u32>| {
        let mut sequence = oracle.sequence();
        tokens.iter().map(|&t| oracle.token(&mut sequence, t)).collect()
    };
    sequences.iter().map(one).collect()
}

/// Runs the sequences in random steps: each takes the next 1 to `chunk` tokens of some sequences, rows of different
/// sequences mixed, pages in random order; compares the logits of the wanted rows with the oracle's.
fn compare(model: &Arc<ModelSpec>, run: Run, sequences: &[Vec<u32>], want: &[Vec<Vec<f32>>], chunk: usize, seed: u64) {
    let mut rng = generator(seed);
    let need: Vec<usize> = sequences.iter().map(|s| s.len().div_ceil(run.page_tokens)).collect();
    let total: usize = need.iter().sum();
    let mut d = device(model, run, total);
    let mut free: Vec<u32> = (0..total as u32).collect();
    free.shuffle(&mut rng);
    let page_tables: Vec<Vec<u32>> = need.iter().map(|&n| free.split_off(free.len() - n)).collect();
    let mut done = vec![0; sequences.len()];
    let mut output = StepOutput::default();
    while done.iter().zip(sequences).any(|(&d, s)| d < s.len()) {
        let mut rows = Vec::new();
        for (s, all) in sequences.iter().enumerate() {
            let most = chunk.min(all.len() - done[s]).min(MAX_ROWS - rows.len());
            let n = if sequences.len() > 1 && most > 0 { rng.random_range(0..=most) } else { most };
            let row = |i: usize| TokenRow { sequence: s, position: i, token: all[i].into() };
            rows.extend((done[s]..done[s] + n).map(row));
            done[s] += n;
        }
        if rows.is_empty() {
            continue;
        }
        // Rows of one sequence stay in order; those of different ones are dealt like cards.
        let mut sequence_of: Vec<usize> = rows.iter().map(|r| r.sequence).collect();
        sequence_of.shuffle(&mut rng);
        let mut mixed = Vec::new();
        for s in sequence_of {
            let at = rows.iter().position(|r: &TokenRow| r.sequence == s).unwrap();
            mixed.push(rows.remove(at));
        }
        let wanted: Vec<usize> = (0..mixed.len()).filter(|_| rng.random_range(0..4) > 0).collect();
        let input = StepInput { rows: mixed, page_tables: page_tables.clone(), wanted, want_logits: true };
        d.provider.run(d.program, &input, &mut output).unwrap();
        let vocab = model.config.vocab;
        assert_eq!((output.logits.len(), output.tokens.len()), (input.wanted.len() * vocab, input.wanted.len()));
        for (i, &w) in input.wanted.iter().enumerate() {
            let row = input.rows[w];
            let (got, want) = (&output.logits[i * vocab..(i + 1) * vocab], &want[row.sequence][row.position]);
            assert_eq!(bits(got), bits(want), "{run:?} chunk {chunk} {row:?}\n{:?}", model.config);
            let choice = argmax(want).map(|t| t as u32).map_err(|t| t as u32);
            assert_eq!(output.tokens[i], choice);
        }
    }
    assert!(d.provider.mapped(RangeKind::Kv) as usize / d.geometry.page_bytes() >= total);
}

fn nbits(bits: u8, block: u16, scale: ScaleType, zero: ZeroPoint) -> Format {
    Format::Nbits(Nbits { bits, block, scale, zero })
}

fn formats() -> Vec<Format> {
    vec![
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
        nbits(4, 32, ScaleType::F16, ZeroPoint::Midpoint),
        nbits(4, 16, ScaleType::F32, ZeroPoint::PerBlock),
        nbits(4, 128, ScaleType::F32, ZeroPoint::TwosComplement),
        nbits(8, 64, ScaleType::F16, ZeroPoint::PerBlock),
    ]
}

#[test]
fn every_number_of_threads_level_layout_and_chunk_gives_the_oracle_s_bits() {
    let shape = ModelShape { formats: formats(), window: Some(40), ..ModelShape::default() };
    let model = Arc::new(random_model(1, &shape));
    let sequences = vec![tokens(2, 100, shape.vocab)];
    let plain = Run::plain();
    for dtype in [KvDtype::F16, KvDtype::F32] {
        let want = expected(&model, Run { dtype, ..plain }, &sequences);
        for level in SimdLevel::available() {
            for threads in [1, 2, 5] {
                for chunk in [1, 7, 64, MAX_ROWS] {
                    for layout in [KvLayout::HeadMajor, KvLayout::SeqMajor] {
                        let run = Run { threads, level, layout, dtype, ..plain };
                        compare(&model, run, &sequences, &want, chunk, 3);
                    }
                }
            }
        }
    }
}

#[test]
fn random_models_and_ragged_batches_give_the_oracle_s_bits() {
    for seed in 0..40 {
        let mut rng = generator(1000 + seed);
        let kv_heads = rng.random_range(1..=3);
        let heads = kv_heads * rng.random_range(1..=4);
        let head_dim = *[8, 12, 20, 32, 64, 72, 128].choose(&mut rng).unwrap();
        let some = formats();
        let shape = ModelShape {
            vocab: rng.random_range(3..300),
            hidden: *[32, 64, 100, 256, 288].choose(&mut rng).unwrap(),
            heads,
            kv_heads,
            head_dim,
            ffn: *[32, 90, 96, 256].choose(&mut rng).unwrap(),
            layers: rng.random_range(1..=3),
            qk_norm: rng.random(),
            bias: rng.random(),
            window: rng.random::<bool>().then(|| rng.random_range(1..70)),
            softcap: if rng.random() { 3.0 } else { 0.0 },
            rope: if rng.random() { RopeStyle::Half } else { RopeStyle::Interleaved },
            rope_dims: if rng.random() { head_dim } else { head_dim / 4 * 2 },
            rope_tables: *[None, None, Some(Format::F32), Some(Format::F16)].choose(&mut rng).unwrap(),
            tied: rng.random(),
            fused: rng.random(),
            col_major: rng.random(),
            formats: (0..4).map(|_| *some.choose(&mut rng).unwrap()).collect(),
            max_context: 200,
        };
        let model = Arc::new(random_model(seed, &shape));
        let lengths: Vec<usize> = (0..rng.random_range(1..=4)).map(|_| rng.random_range(1..90)).collect();
        let sequences: Vec<Vec<u32>> =
            lengths.iter().enumerate().map(|(i, &n)| tokens(seed * 10 + i as u64, n, shape.vocab)).collect();
        let run = Run {
            threads: rng.random_range(1..=4),
            level: *SimdLevel::available().choose(&mut rng).unwrap(),
            layout: if rng.random() { KvLayout::HeadMajor } else { KvLayout::SeqMajor },
            dtype: if rng.random() { KvDtype::F16 } else { KvDtype::F32 },
            page_tokens: *[32, 64].choose(&mut rng).unwrap(),
            activations: if rng.random() { ActivationWidth::Int16 } else { ActivationWidth::Int8 },
            cuts: rng.random_range(1..4),
        };
        let want = expected(&model, run, &sequences);
        for chunk in [1, 5, 40] {
            compare(&model, run, &sequences, &want, chunk, seed);
        }
    }
}
