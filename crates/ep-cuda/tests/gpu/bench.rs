//! Speed of all linear layers of a 14B-shaped model, against the memory's measured read rate.

use cudarc::driver::{result, sys};
use headrace_ep_cuda::abi::{LinearArgs, LinearSegment, ProbeArgs};
use headrace_ep_cuda::launch::{LinearVariant, Queue, wanted_format};
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::decode;
use crate::device::{ActMem, Gpu, Mem, Step, WIDTHS, ordinary};

pub const LAYERS: usize = 48;
/// Rows and columns of qkv, o, gate and up, down.
const SHAPES: [(&str, usize, usize); 4] =
    [("qkv", 7168, 5120), ("o", 5120, 5120), ("gate_up", 27648, 5120), ("down", 5120, 13824)];
const HEAD: (&str, usize, usize) = ("lm_head", 152_064, 5120);
/// Formats by the names that `--formats=` takes: MatMulNBits and GGUF's, those laid out anew as the device keeps them.
pub const FORMATS: [(&str, Format); 9] = [
    ("matmulnbits", Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::Midpoint })),
    ("q4_0", Format::Q4_0),
    ("q4_1", Format::Q4_1),
    ("q5_0", Format::Q5_0),
    ("q5_1", Format::Q5_1),
    ("q8_0", Format::Q8_0),
    ("q4_k", Format::Q4_K),
    ("q5_k", Format::Q5_K),
    ("q6_k", Format::Q6_K),
];

/// The formats that `--formats=` names, as the device keeps them.
pub fn named_formats() -> Option<Vec<Format>> {
    let list = std::env::args().find_map(|a| a.strip_prefix("--formats=").map(str::to_owned))?;
    let known = |name: &str| FORMATS.iter().find(|(n, _)| *n == name).expect("a format").1;
    Some(list.split(',').map(|name| wanted_format(known(name))).collect())
}

/// Median milliseconds of a captured graph of what `record` launches.
pub fn time(gpu: &Gpu, record: &dyn Fn()) -> f64 {
    let stream = gpu.stream.cu_stream();
    // SAFETY: a capture on our own stream; graph and events are destroyed below.
    unsafe {
        result::stream::begin_capture(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("capture");
        record();
        let graph = result::stream::end_capture(stream).expect("capture");
        let mut exec = std::ptr::null_mut();
        sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().expect("instantiate");
        let (mut a, mut b) = (std::ptr::null_mut(), std::ptr::null_mut());
        sys::cuEventCreate(&mut a, 0).result().expect("event");
        sys::cuEventCreate(&mut b, 0).result().expect("event");
        let mut times = Vec::new();
        for i in 0..14 {
            // Long graphs need fewer replays.
            if i > 6 && times.last().is_some_and(|&ms| ms > 30.0) {
                break;
            }
            sys::cuEventRecord(a, stream).result().expect("record");
            sys::cuGraphLaunch(exec, stream).result().expect("launch");
            sys::cuEventRecord(b, stream).result().expect("record");
            sys::cuEventSynchronize(b).result().expect("the graph runs");
            let mut ms = 0f32;
            sys::cuEventElapsedTime(&mut ms, a, b).result().expect("elapsed");
            if i > 2 {
                times.push(f64::from(ms));
            }
        }
        times.sort_by(f64::total_cmp);
        let _ = (sys::cuEventDestroy_v2(a), sys::cuEventDestroy_v2(b));
        let _ = (sys::cuGraphExecDestroy(exec), sys::cuGraphDestroy(graph));
        times[times.len() / 2]
    }
}

pub struct Layer {
    pub format: Format,
    pub segment: LinearSegment,
    cols: usize,
    shape: usize,
    bytes: usize,
    _mem: [Mem; 3],
}

fn layer(format: Format, shape: usize, (_, rows, cols): (&str, usize, usize), noise: &[u8]) -> Layer {
    let plane = |p: usize| Mem::new(rows * format.row_bytes(p, cols));
    let mem = [plane(0), plane(1), plane(2)];
    for (p, m) in mem.iter().enumerate() {
        let len = rows * format.row_bytes(p, cols);
        let mut at = 0;
        while at < len {
            let n = noise.len().min(len - at);
            // Scales: halves near 0.01, from the same noise.
            let piece: Vec<u8> = if p != 1 {
                noise[..n].to_vec()
            } else {
                noise[..n].chunks(2).flat_map(|c| [c[0], 0x20]).take(n).collect()
            };
            // SAFETY: inside the allocation.
            unsafe { result::memcpy_htod_sync(m.ptr + at as u64, &piece) }.expect("copy");
            at += n;
        }
    }
    let segment = LinearSegment { planes: [0, 1, 2].map(|p| mem[p].ptr), rows: rows as u32, ..Default::default() };
    Layer { format, segment, cols, shape, bytes: rows * format.total_row_bytes(cols), _mem: mem }
}

/// What the bench measures.
pub struct Options {
    /// Every form, not only those of interest.
    full: bool,
    /// Formats of the weights.
    formats: Vec<(&'static str, Format)>,
    /// Token rows; more than 64 are a prompt of one sequence, fewer are sequences of their own.
    pub rows: Vec<usize>,
    /// Positions that each sequence already has.
    pub contexts: Vec<usize>,
    /// Bits of the activations; 0 for both.
    width: u32,
    /// Each form on each shape.
    pub forms: bool,
    /// Every way to overlap launches.
    ways: bool,
}

impl Options {
    /// From the command line.
    pub fn from_arguments() -> Options {
        let arguments: Vec<String> = std::env::args().collect();
        let has = |name: &str| arguments.iter().any(|a| a == name);
        let list = |name: &str| -> Option<Vec<usize>> {
            let value = arguments.iter().find_map(|a| a.strip_prefix(name))?;
            Some(value.split(',').map(|n| n.parse().expect("a number")).collect())
        };
        let full = has("--full");
        let names: Vec<&str> =
            arguments.iter().find_map(|a| a.strip_prefix("--formats=")).unwrap_or("matmulnbits").split(',').collect();
        let known = |name: &&str| *FORMATS.iter().find(|(n, _)| n == name).expect("a format");
        Options {
            full,
            formats: names.iter().map(known).collect(),
            rows: list("--rows=").unwrap_or(if full { vec![1, 2, 4, 8, 16, 32] } else { vec![1, 8, 32] }),
            contexts: list("--contexts=").unwrap_or(if full { vec![512, 4096] } else { vec![512] }),
            width: list("--width=").map_or(0, |w| w[0] as u32),
            forms: !has("--no-forms"),
            ways: !has("--no-ways"),
        }
    }
}

/// Prints the figures and writes `kernels.json` to `OUT`.
pub fn run(gpu: &Gpu, options: &Options) {
    let mut report: Vec<Value> = Vec::new();
    for &(name, format) in &options.formats {
        run_format(gpu, options, name, wanted_format(format), &mut report);
    }
    if let Some(dir) = std::env::var_os("OUT") {
        let path = std::path::Path::new(&dir).join("kernels.json");
        let text = json!({"device": gpu.describe(), "results": report});
        std::fs::write(path, text.to_string()).expect("write");
    }
}

fn run_format(gpu: &Gpu, options: &Options, name: &str, format: Format, report: &mut Vec<Value>) {
    let full = options.full;
    let mut rng = ChaCha8Rng::seed_from_u64(30);
    let mut noise = vec![0u8; 32 << 20];
    rng.fill_bytes(&mut noise);
    let mut layers = Vec::new();
    for _ in 0..LAYERS {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            layers.push(layer(format, i, shape, &noise));
        }
    }
    layers.push(layer(format, SHAPES.len(), HEAD, &noise));
    let total: usize = layers.iter().map(|l| l.bytes).sum();
    let ceiling = ceiling(gpu, &layers);
    println!(
        "{name}: weights {:.3} GB; read ceiling {ceiling:.0} GB/s = {:.3} ms a step",
        total as f64 / 1e9,
        total as f64 / ceiling / 1e6
    );
    let most = options.rows.iter().max().copied().unwrap_or(1);
    let out = Mem::new(most * HEAD.1 * 4);
    for &tokens in &options.rows {
        let prompt = tokens > 64;
        let step = Step::rows(tokens);
        for (w, width) in WIDTHS.into_iter().enumerate() {
            let kernels = &gpu.kernels[w];
            let bits = if width == ActivationWidth::Int16 { 16 } else { 8 };
            if options.width != 0 && options.width != bits {
                continue;
            }
            let acts: Vec<ActMem> = [5120, 13824]
                .into_iter()
                .map(|cols| {
                    let rows: Vec<Vec<f32>> = (0..tokens).map(|_| ordinary(&mut rng, cols)).collect();
                    ActMem::of(&rows, tokens.next_multiple_of(8), width).0
                })
                .collect();
            let go = |queue: Queue, l: &Layer, variant: Option<LinearVariant>| {
                let x = acts[usize::from(l.cols != 5120)].at;
                let args = LinearArgs { step: step.at, x, out: out.ptr, out_ld: l.segment.rows, ..Default::default() };
                let segments = [l.segment];
                // SAFETY: every buffer has the size that the shapes need.
                unsafe {
                    match variant {
                        Some(v) => kernels.linear_as(queue, format, v, &args, &segments, tokens),
                        None => kernels.linear(queue, format, &args, &segments, tokens),
                    }
                }
            };
            let mut line = |what: String, bytes: usize, ms: f64| {
                let rate = bytes as f64 / ms / 1e6;
                println!(
                    "{name:11} rows {tokens:2} int{bits:<2} {what:44} {ms:8.4} ms {rate:6.0} GB/s {:5.1}% of the ceiling",
                    rate / ceiling * 100.0
                );
                report.push(json!({"format": name, "weights_bytes": total, "ceiling_gb_per_s": ceiling, "rows": tokens, "bits": bits, "what": what, "ms": ms, "gb_per_s": rate, "share": rate / ceiling}));
            };
            let plain = gpu.queue();
            let overlap = Queue { overlap: kernels.capability() >= 90, ..plain };
            // A prompt wants the logits of its last row only.
            let chosen = if prompt { &layers[..layers.len() - 1] } else { &layers[..] };
            for (name, queue) in [("plain", plain), ("overlap", overlap)] {
                let ms = time(gpu, &|| chosen.iter().for_each(|l| go(queue, l, None).expect("launch")));
                line(format!("all layers, chosen forms, {name}"), total, ms);
            }
            for &context in &options.contexts {
                let model = decode::Model::new(gpu, w, &layers, tokens, context, prompt);
                let what = format!("{}, context {context}", if prompt { "prompt" } else { "decode step" });
                let ways = [
                    ("plain", plain, plain),
                    ("overlap", overlap, overlap),
                    ("linear overlaps", plain, overlap),
                    ("others overlap", overlap, plain),
                ];
                for (name, others, linear) in ways.into_iter().take(if options.ways { 4 } else { 2 }) {
                    let ms = time(gpu, &|| model.record(others, linear, &decode::ALL));
                    line(format!("{what}, {name}"), total, ms);
                }
                let ms = time(gpu, &|| model.record(overlap, overlap, &decode::ALL[1..]));
                line(format!("{what}, overlap, no linear layers"), 0, ms);
                let parts = if [1, 8, 32].contains(&tokens) || prompt { &decode::ALL[1..] } else { &[] };
                for part in parts {
                    let ms = time(gpu, &|| model.record(overlap, overlap, &[*part]));
                    line(format!("{what}, overlap, only {part:?}"), 0, ms);
                }
            }
            // Each form on each shape, over all layers of the shape.
            for (i, shape) in SHAPES.iter().chain([&HEAD]).enumerate() {
                if !options.forms || prompt && i == SHAPES.len() {
                    continue;
                }
                let mine: Vec<&Layer> = layers.iter().filter(|l| l.shape == i).collect();
                let bytes = mine.iter().map(|l| l.bytes).sum();
                for variant in
                    LinearVariant::all(format, kernels.capability(), shape.2).into_iter().flat_map(with_warps)
                {
                    if !useful(variant, tokens, full) || go(plain, mine[0], Some(variant)).is_err() {
                        continue;
                    }
                    gpu.sync();
                    let ms = time(gpu, &|| {
                        mine.iter().for_each(|l| go(overlap, l, Some(variant)).expect("launch"));
                    });
                    line(format!("{} {variant:?}", shape.0), bytes, ms);
                }
            }
        }
    }
}

/// The forms worth a measurement at a row count; all that run there if `full`.
fn useful(variant: LinearVariant, tokens: usize, full: bool) -> bool {
    match variant {
        LinearVariant::Gemv { rows, per_thread, .. } if tokens == 1 => rows == 1 && (full || per_thread == 2),
        LinearVariant::Gemv { rows, .. } => full && rows as usize <= tokens && tokens <= 4,
        LinearVariant::Stream { .. } => tokens == 1,
        LinearVariant::Pipe { tiles, .. } if !full => {
            matches!((tokens, tiles), (4 | 8, 1) | (16, 2) | (32, 4)) || tokens > 32 && tiles == 4
        }
        LinearVariant::Tile { tokens: wide, .. } if !full => wide as usize == tokens.next_power_of_two().clamp(16, 64),
        _ => full && tokens > 1,
    }
}

/// A streaming form with fewer warps too.
fn with_warps(variant: LinearVariant) -> Vec<LinearVariant> {
    match variant {
        LinearVariant::Stream { per_thread, depth, .. } => {
            [14, 10].map(|warps| LinearVariant::Stream { per_thread, depth, warps }).to_vec()
        }
        other => vec![other],
    }
}

/// GB/s of a kernel that only reads, over the planes of codes of every layer.
fn ceiling(gpu: &Gpu, layers: &[Layer]) -> f64 {
    let sink = Mem::new(4);
    let codes = |l: &Layer| l.segment.rows as usize * l.format.row_bytes(0, l.cols);
    let ms = time(gpu, &|| {
        for l in layers.iter().filter(|l| codes(l) > 50 << 20) {
            let args = ProbeArgs { source: l.segment.planes[0], count: (codes(l) / 16) as u64, sink: sink.ptr };
            // SAFETY: inside the plane.
            unsafe { gpu.kernels[0].read_all(gpu.queue(), &args) }.expect("launch");
        }
    });
    layers.iter().map(codes).filter(|&n| n > 50 << 20).sum::<usize>() as f64 / ms / 1e6
}
