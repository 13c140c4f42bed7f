//! The CUDA provider: the contract's kernels, compiled to PTX when the crate is built, and the device that runs steps
//! with them.
//!
//! `abi` holds what the host and the kernels share, `ptx` the embedded device code, `launch` one function a kernel.
//! `driver`, `calls`, `context`, `current`, `stacks`, `stream`, `events` wrap the driver; `clock` keeps the device's time; `physical`, `granules`, `arena` are device memory;
//! `host_memory`, `host_charge`, `host_weights`, `upload`, `bounce` are where weights come from; `faults` are refusals for tests. A program becomes a `plan`, which `bind` turns into
//! kernel arguments (for one row mostly `chain`s of them), `kernel_launcher` launches and `graph` captures; `recorded` holds what a program owns, `step` runs one step, `provider` ties it
//! together.

pub mod abi;
pub mod arena;
mod attached;
pub mod bind;
mod bounce;
pub mod buckets;
mod calls;
pub mod chain;
pub mod clock;
pub mod context;
pub mod current;
pub mod descriptor;
pub mod driver;
pub mod events;
#[cfg(test)]
mod fake;
pub mod faults;
pub mod granules;
pub mod graph;
pub mod host_charge;
pub mod host_memory;
pub mod host_weights;
pub mod kernel_launcher;
pub mod launch;
pub mod launcher;
mod layout;
pub mod link;
pub mod nvml;
pub mod overhead;
pub mod physical;
pub mod plain;
pub mod plan;
pub mod probe;
pub mod provider;
pub mod ptx;
pub mod reader;
mod recorded;
mod regions;
mod share;
mod stacks;
mod step;
pub mod stream;
pub mod upload;

pub use provider::{CudaCounters, CudaProvider};
