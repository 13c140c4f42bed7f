//! Typed access to the metadata of a GGUF file, with errors that name the key and its place.

use crate::error::{ModelError, Result};
use crate::gguf::fault;
use crate::gguf::header::GgufFile;
use crate::gguf::value::{Array, Value, ValueType, scalar};

/// An array of the metadata, its elements still in the file.
#[derive(Clone, Copy, Debug)]
pub struct ArrayView<'a> {
    array: Array,
    bytes: &'a [u8],
}

impl<'a> ArrayView<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.array.count
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.array.count == 0
    }

    /// Type of the elements.
    pub fn elem(&self) -> ValueType {
        self.array.elem
    }

    /// The elements of an array of scalars, in order; nothing for arrays of strings and of arrays.
    pub fn scalars(&self) -> impl Iterator<Item = Value> + 'a {
        let elem = self.array.elem;
        let size = elem.bytes().unwrap_or(usize::MAX);
        self.bytes.chunks_exact(size).filter_map(move |b| scalar(elem, b))
    }

    /// The elements of an array of strings, in order; nothing for other arrays.
    pub fn strings(&self) -> Strings<'a> {
        Strings { rest: if self.array.elem == ValueType::Str { self.bytes } else { &[] } }
    }
}

/// Iterator over the strings of an array.
#[derive(Clone, Debug)]
pub struct Strings<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let (len, rest) = self.rest.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        self.rest = rest;
        std::str::from_utf8(text).ok()
    }
}

impl GgufFile {
    /// A fault of metadata key `key`, at its place in the file.
    pub fn key_error(&self, key: &str, what: impl Into<String>) -> ModelError {
        fault::format(&self.file.path, Some(key), self.metadata.get(key).map(|e| e.offset), what)
    }

    /// A metadata key that asks for something that isn't done.
    pub fn key_unsupported(&self, key: &str, what: impl Into<String>) -> ModelError {
        fault::unsupported(&self.file.path, key, what)
    }

    fn wrong_type(&self, key: &str, want: &str, got: &Value) -> ModelError {
        self.key_error(key, format!("should be {want}, but is {}", got.type_name()))
    }

    /// The value of `key`, if the file has it.
    pub fn value(&self, key: &str) -> Option<Value> {
        self.metadata.get(key).map(|e| e.value)
    }

    /// The string `key`; an error if it has another type.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Str { start, len }) => {
                let text = self.file.bytes.get(start..start + len).and_then(|b| std::str::from_utf8(b).ok());
                text.map(Some).ok_or_else(|| self.key_error(key, "text is not valid UTF-8"))
            }
            Some(other) => Err(self.wrong_type(key, "a string", &other)),
        }
    }

    /// The integer `key`, of any width, signed or not; an error if it is negative or has another type.
    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Uint(n)) => Ok(Some(n)),
            Some(Value::Int(n)) => {
                u64::try_from(n).map(Some).map_err(|_| self.key_error(key, format!("{n} is negative")))
            }
            Some(other) => Err(self.wrong_type(key, "an integer", &other)),
        }
    }

    /// The float `key`; an error if it is not finite or has another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(x)),
            Some(Value::Float(x)) => Err(self.key_error(key, format!("{x} is not finite"))),
            Some(other) => Err(self.wrong_type(key, "a float", &other)),
        }
    }

    /// The bool `key`; an error if it has another type.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(self.wrong_type(key, "a bool", &other)),
        }
    }

    /// The array `key`; an error if it has another type.
    pub fn array(&self, key: &str) -> Result<Option<ArrayView<'_>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(array)) => {
                let bytes = self.file.bytes.get(array.start..array.end).unwrap_or(&[]);
                Ok(Some(ArrayView { array, bytes }))
            }
            Some(other) => Err(self.wrong_type(key, "an array", &other)),
        }
    }
}
