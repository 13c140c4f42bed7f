//! How a weight matrix is stored: formats, planes, and the bytes of a row. No arithmetic.

/// Elements of one activation block, and of one integer dot product.
pub const BLOCK: usize = 32;

/// The most planes a format has: codes (or whole blocks), scales, zero points.
pub const MAX_PLANES: usize = 3;

/// Storage type of the scales of an [`Nbits`] matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE binary32, little-endian.
    F32,
    /// IEEE binary16, little-endian.
    F16,
}

impl ScaleType {
    /// Bytes of one scale.
    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 => 2,
        }
    }
}

/// What is taken off a code of an [`Nbits`] matrix before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ZeroPoint {
    /// The code is unsigned and the zero point is the middle of its range: 8 for 4 bits, 128 for 8 bits.
    Midpoint,
    /// The code is unsigned; plane 2 holds one unsigned zero point of `bits` bits a block, packed low nibble first
    /// for 4 bits, each row padded to whole bytes.
    PerBlock,
    /// The code is a two's complement integer and the zero point is 0.
    TwosComplement,
}

/// Integer codes in one plane, float scales in a second, optional zero points in a third: the layout of ONNX
/// Runtime's `MatMulNBits` operator and of ONNX's blocked `DequantizeLinear`.
///
/// Plane 0 is `[rows, blocks, block * bits / 8]` bytes (4-bit codes low nibble first), plane 1 `[rows, blocks]`
/// scales, plane 2 `[rows, ceil(blocks * bits / 8)]` bytes, where `blocks = ceil(cols / block)`.
/// Source: ONNX Runtime, `docs/ContribOperators.md`, `com.microsoft.MatMulNBits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nbits {
    /// Bits of a code: 4 or 8.
    pub bits: u8,
    /// Elements that share a scale along a row: 16, 32, 64, 128 or 256.
    pub block: u16,
    /// Storage type of the scales.
    pub scale: ScaleType,
    /// Zero points.
    pub zero: ZeroPoint,
}

/// A GGUF format whose blocks are laid out in planes: codes apart from scales. The codes, the scales and the
/// arithmetic are those of the format of the same name; the bytes have another order, in which a GPU copies whole lines and a
/// thread needs no shifts by odd addresses. Files don't hold these formats: a device that wants them lays rows out anew.
///
/// Unless it says otherwise, plane 0 is `[rows, cols / 32, 16]` bytes: nibble `i` of a block is element `i`, low nibble first, as in [`Nbits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Planes {
    /// [`Format::Q4_1`]. Plane 1 is `[rows, cols / 32]` pairs of binary16: scale, minimum.
    Q4_1,
    /// [`Format::Q4_K`]. Plane 1 is `[rows, cols / 256, 16]` bytes: `d` and `dmin` as binary16; then a byte for each of the eight
    /// blocks, the scale in the six low bits and the two low bits of the minimum above; then a nibble for each block, low nibble
    /// first, the four high bits of the minimum.
    Q4_K,
    /// [`Format::Q6_K`], all in plane 0. A row is: the low four bits, `[cols / 32, 16]` bytes; the high two, `[cols / 32, 8]` bytes, of
    /// which byte `4 j + b` of a block holds elements `16 j + 2 b`, one more, eight more and nine more, lowest bits first;
    /// signed scales, `[cols / 256, 16]` bytes; `d` as binary32, `[cols / 256]`; zeros up to a multiple of 16 bytes.
    Q6_K,
}

/// How the elements of a weight matrix are stored. Rows are outputs, columns are inputs (the reduction axis).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// GGUF Q4_0: 32 elements in 18 bytes; `w = d * (q - 8)`.
    Q4_0,
    /// GGUF Q4_1: 32 elements in 20 bytes; `w = d * q + m`.
    Q4_1,
    /// GGUF Q5_0: 32 elements in 22 bytes; `w = d * (q - 16)`.
    Q5_0,
    /// GGUF Q5_1: 32 elements in 24 bytes; `w = d * q + m`.
    Q5_1,
    /// GGUF Q8_0: 32 elements in 34 bytes; `w = d * q`, `q` signed.
    Q8_0,
    /// GGUF Q4_K: 256 elements in 144 bytes; `w = d * sc * q - dmin * m`, 6-bit `sc` and `m` for every 32.
    Q4_K,
    /// GGUF Q5_K: 256 elements in 176 bytes; as Q4_K with 5-bit codes.
    Q5_K,
    /// GGUF Q6_K: 256 elements in 210 bytes; `w = d * sc * (q - 32)`, 8-bit signed `sc` for every 16.
    Q6_K,
    /// Planar integer codes, scales and zero points (ONNX).
    Nbits(Nbits),
    /// A GGUF format in planes.
    Planes(Planes),
}

impl Format {
    /// True for formats whose linear layer quantises its activations; false for F32, F16, BF16.
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Number of planes a matrix of this format occupies: 1 to [`MAX_PLANES`].
    pub const fn planes(self) -> usize {
        match self {
            Format::Nbits(n) => match n.zero {
                ZeroPoint::PerBlock => 3,
                _ => 2,
            },
            Format::Planes(Planes::Q6_K) => 1,
            Format::Planes(_) => 2,
            _ => 1,
        }
    }

    /// The number that `cols` must be a multiple of (GGUF block size; 1 where the last block may be partial).
    pub const fn col_multiple(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::BF16 | Format::Nbits(_) => 1,
            Format::Q4_K | Format::Q5_K | Format::Q6_K | Format::Planes(Planes::Q4_K | Planes::Q6_K) => 256,
            _ => 32,
        }
    }

    /// Bytes of one row of `cols` elements in plane `plane`; 0 for a plane the format doesn't have.
    ///
    /// `cols` must be a multiple of [`Format::col_multiple`]. Saturates instead of overflowing.
    pub const fn row_bytes(self, plane: usize, cols: usize) -> usize {
        if plane >= self.planes() {
            return 0;
        }
        match self {
            Format::F32 => cols.saturating_mul(4),
            Format::F16 | Format::BF16 => cols.saturating_mul(2),
            Format::Q4_0 => (cols / 32).saturating_mul(18),
            Format::Q4_1 => (cols / 32).saturating_mul(20),
            Format::Q5_0 => (cols / 32).saturating_mul(22),
            Format::Q5_1 => (cols / 32).saturating_mul(24),
            Format::Q8_0 => (cols / 32).saturating_mul(34),
            Format::Q4_K => (cols / 256).saturating_mul(144),
            Format::Q5_K => (cols / 256).saturating_mul(176),
            Format::Q6_K => (cols / 256).saturating_mul(210),
            Format::Planes(p) => match (plane, p) {
                (_, Planes::Q6_K) => {
                    let d = (cols / 256).saturating_mul(4).next_multiple_of(16);
                    (cols / 256).saturating_mul(208).saturating_add(d)
                }
                (0, _) => (cols / 32).saturating_mul(16),
                (_, Planes::Q4_1) => (cols / 32).saturating_mul(4),
                (_, Planes::Q4_K) => (cols / 256).saturating_mul(16),
            },
            Format::Nbits(n) => {
                let blocks = cols.div_ceil(n.block as usize);
                match plane {
                    0 => blocks.saturating_mul(n.block as usize * n.bits as usize / 8),
                    1 => blocks.saturating_mul(n.scale.bytes()),
                    _ => blocks.saturating_mul(n.bits as usize).div_ceil(8),
                }
            }
        }
    }

    /// Bytes of one row over all planes.
    pub const fn total_row_bytes(self, cols: usize) -> usize {
        self.row_bytes(0, cols).saturating_add(self.row_bytes(1, cols)).saturating_add(self.row_bytes(2, cols))
    }

    /// A short name for tables and messages, such as `Q4_1` or `int4/32 f16`.
    pub fn name(self) -> String {
        match self {
            Format::Nbits(n) => {
                let scale = match n.scale {
                    ScaleType::F32 => "f32",
                    ScaleType::F16 => "f16",
                };
                let zero = match n.zero {
                    ZeroPoint::Midpoint | ZeroPoint::TwosComplement => "",
                    ZeroPoint::PerBlock => " zp",
                };
                format!("int{}/{} {scale}{zero}", n.bits, n.block)
            }
            Format::Planes(p) => format!("{p:?} in planes"),
            other => format!("{other:?}"),
        }
    }
}

/// A borrowed weight matrix, or a run of whole rows of one.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    /// Storage format.
    pub format: Format,
    /// Number of rows (outputs).
    pub rows: usize,
    /// Number of columns (inputs).
    pub cols: usize,
    /// Bytes of each plane, `rows * format.row_bytes(plane, cols)` long; empty for planes the format doesn't have.
    pub planes: [&'a [u8]; MAX_PLANES],
}

impl<'a> WeightView<'a> {
    /// Checks the lengths of the planes and builds a view; `None` if a plane is shorter than the shape needs, or the
    /// columns don't fit the format.
    pub fn new(format: Format, rows: usize, cols: usize, planes: [&'a [u8]; MAX_PLANES]) -> Option<Self> {
        if !cols.is_multiple_of(format.col_multiple()) {
            return None;
        }
        let mut exact: [&'a [u8]; MAX_PLANES] = [&[]; MAX_PLANES];
        for (p, slice) in planes.iter().enumerate() {
            let need = format.row_bytes(p, cols).checked_mul(rows)?;
            exact[p] = slice.get(..need)?;
        }
        Some(WeightView { format, rows, cols, planes: exact })
    }

    /// The bytes of row `row` in plane `plane`.
    pub fn row(&self, plane: usize, row: usize) -> &'a [u8] {
        let n = self.format.row_bytes(plane, self.cols);
        &self.planes[plane][row * n..(row + 1) * n]
    }

    /// The rows `start .. start + count` as a view of their own.
    pub fn slice_rows(&self, start: usize, count: usize) -> WeightView<'a> {
        let mut planes = self.planes;
        for (p, plane) in planes.iter_mut().enumerate() {
            let n = self.format.row_bytes(p, self.cols);
            *plane = &plane[start * n..(start + count) * n];
        }
        WeightView { rows: count, planes, ..*self }
    }
}
