//! Eight blocks of a weight row in memory, in the order of the activations, and how each format unpacks to them.
//!
//! The unpacking is plain code over arrays; the AVX2 kernels compile it with their own instruction set.

use half::f16;
use headrace_numerics::block::{blocks, weight_block};
use headrace_numerics::format::{BLOCK, Format, Nbits, Planes, ScaleType, WeightView, ZeroPoint};

use crate::activations::{GROUP_BLOCKS, GROUP_CODES, code_at};

/// Unsigned codes of a group in the order of its elements, block after block.
pub(crate) type Natural = [u8; GROUP_CODES];

/// Eight blocks: codes in the byte order of the activations, one lane a block for the rest.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Panel {
    pub(super) codes: [u8; GROUP_CODES],
    /// Scale of the block, or of its first half. Zero in lanes without a block.
    pub(super) scale: [f32; GROUP_BLOCKS],
    /// The second half's scale, or the float minimum.
    pub(super) other: [f32; GROUP_BLOCKS],
    /// Zero point of the block in `[0]`, or of each half.
    pub(super) zero: [[i32; GROUP_BLOCKS]; 2],
}

impl Panel {
    /// Eight absent blocks.
    pub(super) const EMPTY: Panel = Panel {
        codes: [0; GROUP_CODES],
        scale: [0.0; GROUP_BLOCKS],
        other: [0.0; GROUP_BLOCKS],
        zero: [[0; GROUP_BLOCKS]; 2],
    };
}

/// True where each half of a block has a scale of its own.
pub(super) fn has_halves(format: Format) -> bool {
    match format {
        Format::Q6_K | Format::Planes(Planes::Q6_K) => true,
        Format::Nbits(n) => n.block == 16,
        _ => false,
    }
}

/// True for formats with a float minimum.
pub(super) fn has_min(format: Format) -> bool {
    matches!(
        format,
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K | Format::Planes(Planes::Q4_1 | Planes::Q4_K)
    )
}

/// True if all codes are below 16.
pub(super) fn has_nibbles(format: Format) -> bool {
    match format {
        Format::Q4_0 | Format::Q4_1 | Format::Q4_K | Format::Planes(Planes::Q4_1 | Planes::Q4_K) => true,
        Format::Nbits(n) => n.bits == 4,
        _ => false,
    }
}

/// Reorders a group's codes as the activations are: the portable form.
#[inline(always)]
pub(crate) fn interleave(natural: &Natural, codes: &mut [u8; GROUP_CODES]) {
    for (lane, block) in natural.chunks_exact(BLOCK).enumerate() {
        for (i, &code) in block.iter().enumerate() {
            codes[code_at(lane, i)] = code;
        }
    }
}

#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Low nibbles of 16 bytes, then high ones.
#[inline(always)]
fn split_nibbles(packed: &[u8], to: &mut [u8]) {
    let (low, high) = to.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Unpacks group `g` of row `row`: everything but the order of the codes, which `natural` holds as they come.
#[inline(always)]
pub(super) fn unpack(w: &WeightView<'_>, row: usize, g: usize, natural: &mut Natural, panel: &mut Panel) {
    let bytes = w.row(0, row);
    let count = (blocks(w.cols) - g * GROUP_BLOCKS).min(GROUP_BLOCKS);
    if count < GROUP_BLOCKS {
        *panel = Panel::EMPTY;
        natural.fill(0);
    }
    match w.format {
        Format::Q4_0 => packed::<18, false, false>(bytes, g, 8, natural, panel),
        Format::Q4_1 => packed::<20, true, false>(bytes, g, 0, natural, panel),
        Format::Q5_0 => packed::<22, false, true>(bytes, g, 16, natural, panel),
        Format::Q5_1 => packed::<24, true, true>(bytes, g, 0, natural, panel),
        Format::Q8_0 => {
            panel.zero[0] = [128; GROUP_BLOCKS];
            for (lane, block) in bytes.chunks_exact(34).skip(g * GROUP_BLOCKS).take(GROUP_BLOCKS).enumerate() {
                panel.scale[lane] = half_at(block, 0);
                for (to, &code) in natural[lane * BLOCK..][..BLOCK].iter_mut().zip(&block[2..]) {
                    *to = code ^ 128;
                }
            }
        }
        Format::Q4_K => with_k_scales(&bytes[g * 144..][..144], false, natural, panel),
        Format::Q5_K => with_k_scales(&bytes[g * 176..][..176], true, natural, panel),
        Format::Q6_K => six_bits(&bytes[g * 210..][..210], natural, panel),
        Format::Nbits(n) => planar(w, n, row, g, count, natural, panel),
        Format::Planes(_) => {
            let zero: i16 = if w.format == Format::Planes(Planes::Q6_K) { 32 } else { 0 };
            panel.zero = [[i32::from(zero); GROUP_BLOCKS]; 2];
            for lane in 0..count {
                let block = weight_block(w, row, g * GROUP_BLOCKS + lane);
                panel.scale[lane] = block.scale[0];
                panel.other[lane] = block.min.unwrap_or(block.scale[1]);
                for (to, &code) in natural[lane * BLOCK..][..BLOCK].iter_mut().zip(&block.codes) {
                    *to = (code + zero) as u8;
                }
            }
        }
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("checked by `linear`: the format is quantised"),
    }
}

/// Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum (`MIN`), fifth bits (`HIGH`), nibbles.
#[inline(always)]
fn packed<const SIZE: usize, const MIN: bool, const HIGH: bool>(
    bytes: &[u8],
    g: usize,
    zero: i32,
    natural: &mut Natural,
    panel: &mut Panel,
) {
    panel.zero[0] = [zero; GROUP_BLOCKS];
    for (lane, block) in bytes.chunks_exact(SIZE).skip(g * GROUP_BLOCKS).take(GROUP_BLOCKS).enumerate() {
        let to = &mut natural[lane * BLOCK..][..BLOCK];
        panel.scale[lane] = half_at(block, 0);
        let mut head = 2;
        if MIN {
            panel.other[lane] = half_at(block, 2);
            head += 2;
        }
        if HIGH {
            let bits = u32::from_le_bytes([block[head], block[head + 1], block[head + 2], block[head + 3]]);
            split_nibbles(&block[head + 4..], to);
            for (i, to) in to.iter_mut().enumerate() {
                *to |= (((bits >> i) & 1) << 4) as u8;
            }
        } else {
            split_nibbles(&block[head..], to);
        }
    }
}

/// Q4_K, Q5_K (`five`). Source of the packing of scales: ggml, `ggml-quants.c`, `get_scale_min_k4`.
#[inline(always)]
fn with_k_scales(sup: &[u8], five: bool, natural: &mut Natural, panel: &mut Panel) {
    let (d, d_min, packed) = (half_at(sup, 0), half_at(sup, 2), &sup[4..16]);
    let nibbles = &sup[if five { 48 } else { 16 }..];
    panel.zero[0] = [0; GROUP_BLOCKS];
    for lane in 0..GROUP_BLOCKS {
        let (scale, min) = if lane < 4 {
            (packed[lane] & 63, packed[lane + 4] & 63)
        } else {
            let (low, scale, min) = (packed[lane + 4], packed[lane - 4] >> 6, packed[lane] >> 6);
            (low & 15 | scale << 4, low >> 4 | min << 4)
        };
        panel.scale[lane] = d * f32::from(scale);
        panel.other[lane] = -(d_min * f32::from(min));
        let shift = lane % 2 * 4;
        let from = &nibbles[lane / 2 * BLOCK..][..BLOCK];
        for (i, (to, &byte)) in natural[lane * BLOCK..][..BLOCK].iter_mut().zip(from).enumerate() {
            let high = if five { (sup[16 + i] >> lane & 1) << 4 } else { 0 };
            *to = byte >> shift & 15 | high;
        }
    }
}

/// Q6_K.
#[inline(always)]
fn six_bits(sup: &[u8], natural: &mut Natural, panel: &mut Panel) {
    let d = half_at(sup, 208);
    panel.zero = [[32; GROUP_BLOCKS]; 2];
    for lane in 0..GROUP_BLOCKS {
        let (group, j) = (lane / 4, lane % 4);
        panel.scale[lane] = d * f32::from(sup[192 + 2 * lane] as i8);
        panel.other[lane] = d * f32::from(sup[193 + 2 * lane] as i8);
        let low = &sup[group * 64 + j % 2 * 32..][..BLOCK];
        let high = &sup[128 + group * 32..][..BLOCK];
        let to = &mut natural[lane * BLOCK..][..BLOCK];
        for ((to, &low), &high) in to.iter_mut().zip(low).zip(high) {
            *to = low >> (j / 2 * 4) & 15 | (high >> (2 * j) & 3) << 4;
        }
    }
}

/// Planar codes, scales, zero points.
#[inline(always)]
fn planar(w: &WeightView<'_>, n: Nbits, row: usize, g: usize, count: usize, natural: &mut Natural, panel: &mut Panel) {
    let (codes, scales, zeros) = (w.row(0, row), w.row(1, row), w.row(2, row));
    let flip = if n.zero == ZeroPoint::TwosComplement { 1u8 << (n.bits - 1) } else { 0 };
    if n.bits == 4 {
        let codes = codes.get(g * GROUP_CODES / 2..).unwrap_or(&[]);
        for (to, &byte) in natural.chunks_exact_mut(2).zip(codes) {
            to[0] = byte & 15 ^ flip;
            to[1] = byte >> 4 ^ flip;
        }
    } else {
        let codes = codes.get(g * GROUP_CODES..).unwrap_or(&[]);
        for (to, &byte) in natural.iter_mut().zip(codes) {
            *to = byte ^ flip;
        }
    }
    let block = usize::from(n.block);
    let last = w.cols.div_ceil(block) - 1;
    for lane in 0..count {
        for half in 0..if block == 16 { 2 } else { 1 } {
            let at = (((g * GROUP_BLOCKS + lane) * BLOCK + 16 * half) / block).min(last);
            let scale = match n.scale {
                ScaleType::F16 => half_at(scales, 2 * at),
                ScaleType::F32 => {
                    f32::from_le_bytes([scales[4 * at], scales[4 * at + 1], scales[4 * at + 2], scales[4 * at + 3]])
                }
            };
            if half == 0 {
                panel.scale[lane] = scale;
            } else {
                panel.other[lane] = scale;
            }
            panel.zero[half][lane] = match n.zero {
                ZeroPoint::PerBlock if n.bits == 4 => i32::from(zeros[at / 2] >> (at % 2 * 4) & 15),
                ZeroPoint::PerBlock => i32::from(zeros[at]),
                _ => 1 << (n.bits - 1),
            };
        }
    }
}
