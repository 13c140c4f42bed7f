//! Host provider: SIMD kernels, thread pool, host device.

pub mod activations;
mod buffers;
mod compile;
mod exec;
mod kernels;
mod kv_pages;
pub mod linear;
mod memory;
mod pool;
mod profile;
pub mod provider;
mod rope_table;
mod rows;
pub mod simd;
mod weights;

pub use provider::{CpuOptions, CpuProvider};
