//! What a GGUF file holds, before anybody asks what it means: version, metadata, tensors and where their bytes are.
//!
//! Source: GGUF specification, `docs/gguf.md` of the ggml project. Versions 2 and 3, little-endian.

use std::collections::BTreeMap;
use std::path::Path;

use headrace_numerics::format::Format;

use crate::error::{ModelError, Result};
use crate::file::{ModelFile, refuse_lfs_pointer};
use crate::gguf::reader::Reader;
use crate::gguf::value::Value;
use crate::gguf::{fault, ggml_type};

/// Dimensions of a tensor at most, by the format.
const MAX_DIMS: usize = 4;
/// Bytes of a tensor's name at most, by the format.
const MAX_TENSOR_NAME: usize = 64;
/// Metadata entries and tensors at most; real files have some dozens and some hundreds to thousands.
const MAX_COUNT: usize = 1 << 20;
/// Alignment of tensor data where the file doesn't say.
const DEFAULT_ALIGNMENT: usize = 32;
/// The fewest bytes that a metadata entry takes: length of the key, one character, type, value.
const MIN_ENTRY: usize = 8 + 1 + 4 + 1;
/// The fewest bytes that a tensor's description takes: length of the name, one character, dimensions, type, offset.
const MIN_TENSOR: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// A metadata value and where its entry starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// Value.
    pub value: Value,
    /// First byte of the entry in the file.
    pub offset: usize,
}

/// One tensor as the file describes it. Its extent was checked to lie in the file and to overlap no other.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Storage format.
    pub format: Format,
    /// Dimensions, the innermost (columns) first; at least one, none of them 0.
    pub dims: Vec<usize>,
    /// First byte of the description in the file.
    pub described_at: usize,
    /// First byte of the data in the file.
    pub offset: usize,
    /// Bytes of data.
    pub len: usize,
}

/// An open GGUF file, or one shard of several.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// The file's bytes.
    pub file: ModelFile,
    /// Format version: 2 or 3.
    pub version: u32,
    /// Metadata by key.
    pub metadata: BTreeMap<String, Entry>,
    /// Tensors in the order in which the file describes them.
    pub tensors: Vec<TensorInfo>,
    /// Alignment of tensor data in bytes, a power of two.
    pub alignment: usize,
    /// First byte of the tensor data.
    pub data_offset: usize,
}

impl GgufFile {
    /// Maps a file and reads what it says about itself.
    pub fn open(path: &Path) -> Result<GgufFile> {
        GgufFile::parse(ModelFile::open(path)?)
    }

    /// Reads what `file` says about itself. Time and memory are bounded by the size of the file; tensor data is not
    /// touched.
    ///
    /// # Errors
    /// [`ModelError::Format`] if the file is damaged, [`ModelError::Unsupported`] for other versions, big-endian files
    /// and tensor types that are not supported.
    pub fn parse(file: ModelFile) -> Result<GgufFile> {
        let mut r = Reader { path: &file.path, bytes: &file.bytes, pos: 0 };
        check_magic(&r)?;
        r.pos = 4;
        let version = read_version(&mut r)?;
        let tensor_count = r.count(MIN_TENSOR, None, "tensors")?;
        let entry_count = r.count(MIN_ENTRY, None, "metadata entries")?;
        if tensor_count.max(entry_count) > MAX_COUNT {
            let what =
                format!("{tensor_count} tensors and {entry_count} metadata entries; {MAX_COUNT} of each are allowed");
            return Err(fault::format(r.path, None, Some(8), what));
        }
        let mut metadata = BTreeMap::new();
        for _ in 0..entry_count {
            let offset = r.pos;
            let key = r.key()?;
            let value = r.value(key)?;
            if metadata.insert(key.to_owned(), Entry { value, offset }).is_some() {
                return Err(fault::format(r.path, Some(key), Some(offset), "metadata key given twice"));
            }
        }
        let alignment = alignment(r.path, metadata.get("general.alignment"))?;
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(read_tensor(&mut r, alignment)?);
        }
        let data_offset = r.pos.next_multiple_of(alignment);
        place(&file, &mut tensors, data_offset)?;
        Ok(GgufFile { version, metadata, tensors, alignment, data_offset, file })
    }
}

fn check_magic(r: &Reader<'_>) -> Result<()> {
    let bad = |what: String| Err(fault::format(r.path, None, Some(0), what));
    refuse_lfs_pointer(r.path, r.bytes)?;
    match r.bytes.get(..4) {
        Some(b"GGUF") => Ok(()),
        Some(b"ggml" | b"ggmf" | b"ggjt" | b"lmgg" | b"fmgg" | b"tjgg") => {
            bad("a GGML file from before GGUF; convert the original model again".into())
        }
        Some(magic) => bad(format!("not a GGUF file: it starts with {magic:02x?} instead of `GGUF`")),
        None => bad(format!("not a GGUF file: it has only {} bytes", r.bytes.len())),
    }
}

fn read_version(r: &mut Reader<'_>) -> Result<u32> {
    let version = r.u32(None)?;
    let unsupported = |what| ModelError::Unsupported { path: r.path.to_path_buf(), item: None, what };
    match version {
        2 | 3 => Ok(version),
        v if matches!(v.swap_bytes(), 1..=3) => {
            Err(unsupported(format!("big-endian GGUF (version {}); convert it to little-endian", v.swap_bytes())))
        }
        v => Err(unsupported(format!("GGUF version {v}; versions 2 and 3 are supported"))),
    }
}

fn alignment(path: &Path, entry: Option<&Entry>) -> Result<usize> {
    let Some(entry) = entry else { return Ok(DEFAULT_ALIGNMENT) };
    let bad = |what: String| fault::format(path, Some("general.alignment"), Some(entry.offset), what);
    match entry.value {
        Value::Uint(n) if n.is_power_of_two() && (8..=1 << 30).contains(&n) => Ok(n as usize),
        Value::Uint(n) => Err(bad(format!("alignment is {n}; it must be a power of two, 8 to 2^30"))),
        other => Err(bad(format!("alignment should be an unsigned integer, but is {}", other.type_name()))),
    }
}

/// One tensor's description. `offset` is still relative to the tensor data.
fn read_tensor(r: &mut Reader<'_>, alignment: usize) -> Result<TensorInfo> {
    let described_at = r.pos;
    let name = r.string(None)?;
    let bad = |path: &Path, what: String| fault::format(path, Some(name), Some(described_at), what);
    if name.is_empty() || name.len() > MAX_TENSOR_NAME {
        return Err(bad(r.path, format!("tensor name of {} bytes; 1 to {MAX_TENSOR_NAME} are allowed", name.len())));
    }
    let item = Some(name);
    let n_dims = r.u32(item)? as usize;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        return Err(bad(r.path, format!("{n_dims} dimensions; 1 to {MAX_DIMS} are allowed")));
    }
    let mut dims = Vec::with_capacity(MAX_DIMS);
    let mut elements = 1usize;
    for _ in 0..n_dims {
        let d = r.u64(item)?;
        let product = usize::try_from(d).ok().and_then(|d| elements.checked_mul(d));
        elements = product.ok_or_else(|| bad(r.path, "the dimensions multiply to more than 2^64".into()))?;
        dims.push(d as usize);
    }
    if elements == 0 {
        return Err(bad(r.path, format!("a dimension is 0: {dims:?}")));
    }
    let type_id = r.u32(item)?;
    let Some(format) = ggml_type::format(type_id) else {
        let what = format!(
            "tensor type {} is not supported; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are",
            ggml_type::name(type_id)
        );
        return Err(fault::unsupported(r.path, name, what));
    };
    let (per_block, block_bytes) = ggml_type::block(format);
    if !dims[0].is_multiple_of(per_block) {
        let what = format!("{} columns, not a multiple of the {per_block} of a {} block", dims[0], format.name());
        return Err(bad(r.path, what));
    }
    let Some(len) = (elements / per_block).checked_mul(block_bytes) else {
        return Err(bad(r.path, format!("dimensions {dims:?} need more than 2^64 bytes")));
    };
    let offset = r.u64(item)?;
    match usize::try_from(offset) {
        Ok(o) if o.is_multiple_of(alignment) => {
            Ok(TensorInfo { name: name.to_owned(), format, dims, described_at, offset: o, len })
        }
        _ => Err(bad(r.path, format!("data offset {offset} is not a multiple of the alignment, {alignment}"))),
    }
}

/// Makes offsets absolute, and checks that every extent lies in the file, that none overlap, and that names differ.
fn place(file: &ModelFile, tensors: &mut [TensorInfo], data_offset: usize) -> Result<()> {
    let size = file.bytes.len();
    for t in tensors.iter_mut() {
        let start = data_offset.checked_add(t.offset);
        match start.and_then(|s| s.checked_add(t.len)) {
            Some(end) if end <= size => t.offset = end - t.len,
            _ => {
                let what = format!(
                    "data of {} bytes at {} + {} lies outside the file of {size} bytes; it was cut short, fetch it again",
                    t.len, data_offset, t.offset
                );
                return Err(fault::format(&file.path, Some(&t.name), Some(t.described_at), what));
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| (t.offset, t.described_at));
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            let what = format!("data overlaps that of `{}`", fault::shown(&pair[0].name));
            return Err(fault::format(&file.path, Some(&pair[1].name), Some(pair[1].offset), what));
        }
    }
    order.sort_by(|a, b| a.name.cmp(&b.name).then(a.described_at.cmp(&b.described_at)));
    for pair in order.windows(2) {
        if pair[0].name == pair[1].name {
            let what = "tensor described twice";
            return Err(fault::format(&file.path, Some(&pair[1].name), Some(pair[1].described_at), what));
        }
    }
    Ok(())
}
