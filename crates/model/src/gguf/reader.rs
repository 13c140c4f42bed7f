//! A cursor over the bytes of a GGUF file that never reads past their end, nor allocates by a number it read.

use std::path::Path;

use crate::error::Result;
use crate::gguf::fault;
use crate::gguf::value::{Array, Value, ValueType, scalar};

/// Arrays within arrays that are followed. Nothing that writes GGUF nests them at all.
const MAX_DEPTH: usize = 4;

/// Longest metadata key, by the specification.
const MAX_KEY: usize = 65_535;

/// Cursor. `item` is what a message names while it is being read.
pub(super) struct Reader<'a> {
    pub path: &'a Path,
    pub bytes: &'a [u8],
    pub pos: usize,
}

impl<'a> Reader<'a> {
    /// Bytes not yet read.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.pos
    }

    fn take(&mut self, n: usize, item: Option<&str>) -> Result<&'a [u8]> {
        match self.bytes[self.pos..].get(..n) {
            Some(slice) => {
                self.pos += n;
                Ok(slice)
            }
            None => Err(fault::format(
                self.path,
                item,
                Some(self.pos),
                format!("the file ends too early: {n} bytes needed, {} left; fetch it again", self.left()),
            )),
        }
    }

    /// A little-endian u32.
    pub fn u32(&mut self, item: Option<&str>) -> Result<u32> {
        let b = self.take(4, item)?;
        Ok(b.iter().rev().fold(0, |n, &x| (n << 8) | u32::from(x)))
    }

    /// A little-endian u64.
    pub fn u64(&mut self, item: Option<&str>) -> Result<u64> {
        let b = self.take(8, item)?;
        Ok(b.iter().rev().fold(0, |n, &x| (n << 8) | u64::from(x)))
    }

    /// A number of things that take at least `each` bytes: an error unless the bytes left could hold them.
    pub fn count(&mut self, each: usize, item: Option<&str>, things: &str) -> Result<usize> {
        let at = self.pos;
        let n = self.u64(item)?;
        match usize::try_from(n) {
            Ok(n) if n <= self.left() / each => Ok(n),
            _ => Err(fault::format(
                self.path,
                item,
                Some(at),
                format!("{n} {things} declared, but only {} bytes are left: damaged, or cut short", self.left()),
            )),
        }
    }

    /// A string: where its text starts, and the text.
    fn string_at(&mut self, item: Option<&str>) -> Result<(usize, &'a str)> {
        let len = self.count(1, item, "bytes of text")?;
        let start = self.pos;
        let raw = self.take(len, item)?;
        let text = std::str::from_utf8(raw)
            .map_err(|e| fault::format(self.path, item, Some(start + e.valid_up_to()), "text is not valid UTF-8"))?;
        Ok((start, text))
    }

    /// A metadata key: not empty, at most [`MAX_KEY`] bytes.
    pub fn key(&mut self) -> Result<&'a str> {
        let at = self.pos;
        let (_, key) = self.string_at(None)?;
        if key.is_empty() || key.len() > MAX_KEY {
            let what = format!("metadata key of {} bytes; 1 to {MAX_KEY} are allowed", key.len());
            return Err(fault::format(self.path, None, Some(at), what));
        }
        Ok(key)
    }

    /// Name of a tensor.
    pub fn string(&mut self, item: Option<&str>) -> Result<&'a str> {
        Ok(self.string_at(item)?.1)
    }

    /// A type number and the value of that type.
    pub fn value(&mut self, key: &str) -> Result<Value> {
        let kind = self.value_type(key)?;
        match kind {
            ValueType::Str => {
                let (start, text) = self.string_at(Some(key))?;
                Ok(Value::Str { start, len: text.len() })
            }
            ValueType::Array => Ok(Value::Array(self.array(key, 0)?)),
            _ => {
                let at = self.pos;
                let raw = self.take(kind.min_bytes(), Some(key))?;
                scalar(kind, raw).ok_or_else(|| bad_bool(self.path, key, at))
            }
        }
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType> {
        let at = self.pos;
        let id = self.u32(Some(key))?;
        ValueType::from_id(id)
            .ok_or_else(|| fault::format(self.path, Some(key), Some(at), format!("unknown metadata type number {id}")))
    }

    /// Element type, count and elements; every element is checked, none is copied.
    fn array(&mut self, key: &str, depth: usize) -> Result<Array> {
        if depth == MAX_DEPTH {
            let what = format!("arrays nested more than {MAX_DEPTH} deep");
            return Err(fault::format(self.path, Some(key), Some(self.pos), what));
        }
        let elem = self.value_type(key)?;
        let count = self.count(elem.min_bytes(), Some(key), "array elements")?;
        let start = self.pos;
        match elem {
            ValueType::Str => {
                for _ in 0..count {
                    self.string_at(Some(key))?;
                }
            }
            ValueType::Array => {
                for _ in 0..count {
                    self.array(key, depth + 1)?;
                }
            }
            _ => {
                let raw = self.take(count * elem.min_bytes(), Some(key))?;
                if elem == ValueType::Bool
                    && let Some(i) = raw.iter().position(|&b| b > 1)
                {
                    return Err(bad_bool(self.path, key, start + i));
                }
            }
        }
        Ok(Array { elem, count, start, end: self.pos })
    }
}

fn bad_bool(path: &Path, key: &str, at: usize) -> crate::ModelError {
    fault::format(path, Some(key), Some(at), "a bool is neither 0 nor 1")
}
