//! Plan, schedule, session, generation, stats. Knows providers only by their trait.
//!
//! Data's way: files become a [`headrace_model::ModelSpec`]; [`program`] turns that into a step program in read order; a
//! provider records it; [`Engine`] replays it once a step and keeps the books.

#![forbid(unsafe_code)]

pub mod auto;
pub mod books;
pub mod budget;
mod cards;
mod dynamic;
pub mod engine;
pub mod environment;
pub mod error;
mod home;
pub mod host_ledger;
pub mod inventory;
mod kv_state;
mod laps;
pub mod layout;
pub mod mode;
pub mod options;
pub mod paged;
pub mod placement;
pub mod plan;
pub mod probe;
pub mod process;
pub mod program;
pub mod residency;
pub mod run;
pub mod sampling;
pub mod schedule;
pub mod serve;
mod setup;
pub mod shared;
pub mod stats;
pub mod trade;

pub use cards::total_memory;
pub use engine::{Engine, Hook, Limits, Logits, Progress};
pub use error::{EngineError, Result};
pub use inventory::Inventory;
pub use mode::PlacementMode;
pub use options::{DeviceChoice, EngineOptions, GenerationOptions};
pub use residency::PolicyKind;
pub use run::{FinishReason, Generation, Run};

/// The kernel family that the CPU provider picks on this machine.
pub fn cpu_kernels() -> String {
    headrace_ep_cpu::kernel_name()
}

/// Bytes of memory that this process may take: the machine's, or what its control groups leave it, if that is less.
pub fn memory_bytes() -> u64 {
    headrace_ep_cpu::memory::memory_bytes() as u64
}
