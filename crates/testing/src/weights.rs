//! Random matrices in any storage format, with scales of a sensible size.

use half::{bf16, f16};
use headrace_numerics::format::{Format, MAX_PLANES, Planes, ScaleType};
use rand::Rng;

/// The planes of a random `[rows, cols]` matrix whose elements are about `amplitude` at most. `cols` fits the format.
pub fn random_matrix(
    rng: &mut impl Rng,
    format: Format,
    rows: usize,
    cols: usize,
    amplitude: f32,
) -> [Vec<u8>; MAX_PLANES] {
    let mut planes: [Vec<u8>; MAX_PLANES] = Default::default();
    for (p, plane) in planes.iter_mut().enumerate() {
        *plane = vec![0; rows * format.row_bytes(p, cols)];
        rng.fill(&mut plane[..]);
    }
    // (block bytes, offset of the scale, offset of the minimum, divisor of the scale, divisor of the minimum)
    let blocks: Option<(usize, usize, Option<usize>, f32, f32)> = match format {
        Format::Q4_0 => Some((18, 0, None, 8.0, 1.0)),
        Format::Q4_1 => Some((20, 0, Some(2), 8.0, -1.0)),
        Format::Q5_0 => Some((22, 0, None, 16.0, 1.0)),
        Format::Q5_1 => Some((24, 0, Some(2), 16.0, -1.0)),
        Format::Q8_0 => Some((34, 0, None, 127.0, 1.0)),
        Format::Q4_K => Some((144, 0, Some(2), 63.0 * 8.0, 63.0)),
        Format::Q5_K => Some((176, 0, Some(2), 63.0 * 16.0, 63.0)),
        Format::Q6_K => Some((210, 208, None, 127.0 * 32.0, 1.0)),
        _ => None,
    };
    if let Some((size, scale, min, scale_div, min_div)) = blocks {
        for block in planes[0].chunks_exact_mut(size) {
            put_f16(block, scale, amplitude * rng.random_range(0.2..1.0) / scale_div);
            if let Some(min) = min {
                put_f16(block, min, amplitude * rng.random_range(0.2..1.0) / min_div);
            }
        }
    }
    match format {
        Format::Nbits(n) => {
            let div = if n.bits == 4 { 8.0 } else { 128.0 };
            for at in 0..planes[1].len() / n.scale.bytes() {
                let scale = amplitude * rng.random_range(0.2f32..1.0) / div;
                match n.scale {
                    ScaleType::F32 => planes[1][at * 4..at * 4 + 4].copy_from_slice(&scale.to_le_bytes()),
                    ScaleType::F16 => put_f16(&mut planes[1], at * 2, scale),
                }
            }
        }
        Format::Planes(Planes::Q4_1) => planes[1].chunks_exact_mut(4).for_each(|block| {
            put_f16(block, 0, amplitude * rng.random_range(0.2..1.0) / 8.0);
            put_f16(block, 2, -amplitude * rng.random_range(0.2..1.0));
        }),
        Format::Planes(Planes::Q6_K) => {
            for row in planes[0].chunks_exact_mut(format.row_bytes(0, cols)) {
                for d in row[cols / 16 * 13..].chunks_exact_mut(4) {
                    let scale = f16::from_f32(amplitude * rng.random_range(0.2..1.0) / (127.0 * 32.0));
                    d.copy_from_slice(&scale.to_f32().to_le_bytes());
                }
            }
        }
        Format::Planes(Planes::Q4_K) => planes[1].chunks_exact_mut(16).for_each(|block| {
            put_f16(block, 0, amplitude * rng.random_range(0.2..1.0) / (63.0 * 8.0));
            put_f16(block, 2, amplitude * rng.random_range(0.2..1.0) / 63.0);
        }),
        Format::F32 => {
            planes[0].chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&float(rng, amplitude).to_le_bytes()))
        }
        Format::F16 => planes[0].chunks_exact_mut(2).for_each(|c| put_f16(c, 0, float(rng, amplitude))),
        Format::BF16 => planes[0]
            .chunks_exact_mut(2)
            .for_each(|c| c.copy_from_slice(&bf16::from_f32(float(rng, amplitude)).to_le_bytes())),
        _ => {}
    }
    planes
}

fn float(rng: &mut impl Rng, amplitude: f32) -> f32 {
    rng.random_range(-amplitude..=amplitude)
}

fn put_f16(bytes: &mut [u8], at: usize, x: f32) {
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
}
