//! Metadata values of a GGUF file: scalars, and strings and arrays that stay in the file's bytes.
//!
//! Source: GGUF specification, `docs/gguf.md` of the ggml project, `gguf_metadata_value_t`.

/// Type numbers of metadata values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    /// Unsigned, 1 byte.
    U8 = 0,
    /// Signed, 1 byte.
    I8 = 1,
    /// Unsigned, 2 bytes.
    U16 = 2,
    /// Signed, 2 bytes.
    I16 = 3,
    /// Unsigned, 4 bytes.
    U32 = 4,
    /// Signed, 4 bytes.
    I32 = 5,
    /// IEEE binary32.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// 8 bytes of length, then UTF-8.
    Str = 8,
    /// Element type, count, elements.
    Array = 9,
    /// Unsigned, 8 bytes.
    U64 = 10,
    /// Signed, 8 bytes.
    I64 = 11,
    /// IEEE binary64.
    F64 = 12,
}

impl ValueType {
    /// The type with number `id`.
    pub const fn from_id(id: u32) -> Option<ValueType> {
        Some(match id {
            0 => ValueType::U8,
            1 => ValueType::I8,
            2 => ValueType::U16,
            3 => ValueType::I16,
            4 => ValueType::U32,
            5 => ValueType::I32,
            6 => ValueType::F32,
            7 => ValueType::Bool,
            8 => ValueType::Str,
            9 => ValueType::Array,
            10 => ValueType::U64,
            11 => ValueType::I64,
            12 => ValueType::F64,
            _ => return None,
        })
    }

    /// Bytes of one value; `None` for strings and arrays, whose size is their own.
    pub const fn bytes(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::Str | ValueType::Array => None,
        }
    }

    /// The fewest bytes that one value takes in a file.
    pub const fn min_bytes(self) -> usize {
        match self {
            ValueType::Str => 8,
            ValueType::Array => 12,
            other => match other.bytes() {
                Some(n) => n,
                None => 1,
            },
        }
    }

    /// What a message calls a value of this type.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "a u8",
            ValueType::I8 => "an i8",
            ValueType::U16 => "a u16",
            ValueType::I16 => "an i16",
            ValueType::U32 => "a u32",
            ValueType::I32 => "an i32",
            ValueType::F32 => "an f32",
            ValueType::Bool => "a bool",
            ValueType::Str => "a string",
            ValueType::Array => "an array",
            ValueType::U64 => "a u64",
            ValueType::I64 => "an i64",
            ValueType::F64 => "an f64",
        }
    }
}

/// A scalar, or where a string or an array lies in the file. Strings were checked to be UTF-8, and arrays to lie
/// within the file, when the file was opened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Uint(u64),
    /// Any signed integer.
    Int(i64),
    /// Either float; binary32 widened exactly.
    Float(f64),
    /// A bool.
    Bool(bool),
    /// A string.
    Str {
        /// First byte of the text.
        start: usize,
        /// Bytes of the text.
        len: usize,
    },
    /// An array.
    Array(Array),
}

/// Where an array lies in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array {
    /// Type of the elements.
    pub elem: ValueType,
    /// Number of elements.
    pub count: usize,
    /// First byte of the first element.
    pub start: usize,
    /// First byte after the last element.
    pub end: usize,
}

impl Value {
    /// What a message calls this value's type.
    pub const fn type_name(&self) -> &'static str {
        match self {
            Value::Uint(_) => "an unsigned integer",
            Value::Int(_) => "a signed integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::Str { .. } => "a string",
            Value::Array(_) => "an array",
        }
    }

    /// The number that a scalar stands for (bools as 0 and 1); `None` for strings and arrays.
    pub fn number(&self) -> Option<f64> {
        match *self {
            Value::Uint(n) => Some(n as f64),
            Value::Int(n) => Some(n as f64),
            Value::Float(x) => Some(x),
            Value::Bool(b) => Some(f64::from(u8::from(b))),
            Value::Str { .. } | Value::Array(_) => None,
        }
    }
}

/// A scalar of `kind` from its little-endian bytes; `None` if there are too few, `kind` is no scalar, or a bool is
/// neither 0 nor 1.
pub(super) fn scalar(kind: ValueType, bytes: &[u8]) -> Option<Value> {
    let b: &[u8] = bytes.get(..kind.bytes()?)?;
    Some(match (kind, b) {
        (ValueType::U8, &[a]) => Value::Uint(a.into()),
        (ValueType::I8, &[a]) => Value::Int((a as i8).into()),
        (ValueType::Bool, &[a @ (0 | 1)]) => Value::Bool(a == 1),
        (ValueType::U16, &[a, b]) => Value::Uint(u16::from_le_bytes([a, b]).into()),
        (ValueType::I16, &[a, b]) => Value::Int(i16::from_le_bytes([a, b]).into()),
        (ValueType::U32, _) => Value::Uint(u32::from_le_bytes(b.try_into().ok()?).into()),
        (ValueType::I32, _) => Value::Int(i32::from_le_bytes(b.try_into().ok()?).into()),
        (ValueType::F32, _) => Value::Float(f32::from_le_bytes(b.try_into().ok()?).into()),
        (ValueType::U64, _) => Value::Uint(u64::from_le_bytes(b.try_into().ok()?)),
        (ValueType::I64, _) => Value::Int(i64::from_le_bytes(b.try_into().ok()?)),
        (ValueType::F64, _) => Value::Float(f64::from_le_bytes(b.try_into().ok()?)),
        _ => return None,
    })
}
