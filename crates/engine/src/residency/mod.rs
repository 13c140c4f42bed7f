//! The dynamic residency cache: a control arm beside the static schedule.
//!
//! A dense decoder reads every weight once a step, in the same order, so the best resident set is fixed and known in
//! advance; that is what `placement` and `schedule` do. Here a **policy** decides at every access instead, as a cache does that
//! knows nothing of the order. Every policy gives the same tokens; none moves fewer bytes than the best fixed set
//! ([`fixed`] says why). Models whose next weights are not known in advance will need it for more than comparison.
//!
//! All of this is bookkeeping over pieces: no device, no I/O. `dynamic` drives a device with it, [`mod@simulate`] nothing.

pub mod cache;
pub mod fixed;
pub mod pins;
mod policies;
pub mod policy;
pub mod resident;
pub mod simulate;
pub mod trace;

pub use cache::{Access, ResidencyCache};
pub use policy::{Decision, PolicyKind, ResidencyPolicy};
pub use resident::{Limits, ResidentSet};
pub use simulate::{PolicyOutcome, Simulation, simulate};
pub use trace::{ResidencyCounters, TensorTrace};

#[cfg(test)]
mod tests;
