//! How fast the linear layers read weights (one activation row) and multiply (many), beside plain reads of memory.
//!
//! `cargo bench -p headrace-ep-cpu --bench linear`. The level follows `HEADRACE_SIMD`. Weights fill 96 MiB, more than
//! third-level caches hold, so `decode` is comparable with `read`; `decode-cached` fits a second-level cache.

use std::hint::black_box;
use std::thread;

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use headrace_ep_cpu::activations::Activations;
use headrace_ep_cpu::linear::{DenseRows, Epilogue, Sink, dense, linear};
use headrace_ep_cpu::simd::SimdLevel;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Format, Nbits, ScaleType, WeightView, ZeroPoint};

const COLS: usize = 1536;
const LARGE: usize = 96 << 20;
const SMALL: usize = 400 << 10;
const PREFILL: usize = 64;

fn formats() -> Vec<Format> {
    let nbits = |bits, block, scale, zero| Format::Nbits(Nbits { bits, block, scale, zero });
    vec![
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
        nbits(4, 32, ScaleType::F32, ZeroPoint::Midpoint),
        nbits(4, 32, ScaleType::F16, ZeroPoint::PerBlock),
        nbits(4, 128, ScaleType::F16, ZeroPoint::PerBlock),
        nbits(8, 32, ScaleType::F32, ZeroPoint::Midpoint),
        Format::F16,
    ]
}

/// Rows of a format that fill about `bytes`, every byte 0x2a: small positive scales in all formats.
struct Weights {
    format: Format,
    rows: usize,
    planes: [Vec<u8>; 3],
}

impl Weights {
    fn new(format: Format, bytes: usize) -> Weights {
        let rows = bytes / format.total_row_bytes(COLS) / 8 * 8;
        Weights { format, rows, planes: [0, 1, 2].map(|p| vec![0x2a; format.row_bytes(p, COLS) * rows]) }
    }

    fn view(&self) -> WeightView<'_> {
        let planes = [&self.planes[0][..], &self.planes[1][..], &self.planes[2][..]];
        WeightView::new(self.format, self.rows, COLS, planes).expect("planes of the right length")
    }

    fn bytes(&self) -> u64 {
        (self.rows * self.format.total_row_bytes(COLS)) as u64
    }
}

struct Input {
    x: Vec<f32>,
    acts: Activations,
    rows: usize,
}

impl Input {
    fn new(level: SimdLevel, rows: usize, width: ActivationWidth) -> Input {
        let x: Vec<f32> = (0..rows * COLS).map(|i| (i as f32).sin()).collect();
        let mut acts = Activations::new();
        acts.prepare(rows, COLS, width);
        for (r, x) in x.chunks_exact(COLS).enumerate() {
            acts.quantise_row(level, r, x);
        }
        Input { x, acts, rows }
    }
}

/// One layer on `threads` threads, each with its own rows of the weights.
fn layer(level: SimdLevel, w: &Weights, input: &Input, y: &mut [f32], threads: usize) {
    let view = w.view();
    let sink = Sink::new(y, input.rows, w.rows, w.rows);
    let part = |t: usize| {
        let range = t * w.rows / threads..(t + 1) * w.rows / threads;
        let view = view.slice_rows(range.start, range.len());
        // SAFETY: the ranges of different threads don't overlap.
        let mut out = unsafe { sink.columns(range) };
        if w.format.is_quantised() {
            linear(level, &view, &input.acts, 0..input.rows, Epilogue::default(), &mut out);
        } else {
            let x = DenseRows::new(&input.x, input.rows, COLS, COLS);
            dense(level, &view, x, 0..input.rows, Epilogue::default(), &mut out);
        }
    };
    thread::scope(|scope| {
        for t in 1..threads {
            scope.spawn(move || part(t));
        }
        part(0);
    });
}

/// Reads all of `data` on `threads` threads.
fn read(data: &[u64], threads: usize) -> u64 {
    let sum = |part: &[u64]| {
        let mut sums = [0u64; 32];
        for chunk in part.chunks_exact(32) {
            for (sum, &v) in sums.iter_mut().zip(chunk) {
                *sum ^= v;
            }
        }
        sums.iter().fold(0, |a, &b| a ^ b)
    };
    let part = data.len() / threads;
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|t| scope.spawn(move || sum(&data[t * part..(t + 1) * part]))).collect();
        others.into_iter().map(|t| t.join().unwrap_or(0)).fold(sum(&data[..part]), |a, b| a ^ b)
    })
}

fn settings(group: &mut BenchmarkGroup<'_, WallTime>) {
    group.sample_size(10);
    group.warm_up_time(std::time::Duration::from_millis(100));
    group.measurement_time(std::time::Duration::from_millis(400));
}

fn benches(c: &mut Criterion) {
    let level = SimdLevel::detect().expect("a level of this processor");
    let data = vec![1u64; LARGE / 8];
    let mut group = c.benchmark_group("read");
    settings(&mut group);
    group.throughput(Throughput::Bytes(LARGE as u64));
    for threads in [1, 2] {
        group.bench_function(format!("{threads} threads"), |b| b.iter(|| read(black_box(&data), threads)));
    }
    drop(group);
    for (name, bytes, threads) in [("decode-cached", SMALL, 1), ("decode", LARGE, 1), ("decode", LARGE, 2)] {
        let mut group = c.benchmark_group(format!("{name}/{level}/{threads}"));
        settings(&mut group);
        for format in formats() {
            let w = Weights::new(format, bytes);
            let mut y = vec![0f32; w.rows];
            group.throughput(Throughput::Bytes(w.bytes()));
            for width in [ActivationWidth::Int8, ActivationWidth::Int16] {
                let input = Input::new(level, 1, width);
                group.bench_function(format!("{}/{width:?}", format.name()), |b| {
                    b.iter(|| layer(level, &w, &input, black_box(&mut y), threads));
                });
            }
        }
    }
    let mut group = c.benchmark_group(format!("prefill-{PREFILL}/{level}/1"));
    settings(&mut group);
    for format in formats() {
        let w = Weights::new(format, SMALL);
        let mut y = vec![0f32; w.rows * PREFILL];
        group.throughput(Throughput::Elements((w.rows * COLS * PREFILL) as u64));
        for width in [ActivationWidth::Int8, ActivationWidth::Int16] {
            let input = Input::new(level, PREFILL, width);
            group.bench_function(format!("{}/{width:?}", format.name()), |b| {
                b.iter(|| layer(level, &w, &input, black_box(&mut y), 1));
            });
        }
    }
}

criterion_group!(linear_layers, benches);
criterion_main!(linear_layers);
