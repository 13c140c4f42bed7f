//! Linear layers of every format in every form.

use half::{bf16, f16};
use headrace_ep_cuda::abi::{LinearArgs, LinearSegment};
use headrace_ep_cuda::launch::{LinearVariant, is_piped};
use headrace_numerics::format::{Format, Planes, ScaleType, WeightView};
use headrace_numerics::linear::{dense_dot, epilogue, quantised_dot};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::device::{ActMem, Gpu, Mem, Step, WIDTHS, assert_same, each, extreme, formats, ordinary, quick};

/// Bytes of a vector stored as `FloatType` number `kind`, and the values that they read back as.
pub fn vector_bytes(x: &[f32], kind: u32) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let values = x
        .iter()
        .map(|&v| match kind {
            0 => {
                bytes.extend(v.to_le_bytes());
                v
            }
            1 => {
                bytes.extend(f16::from_f32(v).to_le_bytes());
                f16::from_f32(v).to_f32()
            }
            _ => {
                bytes.extend(bf16::from_f32(v).to_le_bytes());
                bf16::from_f32(v).to_f32()
            }
        })
        .collect();
    (bytes, values)
}

/// Random planes of a matrix. Unless `wild`, scales and floats are of ordinary size; else every byte is random, so that
/// scales are infinite, NaN or denormal too.
pub fn random_planes(rng: &mut ChaCha8Rng, format: Format, rows: usize, cols: usize, wild: bool) -> [Vec<u8>; 3] {
    let mut planes = [0, 1, 2].map(|p| {
        let mut bytes = vec![0u8; rows * format.row_bytes(p, cols)];
        rng.fill_bytes(&mut bytes);
        bytes
    });
    if wild {
        return planes;
    }
    let mut half = |bytes: &mut [u8]| {
        let v = f16::from_f32((rng.random::<f32>() - 0.3) * 0.05).to_le_bytes();
        bytes[..2].copy_from_slice(&v);
    };
    let (size, offsets): (usize, &[usize]) = match format {
        Format::Q4_0 => (18, &[0]),
        Format::Q4_1 => (20, &[0, 2]),
        Format::Q5_0 => (22, &[0]),
        Format::Q5_1 => (24, &[0, 2]),
        Format::Q8_0 => (34, &[0]),
        Format::Q4_K => (144, &[0, 2]),
        Format::Q5_K => (176, &[0, 2]),
        Format::Q6_K => (210, &[208]),
        Format::F16 | Format::BF16 | Format::F32 => {
            let kind = match format {
                Format::F32 => 0,
                Format::F16 => 1,
                _ => 2,
            };
            planes[0] = vector_bytes(&ordinary(rng, rows * cols), kind).0;
            return planes;
        }
        Format::Planes(Planes::Q6_K) => {
            for row in planes[0].chunks_exact_mut(format.row_bytes(0, cols)) {
                for d in row[cols / 16 * 13..].chunks_exact_mut(4) {
                    let mut bytes = [0; 2];
                    half(&mut bytes);
                    d.copy_from_slice(&f16::from_le_bytes(bytes).to_f32().to_le_bytes());
                }
            }
            return planes;
        }
        Format::Planes(p) => {
            let (size, offsets): (usize, &[usize]) = match p {
                Planes::Q4_1 => (4, &[0, 2]),
                _ => (16, &[0, 2]),
            };
            for block in planes[1].chunks_mut(size) {
                for &at in offsets {
                    half(&mut block[at..]);
                }
            }
            return planes;
        }
        Format::Nbits(n) => {
            match n.scale {
                ScaleType::F16 => planes[1].chunks_mut(2).for_each(half),
                ScaleType::F32 => planes[1].chunks_mut(4).for_each(|b| {
                    b.copy_from_slice(&((rng.random::<f32>() - 0.3) * 0.05).to_le_bytes());
                }),
            }
            return planes;
        }
    };
    for block in planes[0].chunks_mut(size) {
        for &at in offsets {
            half(&mut block[at..]);
        }
    }
    planes
}

/// A matrix on the host and on the device.
struct Matrix {
    planes: [Vec<u8>; 3],
    mem: [Mem; 3],
}

impl Matrix {
    fn new(rng: &mut ChaCha8Rng, format: Format, rows: usize, cols: usize, wild: bool) -> Matrix {
        let planes = random_planes(rng, format, rows, cols, wild);
        let mem = [Mem::of(&planes[0]), Mem::of(&planes[1]), Mem::of(&planes[2])];
        Matrix { planes, mem }
    }

    fn view(&self, format: Format, rows: usize, cols: usize) -> WeightView<'_> {
        WeightView::new(format, rows, cols, [&self.planes[0], &self.planes[1], &self.planes[2]]).expect("a matrix")
    }

    fn segment(&self, format: Format, rows: usize) -> LinearSegment {
        let third = if format.planes() > 2 { self.mem[2].ptr } else { 0 };
        LinearSegment { planes: [self.mem[0].ptr, self.mem[1].ptr, third], rows: rows as u32, ..Default::default() }
    }
}

fn columns(format: Format) -> Vec<usize> {
    match format.col_multiple() {
        256 => vec![256, 768, 2304],
        32 => vec![32, 96, 320, 1056],
        _ => vec![1, 33, 40, 70, 320, 512, 1000, 1536],
    }
}

/// One matrix times some rows, in every form.
fn check(gpu: &Gpu, rng: &mut ChaCha8Rng, format: Format, rows: usize, cols: usize, tokens: usize, wild: bool) {
    let matrix = Matrix::new(rng, format, rows, cols, wild);
    let view = matrix.view(format, rows, cols);
    let x: Vec<Vec<f32>> =
        (0..tokens).map(|i| if wild { extreme(rng, cols, i % 3 == 2) } else { ordinary(rng, cols) }).collect();
    let step = Step::rows(tokens);
    let ld = tokens.next_multiple_of(8);
    for (w, width) in WIDTHS.into_iter().enumerate() {
        let (act, quant) = ActMem::of(&x, ld, width);
        let want: Vec<f32> = (0..tokens)
            .flat_map(|t| {
                let (quant, x) = (&quant[t], &x[t]);
                (0..rows).map(move |r| {
                    if format.is_quantised() { quantised_dot(&view, r, quant) } else { dense_dot(&view, r, x) }
                })
            })
            .collect();
        for variant in LinearVariant::all(format, gpu.kernels[w].capability(), cols) {
            let out = Mem::new(tokens * rows * 4);
            let args = LinearArgs { step: step.at, x: act.at, out: out.ptr, out_ld: rows as u32, ..Default::default() };
            let segment = [matrix.segment(format, rows)];
            // SAFETY: every buffer has the size that the shapes need.
            unsafe { gpu.kernels[w].linear_as(gpu.queue(), format, variant, &args, &segment, tokens + 3) }
                .expect("launch");
            gpu.sync();
            assert_same(&out.read(tokens * rows), &want, &|| {
                format!("{format:?} [{rows}, {cols}], {tokens} rows, {width:?}, {variant:?}, wild {wild}")
            });
        }
    }
}

pub fn quantised(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    each(formats().into_iter().filter(|f| f.is_quantised()), |format| {
        for cols in columns(format) {
            for tokens in [1, 2, 3, 5, 8, 9, 17, 33, 40] {
                let rows = rng.random_range(1..70);
                check(gpu, &mut rng, format, rows, cols, tokens, false);
            }
        }
    });
    // The shapes that the tuned forms are for.
    for format in formats().into_iter().filter(|f| {
        matches!(
            f.name().as_str(),
            "int4/32 f16" | "int4/32 f32 zp" | "Q4_0" | "Q4_K" | "Q4_1 in planes" | "Q4_K in planes"
        )
    }) {
        for (rows, cols, tokens) in [(7168, 5120, 1), (640, 13824, 1), (2000, 5120, 4), (512, 5120, 33)] {
            check(gpu, &mut rng, format, rows, cols, tokens, false);
        }
    }
}

pub fn extremes(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    each(formats(), |format| {
        for cols in columns(format) {
            for tokens in [1, 3, 6, 19] {
                check(gpu, &mut rng, format, 37, cols, tokens, true);
            }
        }
    });
}

pub fn dense(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    for format in [Format::F32, Format::F16, Format::BF16] {
        for cols in [1, 7, 8, 63, 64, 65, 72, 576, 1000, 1536] {
            for tokens in [1, 2, 4, 5, 40] {
                let rows = rng.random_range(1..100);
                check(gpu, &mut rng, format, rows, cols, tokens, false);
            }
        }
    }
}

/// Several segments, biases of every type, residuals, wanted rows, gaps in the output, more segments than a launch takes.
pub fn segments(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(13);
    each(formats(), |format| {
        let cols = if format.col_multiple() == 256 { 512 } else { 160 };
        for (count, tokens) in [(1, 1), (3, 1), (3, 4), (2, 9), (11, 2), (9, 20)] {
            let sizes: Vec<usize> = (0..count).map(|_| rng.random_range(1..45)).collect();
            let matrices: Vec<Matrix> = sizes.iter().map(|&n| Matrix::new(&mut rng, format, n, cols, false)).collect();
            let all = 2 * tokens;
            let wanted: Vec<u32> = (0..tokens as u32).map(|i| 2 * i).collect();
            let rows = vec![Default::default(); all];
            let step = Step::new(&rows, &wanted, &[]);
            let x: Vec<Vec<f32>> = (0..tokens).map(|_| ordinary(&mut rng, cols)).collect();
            let out_ld = sizes.iter().sum::<usize>() + 3 * count + 5;
            let before = ordinary(&mut rng, tokens * out_ld);
            for (w, width) in WIDTHS.into_iter().enumerate() {
                let (act, quant) = ActMem::of(&x, tokens.next_multiple_of(8), width);
                let mut want = before.clone();
                let mut column = 2;
                let (mut list, mut keep) = (Vec::new(), Vec::new());
                for (i, (matrix, &n)) in matrices.iter().zip(&sizes).enumerate() {
                    let view = matrix.view(format, n, cols);
                    let kind = (i % 4) as u32;
                    let (bytes, bias) = vector_bytes(&ordinary(&mut rng, n), kind.min(2));
                    let bias = (kind < 3).then_some(bias);
                    let accumulate = i % 2 == 1;
                    for t in 0..tokens {
                        for r in 0..n {
                            let y = if format.is_quantised() {
                                quantised_dot(&view, r, &quant[t])
                            } else {
                                dense_dot(&view, r, &x[t])
                            };
                            let at = t * out_ld + column + r;
                            want[at] = epilogue(y, bias.as_ref().map(|b| b[r]), accumulate.then_some(before[at]));
                        }
                    }
                    let mem = Mem::of(&bytes);
                    let mut segment = matrix.segment(format, n);
                    segment.column = column as u32;
                    segment.bias = if bias.is_some() { mem.ptr } else { 0 };
                    segment.bias_type = kind.min(2);
                    segment.accumulate = u32::from(accumulate);
                    list.push(segment);
                    keep.push(mem);
                    column += n + 3;
                }
                let out = Mem::of(&before);
                let args = LinearArgs {
                    step: step.at,
                    x: act.at,
                    out: out.ptr,
                    out_ld: out_ld as u32,
                    wanted: 1,
                    ..Default::default()
                };
                // SAFETY: every buffer has the size that the shapes need.
                unsafe { gpu.kernels[w].linear(gpu.queue(), format, &args, &list, tokens) }.expect("launch");
                gpu.sync();
                assert_same(&out.read(want.len()), &want, &|| {
                    format!("{format:?}, {count} segments, {tokens} rows, {width:?}")
                });
            }
        }
    });
}

/// The formats that linear_tile.cu serves.
pub fn tiled_formats() -> Vec<Format> {
    formats().into_iter().filter(|&f| is_piped(f)).collect()
}

/// The clusters of linear_tile.cu: tiles that are cut off, many token rows, several segments with bias, residual and gaps, spare
/// activation rows.
pub fn tiles(gpu: &Gpu) {
    let mut rng = ChaCha8Rng::seed_from_u64(14);
    let formats = tiled_formats();
    assert!(formats.len() >= 4, "{formats:?}");
    let shapes = [
        (vec![1], 256, 1),
        (vec![70, 300], 512, 65),
        (vec![129], 768, 7),
        (vec![64, 1, 128], 1280, 130),
        (vec![200], 2560, 20),
        (vec![260, 33], 1536, 64),
        (vec![300], 2304, 33),
        (vec![128], 1792, 200),
    ];
    let (first, some) = if quick() { (1, 1) } else { (0, shapes.len()) };
    let formats = if quick() { &formats[..1] } else { &formats[..] };
    each(shapes.iter().enumerate().skip(first).take(some), |(i, (sizes, cols, tokens))| {
        let (cols, tokens) = (*cols, *tokens);
        for &format in formats {
            let wild = i % 3 == 1;
            let matrices: Vec<Matrix> = sizes.iter().map(|&n| Matrix::new(&mut rng, format, n, cols, wild)).collect();
            let x: Vec<Vec<f32>> = (0..tokens)
                .map(|t| if wild { extreme(&mut rng, cols, t % 3 == 2) } else { ordinary(&mut rng, cols) })
                .collect();
            let step = Step::rows(tokens);
            let out_ld = sizes.iter().sum::<usize>() + 3 * sizes.len() + 5;
            let before = ordinary(&mut rng, tokens * out_ld);
            for (w, width) in WIDTHS.into_iter().enumerate() {
                let spare = if i % 2 == 0 { 24 } else { 0 };
                let (act, quant) = ActMem::of(&x, tokens.next_multiple_of(8) + spare, width);
                let mut want = before.clone();
                let mut column = 2;
                let (mut list, mut keep) = (Vec::new(), Vec::new());
                for (m, (matrix, &n)) in matrices.iter().zip(sizes).enumerate() {
                    let view = matrix.view(format, n, cols);
                    let (bytes, bias) = vector_bytes(&ordinary(&mut rng, n), (m % 3) as u32);
                    let (has_bias, accumulate) = (m % 2 == 0, (i + m) % 3 == 1);
                    for (t, row) in quant.iter().enumerate() {
                        for (r, &b) in bias.iter().enumerate() {
                            let at = t * out_ld + column + r;
                            let y = quantised_dot(&view, r, row);
                            want[at] = epilogue(y, has_bias.then_some(b), accumulate.then_some(before[at]));
                        }
                    }
                    let mem = Mem::of(&bytes);
                    let mut segment = matrix.segment(format, n);
                    segment.column = column as u32;
                    segment.bias = if has_bias { mem.ptr } else { 0 };
                    segment.bias_type = (m % 3) as u32;
                    segment.accumulate = u32::from(accumulate);
                    list.push(segment);
                    keep.push(mem);
                    column += n + 3;
                }
                let forms: Vec<LinearVariant> = LinearVariant::all(format, gpu.kernels[w].capability(), cols)
                    .into_iter()
                    .filter(|v| matches!(v, LinearVariant::Tile { .. } | LinearVariant::Wide))
                    .collect();
                assert!(!forms.is_empty() || gpu.kernels[w].capability() < 90, "{format:?}");
                for variant in forms {
                    let out = Mem::of(&before);
                    let args = LinearArgs {
                        step: step.at,
                        x: act.at,
                        out: out.ptr,
                        out_ld: out_ld as u32,
                        ..Default::default()
                    };
                    // SAFETY: every buffer has the size that the shapes need.
                    unsafe { gpu.kernels[w].linear_as(gpu.queue(), format, variant, &args, &list, tokens + 3) }
                        .expect("launch");
                    gpu.sync();
                    assert_same(&out.read(want.len()), &want, &|| {
                        format!("{format:?} {sizes:?} x {cols}, {tokens} rows, {width:?}, {variant:?}, wild {wild}")
                    });
                }
            }
        }
    });
}
