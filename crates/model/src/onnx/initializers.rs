//! Initializers: element types, shapes, and where their bytes are. Nothing is copied unless the file stores numbers
//! in typed fields.

use std::cell::Cell;
use std::collections::HashMap;

use bytes::Bytes;

use super::Origin;
use super::external::{DataSource, check_location};
use super::proto::TensorProto;
use crate::error::Result;
use crate::file::{Extent, ModelFile};

/// Element types of ONNX tensors that occur in decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    U8,
    I8,
    I32,
    I64,
    F16,
    BF16,
    U4,
    I4,
}

impl Type {
    /// From `TensorProto.data_type`.
    pub fn from_onnx(code: i32) -> Option<Type> {
        Some(match code {
            1 => Type::F32,
            2 => Type::U8,
            3 => Type::I8,
            6 => Type::I32,
            7 => Type::I64,
            10 => Type::F16,
            16 => Type::BF16,
            21 => Type::U4,
            22 => Type::I4,
            _ => return None,
        })
    }

    /// Bytes of `n` elements; 4-bit types are packed two a byte. `None` on overflow.
    pub fn bytes(self, n: usize) -> Option<usize> {
        match self {
            Type::U4 | Type::I4 => Some(n.div_ceil(2)),
            Type::U8 | Type::I8 => Some(n),
            Type::F16 | Type::BF16 => n.checked_mul(2),
            Type::F32 | Type::I32 => n.checked_mul(4),
            Type::I64 => n.checked_mul(8),
        }
    }
}

/// One initializer, checked: the extent is inside its file and exactly as long as type and shape need.
#[derive(Debug)]
pub struct Initializer<'a> {
    pub name: &'a str,
    pub ty: Type,
    pub dims: Vec<usize>,
    pub extent: Extent,
    /// Set when the model is found to use it.
    pub used: Cell<bool>,
}

/// All initializers of a graph, and the files they lie in.
pub struct Initializers<'a> {
    list: Vec<Initializer<'a>>,
    by_name: HashMap<&'a str, usize>,
    /// Every file opened or made so far.
    pub files: Vec<ModelFile>,
    external: HashMap<String, usize>,
}

/// Number of elements, as `usize`; the dims as such.
fn shape(dims: &[i64], name: &str, origin: &Origin<'_>) -> Result<(Vec<usize>, usize)> {
    let mut out = Vec::with_capacity(dims.len().min(16));
    let mut count = 1usize;
    for &d in dims {
        let d = usize::try_from(d).map_err(|_| origin.format(Some(name), format!("negative dimension in {dims:?}")))?;
        count = count
            .checked_mul(d)
            .filter(|c| *c <= isize::MAX as usize / 8)
            .ok_or_else(|| origin.format(Some(name), format!("a shape of {dims:?} is too large to exist")))?;
        out.push(d);
    }
    if out.len() > 8 {
        return Err(origin.format(Some(name), format!("{} dimensions", out.len())));
    }
    Ok((out, count))
}

/// Little-endian bytes of numbers stored in typed fields.
fn typed_bytes(t: &TensorProto, ty: Type, count: usize, origin: &Origin<'_>) -> Result<Vec<u8>> {
    let (have, bytes): (usize, Vec<u8>) = match ty {
        Type::F32 => (t.float_data.len(), t.float_data.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Type::I64 => (t.int64_data.len(), t.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Type::I32 => (t.int32_data.len(), t.int32_data.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Type::F16 | Type::BF16 => {
            (t.int32_data.len(), t.int32_data.iter().flat_map(|v| (*v as u16).to_le_bytes()).collect())
        }
        Type::U8 | Type::I8 => (t.int32_data.len(), t.int32_data.iter().map(|v| *v as u8).collect()),
        Type::U4 | Type::I4 => {
            let bytes: Vec<u8> = t.int32_data.iter().map(|v| *v as u8).collect();
            (if bytes.len() == count.div_ceil(2) { count } else { bytes.len().saturating_mul(2) }, bytes)
        }
    };
    if have != count {
        return Err(origin.format(
            Some(&t.name),
            format!("holds {have} numbers, but its shape {:?} needs {count}: the file is damaged", t.dims),
        ));
    }
    Ok(bytes)
}

impl<'a> Initializers<'a> {
    /// Checks every initializer of a graph. `model` is the file that the graph itself lies in.
    ///
    /// # Errors
    /// `Format` for duplicate names, impossible shapes, extents outside their file or overlapping; `Unsupported` for
    /// other element types.
    pub fn read(
        tensors: &'a [TensorProto],
        model: &ModelFile,
        source: &mut dyn DataSource,
        origin: &Origin<'_>,
    ) -> Result<Initializers<'a>> {
        let mut all = Initializers {
            list: Vec::with_capacity(tensors.len()),
            by_name: HashMap::with_capacity(tensors.len()),
            files: vec![model.clone()],
            external: HashMap::new(),
        };
        for t in tensors {
            let init = all.check(t, source, origin)?;
            if t.name.is_empty() {
                return Err(origin.format(None, "an initializer without a name"));
            }
            if all.by_name.insert(&t.name, all.list.len()).is_some() {
                return Err(origin.format(Some(&t.name), "two initializers have this name"));
            }
            all.list.push(init);
        }
        all.refuse_overlaps()?;
        Ok(all)
    }

    fn check(
        &mut self,
        t: &'a TensorProto,
        source: &mut dyn DataSource,
        origin: &Origin<'_>,
    ) -> Result<Initializer<'a>> {
        let Some(ty) = Type::from_onnx(t.data_type) else {
            return Err(
                origin.unsupported(Some(t.name.clone()), format!("initializer of ONNX element type {}", t.data_type))
            );
        };
        if t.segment.is_some() {
            return Err(origin.unsupported(Some(t.name.clone()), "initializer stored in segments"));
        }
        let (dims, count) = shape(&t.dims, &t.name, origin)?;
        let need = ty
            .bytes(count)
            .ok_or_else(|| origin.format(Some(&t.name), format!("a shape of {:?} is too large to exist", t.dims)))?;
        let extent = match t.data_location {
            0 if !t.external_data.is_empty() => {
                return Err(origin.format(Some(&t.name), "lists external data, but says its data is in the model file"));
            }
            0 => self.embedded(t, ty, count, need, origin)?,
            1 => self.external(t, need, source, origin)?,
            other => return Err(origin.format(Some(&t.name), format!("data location {other}"))),
        };
        Ok(Initializer { name: &t.name, ty, dims, extent, used: Cell::new(false) })
    }

    fn embedded(
        &mut self,
        t: &TensorProto,
        ty: Type,
        count: usize,
        need: usize,
        origin: &Origin<'_>,
    ) -> Result<Extent> {
        let Some(raw) = &t.raw_data else {
            let bytes = typed_bytes(t, ty, count, origin)?;
            return Ok(self.own(&t.name, bytes, origin));
        };
        if raw.len() != need {
            return Err(origin.format(
                Some(&t.name),
                format!("holds {} bytes, but its shape {:?} needs {need}: the file is damaged", raw.len(), t.dims),
            ));
        }
        Ok(match offset_in(&self.files[0].bytes, raw) {
            Some(offset) => Extent { file: 0, offset, len: need },
            None => self.own_bytes(&t.name, raw.clone(), origin),
        })
    }

    fn external(
        &mut self,
        t: &TensorProto,
        need: usize,
        source: &mut dyn DataSource,
        origin: &Origin<'_>,
    ) -> Result<Extent> {
        if t.raw_data.is_some() || !t.float_data.is_empty() || !t.int32_data.is_empty() || !t.int64_data.is_empty() {
            return Err(origin.format(Some(&t.name), "has data both in the model file and outside"));
        }
        let (mut location, mut offset, mut length) = (None, None, None);
        for e in &t.external_data {
            let number = || {
                e.value.parse::<u64>().map_err(|_| {
                    origin.format(Some(&t.name), format!("external data {} {:?} is not a number", e.key, e.value))
                })
            };
            let twice = match e.key.as_str() {
                "location" => location.replace(e.value.as_str()).is_some(),
                "offset" => offset.replace(number()?).is_some(),
                "length" => length.replace(number()?).is_some(),
                // A digest of the whole file: nothing that loading needs.
                "checksum" => false,
                other => {
                    return Err(origin.unsupported(Some(t.name.clone()), format!("external data key {other:?}")));
                }
            };
            if twice {
                return Err(origin.format(Some(&t.name), format!("external data {} twice", e.key)));
            }
        }
        let location = location.ok_or_else(|| origin.format(Some(&t.name), "external data without a location"))?;
        let file = match self.external.get(location) {
            Some(f) => *f,
            None => {
                check_location(location, &t.name, origin)?;
                self.files.push(source.open(location, &t.name)?);
                self.external.insert(location.to_string(), self.files.len() - 1);
                self.files.len() - 1
            }
        };
        let size = self.files[file].bytes.len() as u64;
        let at = Origin { path: &self.files[file].path };
        let offset = offset.unwrap_or(0);
        let length = length.unwrap_or(size.saturating_sub(offset));
        if length != need as u64 {
            return Err(at.format_in(
                &t.name,
                offset,
                format!("{length} bytes are declared, but the shape {:?} needs {need}", t.dims),
            ));
        }
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(at.format_in(
                &t.name,
                offset,
                format!(
                    "{length} bytes from here end past the file, which has {size}: it is truncated, or not this model's"
                ),
            ));
        }
        Ok(Extent { file, offset: offset as usize, len: need })
    }

    fn own_bytes(&mut self, name: &str, bytes: Bytes, origin: &Origin<'_>) -> Extent {
        let len = bytes.len();
        self.files.push(ModelFile::owned(format!("{} ({name})", origin.path.display()), bytes));
        Extent { file: self.files.len() - 1, offset: 0, len }
    }

    /// Keeps bytes that exist in no file as such.
    pub fn own(&mut self, name: &str, bytes: Vec<u8>, origin: &Origin<'_>) -> Extent {
        self.own_bytes(name, bytes.into(), origin)
    }

    /// Two initializers may share all their bytes (tied weights), or none.
    fn refuse_overlaps(&self) -> Result<()> {
        let mut order: Vec<&Initializer<'_>> = self.list.iter().filter(|i| i.extent.len > 0).collect();
        order.sort_by_key(|i| i.extent);
        for pair in order.windows(2) {
            let (a, b) = (pair[0].extent, pair[1].extent);
            if a != b && a.file == b.file && b.offset < a.offset + a.len {
                return Err(Origin { path: &self.files[b.file].path }.format_in(
                    pair[1].name,
                    b.offset as u64,
                    format!("overlaps the bytes of {}", pair[0].name),
                ));
            }
        }
        Ok(())
    }

    /// Index of the initializer `name`, which counts as used from now on.
    pub fn take(&self, name: &str) -> Option<usize> {
        let i = *self.by_name.get(name)?;
        self.list[i].used.set(true);
        Some(i)
    }

    /// True if there is an initializer `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// The initializer at `index`.
    pub fn get(&self, index: usize) -> &Initializer<'a> {
        &self.list[index]
    }

    /// Every initializer.
    pub fn iter(&self) -> impl Iterator<Item = &Initializer<'a>> {
        self.list.iter()
    }

    /// The bytes of an extent.
    pub fn bytes(&self, e: Extent) -> &[u8] {
        &self.files[e.file].bytes[e.offset..e.offset + e.len]
    }
}

/// Where `part` lies in `whole`, if it shares its memory.
fn offset_in(whole: &Bytes, part: &Bytes) -> Option<usize> {
    let (start, at) = (whole.as_ptr() as usize, part.as_ptr() as usize);
    let offset = at.checked_sub(start)?;
    (offset.checked_add(part.len())? <= whole.len()).then_some(offset)
}
