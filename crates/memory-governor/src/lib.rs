//! Who may hold how many bytes of which pool: ledger, leases, growth transactions. No unsafe, no I/O, no CUDA.
//!
//! A **pool** is physical memory of one kind under one hard limit: a device, pinned host memory, plain host memory. A
//! **holder** is a subsystem that uses it: weights, KV, staging. A **lease** is bytes that a holder was granted; they
//! are charged from the moment they are reserved, before any memory exists, until the lease is dropped.
//!
//! A holder states two sizes. Its *floor* is set aside for it at once. Its *promise* is what it is certain to get in
//! total; the part above the floor that it does not use yet is **lent**: others may use it, if they can give it back.
//! What the holder may yet take of its promise is its **allowance**. With KV at its floor and weights all over the rest:
//!
//! ```text
//!   |<---------------------------- limit --------------------------->|
//!   | context | staging | KV floor | weights ........................ |
//!                       |<------ KV's promise ----->|
//!                                  |<-- lent ------>|  comes back as KV grows
//! ```
//!
//! A growth takes the holder's own set-aside bytes, then unassigned ones, then asks other holders to yield, lowest
//! priority number first. Only bytes beyond a holder's promise can be asked for, and only through its own [`Reclaim`]
//! callback: the governor never takes bytes itself. It happens as a whole or not at all. So a refused request changes
//! nothing, and says in a [`BudgetError`] who holds what and which limit would do.
//!
//! Callbacks run without any lock. Requests on one pool are served in order of arrival, with one exception: a request
//! within its holder's promise does not queue behind requests that have none.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use headrace_memory_governor::*;
//!
//! /// Resident weights: one lease here; a planner would pick segments that nothing in flight reads.
//! struct Weights { lease: Mutex<Lease> }
//!
//! impl Reclaim for Weights {
//!     fn offer(&self, ask: &Ask) -> Vec<Lease> {
//!         let mut lease = self.lease.lock().unwrap();
//!         let bytes = ask.bytes.min(lease.bytes());
//!         lease.split(bytes).into_iter().collect()
//!     }
//!     fn evict(&self, _: &[Lease]) -> Result<(), ReclaimError> { Ok(()) } // fence, then unmap
//!     fn restore(&self, leases: Vec<Lease>, _evicted: bool) {
//!         let mut lease = self.lease.lock().unwrap();
//!         leases.into_iter().for_each(|part| lease.merge(part).expect("its own lease"));
//!     }
//! }
//!
//! # fn main() -> Result<(), GovernorError> {
//! const MIB: u64 = 1 << 20;
//! let device = Pool::Device(0);
//! let governor = Governor::new([PoolSpec { pool: device, limit: 1000 * MIB, granule: 2 * MIB }])?;
//!
//! // KV is promised 400 MiB and starts with 20. The weights take the rest, the 380 lent MiB included.
//! let kv = governor.holder(device, HolderSpec::new("kv", Role::Kv, 5).floor(20 * MIB).promise(400 * MIB))?;
//! let account = governor.holder(device, HolderSpec::new("weights", Role::Weights, 1))?;
//! let weights = Arc::new(Weights { lease: Mutex::new(account.empty_lease()) });
//! account.set_reclaim(&weights);
//! let free = account.room().free;
//! account.grow(&mut weights.lease.lock().unwrap(), free)?;
//! assert_eq!(free, 980 * MIB);
//!
//! // KV grows to what it was promised; the weights shed exactly that.
//! let mut lease = kv.reserve(20 * MIB)?.commit();
//! let reservation = kv.reserve(380 * MIB)?;         // charged; now map the memory
//! assert_eq!(reservation.sources().reclaimed, 380 * MIB);
//! reservation.commit_into(&mut lease)?;             // or drop it, and the bytes go back
//! assert_eq!(weights.lease.lock().unwrap().bytes(), 600 * MIB);
//! println!("{}", governor.report());
//! # Ok(()) }
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used)]

mod error;
mod governor;
mod lease;
mod ledger;
mod pressure;
mod queue;
mod reclaim;
mod report;
mod spec;
mod sync;
mod transaction;

pub use error::{BudgetError, GovernorError, Refusal};
pub use governor::{Governor, Holder, Room};
pub use lease::{Lease, Reservation};
pub use ledger::Sources;
pub use pressure::{Pressure, PressureKind, Subscription};
pub use reclaim::{Ask, Reclaim, ReclaimError};
pub use report::{HolderReport, Physical, PoolReport, Report, Source};
pub use spec::{HolderSpec, Pool, PoolSpec, Role};
