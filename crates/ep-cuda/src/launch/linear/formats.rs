//! What the linear kernels need to know of a weight format.

use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};

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
    }
}

/// True if linear.cu has tuned variants for the format.
pub(super) fn is_hot(format: Format) -> bool {
    matches!(class_of(format), "p4h" | "p4hz" | "p4f" | "p4fz" | "q4_0" | "q4_1" | "q8_0")
}

/// True if linear_pipe.cu serves the format.
pub(super) fn is_piped(format: Format) -> bool {
    matches!(format, Format::Nbits(Nbits { bits: 4, block: 32, zero, .. }) if zero != ZeroPoint::PerBlock)
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
        _ => (0, 0, 0),
    }
}
