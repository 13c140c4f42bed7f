//! Rounding to fp16 and back, for stored keys and values.

use half::slice::HalfFloatSliceExt;

use half::f16;

/// `out[i] = f16(x[i])`, rounded to nearest even. Slices have the same length.
pub fn to_f16(x: &[f32], out: &mut [f16]) {
    out.convert_from_f32_slice(x);
}

/// `out[i] = x[i]`, exact. Slices have the same length.
pub fn from_f16(x: &[f16], out: &mut [f32]) {
    x.convert_to_f32_slice(out);
}
