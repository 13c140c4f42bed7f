//! Host provider: SIMD kernels, thread pool, host device.

pub mod activations;
pub mod linear;
pub mod simd;
