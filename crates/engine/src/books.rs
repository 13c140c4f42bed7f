//! The books of a device: one governor for each physical memory of the process, shared by every engine that uses it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use headrace_memory_governor::{
    Governor, Holder, HolderReport, HolderSpec, Lease, Pool, PoolSpec, Report, Role, Source,
};

use crate::error::Result;
use crate::process::own;

/// Reclaim priority of what can't give way.
const FIXED_PRIORITY: u32 = 100;

/// Name of the holder of what the process takes of a device once, however many engines use it.
const CONTEXT: &str = "context";

/// Books that engines of this process keep together, by the name of the memory.
static SHARED: Mutex<BTreeMap<String, Weak<Books>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is whole after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that others hold for certain, and what for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Bytes, whole granules: what can't be talked away.
    pub bytes: u64,
    /// Each holder with its bytes.
    pub holders: Vec<(String, u64)>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the engine that joined last.
    engines: u64,
    /// What each engine's device says it has mapped, and the part that the process takes once.
    mapped: BTreeMap<u64, u64>,
    /// Engines that have left.
    left: u64,
    context: Option<Lease>,
}

/// The books of one physical memory.
#[derive(Debug)]
pub struct Books {
    governor: Governor,
    pool: Pool,
    shared: bool,
    state: Mutex<State>,
    /// One engine joins or changes the limit at a time: what it planned with is still true when it takes it.
    joining: Mutex<()>,
}

/// One engine's part in the books; it ends when this is dropped.
#[derive(Debug)]
pub struct Member {
    books: Arc<Books>,
    number: u64,
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = lock(&self.books.state);
        state.mapped.remove(&self.number);
        state.left += 1;
    }
}

/// The ending that the holders of one engine have in shared books.
fn ending(number: u64) -> String {
    format!(" of engine {number}")
}

impl Books {
    /// The books of the memory that `key` names, or new ones of a memory that nobody shares. `limit` counts for new ones.
    ///
    /// # Errors
    /// The governor's, for a granule of 0.
    pub fn open(key: Option<&str>, limit: u64, granule: u64) -> Result<Arc<Books>> {
        Books::open_pool(Pool::Device(0), key, limit, granule)
    }

    /// As [`Books::open`], of memory of another kind.
    ///
    /// # Errors
    /// As [`Books::open`].
    pub fn open_pool(pool: Pool, key: Option<&str>, limit: u64, granule: u64) -> Result<Arc<Books>> {
        let key = key.map(own);
        let key = key.as_deref();
        let mut shared = lock(&SHARED);
        if let Some(books) = key.and_then(|key| shared.get(key)).and_then(Weak::upgrade) {
            return Ok(books);
        }
        let books = Arc::new(Books {
            governor: Governor::new([PoolSpec { pool, limit, granule }])?,
            pool,
            shared: key.is_some(),
            state: Mutex::default(),
            joining: Mutex::new(()),
        });
        if let Some(key) = key {
            shared.retain(|_, books| books.strong_count() > 0);
            shared.insert(key.to_string(), Arc::downgrade(&books));
        }
        Ok(books)
    }

    /// The limit in force for the process, if any engine uses the memory that `key` names.
    pub fn limit_of(key: &str) -> Option<u64> {
        let books = lock(&SHARED).get(&own(key)).and_then(Weak::upgrade)?;
        books.governor.report().pool(books.pool).map(|pool| pool.limit)
    }

    /// What engines hold for certain of the memory that `key` names.
    pub fn others_of(key: Option<&str>) -> Others {
        let books = key.and_then(|key| lock(&SHARED).get(&own(key)).and_then(Weak::upgrade));
        books.map_or_else(Others::default, |books| books.others(None))
    }

    /// Held while an engine plans and takes what it planned.
    pub fn joining(&self) -> MutexGuard<'_, ()> {
        lock(&self.joining)
    }

    /// Takes a part in the books.
    pub fn join(self: &Arc<Books>) -> Member {
        let mut state = lock(&self.state);
        state.engines += 1;
        Member { books: self.clone(), number: state.engines }
    }

    /// What holders that are not `member`'s have for certain: their promise, and what they use beyond it where they can't give
    /// it back. What the process takes once is nobody's.
    pub fn others(&self, member: Option<&Member>) -> Others {
        let own = member.map(|m| ending(m.number));
        let mut others = Others::default();
        for holder in self.pool_holders() {
            let mine = !self.shared || own.as_ref().is_some_and(|own| holder.name.ends_with(own.as_str()));
            if mine || holder.name == CONTEXT || holder.declined.is_some() {
                continue;
            }
            let gives_back = holder.role == Role::Weights;
            let bytes = if gives_back { holder.promise } else { holder.promise.max(holder.used).max(holder.floor) };
            if bytes > 0 {
                others.bytes += bytes;
                others.holders.push((holder.name, bytes));
            }
        }
        others
    }

    fn pool_holders(&self) -> Vec<HolderReport> {
        self.governor.report().pools.into_iter().flat_map(|pool| pool.holders).collect()
    }

    /// Charges `bytes` that the process takes once, if nobody has yet.
    ///
    /// # Errors
    /// The governor's, if they don't fit.
    pub fn take_context(&self, bytes: u64) -> Result<()> {
        if bytes == 0 || lock(&self.state).context.is_some() {
            return Ok(());
        }
        let holder =
            self.governor.holder(self.pool, HolderSpec::new(CONTEXT, Role::Other, FIXED_PRIORITY).floor(bytes))?;
        let lease = holder.reserve(bytes)?.commit();
        lock(&self.state).context.get_or_insert(lease);
        Ok(())
    }

    /// The limit in force, in bytes.
    pub fn limit(&self) -> u64 {
        self.governor.report().pool(self.pool).map_or(0, |pool| pool.limit)
    }

    /// Changes the limit, whole or not at all: weights of any engine give way if need be.
    ///
    /// # Errors
    /// The governor's, if what is held can't be brought below it.
    pub fn set_limit(&self, limit: u64) -> Result<()> {
        Ok(self.governor.set_limit(self.pool, limit)?)
    }

    /// The ledger.
    pub fn report(&self) -> Report {
        self.governor.report()
    }

    /// Peaks start again at what is held now.
    pub fn reset_peaks(&self) {
        self.governor.reset_peaks();
    }
}

impl Member {
    /// The books.
    pub fn books(&self) -> &Arc<Books> {
        &self.books
    }

    /// Registers a holder of this engine.
    ///
    /// # Errors
    /// The governor's.
    pub fn holder(&self, mut spec: HolderSpec) -> Result<Holder> {
        if self.books.shared {
            spec.name.push_str(&ending(self.number));
        }
        Ok(self.books.governor.holder(self.books.pool, spec)?)
    }

    /// Ending of the names of this engine's holders, if the books are shared.
    pub fn ending(&self) -> Option<String> {
        self.books.shared.then(|| ending(self.number))
    }

    /// Engines that have left the books: their bytes may be free.
    pub fn left(&self) -> u64 {
        if self.books.shared { lock(&self.books.state).left } else { 0 }
    }

    /// The engine's memory is about to be given back: it counts no more.
    pub fn forget_mapped(&self) {
        lock(&self.books.state).mapped.remove(&self.number);
    }

    /// Notes what this engine's device has mapped, what the process takes once not included, and takes the sum of all engines
    /// as the device's own count.
    ///
    /// # Errors
    /// The governor's.
    pub fn record_mapped(&self, bytes: u64) -> Result<()> {
        let mut state = lock(&self.books.state);
        state.mapped.insert(self.number, bytes);
        let context = state.context.as_ref().map_or(0, Lease::bytes);
        let sum = state.mapped.values().sum::<u64>() + context;
        // Under the lock, so that no older sum comes after a newer one.
        Ok(self.books.governor.record_physical(self.books.pool, Source::MapCount, sum)?)
    }

    /// Notes a figure of the whole process.
    ///
    /// # Errors
    /// The governor's.
    pub fn record(&self, source: Source, bytes: u64) -> Result<()> {
        Ok(self.books.governor.record_physical(self.books.pool, source, bytes)?)
    }

    /// The ledger; this engine's own holders have their plain names.
    pub fn report(&self) -> Report {
        let mut report = self.books.governor.report();
        if self.books.shared {
            let own = ending(self.number);
            for holder in report.pools.iter_mut().flat_map(|pool| &mut pool.holders) {
                if let Some(plain) = holder.name.strip_suffix(own.as_str()) {
                    holder.name = plain.to_string();
                }
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn books_are_shared_by_name_and_end_with_their_last_member() {
        let (one, other) = (Books::open(Some("books-test"), 100, 10), Books::open(Some("books-test"), 70, 10));
        let (one, other) = (one.unwrap().join(), other.unwrap().join());
        assert!(Arc::ptr_eq(one.books(), other.books()));
        assert_eq!(Books::limit_of("books-test"), Some(100), "the first one's");
        let kv = one.holder(HolderSpec::new("kv", Role::Kv, 5).promise(40)).unwrap();
        let _weights = one.holder(HolderSpec::new("weights", Role::Weights, 1)).unwrap();
        let _lease = kv.reserve(20).unwrap().commit();
        one.books().take_context(10).unwrap();
        other.books().take_context(10).unwrap();
        let seen = other.books().others(Some(&other));
        assert_eq!(seen, Others { bytes: 40, holders: vec![("kv of engine 1".to_string(), 40)] });
        assert_eq!(one.books().others(Some(&one)), Others::default());
        // One context, and a count of both.
        one.record_mapped(20).unwrap();
        other.record_mapped(0).unwrap();
        let report = other.report();
        let pool = &report.pools[0];
        assert_eq!((pool.used, pool.unaccounted), (30, Some(0)));
        assert!(one.report().pools[0].holder("kv").is_some() && pool.holder("kv").is_none());
        drop((one, other, kv, _weights, _lease));
        assert_eq!(Books::limit_of("books-test"), None);
        let private = Books::open(None, 5, 1).unwrap();
        assert!(!Arc::ptr_eq(&private, &Books::open(None, 5, 1).unwrap()));
    }
}
