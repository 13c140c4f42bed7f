//! One 32-wide block of a weight row: integer codes, scales and float minimum, and dequantised elements.

use half::{bf16, f16};

use crate::format::{BLOCK, Format, Nbits, Planes, ScaleType, WeightView, ZeroPoint};

/// A 32-wide block of a quantised weight row, in the terms of the contract:
/// `w[i] = scale[i / 16] * codes[i] + min`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightBlock {
    /// Codes with the zero point taken off; 0 past the last column.
    pub codes: [i16; BLOCK],
    /// The scale of each half. Equal, unless [`WeightBlock::halves`] is set.
    pub scale: [f32; 2],
    /// True where each half of 16 has a scale of its own and so a dot of its own (Q6_K, `Nbits` of block 16).
    pub halves: bool,
    /// Float minimum, for the formats that have one.
    pub min: Option<f32>,
}

/// Number of 32-wide blocks in a row of `cols` elements.
pub const fn blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn nibble(bytes: &[u8], i: usize) -> i16 {
    i16::from((bytes[i / 2] >> (4 * (i % 2))) & 15)
}

/// The 6-bit scale and minimum of sub-block `j` (0 to 7) of a Q4_K or Q5_K super-block, from its 12 packed bytes.
/// Source: ggml, `ggml-quants.c`, `get_scale_min_k4`.
fn scale_min_k4(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// Reads block `b` (elements `32 b .. 32 b + 32`) of row `row` of a quantised matrix.
///
/// # Panics
/// If the format is not quantised, or `row` or `b` is out of range.
pub fn weight_block(w: &WeightView<'_>, row: usize, b: usize) -> WeightBlock {
    let bytes = w.row(0, row);
    let mut codes = [0i16; BLOCK];
    let mut min = None;
    let plain = |d: f32| [d, d];
    let (scale, halves) = match w.format {
        Format::Q4_0 | Format::Q4_1 => {
            let (size, head) = if w.format == Format::Q4_0 { (18, 2) } else { (20, 4) };
            let blk = &bytes[b * size..(b + 1) * size];
            let zero = if w.format == Format::Q4_0 { 8 } else { 0 };
            for i in 0..16 {
                codes[i] = i16::from(blk[head + i] & 15) - zero;
                codes[i + 16] = i16::from(blk[head + i] >> 4) - zero;
            }
            if w.format == Format::Q4_1 {
                min = Some(f16_at(blk, 2));
            }
            (plain(f16_at(blk, 0)), false)
        }
        Format::Q5_0 | Format::Q5_1 => {
            let (size, head) = if w.format == Format::Q5_0 { (22, 2) } else { (24, 4) };
            let blk = &bytes[b * size..(b + 1) * size];
            let zero = if w.format == Format::Q5_0 { 16 } else { 0 };
            let high = u32::from_le_bytes([blk[head], blk[head + 1], blk[head + 2], blk[head + 3]]);
            for i in 0..16 {
                let byte = blk[head + 4 + i];
                codes[i] = i16::from(byte & 15) + 16 * ((high >> i) & 1) as i16 - zero;
                codes[i + 16] = i16::from(byte >> 4) + 16 * ((high >> (i + 16)) & 1) as i16 - zero;
            }
            if w.format == Format::Q5_1 {
                min = Some(f16_at(blk, 2));
            }
            (plain(f16_at(blk, 0)), false)
        }
        Format::Q8_0 => {
            let blk = &bytes[b * 34..(b + 1) * 34];
            for i in 0..32 {
                codes[i] = i16::from(blk[2 + i] as i8);
            }
            (plain(f16_at(blk, 0)), false)
        }
        Format::Q4_K | Format::Q5_K => {
            let five = w.format == Format::Q5_K;
            let size = if five { 176 } else { 144 };
            let sup = &bytes[b / 8 * size..(b / 8 + 1) * size];
            let j = b % 8;
            let (sc, m) = scale_min_k4(&sup[4..16], j);
            let qs = &sup[if five { 48 } else { 16 }..];
            for i in 0..32 {
                let byte = qs[j / 2 * 32 + i];
                let low = if j.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                let high = if five { (sup[16 + i] >> j) & 1 } else { 0 };
                codes[i] = i16::from(low) + 16 * i16::from(high);
            }
            min = Some(-(f16_at(sup, 2) * f32::from(m)));
            (plain(f16_at(sup, 0) * f32::from(sc)), false)
        }
        Format::Q6_K => {
            let sup = &bytes[b / 8 * 210..(b / 8 + 1) * 210];
            let (j, group) = (b % 4, b % 8 / 4);
            let low = &sup[group * 64..];
            let high = &sup[128 + group * 32..];
            for i in 0..32 {
                let byte = low[(j % 2) * 32 + i];
                let nib = if j < 2 { byte & 15 } else { byte >> 4 };
                codes[i] = i16::from(nib) + 16 * i16::from((high[i] >> (2 * j)) & 3) - 32;
            }
            let d = f16_at(sup, 208);
            let sc = |h: usize| d * f32::from(sup[192 + (b % 8) * 2 + h] as i8);
            ([sc(0), sc(1)], true)
        }
        Format::Nbits(n) => return nbits_block(w, n, row, b),
        Format::Planes(Planes::Q6_K) => {
            let (high, scales) = (&bytes[w.cols / 2 + b * 8..], &bytes[w.cols / 4 * 3..]);
            for (i, code) in codes.iter_mut().enumerate() {
                let pair = high[i / 16 * 4 + i % 8 / 2] >> (2 * (i % 2) + 4 * (i % 16 / 8)) & 3;
                *code = nibble(bytes, b * BLOCK + i) + 16 * i16::from(pair) - 32;
            }
            let at = w.cols / 16 + b / 8 * 4;
            let d = f32::from_le_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]]);
            let sc = |h: usize| d * f32::from(scales[b * 2 + h] as i8);
            ([sc(0), sc(1)], true)
        }
        Format::Planes(p) => {
            for (i, code) in codes.iter_mut().enumerate() {
                *code = nibble(bytes, b * BLOCK + i);
            }
            let scales = w.row(1, row);
            match p {
                Planes::Q4_1 => {
                    min = Some(f16_at(scales, b * 4 + 2));
                    (plain(f16_at(scales, b * 4)), false)
                }
                Planes::Q4_K | Planes::Q6_K => {
                    let sup = &scales[b / 8 * 16..b / 8 * 16 + 16];
                    let (packed, m_high) = (sup[4 + b % 8], nibble(&sup[12..], b % 8) as u8);
                    min = Some(-(f16_at(sup, 2) * f32::from(packed >> 6 | m_high << 2)));
                    (plain(f16_at(sup, 0) * f32::from(packed & 63)), false)
                }
            }
        }
        Format::F32 | Format::F16 | Format::BF16 => {
            unreachable!("weight_block is for quantised formats")
        }
    };
    WeightBlock { codes, scale, halves, min }
}

fn nbits_block(w: &WeightView<'_>, n: Nbits, row: usize, b: usize) -> WeightBlock {
    let (codes_row, scales_row, zeros_row) = (w.row(0, row), w.row(1, row), w.row(2, row));
    let block = n.block as usize;
    let scale_at = |g: usize| match n.scale {
        ScaleType::F32 => {
            let s = &scales_row[g * 4..g * 4 + 4];
            f32::from_le_bytes([s[0], s[1], s[2], s[3]])
        }
        ScaleType::F16 => f16_at(scales_row, g * 2),
    };
    let groups = w.cols.div_ceil(block);
    let mut codes = [0i16; BLOCK];
    for (i, code) in codes.iter_mut().enumerate() {
        let k = b * BLOCK + i;
        if k >= w.cols {
            break;
        }
        let raw = if n.bits == 4 { nibble(codes_row, k) } else { i16::from(codes_row[k]) };
        let zero = match n.zero {
            ZeroPoint::Midpoint => 1 << (n.bits - 1),
            ZeroPoint::PerBlock if n.bits == 4 => nibble(zeros_row, k / block),
            ZeroPoint::PerBlock => i16::from(zeros_row[k / block]),
            ZeroPoint::TwosComplement if raw >= 1 << (n.bits - 1) => 1 << n.bits,
            ZeroPoint::TwosComplement => 0,
        };
        *code = raw - zero;
    }
    let first = b * BLOCK / block;
    let halves = block == 16;
    let second = if halves { (first + 1).min(groups - 1) } else { first };
    WeightBlock { codes, scale: [scale_at(first), scale_at(second)], halves, min: None }
}

/// Dequantises row `row` of a matrix of any format into `out` (`cols` elements): `scale * code` rounded once, or
/// `fma(code, scale, min)` for the formats with a float minimum.
///
/// # Panics
/// If `row` is out of range or `out` is not `cols` long.
pub fn dequantise_row(w: &WeightView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), w.cols);
    if w.format.is_quantised() {
        for (b, chunk) in out.chunks_mut(BLOCK).enumerate() {
            let blk = weight_block(w, row, b);
            for (i, o) in chunk.iter_mut().enumerate() {
                let (q, s) = (f32::from(blk.codes[i]), blk.scale[i / 16]);
                *o = match blk.min {
                    Some(m) => q.mul_add(s, m),
                    None => q * s,
                };
            }
        }
    } else {
        for (k, o) in out.iter_mut().enumerate() {
            *o = float_element(w.format, w.row(0, row), k);
        }
    }
}

/// Element `k` of a row of an unquantised format, exact.
///
/// # Panics
/// If the format is quantised or `k` is out of range.
pub fn float_element(format: Format, row: &[u8], k: usize) -> f32 {
    match format {
        Format::F32 => {
            let s = &row[k * 4..k * 4 + 4];
            f32::from_le_bytes([s[0], s[1], s[2], s[3]])
        }
        Format::F16 => f16_at(row, k * 2),
        Format::BF16 => bf16::from_le_bytes([row[k * 2], row[k * 2 + 1]]).to_f32(),
        _ => unreachable!("float_element is for F32, F16 and BF16"),
    }
}
