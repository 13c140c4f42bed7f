//! A look at the protobuf bytes before they are decoded: are they whole, and will decoding stay small?
//!
//! Decoding turns a two-byte empty message into a structure of hundreds of bytes. So a walk over the wire format
//! counts first. It allocates nothing, and it knows where in the file a fault is.

use super::Origin;
use crate::error::Result;

/// The most fields that the known messages of one model may hold in sum. Exports of 100 layers hold under 50,000.
pub const MAX_FIELDS: usize = 1_000_000;

/// The most bytes that a model may hold outside `raw_data`: names, shapes, attributes, data in typed fields.
pub const MAX_STRUCTURE_BYTES: usize = 64 << 20;

/// Messages whose fields are counted. None contains itself.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Leaf,
    ValueInfo,
    Type,
    TensorType,
    Shape,
}

impl Kind {
    fn child(self, field: u64) -> Option<Kind> {
        Some(match (self, field) {
            (Kind::Model, 7) => Kind::Graph,
            (Kind::Model, 8) => Kind::Leaf,
            (Kind::Graph, 1) => Kind::Node,
            (Kind::Graph, 5) | (Kind::Attribute, 5) => Kind::Tensor,
            (Kind::Graph, 11 | 12) => Kind::ValueInfo,
            (Kind::Node, 5) => Kind::Attribute,
            (Kind::Tensor, 13) => Kind::Leaf,
            (Kind::ValueInfo, 2) => Kind::Type,
            (Kind::Type, 1) => Kind::TensorType,
            (Kind::TensorType, 2) => Kind::Shape,
            (Kind::Shape, 1) => Kind::Leaf,
            _ => return None,
        })
    }
}

struct Scan<'a> {
    bytes: &'a [u8],
    origin: &'a Origin<'a>,
    fields: usize,
    structure: usize,
}

/// Walks the whole model once.
///
/// # Errors
/// `Format` with the offset if the bytes are cut off or are no protobuf; `Unsupported` above [`MAX_FIELDS`] or
/// [`MAX_STRUCTURE_BYTES`].
pub fn check(bytes: &[u8], origin: &Origin<'_>) -> Result<()> {
    Scan { bytes, origin, fields: 0, structure: 0 }.message(0, bytes.len(), Kind::Model)
}

impl Scan<'_> {
    fn varint(&self, at: &mut usize, end: usize) -> Result<u64> {
        let mut value = 0u64;
        let start = *at;
        for shift in (0..70).step_by(7) {
            let byte = match self.bytes.get(*at) {
                Some(b) if *at < end => *b,
                _ => return Err(self.origin.format_at(start, "the file ends, or a message ends, inside a number")),
            };
            *at += 1;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.origin.format_at(start, "not a protobuf number: is this an ONNX file?"))
    }

    fn message(&mut self, start: usize, end: usize, kind: Kind) -> Result<()> {
        let mut at = start;
        while at < end {
            let field_at = at;
            let key = self.varint(&mut at, end)?;
            self.fields += 1;
            if self.fields > MAX_FIELDS {
                return Err(self
                    .origin
                    .unsupported(None, format!("more than {MAX_FIELDS} fields: no decoder export is that large")));
            }
            match key & 7 {
                0 => {
                    self.varint(&mut at, end)?;
                }
                1 => at = at.saturating_add(8),
                5 => at = at.saturating_add(4),
                2 => {
                    let len = self.varint(&mut at, end)?;
                    let stop = usize::try_from(len).ok().and_then(|l| at.checked_add(l)).filter(|s| *s <= end);
                    let Some(stop) = stop else {
                        return Err(self.origin.format_at(
                            field_at,
                            format!(
                                "a field of {len} bytes, but {} are left: the file is truncated or damaged",
                                end - at
                            ),
                        ));
                    };
                    match kind.child(key >> 3) {
                        Some(child) => self.message(at, stop, child)?,
                        None if matches!(kind, Kind::Tensor) && key >> 3 == 9 => {}
                        None => self.structure += stop - at,
                    }
                    if self.structure > MAX_STRUCTURE_BYTES {
                        return Err(self.origin.unsupported(
                            None,
                            format!("more than {MAX_STRUCTURE_BYTES} bytes outside raw tensor data; export the weights as external data"),
                        ));
                    }
                    at = stop;
                }
                other => {
                    return Err(self
                        .origin
                        .format_at(field_at, format!("protobuf wire type {other}: is this an ONNX file?")));
                }
            }
            if at > end {
                return Err(self
                    .origin
                    .format_at(field_at, "the file ends inside a field: it is truncated or damaged"));
            }
        }
        Ok(())
    }
}
