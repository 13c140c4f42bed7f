//! What the linear kernels need to know of a weight format.

use headrace_model::arrange::in_planes;
use headrace_numerics::format::{Format, Nbits, Planes, ScaleType, ZeroPoint};

/// The format in which the kernels want matrices that a file has in `format`.
pub fn wanted_format(format: Format) -> Format {
    match in_planes(format) {
        Some(planes) if is_piped(planes) || is_six(planes) => planes,
        _ => format,
    }
}

/// Name of a format's class in kernels/formats.txt.
pub(in crate::launch) fn class_of(format: Format) -> &'static str {
    match format {
        Format::F32 => "f32",
        Format::F16 => "f16",
        Format::BF16 => "bf16",
        Format::Q4_0 => "q4_0",
        Format::Q4_1 => "q4_1",
        Format::Q5_0 => "q5_0",
        Format::Q5_1 => "q5_1",
        Format::Q8_0 => "q8_0",
        Format::Q4_K => "q4_k",
        Format::Q5_K => "q5_k",
        Format::Q6_K => "q6_k",
        Format::Nbits(Nbits { bits: 4, block: 16, .. }) => "p4s",
        Format::Nbits(Nbits { block: 16, .. }) => "p8s",
        Format::Nbits(Nbits { bits: 4, scale, zero, .. }) => match (scale, zero) {
            (ScaleType::F16, ZeroPoint::PerBlock) => "p4hz",
            (ScaleType::F16, _) => "p4h",
            (ScaleType::F32, ZeroPoint::PerBlock) => "p4fz",
            (ScaleType::F32, _) => "p4f",
        },
        Format::Nbits(_) => "p8",
        Format::Planes(Planes::Q4_1) => "p4m",
        Format::Planes(Planes::Q4_K) => "p4k",
        Format::Planes(Planes::Q6_K) => "p6k",
    }
}

/// True if linear.cu has tuned variants for the format.
pub(super) fn is_hot(format: Format) -> bool {
    matches!(class_of(format), "p4h" | "p4hz" | "p4f" | "p4fz" | "p4m" | "p4k" | "p6k" | "q4_0" | "q4_1" | "q8_0")
}

/// True if linear_pipe.cu and the other kernels behind rings of copies serve the format: codes of 4 bits in plane 0, scales for each 32
/// columns in plane 1, no zero points.
pub fn is_piped(format: Format) -> bool {
    match format {
        Format::Nbits(Nbits { bits: 4, block: 32, zero, .. }) => zero != ZeroPoint::PerBlock,
        Format::Planes(p) => p != Planes::Q6_K,
        _ => false,
    }
}

/// True for six bits in planes, which linear_tile.cu serves as well.
pub fn is_six(format: Format) -> bool {
    format == Format::Planes(Planes::Q6_K)
}

/// True if a class has those kernels, for some of its formats.
pub(in crate::launch) fn is_piped_class(class: &str) -> bool {
    matches!(class, "p4h" | "p4f" | "p4m" | "p4k")
}

/// True if a piped format has a float minimum.
pub(super) fn has_minimum(format: Format) -> bool {
    matches!(format, Format::Planes(Planes::Q4_1 | Planes::Q4_K))
}

/// Bytes of the scales, and whatever goes with them, of a block of 32 columns in plane 1 of a piped format.
pub fn scale_bytes(format: Format) -> usize {
    match format {
        Format::Nbits(Nbits { scale: ScaleType::F16, .. }) | Format::Planes(Planes::Q4_K | Planes::Q6_K) => 2,
        _ => 4,
    }
}

/// What the planar kernels need to know beyond their class: `(group_shift, flip, scale_half)`.
pub fn format_params(format: Format) -> (u32, u32, u32) {
    match format {
        Format::Nbits(n) => {
            let flip = match (n.bits, n.zero) {
                (4, ZeroPoint::TwosComplement) => 0x8888_8888,
                (4, _) | (_, ZeroPoint::TwosComplement) => 0,
                _ => 0x8080_8080,
            };
            (u32::from(n.block).trailing_zeros(), flip, u32::from(n.scale == ScaleType::F16))
        }
        // In planes: blocks of 32, unsigned codes.
        Format::Planes(_) => (5, 0, 0),
        _ => (0, 0, 0),
    }
}
