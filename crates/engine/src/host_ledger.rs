//! Page-locked memory of the host: one limit for all engines of the process, which registrations of model files, pinned copies and
//! buffers are charged to.

use std::sync::Arc;

use headrace_memory_governor::{Holder, HolderSpec, Lease, Pool, Report, Role};
use headrace_provider::{HostLease, HostLedger, HostUse};

use crate::books::{Books, Member};
use crate::error::{EngineError, Result};

/// Name of the memory.
const KEY: &str = "page-locked host memory";

/// Bytes of a page, the unit of locking.
const PAGE: u64 = 4096;

/// Bytes set aside for buffers, without which nothing runs: the pool that replaces what can't be locked, descriptors and logits.
const BUFFERS: u64 = 80 << 20;

/// The share of the memory, in hundredths, that may be locked where nobody said how much: the rest of the machine needs some, and
/// what is locked can't be swapped or dropped.
const SHARE: u64 = 80;

/// One engine's part in the page-locked memory of the process.
#[derive(Debug)]
pub struct HostMemory {
    member: Member,
    /// In the order of [`HostUse::ALL`].
    holders: [Holder; 3],
}

#[derive(Debug)]
struct Granted(#[allow(dead_code)] Lease);

impl HostLease for Granted {}

impl HostMemory {
    /// Takes a part. `limit` is the limit of the process from now on; `None` for the one in force, or a share of `memory` bytes, the
    /// machine's or its control group's.
    ///
    /// # Errors
    /// [`EngineError::Argument`] for a limit below what engines of this process hold already.
    pub fn join(limit: Option<u64>, memory: u64) -> Result<Arc<HostMemory>> {
        let default = (u128::from(memory) * u128::from(SHARE) / 100) as u64;
        let books = Books::open_pool(Pool::PinnedHost, Some(KEY), limit.unwrap_or(default), PAGE)?;
        let joining = books.joining();
        if let Some(limit) = limit.filter(|&limit| limit != books.limit()) {
            books.set_limit(limit).map_err(|_| {
                let held: u64 = books.report().pools.iter().map(|pool| pool.limit - pool.unassigned).sum();
                let what =
                    format!("engines of this process hold {held} bytes of page-locked memory, or have them set aside");
                EngineError::argument("host_limit", limit, what)
            })?;
        }
        let member = books.join();
        let free: u64 = books.report().pools.iter().map(|pool| pool.unassigned).sum();
        let holder = |of: HostUse| {
            let floor = if of == HostUse::Buffer { BUFFERS.min(free) / PAGE * PAGE } else { 0 };
            member.holder(HolderSpec::new(of.name(), Role::Other, 100).floor(floor))
        };
        let [registrations, copies, buffers] = HostUse::ALL.map(holder);
        drop(joining);
        Ok(Arc::new(HostMemory { member, holders: [registrations?, copies?, buffers?] }))
    }

    /// The limit in force, in bytes.
    pub fn limit(&self) -> u64 {
        self.member.books().limit()
    }

    /// The ledger; `locked` is what the device says it has locked.
    ///
    /// # Errors
    /// The governor's.
    pub fn report(&self, locked: u64) -> Result<Report> {
        self.member.record_mapped(locked)?;
        Ok(self.member.report())
    }

    /// Peaks start again at what is held now.
    pub fn reset_peaks(&self) {
        self.member.books().reset_peaks();
    }
}

impl HostLedger for HostMemory {
    fn reserve(&self, of: HostUse, bytes: u64) -> std::result::Result<Box<dyn HostLease>, String> {
        let holder =
            HostUse::ALL.into_iter().zip(&self.holders).find(|(known, _)| *known == of).map(|(_, holder)| holder);
        let reserved = holder.and_then(|holder| holder.try_reserve(bytes).ok());
        reserved.map(|reserved| Box::new(Granted(reserved.commit())) as Box<dyn HostLease>).ok_or_else(|| {
            let free: u64 = self.member.books().report().pools.iter().map(|pool| pool.unassigned).sum();
            format!("host_limit = {} bytes leaves {free} for it: raise host_limit", self.limit())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    // One test, because the limit is the process's.
    #[test]
    fn one_limit_holds_for_all_uses_and_engines_and_keeps_room_for_buffers() {
        let first = HostMemory::join(None, 1000 * MIB).unwrap();
        assert_eq!(first.limit(), 800 * MIB);
        // 80 MiB are set aside for buffers.
        assert!(first.reserve(HostUse::Registration, 721 * MIB).unwrap_err().contains("host_limit = 838860800"));
        let file = first.reserve(HostUse::Registration, 600 * MIB).unwrap();
        let copy = first.reserve(HostUse::Copy, 100 * MIB).unwrap();
        let buffers = first.reserve(HostUse::Buffer, 64 * MIB).unwrap();
        // A second engine: no limit of its own, and what is free of the first one's.
        let second = HostMemory::join(None, 5).unwrap();
        assert_eq!(second.limit(), 800 * MIB);
        assert!(second.reserve(HostUse::Registration, 21 * MIB).is_err());
        let own = second.reserve(HostUse::Buffer, 20 * MIB).unwrap();
        let report = first.report(764 * MIB).unwrap();
        second.report(20 * MIB).unwrap();
        let pool = second.report(20 * MIB).unwrap().pools.remove(0);
        assert_eq!((pool.used, pool.unaccounted, pool.pool), (784 * MIB, Some(0), Pool::PinnedHost));
        let names: Vec<_> = report.pools[0].holders.iter().filter(|h| h.used > 0).map(|h| h.name.clone()).collect();
        assert_eq!(names.len(), 4, "{names:?}");
        assert!(names.contains(&"registrations".to_string()) && names.contains(&"buffers of engine 2".to_string()));
        // A lower limit than what is held is refused, and one above it counts for all.
        let error = HostMemory::join(Some(700 * MIB), 0).err().unwrap().to_string();
        assert!(error.starts_with("host_limit = 734003200: engines of this process hold"), "{error}");
        let third = HostMemory::join(Some(2000 * MIB), 0).unwrap();
        assert_eq!((first.limit(), third.limit()), (2000 * MIB, 2000 * MIB));
        drop((file, copy, buffers, own, third, second));
        let pool = first.report(0).unwrap().pools.remove(0);
        assert_eq!((pool.used, pool.underflows, pool.peak_oversubscribed), (0, 0, 0));
    }
}
