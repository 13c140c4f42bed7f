//! The arithmetic contract of Headrace: scalar, readable, the oracle that every fast path is tested against.
//!
//! Everything here is IEEE-754 binary32, round to nearest even, denormals kept; a fused multiply-add only where the
//! code says [`f32::mul_add`]; integer sums are exact. Reductions have a fixed shape that depends on the length
//! alone, so that scalar code, SIMD registers, `dp4a` and integer tensor cores all give the same bits.
//! `docs/numerics.md` explains the reasons. There is no SIMD in this crate, and nothing here is meant to be fast.

#![forbid(unsafe_code)]

pub mod activation;
pub mod argmax;
pub mod attention;
pub mod block;
pub mod elementwise;
pub mod format;
pub mod linear;
pub mod norm;
pub mod reduce;
pub mod rope;

/// The version of the contract. A change that alters any bit of any result raises it; stats report it.
pub const CONTRACT_VERSION: u32 = 1;
