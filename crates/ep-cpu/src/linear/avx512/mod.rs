//! The linear layers for AVX-512 with VNNI and VBMI: which kernel serves which format.
//!
//! Every format unpacks eight blocks of a row into one [`Tile`] of unsigned bytes in the order of the activations (see
//! `crate::activations`), straight from the file's bytes. One activation row multiplies the tile while it is in
//! registers ([`decode`]); several rows multiply it from a panel in the cache ([`gemm`]).

// Indices name registers and rows across several arrays at once.
#![allow(clippy::needless_range_loop)]

mod decode;
mod dense;
mod gemm;
mod kquant;
mod legacy;
mod nbits;
mod tile;

use std::ops::Range;

use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Format, WeightView, ZeroPoint};

use super::scalar;
use super::sink::{Columns, Epilogue};
use crate::activations::Activations;
use tile::Unpack;

pub(super) use dense::dense;
pub(crate) use legacy::transpose;
pub(crate) use tile::{Table, table};

/// The checked arguments of a quantised linear layer.
struct Call<'a, 'o> {
    w: &'a WeightView<'a>,
    acts: &'a Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'a>,
    out: &'a mut Columns<'o>,
}

/// The quantised linear layer.
///
/// # Safety
/// The processor must have `SimdLevel::Avx512Vnni`.
pub(super) unsafe fn linear(
    w: &WeightView<'_>,
    acts: &Activations,
    rows: Range<usize>,
    epilogue: Epilogue<'_>,
    out: &mut Columns<'_>,
) {
    let call = Call { w, acts, rows, epilogue, out };
    // SAFETY: the caller vouches for the processor; each unpacker is given a matrix of its own format.
    unsafe {
        match w.format {
            Format::Q4_0 => run(legacy::Q4_0, call),
            Format::Q4_1 => run(legacy::Q4_1, call),
            Format::Q5_0 => run(legacy::Q5_0, call),
            Format::Q5_1 => run(legacy::Q5_1, call),
            Format::Q8_0 => run(legacy::Q8_0, call),
            Format::Q4_K => run(kquant::Q4K, call),
            Format::Q5_K => run(kquant::Q5K, call),
            Format::Q6_K => run(kquant::Q6K, call),
            Format::Nbits(n) => {
                let halves = n.block == 16;
                match (n.bits == 4, n.zero == ZeroPoint::PerBlock, halves) {
                    (true, false, false) => run(nbits::Nibbles::<false, false>::new(n), call),
                    (true, true, false) => run(nbits::Nibbles::<true, false>::new(n), call),
                    (true, false, true) => run(nbits::Nibbles::<false, true>::new(n), call),
                    (true, true, true) => run(nbits::Nibbles::<true, true>::new(n), call),
                    (false, false, false) => run(nbits::Bytes::<false, false>::new(n), call),
                    (false, true, false) => run(nbits::Bytes::<true, false>::new(n), call),
                    (false, false, true) => run(nbits::Bytes::<false, true>::new(n), call),
                    (false, true, true) => run(nbits::Bytes::<true, true>::new(n), call),
                }
            }
            // Formats that only cards keep: the host device has them to show that a card's layout gives the same bits.
            Format::Planes(_) => scalar::linear(call.w, call.acts, call.rows, call.epilogue, call.out),
            Format::F32 | Format::F16 | Format::BF16 => unreachable!("checked by the caller: the format is quantised"),
        }
    }
}

/// # Safety
/// As [`linear`]; `format` must be the unpacker of `call.w.format`.
unsafe fn run<F: Unpack>(format: F, call: Call<'_, '_>) {
    // SAFETY: passed on to the caller.
    unsafe {
        match (call.rows.len(), call.acts.width()) {
            (0, _) => {}
            (1, ActivationWidth::Int8) => decode::decode::<F, false>(format, call),
            (1, ActivationWidth::Int16) => decode::decode::<F, true>(format, call),
            (_, ActivationWidth::Int8) => gemm::gemm::<F, false>(format, call),
            (_, ActivationWidth::Int16) => gemm::gemm::<F, true>(format, call),
        }
    }
}
