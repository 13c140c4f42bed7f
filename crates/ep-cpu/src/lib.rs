//! Host provider: SIMD kernels, thread pool, host device.

pub mod activations;
mod buffers;
pub mod cgroup;
mod compile;
mod errors;
mod exec;
mod executor;
mod granules;
pub mod host_device;
mod in_flight;
mod kernels;
mod kv_pages;
pub mod linear;
pub mod memory;
mod pool;
pub mod probe;
mod profile;
pub mod provider;
mod rope_table;
mod rows;
pub mod simd;
mod weights;

pub use host_device::{HostDevice, HostOptions};
pub use provider::{CpuOptions, CpuProvider};

/// The kernel family in use on this machine, or why there is none: an instruction set that was asked for and is missing.
pub fn kernel_name() -> String {
    simd::SimdLevel::detect().map_or_else(|e| e.to_string(), |level| level.to_string())
}
