//! Speed of attention alone over the keys and values of many layers, random ones, and that every way gives the same bits.

use cudarc::driver::result;
use headrace_ep_cuda::abi::{AttentionArgs, StepRow};
use headrace_ep_cuda::launch::{AttentionForm, StagedChoice};
use headrace_kv::{KvGeometry, KvLayout};
use headrace_numerics::elementwise::KvDtype;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::attention::kv_ref_of;
use crate::bench::{LAYERS, Options, time};
use crate::device::{Gpu, Mem, Step, ordinary, same};

const HEADS: usize = 40;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
/// Most bytes of keys and values that are held; more layers than fit read the same ones in turn.
const MOST_BYTES: usize = 40 << 30;

/// Prints, for each number of rows and each context, what `LAYERS` launches take in every way.
pub fn run(gpu: &Gpu, options: &Options) {
    let mut rng = ChaCha8Rng::seed_from_u64(31);
    let noise: Vec<u16> = ordinary(&mut rng, 16 << 20).into_iter().map(|x| half::f16::from_f32(x).to_bits()).collect();
    let noise = Mem::of(&noise);
    for &context in &options.contexts {
        for &rows in &options.rows {
            shape(gpu, &mut rng, &noise, rows, context, options.forms);
        }
    }
}

fn shape(gpu: &Gpu, rng: &mut ChaCha8Rng, noise: &Mem, rows: usize, context: usize, forms: bool) {
    let g = KvGeometry {
        layers: 1,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: 32,
    };
    // A context of whole chunks.
    let pages = g.pages_for(context);
    let bytes = rows * pages * g.page_bytes();
    let layers = (MOST_BYTES / bytes).clamp(1, LAYERS);
    let stores: Vec<Mem> = (0..layers)
        .map(|_| {
            let store = Mem::new(bytes);
            let mut at = 0;
            while at < bytes {
                let n = (32 << 20).min(bytes - at);
                // SAFETY: both ranges lie in their allocations.
                unsafe { result::memcpy_dtod_sync(store.ptr + at as u64, noise.ptr, n) }.expect("copy");
                at += n;
            }
            store
        })
        .collect();
    let step_rows: Vec<StepRow> = (0..rows as u32)
        .map(|s| StepRow { sequence: s, position: context as u32 - 1, token: 0, table: s * pages as u32 })
        .collect();
    let tables: Vec<u32> = (0..(rows * pages) as u32).collect();
    let step = Step::new(&step_rows, &[], &tables);
    let all = HEADS + 2 * KV_HEADS;
    let qkv = Mem::of(&ordinary(rng, rows * all * DIM));
    let chunks = context.div_ceil(32);
    let partials = Mem::new(AttentionArgs::partials_bytes(rows, HEADS, chunks, DIM));
    let tickets = Mem::of(&vec![0u32; rows * HEADS]);
    let out = Mem::new(rows * HEADS * DIM * 4);
    let args = |layer: usize| AttentionArgs {
        step: step.at,
        kv: kv_ref_of(&g, stores[layer % layers].ptr, 0),
        qkv: qkv.ptr,
        out: out.ptr,
        partials: partials.ptr,
        tickets: tickets.ptr,
        heads: HEADS as u32,
        kv_heads: KV_HEADS as u32,
        head_dim: DIM as u32,
        qkv_ld: (all * DIM) as u32,
        scale: 0.088,
        chunks: chunks as u32,
        ..Default::default()
    };
    let kernels = &gpu.kernels[0];
    let mut ways = vec![(kernels.attention_form(&args(0), rows), None)];
    if forms {
        let blocks = rows * KV_HEADS;
        let split =
            |heads, workers, spread: usize| (AttentionForm::Split, Some(StagedChoice { heads, workers, spread }));
        ways.extend(
            [4, 3, 2].map(|workers| (AttentionForm::Direct, Some(StagedChoice { heads: 6, workers, spread: 1 }))),
        );
        for workers in [6, 4, 2, 1] {
            for waves in [1, 2] {
                let spread = (gpu.kernels[0].processors() * 2 * waves / blocks).min(chunks.div_ceil(workers));
                if spread > 1 && rows <= 16 {
                    ways.push(split(6, workers, spread));
                }
                if rows == 1 && workers < 6 {
                    ways.push(split(2, workers, spread.min(chunks.div_ceil(workers))));
                }
            }
        }
    }
    let mut expected: Vec<f32> = Vec::new();
    // Copies return before they are done, and the tests' stream does not wait for them.
    let settle = || result::ctx::synchronize().expect("copies");
    for (form, choice) in ways {
        out.write(&vec![f32::NAN; rows * HEADS * DIM]);
        settle();
        // SAFETY: every buffer has the size that the shapes need.
        let go = |layer: usize| unsafe { kernels.attention_as(gpu.queue(), form, choice, &args(layer), rows) };
        if let Err(error) = go(0) {
            println!("rows {rows:2} context {context:5} {form:?} {choice:?}: {error}");
            continue;
        }
        gpu.sync();
        let got: Vec<f32> = out.read(rows * HEADS * DIM);
        if expected.is_empty() {
            expected.clone_from(&got);
        }
        let mut equal = got.iter().zip(&expected).all(|(&a, &b)| same(a, b)) && got.iter().all(|x| x.is_finite());
        let ms = time(gpu, &|| (0..LAYERS).for_each(|l| go(l).expect("launch")));
        // The same again and again: what changes from launch to launch is a race.
        for _ in 0..50 {
            out.write(&vec![f32::NAN; rows * HEADS * DIM]);
            settle();
            go(0).expect("launch");
            gpu.sync();
            let again: Vec<f32> = out.read(rows * HEADS * DIM);
            equal &= again.iter().zip(&expected).all(|(&a, &b)| same(a, b));
        }
        println!(
            "rows {rows:2} context {context:5} {ms:8.3} ms {:5.0} GB/s {:7.1} us a layer {} {form:?} {choice:?}",
            (bytes * LAYERS) as f64 / ms / 1e6,
            ms * 1e3 / LAYERS as f64,
            if equal { "same bits" } else { "OTHER BITS" },
        );
        assert!(equal, "{form:?} {choice:?} gives other bits than the first way");
    }
}
