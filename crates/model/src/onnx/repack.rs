//! Blocked `DequantizeLinear` weights: as the file has them where the layout is Headrace's own, else rearranged once.
//!
//! ONNX blocks run along `axis`. With the reduction axis last the codes already lie as [`Nbits`] wants them. With the
//! reduction axis first, as the builder exports it, neighbours along it are a whole row apart; the codes are then
//! transposed into memory of their own.

use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};

use super::initializers::Type;

/// A blocked weight matrix as ONNX describes it.
pub struct Blocked<'b> {
    /// Type of codes and zero points: U4, I4, U8 or I8.
    pub ty: Type,
    /// Outputs.
    pub rows: usize,
    /// Inputs, a multiple of `block`.
    pub cols: usize,
    /// Elements that share a scale.
    pub block: usize,
    /// Type of the scales.
    pub scale: ScaleType,
    /// True if the codes are `[rows, cols]` and scales `[rows, blocks]`; false if `[cols, rows]` and `[blocks, rows]`.
    pub rows_first: bool,
    /// Packed codes.
    pub codes: &'b [u8],
    /// Scales.
    pub scales: &'b [u8],
    /// Packed zero points in the layout of the scales.
    pub zeros: Option<&'b [u8]>,
}

/// A plane: in place, or new bytes.
pub enum Plane {
    /// The bytes in the file will do.
    InPlace,
    /// These will.
    Made(Vec<u8>),
}

fn is_signed(ty: Type) -> bool {
    matches!(ty, Type::I4 | Type::I8)
}

fn bits(ty: Type) -> usize {
    if matches!(ty, Type::U4 | Type::I4) { 4 } else { 8 }
}

/// Element `i` of packed 4- or 8-bit codes.
fn element(bytes: &[u8], bits: usize, i: usize) -> u8 {
    if bits == 8 { bytes[i] } else { (bytes[i / 2] >> (4 * (i % 2))) & 15 }
}

impl Blocked<'_> {
    /// The format of the rearranged matrix. Signed codes without zero points stay signed; with zero points, both are
    /// moved to the unsigned range, which changes no value. Unsigned codes without zero points get zero points of 0.
    pub fn format(&self) -> Format {
        let zero = match (is_signed(self.ty), self.zeros) {
            (true, None) => ZeroPoint::TwosComplement,
            _ => ZeroPoint::PerBlock,
        };
        Format::Nbits(Nbits { bits: bits(self.ty) as u8, block: self.block as u16, scale: self.scale, zero })
    }

    fn blocks(&self) -> usize {
        self.cols / self.block
    }

    /// What turns a code of the file into a code of [`Blocked::format`].
    fn flip(&self) -> u8 {
        match (is_signed(self.ty), self.zeros) {
            (true, Some(_)) => 1 << (bits(self.ty) - 1),
            _ => 0,
        }
    }

    /// Plane 0: codes.
    pub fn codes_plane(&self) -> Plane {
        if self.rows_first && self.flip() == 0 {
            return Plane::InPlace;
        }
        Plane::Made(self.gather(self.codes, self.cols))
    }

    /// Plane 1: scales.
    pub fn scales_plane(&self) -> Plane {
        if self.rows_first {
            return Plane::InPlace;
        }
        let (size, blocks) = (self.scale.bytes(), self.blocks());
        let mut out = Vec::with_capacity(self.scales.len());
        for r in 0..self.rows {
            for b in 0..blocks {
                let at = (b * self.rows + r) * size;
                out.extend_from_slice(&self.scales[at..at + size]);
            }
        }
        Plane::Made(out)
    }

    /// Plane 2: zero points, each row padded to whole bytes; `None` if the format has none.
    pub fn zeros_plane(&self) -> Option<Plane> {
        if matches!(self.format(), Format::Nbits(n) if n.zero != ZeroPoint::PerBlock) {
            return None;
        }
        let row = (self.blocks() * bits(self.ty)).div_ceil(8);
        Some(match self.zeros {
            None => Plane::Made(vec![0; row * self.rows]),
            Some(_) if self.rows_first && self.flip() == 0 && (self.blocks() * bits(self.ty)).is_multiple_of(8) => {
                Plane::InPlace
            }
            Some(z) => Plane::Made(self.gather(z, self.blocks())),
        })
    }

    /// Rows of `per_row` packed elements from either layout, each padded to whole bytes, codes flipped.
    fn gather(&self, from: &[u8], per_row: usize) -> Vec<u8> {
        const TILE: usize = 64;
        let (bits, flip, rows) = (bits(self.ty), self.flip(), self.rows);
        let row_bytes = (per_row * bits).div_ceil(8);
        let mut out = vec![0u8; row_bytes * rows];
        let at = |r: usize, c: usize| if self.rows_first { r * per_row + c } else { c * rows + r };
        for first in (0..rows).step_by(TILE) {
            let tile = first..(first + TILE).min(rows);
            for c in 0..per_row {
                for r in tile.clone() {
                    let code = element(from, bits, at(r, c)) ^ flip;
                    if bits == 8 {
                        out[r * row_bytes + c] = code;
                    } else {
                        out[r * row_bytes + c / 2] |= code << (4 * (c % 2));
                    }
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headrace_numerics::block::dequantise_row;
    use headrace_numerics::format::WeightView;

    /// Every type and layout must give `(code - zero) * scale` of ONNX's `DequantizeLinear`.
    #[test]
    fn every_layout_dequantises_as_onnx_says() {
        let (rows, cols, block) = (5usize, 48usize, 16usize);
        let blocks = cols / block;
        for ty in [Type::U4, Type::I4, Type::U8, Type::I8] {
            for with_zeros in [false, true] {
                for rows_first in [false, true] {
                    let (bits, span) = (bits(ty), 1i32 << bits(ty));
                    let low = if is_signed(ty) { -span / 2 } else { 0 };
                    let code = |r: usize, c: usize| low + ((r * 31 + c * 7) as i32) % span;
                    let zero = |r: usize, b: usize| if with_zeros { low + ((r * 5 + b * 3) as i32) % span } else { 0 };
                    let scale = |r: usize, b: usize| 0.5 + r as f32 + 0.25 * b as f32;
                    let pack = |per_row: usize, value: &dyn Fn(usize, usize) -> i32| {
                        let mut out = vec![0u8; (rows * per_row * bits).div_ceil(8)];
                        for i in 0..rows * per_row {
                            let (r, c) = if rows_first { (i / per_row, i % per_row) } else { (i % rows, i / rows) };
                            let v = value(r, c) as u8;
                            if bits == 8 { out[i] = v } else { out[i / 2] |= (v & 15) << (4 * (i % 2)) }
                        }
                        out
                    };
                    let codes = pack(cols, &code);
                    let zeros = pack(blocks, &zero);
                    let scales: Vec<u8> = (0..rows * blocks)
                        .map(|i| if rows_first { (i / blocks, i % blocks) } else { (i % rows, i / rows) })
                        .flat_map(|(r, b)| scale(r, b).to_le_bytes())
                        .collect();
                    let m = Blocked {
                        ty,
                        rows,
                        cols,
                        block,
                        scale: ScaleType::F32,
                        rows_first,
                        codes: &codes,
                        scales: &scales,
                        zeros: with_zeros.then_some(&zeros[..]),
                    };
                    let bytes = |p: Plane, original: &[u8]| match p {
                        Plane::InPlace => original.to_vec(),
                        Plane::Made(v) => v,
                    };
                    let planes = [
                        bytes(m.codes_plane(), &codes),
                        bytes(m.scales_plane(), &scales),
                        m.zeros_plane().map_or(vec![], |p| bytes(p, &zeros)),
                    ];
                    let view = WeightView::new(m.format(), rows, cols, [&planes[0], &planes[1], &planes[2]]).unwrap();
                    let mut out = vec![0f32; cols];
                    for r in 0..rows {
                        dequantise_row(&view, r, &mut out);
                        for (c, v) in out.iter().enumerate() {
                            let want = (code(r, c) - zero(r, c / block)) as f32 * scale(r, c / block);
                            assert_eq!(*v, want, "{ty:?} zeros {with_zeros} rows first {rows_first} at {r},{c}");
                        }
                    }
                }
            }
        }
    }
}
