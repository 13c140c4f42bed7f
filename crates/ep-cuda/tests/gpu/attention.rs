//! RoPE with KV append, and attention over pages, in both layouts and both types.

use half::f16;
use headrace_ep_cuda::abi::{AttentionArgs, KvRef, RopeArgs, StepRow};
use headrace_ep_cuda::launch::{AttentionForm, StagedChoice};
use headrace_kv::{KvGeometry, KvHalf, KvLayout};
use headrace_numerics::attention::{AttentionParams, attend};
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::norm::rms_norm;
use headrace_numerics::rope::{RopeStyle, inv_freq, rotate, table_row};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::device::{Gpu, Mem, Step, assert_same, each, ordinary, quick};
use crate::linear::vector_bytes;

const LAYERS: usize = 2;
const LAYER: usize = 1;

pub fn kv_ref(g: &KvGeometry, base: u64) -> KvRef {
    kv_ref_of(g, base, LAYER)
}

pub fn kv_ref_of(g: &KvGeometry, base: u64, layer: usize) -> KvRef {
    let size = g.dtype.bytes();
    let head_rows = if g.layout == KvLayout::HeadMajor { g.page_tokens } else { 1 };
    KvRef {
        base,
        page_bytes: g.page_bytes() as u64,
        key_offset: g.offset(layer, KvHalf::Key, 0, 0) as u64,
        value_offset: g.offset(layer, KvHalf::Value, 0, 0) as u64,
        token_stride: (g.token_stride() / size) as u32,
        head_stride: (head_rows * g.head_dim) as u32,
        page_tokens: g.page_tokens as u32,
        half: u32::from(g.dtype == KvDtype::F16),
    }
}

fn put(bytes: &mut [u8], at: usize, dtype: KvDtype, x: &[f32]) {
    for (i, &v) in x.iter().enumerate() {
        match dtype {
            KvDtype::F16 => bytes[at + 2 * i..][..2].copy_from_slice(&f16::from_f32(v).to_le_bytes()),
            KvDtype::F32 => bytes[at + 4 * i..][..4].copy_from_slice(&v.to_le_bytes()),
        }
    }
}

fn get(bytes: &[u8], at: usize, dtype: KvDtype, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| match dtype {
            KvDtype::F16 => f16::from_le_bytes([bytes[at + 2 * i], bytes[at + 2 * i + 1]]).to_f32(),
            KvDtype::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|b| bytes[at + 4 * i + b])),
        })
        .collect()
}

/// Sequences with shuffled pages: tables one after the other, and where each starts.
fn tables(rng: &mut ChaCha8Rng, g: &KvGeometry, lengths: &[usize]) -> (Vec<u32>, Vec<usize>, usize) {
    let counts: Vec<usize> = lengths.iter().map(|&n| g.pages_for(n)).collect();
    let total: usize = counts.iter().sum();
    let mut pages: Vec<u32> = (0..total as u32).collect();
    pages.shuffle(rng);
    let starts = counts.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
    (pages, starts, total)
}

pub fn rope_append(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(20);
    each(0..48, |case: usize| {
        let (heads, kv_heads) = [(9, 3), (4, 4), (40, 8), (3, 1)][case % 4];
        let head_dim = [64, 128, 20, 80, 7, 256][case / 2 % 6];
        let dims = if case.is_multiple_of(3) { head_dim / 4 * 2 } else { head_dim / 2 * 2 };
        let g = KvGeometry {
            layers: LAYERS,
            kv_heads,
            head_dim,
            dtype: if case.is_multiple_of(2) { KvDtype::F16 } else { KvDtype::F32 },
            layout: if (case / 2).is_multiple_of(2) { KvLayout::HeadMajor } else { KvLayout::SeqMajor },
            page_tokens: if case.is_multiple_of(5) { 64 } else { 32 },
        };
        let lengths = [40, 70, 1];
        let (pages, starts, total) = tables(&mut rng, &g, &lengths);
        let rows: Vec<StepRow> = [(0, 39), (1, 30), (1, 31), (1, 32), (1, 69), (2, 0)]
            .iter()
            .map(|&(s, p)| StepRow { sequence: s, position: p, token: 0, table: starts[s as usize] as u32 })
            .collect();
        let style = if case.is_multiple_of(2) { RopeStyle::Half } else { RopeStyle::Interleaved };
        let freqs: Vec<f64> = (0..dims / 2).map(|i| inv_freq(10000.0, dims, None, i)).collect();
        let (mut cos, mut sin) = (vec![0.0; 70 * (dims / 2)], vec![0.0; 70 * (dims / 2)]);
        for p in 0..70 {
            let at = p * (dims / 2)..(p + 1) * (dims / 2);
            table_row(&freqs, p, &mut cos[at.clone()], &mut sin[at]);
        }
        let all = heads + 2 * kv_heads;
        let qkv = ordinary(&mut rng, rows.len() * all * head_dim);
        let kind = (case % 3) as u32;
        let norms = case % 4 != 1;
        let (qn_bytes, qn) = vector_bytes(&ordinary(&mut rng, head_dim), kind);
        let (kn_bytes, kn) = vector_bytes(&ordinary(&mut rng, head_dim), kind);

        let mut want_q = qkv.clone();
        let mut want_kv = vec![0xffu8; total * g.page_bytes()];
        for (r, row) in rows.iter().enumerate() {
            let p = row.position as usize;
            let at = p * (dims / 2)..(p + 1) * (dims / 2);
            for h in 0..all {
                let from = (r * all + h) * head_dim;
                let mut x = qkv[from..from + head_dim].to_vec();
                if h < heads + kv_heads {
                    if norms {
                        let source = x.clone();
                        rms_norm(&source, if h < heads { &qn } else { &kn }, 1e-6, &mut x);
                    }
                    rotate(&mut x, style, &cos[at.clone()], &sin[at.clone()]);
                }
                if h < heads {
                    want_q[from..from + head_dim].copy_from_slice(&x);
                    continue;
                }
                let (half, head) =
                    if h < heads + kv_heads { (KvHalf::Key, h - heads) } else { (KvHalf::Value, h - heads - kv_heads) };
                let page = pages[row.table as usize + p / g.page_tokens] as usize;
                let offset = page * g.page_bytes() + g.offset(LAYER, half, head, p % g.page_tokens);
                put(&mut want_kv, offset, g.dtype, &x);
            }
        }

        let step = Step::new(&rows, &[], &pages);
        let store = Mem::new(want_kv.len());
        let (qkv_mem, cos_mem, sin_mem) = (Mem::of(&qkv), Mem::of(&cos), Mem::of(&sin));
        let (qn_mem, kn_mem) = (Mem::of(&qn_bytes), Mem::of(&kn_bytes));
        let args = RopeArgs {
            step: step.at,
            kv: kv_ref(&g, store.ptr),
            qkv: qkv_mem.ptr,
            cos: cos_mem.ptr,
            sin: sin_mem.ptr,
            q_norm: if norms { qn_mem.ptr } else { 0 },
            k_norm: if norms { kn_mem.ptr } else { 0 },
            q_norm_type: kind,
            k_norm_type: kind,
            eps: 1e-6,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            dims: dims as u32,
            interleaved: u32::from(style == RopeStyle::Interleaved),
        };
        // SAFETY: every buffer has the size that the shapes need.
        unsafe { gpu.kernels[0].rope_append(gpu.queue(), &args, rows.len() + 2) }.expect("launch");
        gpu.sync();
        let got: Vec<f32> = qkv_mem.read(qkv.len());
        for r in 0..rows.len() {
            let range = r * all * head_dim..(r * all + heads) * head_dim;
            assert_same(&got[range.clone()], &want_q[range], &|| format!("case {case}: queries of row {r}"));
        }
        assert!(store.read::<u8>(want_kv.len()) == want_kv, "case {case}: pages");
    });
}

struct Case {
    heads: usize,
    kv_heads: usize,
    g: KvGeometry,
    params: AttentionParams,
    lengths: Vec<usize>,
    rows: Vec<(usize, usize)>,
}

fn run(gpu: &Gpu, rng: &mut ChaCha8Rng, case: &Case, name: &str) {
    let Case { heads, kv_heads, g, params, lengths, rows } = case;
    let (dim, share) = (g.head_dim, heads / kv_heads);
    let (pages, starts, total) = tables(rng, g, lengths);
    // Everything that isn't a stored position is 0xff: NaN.
    let mut store = vec![0xffu8; total * g.page_bytes()];
    for (s, &n) in lengths.iter().enumerate() {
        for p in 0..n {
            let page = pages[starts[s] + p / g.page_tokens] as usize;
            for half in [KvHalf::Key, KvHalf::Value] {
                for h in 0..*kv_heads {
                    let at = page * g.page_bytes() + g.offset(LAYER, half, h, p % g.page_tokens);
                    put(&mut store, at, g.dtype, &ordinary(rng, dim));
                }
            }
        }
    }
    let all = heads + 2 * kv_heads;
    let qkv = ordinary(rng, rows.len() * all * dim);
    let mut want = vec![0.0; rows.len() * heads * dim];
    for (r, &(s, pos)) in rows.iter().enumerate() {
        for kv in 0..*kv_heads {
            let read = |half| -> Vec<f32> {
                (0..=pos)
                    .flat_map(|p| {
                        let page = pages[starts[s] + p / g.page_tokens] as usize;
                        get(&store, page * g.page_bytes() + g.offset(LAYER, half, kv, p % g.page_tokens), g.dtype, dim)
                    })
                    .collect()
            };
            let (keys, values) = (read(KvHalf::Key), read(KvHalf::Value));
            for h in kv * share..(kv + 1) * share {
                let q = &qkv[(r * all + h) * dim..][..dim];
                attend(q, &keys, &values, pos, params, &mut want[(r * heads + h) * dim..][..dim]);
            }
        }
    }
    let step_rows: Vec<StepRow> = rows
        .iter()
        .map(|&(s, p)| StepRow { sequence: s as u32, position: p as u32, token: 0, table: starts[s] as u32 })
        .collect();
    let step = Step::new(&step_rows, &[], &pages);
    // Few rows have forms of their own.
    let bucket = if rows.len() <= 2 { rows.len() } else { rows.len() + 1 };
    let chunks = lengths.iter().max().expect("a sequence").div_ceil(32) + 1;
    let (store_mem, qkv_mem) = (Mem::of(&store), Mem::of(&qkv));
    let partials = Mem::new(AttentionArgs::partials_bytes(bucket, *heads, chunks, dim));
    let tickets = Mem::of(&vec![0u32; bucket * heads]);
    // Own choices, then many and few workers, and splits that leave blocks without a chunk.
    let mut ways = [AttentionForm::Direct, AttentionForm::Split, AttentionForm::Split, AttentionForm::Tiled]
        .map(|f| (f, None))
        .to_vec();
    for (heads, workers) in [(6, 3), (6, 2), (2, 2)] {
        ways.push((AttentionForm::Direct, Some(StagedChoice { heads, workers, spread: 1 })));
        ways.extend(
            [1, 3, 8].map(|spread| (AttentionForm::Split, Some(StagedChoice { heads, workers: workers - 1, spread }))),
        );
    }
    for (form, choice) in ways {
        let out = Mem::new(want.len() * 4);
        let args = AttentionArgs {
            step: step.at,
            kv: kv_ref(g, store_mem.ptr),
            qkv: qkv_mem.ptr,
            out: out.ptr,
            partials: partials.ptr,
            tickets: tickets.ptr,
            heads: *heads as u32,
            kv_heads: *kv_heads as u32,
            head_dim: dim as u32,
            qkv_ld: (all * dim) as u32,
            scale: params.scale,
            softcap: params.softcap,
            window: params.window.unwrap_or(0) as u32,
            chunks: chunks as u32,
        };
        // SAFETY: every buffer has the size that the shapes need.
        unsafe { gpu.kernels[0].attention_as(gpu.queue(), form, choice, &args, bucket) }.expect("launch");
        gpu.sync();
        assert_same(&out.read(want.len()), &want, &|| {
            format!(
                "{name}: {heads}/{kv_heads} heads of {dim}, {:?} {:?}, {params:?}, {form:?} {choice:?}",
                g.layout, g.dtype
            )
        });
        assert!(tickets.read::<u32>(bucket * heads).iter().all(|&t| t == 0), "{name}: tickets");
    }
}

pub fn attention(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(21);
    each(0..64, |i: usize| {
        let (heads, kv_heads) = [(9, 3), (4, 4), (40, 8), (14, 2), (6, 3), (20, 1), (8, 1)][i % 7];
        let dim = [64, 128, 20, 80, 7, 256, 36][i / 2 % 7];
        let g = KvGeometry {
            layers: LAYERS,
            kv_heads,
            head_dim: dim,
            dtype: if i.is_multiple_of(2) { KvDtype::F16 } else { KvDtype::F32 },
            layout: if (i / 2).is_multiple_of(2) { KvLayout::HeadMajor } else { KvLayout::SeqMajor },
            page_tokens: if i.is_multiple_of(3) { 64 } else { 32 },
        };
        let params = AttentionParams {
            scale: 1.0 / (dim as f32).sqrt(),
            softcap: if i % 5 == 1 { 3.0 } else { 0.0 },
            window: [None, Some(1), Some(33), Some(100)][i % 4],
        };
        let lengths = vec![1, 200, rng.random_range(2..150)];
        let mut rows = vec![(0, 0), (1, rng.random_range(0..200)), (1, 199), (2, lengths[2] - 1)];
        rows.extend((31..34).map(|p| (1, p)));
        if i % 2 == 1 {
            rows.drain(..if i % 4 == 1 { 5 } else { 6 });
        }
        run(gpu, &mut rng, &Case { heads, kv_heads, g, params, lengths, rows }, "attention");
    });
}

/// Contexts of more chunks than a combining tile of 32, and scores far apart.
pub fn long(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(22);
    for (dtype, layout, scale) in [(KvDtype::F16, KvLayout::HeadMajor, 0.1), (KvDtype::F32, KvLayout::SeqMajor, 12.0)] {
        let g = KvGeometry { layers: LAYERS, kv_heads: 2, head_dim: 64, dtype, layout, page_tokens: 32 };
        let params = AttentionParams { scale, softcap: 0.0, window: None };
        let case = Case {
            heads: 10,
            kv_heads: 2,
            g,
            params,
            lengths: vec![3000, 1],
            rows: vec![(0, 2999), (0, 1023), (0, 1024), (1, 0)],
        };
        run(gpu, &mut rng, &case, "long");
    }
}

/// Prompts: many rows of a sequence, mixed with single rows of others, windows that cut chunks, tiles that are not full.
pub fn prompts(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(23);
    each(0..if quick() { 2 } else { 24 }, |i: usize| {
        let (heads, kv_heads) = [(40, 8), (9, 3), (4, 4), (14, 2), (16, 2), (6, 3)][i % 6];
        let dim = [128, 64][i / 6 % 2];
        let g = KvGeometry {
            layers: LAYERS,
            kv_heads,
            head_dim: dim,
            dtype: KvDtype::F16,
            layout: if i.is_multiple_of(2) { KvLayout::HeadMajor } else { KvLayout::SeqMajor },
            page_tokens: if i.is_multiple_of(3) { 64 } else { 32 },
        };
        let params = AttentionParams {
            scale: 1.0 / (dim as f32).sqrt(),
            softcap: if i % 5 == 1 { 3.0 } else { 0.0 },
            window: [None, Some(40), None, Some(5)][i % 4],
        };
        let lengths = vec![150, 70, 33];
        let start = rng.random_range(0..90);
        let many = rng.random_range(9..60);
        let mut rows: Vec<(usize, usize)> = (start..start + many).map(|p| (0, p)).collect();
        // Single rows, then another prompt, which starts inside a tile.
        rows.extend((0..i % 3).map(|r| (2, 30 + r)));
        rows.extend((0..70).map(|p| (1, p)));
        run(gpu, &mut rng, &Case { heads, kv_heads, g, params, lengths, rows }, "prompts");
    });
}
