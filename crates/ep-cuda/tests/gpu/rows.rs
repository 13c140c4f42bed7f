//! Kernels that make rows: quantisation, norm, SwiGLU, embedding, arg-maximum.

use headrace_ep_cuda::abi::{ALL_FINITE, ArgmaxArgs, ArgmaxResult, EmbedArgs, QuantiseArgs, StepRow, TOKEN_FEEDBACK};
use headrace_ep_cuda::launch::Source;
use headrace_numerics::activation::{ActivationWidth, quantise as quantise_row};
use headrace_numerics::argmax::argmax as argmax_row;
use headrace_numerics::block::dequantise_row;
use headrace_numerics::elementwise::swiglu as swiglu_one;
use headrace_numerics::format::WeightView;
use headrace_numerics::norm::rms_norm;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::device::{ActMem, Gpu, Mem, Step, WIDTHS, assert_same, extreme, formats, ordinary};
use crate::linear::{random_planes, vector_bytes};

const COLS: [usize; 9] = [1, 31, 32, 33, 100, 256, 576, 1536, 5120];

/// Runs `kind` over `rows` and compares floats and quantised blocks with `want`.
#[allow(clippy::too_many_arguments)]
fn check(
    gpu: &Gpu,
    kind: Source,
    name: &str,
    rows: &[Vec<f32>],
    want: &[Vec<f32>],
    mut args: QuantiseArgs,
    step: &Step,
    ld: usize,
) {
    let cols = want[0].len();
    for (w, width) in WIDTHS.into_iter().enumerate() {
        let wide = width == ActivationWidth::Int16;
        let src = Mem::of(&rows.concat());
        let out = ActMem::new(cols, ld, wide);
        args.step = step.at;
        args.out = out.at;
        args.src = src.ptr;
        args.src_ld = rows[0].len() as u32;
        args.codes = 1;
        args.floats = 1;
        // SAFETY: every buffer has the size that the shapes need.
        unsafe { gpu.kernels[w].activation(gpu.queue(), kind, &args, ld) }.expect("launch");
        gpu.sync();
        for (r, row) in want.iter().enumerate() {
            let what = || format!("{name}, {cols} columns, row {r}, {width:?}");
            assert_same(&out.floats(r), row, &what);
            let q = quantise_row(row, width);
            let (codes, d, sums) = out.row(r, wide);
            assert_eq!(codes, q.codes, "{}: codes", what());
            assert_same(&d, &q.d, &|| format!("{}: steps", what()));
            let want_sums: Vec<i32> = q.codes.chunks(32).map(|b| b.iter().map(|&c| i32::from(c)).sum()).collect();
            assert_eq!(sums, want_sums, "{}: sums", what());
        }
    }
}

pub fn quantise(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for cols in COLS {
        for n in [1, 3, 5] {
            let rows: Vec<Vec<f32>> = (0..n)
                .map(|i| if i == 0 { ordinary(&mut rng, cols) } else { extreme(&mut rng, cols, i > 1) })
                .collect();
            check(gpu, Source::Plain, "quantise", &rows, &rows, QuantiseArgs::default(), &Step::rows(n), 8);
        }
    }
}

pub fn norm(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for cols in COLS {
        for weight_type in 0..3 {
            let rows: Vec<Vec<f32>> = (0..5)
                .map(|i| match i {
                    0 => vec![0.0; cols],
                    1 => extreme(&mut rng, cols, false),
                    2 => extreme(&mut rng, cols, true),
                    _ => ordinary(&mut rng, cols),
                })
                .collect();
            let (bytes, weight) = vector_bytes(&ordinary(&mut rng, cols), weight_type);
            let weight_mem = Mem::of(&bytes);
            let eps = 1e-5;
            let normed = |row: &Vec<f32>| {
                let mut out = vec![0.0; cols];
                rms_norm(row, &weight, eps, &mut out);
                out
            };
            let args = QuantiseArgs { weight: weight_mem.ptr, weight_type, eps, ..Default::default() };
            let want: Vec<_> = rows.iter().map(normed).collect();
            check(gpu, Source::Norm, "norm", &rows, &want, args, &Step::rows(5), 8);
            let step = Step::new(&[StepRow::default(); 5], &[1, 4], &[]);
            let want = [want[1].clone(), want[4].clone()];
            let args = QuantiseArgs { gather: 1, wanted: 1, ..args };
            check(gpu, Source::Norm, "norm of wanted rows", &rows, &want, args, &step, 2);
        }
    }
}

pub fn swiglu(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for cols in COLS {
        let rows: Vec<Vec<f32>> = (0..4)
            .map(|i| match i {
                0 => ordinary(&mut rng, 2 * cols).iter().map(|x| x * 60.0).collect(),
                1 => extreme(&mut rng, 2 * cols, true),
                2 => extreme(&mut rng, 2 * cols, false),
                _ => ordinary(&mut rng, 2 * cols),
            })
            .collect();
        let want: Vec<Vec<f32>> =
            rows.iter().map(|r| (0..cols).map(|i| swiglu_one(r[i], r[cols + i])).collect()).collect();
        check(gpu, Source::Swiglu, "swiglu", &rows, &want, QuantiseArgs::default(), &Step::rows(4), 4);
    }
}

pub fn embed(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for format in formats() {
        for cols in [1, 33, 40, 64, 256, 512, 5120].into_iter().filter(|c| c % format.col_multiple() == 0) {
            let vocab = 11;
            let planes = random_planes(&mut rng, format, vocab, cols, false);
            let view = WeightView::new(format, vocab, cols, [&planes[0], &planes[1], &planes[2]]).expect("a matrix");
            let mem = [Mem::of(&planes[0]), Mem::of(&planes[1]), Mem::of(&planes[2])];
            let feedback = Mem::of(&[3u32, 9, 10]);
            let rows: Vec<StepRow> =
                [0, 10, 5, TOKEN_FEEDBACK | 1].iter().map(|&token| StepRow { token, ..Default::default() }).collect();
            let step = Step::new(&rows, &[], &[]);
            for gathered in [0, 1] {
                let out = Mem::new(rows.len() * cols * 4);
                let args = EmbedArgs {
                    step: step.at,
                    planes: [mem[0].ptr, mem[1].ptr, if format.planes() > 2 { mem[2].ptr } else { 0 }],
                    feedback: feedback.ptr,
                    out: out.ptr,
                    cols: cols as u32,
                    vocab: vocab as u32,
                    gathered,
                    ..Default::default()
                };
                // SAFETY: every buffer has the size that the shapes need.
                unsafe { gpu.kernels[0].embed(gpu.queue(), format, &args, 6) }.expect("launch");
                gpu.sync();
                let got: Vec<f32> = out.read(rows.len() * cols);
                for (r, token) in [0, 10, 5, 9].into_iter().enumerate() {
                    let mut want = vec![0.0; cols];
                    dequantise_row(&view, if gathered == 1 { r } else { token }, &mut want);
                    assert_same(&got[r * cols..(r + 1) * cols], &want, &|| {
                        format!("{format:?}, {cols} columns, row {r}, gathered {gathered}")
                    });
                }
            }
        }
    }
}

pub fn argmax(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for vocab in [1usize, 2, 255, 256, 257, 5000, 152064] {
        let mut rows: Vec<Vec<f32>> = (0..6).map(|_| ordinary(&mut rng, vocab)).collect();
        // Ties, signed zeros, a maximum at the end, everything negative, and bad values.
        rows[1] = (0..vocab).map(|i| [1.0, -2.0, 0.5][i % 3]).collect();
        rows[2] = (0..vocab).map(|i| if i % 2 == 0 { -0.0 } else { 0.0 }).collect();
        rows[3].iter_mut().for_each(|x| *x = -x.abs() - 1.0);
        rows[4][vocab - 1] = 1e30;
        let bad = rng.random_range(0..vocab);
        rows[5][bad] = f32::NAN;
        rows[5][vocab - 1] = f32::INFINITY;
        let n = rows.len();
        let wanted: Vec<u32> = (0..n as u32).map(|i| 2 * i + 1).collect();
        let step_rows: Vec<StepRow> =
            (0..2 * n as u32).map(|i| StepRow { sequence: 2 * n as u32 - 1 - i, ..Default::default() }).collect();
        let step = Step::new(&step_rows, &wanted, &[]);
        let logits = Mem::of(&rows.concat());
        let results = Mem::new(n * size_of::<ArgmaxResult>());
        let feedback = Mem::new(n * 4);
        let scratch = Mem::of(&vec![ArgmaxArgs::SCRATCH_INIT; n + 2]);
        // The step's slot is the second of two.
        let (host, flag) = (Mem::new(2 * n * size_of::<ArgmaxResult>()), Mem::new(8));
        let args = ArgmaxArgs {
            step: step.at,
            logits: logits.ptr,
            results: results.ptr,
            feedback: feedback.ptr,
            scratch: scratch.ptr,
            host_results: host.ptr,
            host_flag: flag.ptr,
            vocab: vocab as u32,
            max_wanted: n as u32,
        };
        // Twice: the scratch must be as it was.
        for round in 0..2 {
            // SAFETY: every buffer has the size that the shapes need.
            unsafe {
                gpu.kernels[0].argmax(gpu.queue(), &args, n + 2).expect("launch");
                gpu.kernels[0].report(gpu.queue(), &args).expect("launch");
            }
            gpu.sync();
            let got: Vec<ArgmaxResult> = results.read(n);
            let fed: Vec<u32> = feedback.read(n);
            for (r, row) in rows.iter().enumerate() {
                match argmax_row(row) {
                    Ok(token) => {
                        assert_eq!(
                            got[r],
                            ArgmaxResult { token: token as u32, bad: ALL_FINITE },
                            "{vocab} {r} {round}"
                        );
                        assert_eq!(fed[r], token as u32);
                    }
                    Err(index) => assert_eq!(got[r].bad, index as u32, "{vocab}, row {r}, round {round}"),
                }
            }
            assert_eq!(host.read::<ArgmaxResult>(2 * n)[n..], got);
            assert_eq!(flag.read::<u32>(2)[1], 7);
        }
    }
}
