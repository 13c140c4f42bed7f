//! Finds tensors by name over all shards, checks their shapes, and keeps account of which were used.

use std::collections::HashMap;

use headrace_numerics::format::Format;

use crate::error::Result;
use crate::file::{Extent, ModelFile};
use crate::gguf::header::{GgufFile, TensorInfo};
use crate::gguf::{fault, split};
use crate::spec::{Layout, Linear, Tensor, TensorId};

/// The tensors of a model, by name, and those taken so far.
pub(super) struct Tensors<'a> {
    shards: &'a [GgufFile],
    /// Shard, description, and the id once it is taken.
    by_name: HashMap<&'a str, (usize, &'a TensorInfo, Option<TensorId>)>,
    /// Shard to index in `files`.
    file_of: Vec<Option<usize>>,
    pub tensors: Vec<Tensor>,
    pub files: Vec<ModelFile>,
}

impl<'a> Tensors<'a> {
    pub fn new(shards: &'a [GgufFile]) -> Result<Self> {
        let mut by_name = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for info in &shard.tensors {
                if by_name.insert(info.name.as_str(), (s, info, None)).is_some() {
                    return Err(split::described_twice(shard, &info.name, info.described_at));
                }
            }
        }
        let file_of = vec![None; shards.len()];
        Ok(Tensors { shards, by_name, file_of, tensors: Vec::new(), files: Vec::new() })
    }

    /// The description of `name`, if the file has it.
    pub fn info(&self, name: &str) -> Option<&'a TensorInfo> {
        self.by_name.get(name).map(|&(_, info, _)| info)
    }

    /// A matrix `[rows, cols]` that must be there.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<TensorId> {
        self.try_matrix(name, rows, cols)?.ok_or_else(|| self.missing(name))
    }

    /// A vector of `len` floats that must be there.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<TensorId> {
        self.try_vector(name, len)?.ok_or_else(|| self.missing(name))
    }

    /// A matrix `[rows, cols]`, if the file has it.
    pub fn try_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Option<TensorId>> {
        self.take(name, rows, cols, &[cols, rows])
    }

    /// A vector of `len` floats, if the file has it.
    pub fn try_vector(&mut self, name: &str, len: usize) -> Result<Option<TensorId>> {
        let id = self.take(name, 1, len, &[len])?;
        if let (Some(id), Some((s, info, _))) = (id, self.by_name.get(name))
            && self.tensors[id.0].format.is_quantised()
        {
            let what = format!("norms and biases must be F32, F16 or BF16, but this is {}", info.format.name());
            return Err(fault::unsupported(&self.shards[*s].file.path, name, what));
        }
        Ok(id)
    }

    /// `{prefix}.weight` `[rows, cols]`, which must be there, and `{prefix}.bias`, which may be.
    pub fn linear(&mut self, prefix: &str, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{prefix}.weight"), rows, cols)?;
        Ok(Linear { weight, bias: self.try_vector(&format!("{prefix}.bias"), rows)? })
    }

    fn missing(&self, name: &str) -> crate::ModelError {
        // There is always a shard: a model is opened from a file.
        let path = self.shards.first().map(|s| s.file.path.as_path()).unwrap_or_else(|| "".as_ref());
        fault::format(path, Some(name), None, "tensor missing")
    }

    /// Takes tensor `name`. `dims` are the dimensions expected, innermost first; further ones must be 1.
    fn take(&mut self, name: &str, rows: usize, cols: usize, dims: &[usize]) -> Result<Option<TensorId>> {
        let Some((s, info, taken)) = self.by_name.get_mut(name) else { return Ok(None) };
        if let Some(id) = taken {
            return Ok(Some(*id));
        }
        let (have, more) = info.dims.split_at(dims.len().min(info.dims.len()));
        let padded = dims.iter().skip(have.len()).chain(more).all(|&d| d == 1);
        if have != &dims[..have.len()] || !padded {
            let what = format!("dimensions {:?}, but the metadata ask for {dims:?} (innermost first)", info.dims);
            return Err(fault::format(&self.shards[*s].file.path, Some(name), Some(info.described_at), what));
        }
        let file = *self.file_of[*s].get_or_insert_with(|| {
            self.files.push(self.shards[*s].file.clone());
            self.files.len() - 1
        });
        let id = TensorId(self.tensors.len());
        *taken = Some(id);
        self.tensors.push(Tensor {
            name: name.to_owned(),
            format: info.format,
            stored: None,
            rows,
            cols,
            layout: Layout::RowMajor,
            planes: [Some(Extent { file, offset: info.offset, len: info.len }), None, None],
        });
        Ok(Some(id))
    }

    /// The elements of a vector that was taken, which must be F32.
    pub fn floats(&self, id: TensorId) -> Result<Vec<f32>> {
        let t = &self.tensors[id.0];
        let Some(&(s, info, _)) = self.by_name.get(t.name.as_str()) else { return Ok(Vec::new()) };
        let file = &self.shards[s].file;
        if info.format != Format::F32 {
            let what = format!("must be F32, but is {}", info.format.name());
            return Err(fault::unsupported(&file.path, &t.name, what));
        }
        let bytes = file.bytes.get(info.offset..info.offset + info.len).unwrap_or(&[]);
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// A fault of tensor `name`, at its place.
    pub fn fault(&self, name: &str, what: impl Into<String>) -> crate::ModelError {
        match self.by_name.get(name) {
            Some(&(s, info, _)) => fault::format(&self.shards[s].file.path, Some(name), Some(info.described_at), what),
            None => self.missing(name),
        }
    }

    /// An error unless every tensor was taken, or is one that `harmless` knows.
    pub fn all_used(&self, harmless: impl Fn(&str) -> bool) -> Result<()> {
        let unused = |name: &str| matches!(self.by_name.get(name), Some((_, _, None))) && !harmless(name);
        let mut left = self.shards.iter().flat_map(|s| s.tensors.iter().map(move |t| (s, t)));
        let Some((shard, first)) = left.find(|(_, t)| unused(&t.name)) else { return Ok(()) };
        let more = left.filter(|(_, t)| unused(&t.name)).count();
        let others = if more == 0 { String::new() } else { format!(" (and {more} more)") };
        let what = format!("the architecture has no use for this tensor{others}; running without it would be wrong");
        Err(fault::unsupported(&shard.file.path, &first.name, what))
    }
}
