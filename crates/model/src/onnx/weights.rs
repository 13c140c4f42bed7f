//! Weight matrices and vectors: from the operators that use them to tensors of the model.

use std::collections::HashMap;

use headrace_numerics::format::{Format, MAX_PLANES, Nbits, ScaleType, ZeroPoint};

use super::graph::{Graph, MICROSOFT};
use super::initializers::{Initializers, Type};
use super::repack::{Blocked, Plane};
use crate::error::Result;
use crate::file::{Extent, ModelFile};
use crate::spec::{Layout, Linear, Tensor, TensorId};

type Key = (Format, usize, usize, Layout, [Option<Extent>; MAX_PLANES]);

/// The tensors found so far. Those with equal planes and shape are one (tied weights).
pub struct Weights<'a> {
    pub init: Initializers<'a>,
    tensors: Vec<Tensor>,
    index: HashMap<Key, TensorId>,
    rearranged: HashMap<(usize, bool), TensorId>,
}

/// A linear layer as found in the graph.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    pub linear: Linear,
    /// The value it is applied to.
    pub input: &'a str,
    /// Its node, for messages.
    pub node: usize,
    pub rows: usize,
    pub cols: usize,
}

fn float_format(ty: Type) -> Option<Format> {
    match ty {
        Type::F32 => Some(Format::F32),
        Type::F16 => Some(Format::F16),
        Type::BF16 => Some(Format::BF16),
        _ => None,
    }
}

fn scale_type(ty: Type) -> Option<ScaleType> {
    match ty {
        Type::F32 => Some(ScaleType::F32),
        Type::F16 => Some(ScaleType::F16),
        _ => None,
    }
}

impl<'a> Weights<'a> {
    /// No tensors yet.
    pub fn new(init: Initializers<'a>) -> Weights<'a> {
        Weights { init, tensors: Vec::new(), index: HashMap::new(), rearranged: HashMap::new() }
    }

    /// Tensor `id`.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    fn add(&mut self, tensor: Tensor) -> TensorId {
        let key = (tensor.format, tensor.rows, tensor.cols, tensor.layout, tensor.planes);
        *self.index.entry(key).or_insert_with(|| {
            self.tensors.push(tensor);
            TensorId(self.tensors.len() - 1)
        })
    }

    fn initializer(&self, g: &Graph<'a>, n: usize, value: &str, what: &str) -> Result<usize> {
        self.init.take(value).ok_or_else(|| g.unsupported(n, format!("its {what}, {value:?}, is not an initializer")))
    }

    /// A floating-point vector.
    pub fn vector(&mut self, g: &Graph<'a>, n: usize, value: &str, what: &str) -> Result<TensorId> {
        let t = self.init.get(self.initializer(g, n, value, what)?);
        let Some(format) = float_format(t.ty) else {
            return Err(g.unsupported(n, format!("its {what}, {}, has element type {:?}", t.name, t.ty)));
        };
        if t.dims.len() != 1 || t.dims[0] == 0 {
            return Err(g.format(n, format!("its {what}, {}, has shape {:?}; a vector is needed", t.name, t.dims)));
        }
        let (name, cols, extent) = (t.name.to_string(), t.dims[0], t.extent);
        Ok(self.add(Tensor {
            name,
            format,
            stored: None,
            rows: 1,
            cols,
            layout: Layout::RowMajor,
            planes: [Some(extent), None, None],
        }))
    }

    /// A floating-point matrix as it is, such as a table of cosines.
    pub fn table(&mut self, g: &Graph<'a>, n: usize, value: &'a str, what: &str) -> Result<TensorId> {
        let i = self.initializer(g, n, value, what)?;
        self.float_matrix(g, n, i, true)
    }

    fn float_matrix(&mut self, g: &Graph<'a>, n: usize, index: usize, rows_first: bool) -> Result<TensorId> {
        let t = self.init.get(index);
        let Some(format) = float_format(t.ty) else {
            return Err(g.unsupported(n, format!("{} has element type {:?}", t.name, t.ty)));
        };
        let (rows, cols, layout) = match (&t.dims[..], rows_first) {
            (&[r, c], true) if r > 0 && c > 0 => (r, c, Layout::RowMajor),
            (&[c, r], false) if r > 0 && c > 0 => (r, c, Layout::ColMajor),
            _ => return Err(g.format(n, format!("{} has shape {:?}; a matrix is needed", t.name, t.dims))),
        };
        let (name, extent) = (t.name.to_string(), t.extent);
        Ok(self.add(Tensor { name, format, stored: None, rows, cols, layout, planes: [Some(extent), None, None] }))
    }

    /// The matrix behind `value`: an initializer, or a `DequantizeLinear` of one, perhaps transposed. `rows_first` says
    /// that `value` itself is `[rows, cols]`.
    pub fn matrix(&mut self, g: &Graph<'a>, n: usize, value: &'a str, rows_first: bool) -> Result<TensorId> {
        let (mut value, mut rows_first) = (value, rows_first);
        if let Some(t) = g.producer_of(value, "", "Transpose") {
            let mut a = g.claim_shared(t)?;
            if !matches!(a.ints("perm")?, None | Some([1, 0])) {
                return Err(g.unsupported(t, "attribute perm other than [1, 0]"));
            }
            a.finish()?;
            g.at_most(t, 1)?;
            value = g.need(t, 0, "data")?;
            rows_first = !rows_first;
        }
        if let Some(dq) = g.producer_of(value, "", "DequantizeLinear") {
            return self.blocked(g, dq, rows_first);
        }
        let i = self.initializer(g, n, value, "matrix")?;
        self.float_matrix(g, n, i, rows_first)
    }

    /// A blocked `DequantizeLinear`.
    fn blocked(&mut self, g: &Graph<'a>, n: usize, rows_first: bool) -> Result<TensorId> {
        if let Some(id) = self.rearranged.get(&(n, rows_first)) {
            return Ok(*id);
        }
        let mut a = g.claim_shared(n)?;
        let axis = a.int("axis")?.unwrap_or(1);
        let block = a.int("block_size")?.unwrap_or(0);
        a.ignore("output_dtype");
        a.finish()?;
        g.at_most(n, 3)?;
        let along = i64::from(rows_first);
        if axis != along && axis != along - 2 {
            return Err(g.unsupported(n, format!("attribute axis = {axis}: blocks don't run along the reduction axis")));
        }
        let Some(block) = supported_block(block) else {
            return Err(
                g.unsupported(n, format!("attribute block_size = {block}; 16, 32, 64, 128 and 256 are supported"))
            );
        };
        let codes = self.init.get(self.initializer(g, n, g.need(n, 0, "x")?, "codes")?);
        let scales = self.init.get(self.initializer(g, n, g.need(n, 1, "x_scale")?, "scales")?);
        let zeros = match g.input(n, 2) {
            Some(z) => Some(self.init.get(self.initializer(g, n, z, "zero points")?)),
            None => None,
        };
        if !matches!(codes.ty, Type::U4 | Type::I4 | Type::U8 | Type::I8) {
            return Err(g.unsupported(n, format!("codes {} of element type {:?}", codes.name, codes.ty)));
        }
        let Some(scale) = scale_type(scales.ty) else {
            return Err(g.unsupported(n, format!("scales {} of element type {:?}", scales.name, scales.ty)));
        };
        let (rows, cols) = match (&codes.dims[..], rows_first) {
            (&[r, c], true) | (&[c, r], false) if r > 0 && c > 0 => (r, c),
            _ => return Err(g.format(n, format!("codes {} have shape {:?}", codes.name, codes.dims))),
        };
        if cols % block != 0 {
            return Err(g.unsupported(n, format!("{cols} inputs are no multiple of the block size {block}")));
        }
        let shape = if rows_first { [rows, cols / block] } else { [cols / block, rows] };
        if scales.dims != shape {
            return Err(g.format(n, format!("scales {} have shape {:?}, not {shape:?}", scales.name, scales.dims)));
        }
        if let Some(z) = zeros.filter(|z| z.dims != shape || z.ty != codes.ty) {
            return Err(g.format(
                n,
                format!("zero points {} are {:?} {:?}, not {:?} {shape:?}", z.name, z.ty, z.dims, codes.ty),
            ));
        }
        let b = Blocked {
            ty: codes.ty,
            rows,
            cols,
            block,
            scale,
            rows_first,
            codes: self.init.bytes(codes.extent),
            scales: self.init.bytes(scales.extent),
            zeros: zeros.map(|z| self.init.bytes(z.extent)),
        };
        let format = b.format();
        let made = [Some(b.codes_plane()), Some(b.scales_plane()), b.zeros_plane()];
        let sources =
            [Some((codes.name, codes.extent)), Some((scales.name, scales.extent)), zeros.map(|z| (z.name, z.extent))];
        let name = codes.name;
        let mut planes = [None; MAX_PLANES];
        for ((plane, made), source) in planes.iter_mut().zip(made).zip(sources) {
            *plane = match (made, source) {
                (None, _) => None,
                (Some(Plane::InPlace), source) => source.map(|(_, e)| e),
                (Some(Plane::Made(bytes)), source) => {
                    Some(self.init.own(source.map_or(name, |(s, _)| s), bytes, g.origin))
                }
            };
        }
        let id = self.add(Tensor {
            name: name.to_string(),
            format,
            stored: None,
            rows,
            cols,
            layout: Layout::RowMajor,
            planes,
        });
        self.rearranged.insert((n, rows_first), id);
        Ok(id)
    }

    /// Packed codes in bytes, scales and optional zero points: the weights of `MatMulNBits` and
    /// `GatherBlockQuantized`. `codes` are known to have the right number of bytes a row.
    #[allow(clippy::too_many_arguments)]
    fn nbits(
        &mut self,
        g: &Graph<'a>,
        n: usize,
        bits: usize,
        block: usize,
        (rows, cols): (usize, usize),
        codes: usize,
        scales: &str,
        zeros: Option<&str>,
    ) -> Result<TensorId> {
        let blocks = cols.div_ceil(block);
        let scales = self.init.get(self.initializer(g, n, scales, "scales")?);
        let Some(scale) = scale_type(scales.ty) else {
            return Err(g.unsupported(n, format!("scales {} of element type {:?}", scales.name, scales.ty)));
        };
        let count = rows.checked_mul(blocks);
        if scales.dims != [rows, blocks] && !(scales.dims.len() == 1 && scales.dims.first().copied() == count) {
            return Err(
                g.format(n, format!("scales {} have shape {:?}, not [{rows}, {blocks}]", scales.name, scales.dims))
            );
        }
        let zeros = match zeros {
            Some(z) => Some(self.init.get(self.initializer(g, n, z, "zero points")?)),
            None => None,
        };
        if let Some(z) = zeros {
            if z.ty != Type::U8 {
                return Err(g.unsupported(
                    n,
                    format!("zero points {} of element type {:?}; only packed U8 ones are supported", z.name, z.ty),
                ));
            }
            let row = (blocks * bits).div_ceil(8);
            if z.dims != [rows, row] && !(z.dims.len() == 1 && z.dims.first().copied() == rows.checked_mul(row)) {
                return Err(g.format(n, format!("zero points {} have shape {:?}, not [{rows}, {row}]", z.name, z.dims)));
            }
        }
        let zero = if zeros.is_some() { ZeroPoint::PerBlock } else { ZeroPoint::Midpoint };
        let format = Format::Nbits(Nbits { bits: bits as u8, block: block as u16, scale, zero });
        let codes = self.init.get(codes);
        let planes = [Some(codes.extent), Some(scales.extent), zeros.map(|z| z.extent)];
        let name = codes.name.to_string();
        Ok(self.add(Tensor { name, format, stored: None, rows, cols, layout: Layout::RowMajor, planes }))
    }

    fn bits_and_block(g: &Graph<'a>, n: usize, bits: i64, block: i64) -> Result<(usize, usize)> {
        let bits = match bits {
            4 => 4,
            8 => 8,
            other => return Err(g.unsupported(n, format!("attribute bits = {other}; 4 and 8 are supported"))),
        };
        match supported_block(block) {
            Some(b) => Ok((bits, b)),
            None => {
                Err(g.unsupported(n, format!("attribute block_size = {block}; 16, 32, 64, 128 and 256 are supported")))
            }
        }
    }

    fn mat_mul_nbits(&mut self, g: &Graph<'a>, n: usize) -> Result<(TensorId, Option<&'a str>)> {
        let mut a = g.claim(n)?;
        let size = |v: Option<i64>, name: &str| {
            v.and_then(|v| usize::try_from(v).ok())
                .filter(|v| (1..=1 << 40).contains(v))
                .ok_or_else(|| g.format(n, format!("attribute {name} = {v:?}")))
        };
        let cols = size(a.int("K")?, "K")?;
        let rows = size(a.int("N")?, "N")?;
        let (bits, block) = (a.int("bits")?.unwrap_or(4), a.int("block_size")?.unwrap_or(0));
        a.only_int("weight_prepacked", 0, 0)?;
        // A hint about the speed and precision of the activations; Headrace's arithmetic is the same for all.
        a.int("accuracy_level")?;
        a.finish()?;
        g.at_most(n, 6)?;
        if let Some(idx) = g.input(n, 4) {
            return Err(g.unsupported(n, format!("input g_idx ({idx:?}): weights in an order of their own")));
        }
        let (bits, block) = Self::bits_and_block(g, n, bits, block)?;
        let b = g.need(n, 1, "B")?;
        let codes = self.initializer(g, n, b, "codes")?;
        let t = self.init.get(codes);
        let shape = [rows, cols.div_ceil(block), block * bits / 8];
        if t.ty != Type::U8 || t.dims != shape {
            return Err(g.format(n, format!("B {b} is {:?} {:?}, not U8 {shape:?}", t.ty, t.dims)));
        }
        let scales = g.need(n, 2, "scales")?;
        let id = self.nbits(g, n, bits, block, (rows, cols), codes, scales, g.input(n, 3))?;
        Ok((id, g.input(n, 5)))
    }

    /// The linear layer that makes `value`: `MatMulNBits` or `MatMul`, and perhaps `Add` of a bias.
    pub fn linear(&mut self, g: &Graph<'a>, value: &'a str) -> Result<Found<'a>> {
        let mut value = g.through_casts(value)?;
        let mut bias = None;
        if let Some(add) = g.producer_of(value, "", "Add") {
            g.claim(add)?.finish()?;
            g.at_most(add, 2)?;
            let (x, y) = (g.need(add, 0, "A")?, g.need(add, 1, "B")?);
            let (from, b) = if self.init.contains(y) { (x, y) } else { (y, x) };
            bias = Some((add, b));
            value = g.through_casts(from)?;
        }
        let Some((n, 0)) = g.producer(value) else {
            return Err(g
                .origin
                .unsupported(Some(value.to_string()), "a linear layer (MatMulNBits, MatMul) is expected here"));
        };
        let weight = if g.is(n, MICROSOFT, "MatMulNBits") {
            let (weight, own_bias) = self.mat_mul_nbits(g, n)?;
            match (own_bias, bias) {
                (Some(_), Some((add, _))) => return Err(g.unsupported(add, "a second bias of one linear layer")),
                (Some(b), None) => bias = Some((n, b)),
                _ => {}
            }
            weight
        } else if g.is(n, "", "MatMul") {
            g.claim(n)?.finish()?;
            g.at_most(n, 2)?;
            self.matrix(g, n, g.need(n, 1, "B")?, false)?
        } else {
            return Err(g.unsupported(n, "stands where a linear layer (MatMulNBits, MatMul) is expected"));
        };
        let (rows, cols) = (self.tensors[weight.0].rows, self.tensors[weight.0].cols);
        let bias = match bias {
            Some((at, b)) => {
                let id = self.vector(g, at, b, "bias")?;
                let have = self.tensors[id.0].cols;
                if have != rows {
                    return Err(g.format(at, format!("bias {b} has {have} elements, but the layer {rows} outputs")));
                }
                Some(id)
            }
            None => None,
        };
        Ok(Found { linear: Linear { weight, bias }, input: g.need(n, 0, "A")?, node: n, rows, cols })
    }

    /// The embedding matrix that node `n` gathers rows of, by the tokens of graph input `ids`.
    pub fn embedding(&mut self, g: &Graph<'a>, n: usize, ids: &str) -> Result<TensorId> {
        let indices = |i: usize| match g.need(n, i, "indices")? {
            v if v == ids && g.is_input(v) => Ok(()),
            v => Err(g.unsupported(n, format!("gathers by {v:?}, not by {ids}"))),
        };
        if g.is(n, "", "Gather") {
            let mut a = g.claim(n)?;
            a.only_int("axis", 0, 0)?;
            a.finish()?;
            g.at_most(n, 2)?;
            indices(1)?;
            return self.matrix(g, n, g.need(n, 0, "data")?, true);
        }
        if !g.is(n, MICROSOFT, "GatherBlockQuantized") {
            return Err(g.unsupported(n, "stands where the embedding or a residual sum is expected"));
        }
        let mut a = g.claim(n)?;
        let (bits, block) = (a.int("bits")?.unwrap_or(4), a.int("block_size")?.unwrap_or(128));
        a.only_int("gather_axis", 0, 0)?;
        a.only_int("quantize_axis", 1, 1)?;
        a.finish()?;
        let scales = g.need(n, 2, "scales")?;
        g.at_most(n, 4)?;
        indices(1)?;
        let (bits, block) = Self::bits_and_block(g, n, bits, block)?;
        let mut data = g.need(n, 0, "data")?;
        let mut shape = None;
        if let Some(r) = g.producer_of(data, "", "Reshape") {
            let mut a = g.claim_shared(r)?;
            a.only_int("allowzero", 0, 0)?;
            a.finish()?;
            g.at_most(r, 2)?;
            let to = g.ints(g.need(r, 1, "shape")?, &self.init)?;
            let to = to.ok_or_else(|| g.unsupported(r, "a shape that is no constant"))?;
            let to: Option<Vec<usize>> = to.iter().map(|d| usize::try_from(*d).ok().filter(|d| *d > 0)).collect();
            shape = Some(to.ok_or_else(|| g.unsupported(r, "a shape with computed dimensions"))?);
            data = g.need(r, 0, "data")?;
        }
        let codes = self.initializer(g, n, data, "data")?;
        let t = self.init.get(codes);
        if t.ty != Type::U8 {
            return Err(g.unsupported(n, format!("data {data} of element type {:?}; only U8 is supported", t.ty)));
        }
        let shape = shape.unwrap_or_else(|| t.dims.clone());
        let [rows, packed] = shape[..] else {
            return Err(g.unsupported(n, format!("data {data} of shape {shape:?}; [vocabulary, bytes] is supported")));
        };
        if rows.checked_mul(packed) != Some(t.extent.len) || packed == 0 || packed % (block * bits / 8) != 0 {
            return Err(g.format(n, format!("data {data}, {:?}, is no matrix {shape:?} of whole blocks", t.dims)));
        }
        self.nbits(g, n, bits, block, (rows, packed * 8 / bits), codes, scales, g.input(n, 3))
    }

    /// The tensors, the files that they reference, and nothing else.
    pub fn finish(self) -> (Vec<Tensor>, Vec<ModelFile>) {
        let mut tensors = self.tensors;
        let mut moved: Vec<Option<usize>> = vec![None; self.init.files.len()];
        let mut files = Vec::new();
        for e in tensors.iter_mut().flat_map(|t| t.planes.iter_mut().flatten()) {
            let old = e.file;
            e.file = *moved[old].get_or_insert_with(|| {
                files.push(self.init.files[old].clone());
                files.len() - 1
            });
        }
        (tensors, files)
    }
}

fn supported_block(block: i64) -> Option<usize> {
    matches!(block, 16 | 32 | 64 | 128 | 256).then_some(block as usize)
}
