//! Rows of GGUF matrices laid out anew, in planes: which format becomes which, and the bytes of the rows. No value changes.
//!
//! GGUF keeps a block's scale beside its codes, at addresses that are multiples of 2. A GPU wants whole aligned lines of codes,
//! and scales apart from them. A device says which formats it wants so ([`ModelSpec::arranged`]); it makes the bytes itself with
//! [`arrange_rows`], when it loads rows or pins them.

use std::sync::Arc;

use half::f16;
use headrace_numerics::format::{Format, Nbits, Planes, ScaleType, ZeroPoint};

use crate::spec::{ModelSpec, TensorId};

/// The format in planes with the codes, scales and arithmetic of `format`; `None` if there is none.
pub const fn in_planes(format: Format) -> Option<Format> {
    match format {
        // The same as ONNX's: codes less 8, one binary16 scale for 32 columns.
        Format::Q4_0 => {
            Some(Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::Midpoint }))
        }
        Format::Q8_0 => {
            Some(Format::Nbits(Nbits { bits: 8, block: 32, scale: ScaleType::F16, zero: ZeroPoint::TwosComplement }))
        }
        Format::Q4_1 => Some(Format::Planes(Planes::Q4_1)),
        Format::Q4_K => Some(Format::Planes(Planes::Q4_K)),
        Format::Q6_K => Some(Format::Planes(Planes::Q6_K)),
        _ => None,
    }
}

/// Writes plane `plane` of the format in planes of some rows of a matrix of `cols` columns: `from` holds whole rows of `stored`, `to` as
/// many rows of the plane. False, and nothing written, if `stored` has no format in planes or the lengths don't belong together.
pub fn arrange_rows(stored: Format, plane: usize, cols: usize, from: &[u8], to: &mut [u8]) -> bool {
    let Some(format) = in_planes(stored) else { return false };
    let (size, wanted) = (stored.row_bytes(0, cols), format.row_bytes(plane, cols));
    let fits = cols.is_multiple_of(stored.col_multiple()) && size > 0 && wanted > 0 && from.len().is_multiple_of(size);
    if !fits || from.len() / size * wanted != to.len() {
        return false;
    }
    let rows = from.chunks_exact(size).zip(to.chunks_exact_mut(wanted));
    match (stored, plane) {
        (Format::Q4_0, 0) => blocks(rows, 18, 16, |b, to| put(to, 0, pair_halves(&b[2..18]))),
        (Format::Q4_1, 0) => blocks(rows, 20, 16, |b, to| put(to, 0, pair_halves(&b[4..20]))),
        (Format::Q8_0, 0) => blocks(rows, 34, 32, |b, to| to.copy_from_slice(&b[2..])),
        (Format::Q4_0, 1) => blocks(rows, 18, 2, |b, to| to.copy_from_slice(&b[..2])),
        (Format::Q8_0, 1) => blocks(rows, 34, 2, |b, to| to.copy_from_slice(&b[..2])),
        (Format::Q4_1, 1) => blocks(rows, 20, 4, |b, to| to.copy_from_slice(&b[..4])),
        (Format::Q4_K, 0) => blocks(rows, 144, 128, super_codes),
        (Format::Q4_K, 1) => blocks(rows, 144, 16, super_scales),
        (Format::Q6_K, 0) => rows.for_each(|(from, to)| six_bits(cols, from, to)),
        _ => return false,
    }
    true
}

/// Does every block of `size` bytes of some rows, which becomes `wanted` bytes.
fn blocks<'a>(
    rows: impl Iterator<Item = (&'a [u8], &'a mut [u8])>,
    size: usize,
    wanted: usize,
    arrange: impl Fn(&[u8], &mut [u8]),
) {
    for (from, to) in rows {
        from.chunks_exact(size).zip(to.chunks_exact_mut(wanted)).for_each(|(from, to)| arrange(from, to));
    }
}

fn put(to: &mut [u8], at: usize, halves: [u64; 2]) {
    to[at..at + 8].copy_from_slice(&halves[0].to_le_bytes());
    to[at + 8..at + 16].copy_from_slice(&halves[1].to_le_bytes());
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// The low nibbles of eight bytes, next to each other.
const fn squeeze(bytes: u64) -> u64 {
    let x = bytes & 0x0f0f_0f0f_0f0f_0f0f;
    let x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
    let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) & 0xffff_ffff
}

/// 16 bytes whose low nibbles are elements 0 to 15 and whose high ones are elements 16 to 31, as nibbles in order.
fn pair_halves(from: &[u8]) -> [u64; 2] {
    let (a, b) = (word(from, 0), word(from, 8));
    [squeeze(a) | squeeze(b) << 32, squeeze(a >> 4) | squeeze(b >> 4) << 32]
}

/// The codes of a Q4_K super-block: 32 bytes hold two blocks, one in their low nibbles, one in their high ones.
fn super_codes(from: &[u8], to: &mut [u8]) {
    for (from, to) in from[16..144].chunks_exact(32).zip(to.chunks_exact_mut(32)) {
        for half in 0..2 {
            let (a, b) = (word(from, 16 * half), word(from, 16 * half + 8));
            to[8 * half..8 * half + 8].copy_from_slice(&(squeeze(a) | squeeze(b) << 32).to_le_bytes());
            let high = squeeze(a >> 4) | squeeze(b >> 4) << 32;
            to[16 + 8 * half..24 + 8 * half].copy_from_slice(&high.to_le_bytes());
        }
    }
}

/// The scales and minima of a Q4_K super-block, as [`Planes::Q4_K`] has them.
/// Source of the packing in the file: ggml, `ggml-quants.c`, `get_scale_min_k4`.
fn super_scales(from: &[u8], to: &mut [u8]) {
    let packed = &from[4..16];
    to[..4].copy_from_slice(&from[..4]);
    to[12..16].fill(0);
    for j in 0..8 {
        let (sc, m) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        };
        to[4 + j] = sc | m << 6;
        to[12 + j / 2] |= m >> 2 << (4 * (j % 2));
    }
}

/// A row of Q6_K, as [`Planes::Q6_K`] has it.
fn six_bits(cols: usize, from: &[u8], to: &mut [u8]) {
    let (low, rest) = to.split_at_mut(cols / 2);
    let (high, rest) = rest.split_at_mut(cols / 4);
    let (scales, ds) = rest.split_at_mut(cols / 16);
    ds.fill(0);
    let supers = from.chunks_exact(210).zip(low.chunks_exact_mut(128)).zip(high.chunks_exact_mut(64));
    let others = scales.chunks_exact_mut(16).zip(ds.chunks_exact_mut(4));
    for (((from, low), high), (scales, d)) in supers.zip(others) {
        scales.copy_from_slice(&from[192..208]);
        d.copy_from_slice(&f16::from_le_bytes([from[208], from[209]]).to_f32().to_le_bytes());
        for group in 0..2 {
            let (codes, pairs) = (&from[group * 64..][..64], &from[128 + group * 32..][..32]);
            for j in 0..4 {
                let block = group * 4 + j;
                let nibbles = |half: usize| {
                    let at = j % 2 * 32 + half * 16;
                    let (a, b) = (word(codes, at), word(codes, at + 8));
                    let shift = if j < 2 { 0 } else { 4 };
                    squeeze(a >> shift) | squeeze(b >> shift) << 32
                };
                put(low, block * 16, [nibbles(0), nibbles(1)]);
                for (i, to) in high[block * 8..][..8].iter_mut().enumerate() {
                    let pair = |more: usize| (pairs[i / 4 * 16 + 2 * (i % 4) + more] >> (2 * j)) & 3;
                    *to = pair(0) | pair(1) << 2 | pair(8) << 4 | pair(9) << 6;
                }
            }
        }
    }
}

impl ModelSpec {
    /// The same model with the matrices of its linear layers in the formats that `wanted` names; a format that it gives back as it
    /// is stays. Their bytes stay where they are in the files: [`crate::spec::Tensor::stored`] says in which format.
    ///
    /// An embedding that is also the head stays as it is for the rows that a step reads of it, and the head becomes a tensor of its
    /// own over the same bytes.
    pub fn arranged(self: &Arc<ModelSpec>, wanted: impl Fn(Format) -> Format) -> Arc<ModelSpec> {
        let changes = |id: TensorId| {
            let format = self.tensor(id).format;
            let other = wanted(format);
            (other != format && in_planes(format) == Some(other)).then_some(other)
        };
        let layers = self.layers.iter();
        let linears = layers.flat_map(|l| l.qkv.iter().chain([&l.o]).chain(&l.gate_up).chain([&l.down]));
        let ids: Vec<TensorId> = linears.chain([&self.lm_head]).map(|l| l.weight).collect();
        if ids.iter().all(|&id| changes(id).is_none()) {
            return self.clone();
        }
        let mut model = ModelSpec::clone(self);
        if model.lm_head.weight == model.embedding && changes(model.embedding).is_some() {
            let mut head = model.tensor(model.embedding).clone();
            head.name += " as the head";
            model.lm_head.weight = TensorId(model.tensors.len());
            model.tensors.push(head);
            if let (Some(format), Some(t)) = (changes(model.embedding), model.tensors.last_mut()) {
                (t.stored, t.format) = (Some(t.format), format);
            }
        }
        for id in ids.into_iter().filter(|&id| id != model.embedding) {
            if let (Some(format), Some(t)) = (changes(id), model.tensors.get_mut(id.0)) {
                (t.stored, t.format) = (Some(self.tensor(id).format), format);
            }
        }
        Arc::new(model)
    }
}

#[cfg(test)]
mod tests {
    use headrace_numerics::block::weight_block;
    use headrace_numerics::format::WeightView;
    use rand::{RngCore, SeedableRng};

    use super::*;

    #[test]
    fn every_block_is_the_same_in_planes() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for stored in [Format::Q4_0, Format::Q4_1, Format::Q8_0, Format::Q4_K, Format::Q6_K] {
            let format = in_planes(stored).unwrap();
            let (rows, cols) = (5, 768);
            let mut from = vec![0; rows * stored.row_bytes(0, cols)];
            rng.fill_bytes(&mut from);
            let planes = [0, 1, 2].map(|p| {
                let mut to = vec![0xa5; rows * format.row_bytes(p, cols)];
                assert_eq!(arrange_rows(stored, p, cols, &from, &mut to), p < format.planes(), "{stored:?} {p}");
                to
            });
            let bytes = planes.iter().map(Vec::len).sum::<usize>();
            assert!(
                bytes == from.len() || stored == Format::Q6_K && bytes == rows * (3 * 208 + 16),
                "{stored:?}: {bytes}"
            );
            let before = WeightView::new(stored, rows, cols, [&from, &[], &[]]).unwrap();
            let after = WeightView::new(format, rows, cols, [&planes[0], &planes[1], &planes[2]]).unwrap();
            for (row, b) in (0..rows).flat_map(|r| (0..cols / 32).map(move |b| (r, b))) {
                let (x, y) = (weight_block(&before, row, b), weight_block(&after, row, b));
                let bits = |f: f32| if f.is_nan() { 0x7fc0_0000 } else { f.to_bits() };
                assert_eq!(x.codes, y.codes, "{stored:?} row {row} block {b}");
                assert_eq!(x.scale.map(bits), y.scale.map(bits), "{stored:?} row {row} block {b}");
                assert_eq!(x.min.map(bits), y.min.map(bits), "{stored:?} row {row} block {b}");
                assert_eq!(x.halves, y.halves);
            }
        }
    }

    #[test]
    fn lengths_that_do_not_belong_together_are_refused() {
        let mut to = [0; 16];
        assert!(arrange_rows(Format::Q4_0, 0, 32, &[0; 18], &mut to));
        assert!(!arrange_rows(Format::Q4_0, 0, 32, &[0; 17], &mut to));
        assert!(!arrange_rows(Format::Q4_0, 0, 32, &[0; 36], &mut to));
        assert!(!arrange_rows(Format::Q4_0, 0, 31, &[0; 18], &mut to));
        assert!(!arrange_rows(Format::Q4_0, 0, 0, &[], &mut []));
        assert!(!arrange_rows(Format::Q4_0, 2, 32, &[0; 18], &mut to));
        assert!(!arrange_rows(Format::F16, 0, 32, &[0; 18], &mut to));
        assert!(!arrange_rows(Format::Q6_K, 1, 256, &[0; 210], &mut to));
        assert!(!arrange_rows(Format::Q6_K, 0, 256, &[0; 210], &mut [0; 208]));
        assert!(arrange_rows(Format::Q6_K, 0, 256, &[0; 210], &mut [0; 224]));
    }
}
