//! Numbers of ggml's tensor types, and which of them are supported.
//!
//! Source: ggml, `include/ggml.h`, `enum ggml_type`; the numbers are part of the GGUF format.

use headrace_numerics::format::Format;

/// The format that type number `id` stands for; `None` if it isn't supported.
pub(super) fn format(id: u32) -> Option<Format> {
    Some(match id {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        12 => Format::Q4_K,
        13 => Format::Q5_K,
        14 => Format::Q6_K,
        30 => Format::BF16,
        _ => return None,
    })
}

/// What a message calls type number `id`.
pub(super) fn name(id: u32) -> String {
    let known = match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return format(id).map_or_else(|| format!("number {id}"), Format::name),
    };
    known.to_owned()
}

/// Elements that one block of `format` holds, and bytes of one block.
pub(super) const fn block(format: Format) -> (usize, usize) {
    let elements = format.col_multiple();
    (elements, format.row_bytes(0, elements))
}
