//! The handles: a governor, and the holders registered with it.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::error::GovernorError;
use crate::lease::{Lease, Reservation};
use crate::ledger::{Change, HolderId, Ledger, clamp};
use crate::pressure::{Pressure, Subscription};
use crate::reclaim::Reclaim;
use crate::report::{HolderReport, PoolReport, Report, Source};
use crate::spec::{HolderSpec, Pool, PoolSpec, Terms};
use crate::transaction::{Patience, Shared, run};

/// Decides who may hold how many bytes of which pool. Clones share the same books.
#[derive(Clone)]
pub struct Governor {
    shared: Arc<Shared>,
}

impl Governor {
    /// A governor of the given pools.
    ///
    /// # Errors
    /// If a pool is declared twice or has a granule of 0.
    pub fn new(pools: impl IntoIterator<Item = PoolSpec>) -> Result<Self, GovernorError> {
        Ok(Self { shared: Shared::new(Ledger::new(pools)?) })
    }

    /// Registers a holder. Its floor is set aside at once, others yielding for it if need be.
    ///
    /// # Errors
    /// If the promises of all holders would no longer fit in the pool together, or the floor can't be had.
    pub fn holder(&self, pool: Pool, spec: HolderSpec) -> Result<Holder, GovernorError> {
        let (id, terms) = {
            let mut state = self.shared.lock();
            let pool = state.ledger.pool(pool)?;
            let terms = spec.terms(state.ledger.pools[pool].granule)?;
            (state.ledger.open(pool, spec), terms)
        };
        let holder = Holder { account: Arc::new(Account { shared: self.shared.clone(), id }) };
        holder.change_terms(terms)?;
        Ok(holder)
    }

    /// Reserves bytes for several holders, of one or several pools, all or none.
    /// Waits for running transactions, but never for somebody to release bytes.
    ///
    /// # Errors
    /// [`Budget`](GovernorError::Budget) if any of it can't be had; nothing has changed then. Also if a holder occurs
    /// twice or is another governor's.
    pub fn reserve_all(&self, wanted: &[(&Holder, u64)]) -> Result<Vec<Reservation>, GovernorError> {
        let mut grants: Vec<(HolderId, u64)> = Vec::with_capacity(wanted.len());
        for (holder, bytes) in wanted {
            let id = holder.account.id;
            if !Arc::ptr_eq(&holder.account.shared, &self.shared) || grants.iter().any(|g| g.0 == id) {
                let what = "a holder occurs twice in one request, or belongs to another governor".to_owned();
                return Err(GovernorError::Spec { what });
            }
            grants.push((id, self.shared.lock().ledger.round_up_for(id, *bytes)?));
        }
        reserve(&self.shared, grants, Patience::Turn)
    }

    /// Changes a pool's limit, as a whole or not at all. Lowering it first asks holders to yield what is over.
    ///
    /// # Errors
    /// [`Budget`](GovernorError::Budget) if the holders need more than `bytes`; the limit is unchanged then.
    pub fn set_limit(&self, pool: Pool, bytes: u64) -> Result<(), GovernorError> {
        let pool = self.shared.lock().ledger.pool(pool)?;
        run(&self.shared, &Change { limit: Some((pool, bytes)), ..Change::default() }, Patience::Turn).map(drop)
    }

    /// All figures, taken at one instant.
    pub fn report(&self) -> Report {
        let state = self.shared.lock();
        let pools = 0..state.ledger.pools.len();
        Report { pools: pools.map(|pool| PoolReport::of(&state.ledger, pool, state.queue.waiting(pool))).collect() }
    }

    /// Notes a physical figure for a pool beside the ledger's. What it exceeds the ledger by is `unaccounted`.
    /// Measure and record while nothing is being released, else a release in between looks like an excess.
    ///
    /// # Errors
    /// If there is no such pool.
    pub fn record_physical(&self, pool: Pool, source: Source, bytes: u64) -> Result<(), GovernorError> {
        let mut state = self.shared.lock();
        let pool = state.ledger.pool(pool)?;
        let holders = state.ledger.holders.values().filter(|h| h.pool == pool);
        let explained = holders.fold(0u64, |sum, h| sum.saturating_add(h.used)); // declined holders' bytes as well
        let figure = state.ledger.pools[pool].physical.entry(source).or_default();
        figure.bytes = bytes;
        figure.peak = figure.peak.max(bytes);
        figure.unaccounted = bytes.saturating_sub(explained);
        figure.peak_unaccounted = figure.peak_unaccounted.max(figure.unaccounted);
        Ok(())
    }

    /// Starts a new window for peaks: each becomes the present figure.
    pub fn reset_peaks(&self) {
        let mut state = self.shared.lock();
        let ledger = &mut state.ledger;
        for pool in 0..ledger.pools.len() {
            ledger.pools[pool].peak = ledger.used(pool);
            for figure in ledger.pools[pool].physical.values_mut() {
                figure.peak = figure.bytes;
                figure.peak_unaccounted = figure.unaccounted;
            }
        }
        for holder in ledger.holders.values_mut() {
            holder.peak = holder.used;
        }
    }

    /// Calls `callback` whenever the bytes that nobody can be asked to yield cross `percent` of the pool's limit, and
    /// whenever a request is refused. It is called without any lock, by the thread that caused the event.
    ///
    /// # Errors
    /// If there is no such pool.
    pub fn on_pressure(
        &self,
        pool: Pool,
        percent: u8,
        callback: impl Fn(&Pressure) + Send + Sync + 'static,
    ) -> Result<Subscription, GovernorError> {
        let mut state = self.shared.lock();
        let pool = state.ledger.pool(pool)?;
        let state = &mut *state;
        let id = state.subscribers.add(&state.ledger, pool, percent, Arc::new(callback));
        Ok(Subscription { shared: Arc::downgrade(&self.shared), id })
    }
}

impl fmt::Debug for Governor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.report(), f)
    }
}

fn reserve(
    shared: &Arc<Shared>,
    grants: Vec<(HolderId, u64)>,
    patience: Patience,
) -> Result<Vec<Reservation>, GovernorError> {
    let change = Change { grants, ..Change::default() };
    let sources = run(shared, &change, patience)?;
    let grants = change.grants.into_iter().zip(sources);
    Ok(grants.map(|((id, bytes), sources)| Reservation::new(shared.clone(), id, bytes, sources)).collect())
}

/// Closes the holder's books when its last handle is dropped.
struct Account {
    shared: Arc<Shared>,
    id: HolderId,
}

impl Drop for Account {
    fn drop(&mut self) {
        self.shared.edit(|ledger| ledger.close(self.id));
    }
}

/// What a holder could get at present, bytes, multiples of the granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Without anybody's help.
    pub free: u64,
    /// If all others yielded everything they can be asked for.
    pub with_reclaim: u64,
}

/// A registered holder. Clones share one account; with the last of them its floor and promise end, while its leases
/// live on.
#[derive(Clone)]
pub struct Holder {
    account: Arc<Account>,
}

impl Holder {
    /// Reserves `bytes`, rounded up to the granule: own bytes first, then unassigned ones, then what others yield.
    /// Waits for running transactions, but never for somebody to release bytes.
    ///
    /// # Errors
    /// [`Budget`](GovernorError::Budget) with the whole breakdown; nothing has changed then.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, GovernorError> {
        self.request(bytes, Patience::Turn)
    }

    /// Reserves free bytes only: asks nobody to yield, overtakes nobody and never waits.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn try_reserve(&self, bytes: u64) -> Result<Reservation, GovernorError> {
        self.request(bytes, Patience::Try)
    }

    /// Like [`reserve`](Self::reserve), and waits up to `timeout` for bytes, first come, first served.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), after the timeout.
    pub fn reserve_within(&self, bytes: u64, timeout: Duration) -> Result<Reservation, GovernorError> {
        let year = Duration::from_secs(365 * 24 * 3600);
        self.request(bytes, Patience::Until(Instant::now() + timeout.min(year)))
    }

    fn request(&self, bytes: u64, patience: Patience) -> Result<Reservation, GovernorError> {
        let Account { shared, id } = &*self.account;
        let bytes = shared.lock().ledger.round_up_for(*id, bytes)?;
        let change = Change { grants: vec![(*id, bytes)], ..Change::default() };
        let sources = run(shared, &change, patience)?.first().copied().unwrap_or_default();
        Ok(Reservation::new(shared.clone(), *id, bytes, sources))
    }

    /// Reserves `bytes` and adds them to `lease` at once: for memory that is mapped by the lease's owner afterwards.
    /// Where mapping may fail, use [`reserve`](Self::reserve) and [`Reservation::commit_into`].
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), or if `lease` is another holder's.
    pub fn grow(&self, lease: &mut Lease, bytes: u64) -> Result<(), GovernorError> {
        if !lease.belongs_to(&self.account.shared, self.account.id) {
            return Err(GovernorError::Lease { what: "the lease to grow is another holder's".to_owned() });
        }
        self.reserve(bytes)?.commit_into(lease)
    }

    /// A lease of nothing, to be grown.
    pub fn empty_lease(&self) -> Lease {
        Lease::empty(self.account.shared.clone(), self.account.id)
    }

    /// Lets this holder borrow lent bytes: from now on it can be asked to yield what it uses beyond its promise.
    /// Only a weak reference is kept; when the callback is gone the holder yields nothing.
    pub fn set_reclaim<R: Reclaim + 'static>(&self, callback: &Arc<R>) {
        let weak: Weak<dyn Reclaim> = Arc::downgrade(callback) as Weak<dyn Reclaim>;
        let old = self.account.shared.edit(|ledger| {
            ledger.generation += 1;
            ledger.holders.get_mut(&self.account.id).and_then(|h| h.reclaim.replace(weak))
        });
        drop(old);
    }

    /// Tells waiting requests that this holder could now yield more than when it was last asked.
    pub fn can_yield_again(&self) {
        self.account.shared.edit(|ledger| ledger.generation += 1);
    }

    /// Changes floor and promise, bytes, as a whole or not at all; others yield for a higher floor if need be.
    ///
    /// # Errors
    /// [`Budget`](GovernorError::Budget) if the promises of all holders would no longer fit together; also if the
    /// governor declined to manage this holder.
    pub fn set_terms(&self, floor: u64, promise: u64) -> Result<(), GovernorError> {
        let (granule, declined) = {
            let state = self.account.shared.lock();
            let declined = state.ledger.holders.get(&self.account.id).is_some_and(|h| !h.managed());
            (state.ledger.granule_of(self.account.id), declined)
        };
        if declined {
            return Err(GovernorError::Spec { what: "a holder that isn't managed has no floor and no promise".into() });
        }
        self.change_terms(Terms::new(floor, promise, granule)?)
    }

    fn change_terms(&self, terms: Terms) -> Result<(), GovernorError> {
        let change = Change { terms: Some((self.account.id, terms)), ..Change::default() };
        run(&self.account.shared, &change, Patience::Turn).map(drop)
    }

    /// The governor steps aside: from now on this holder's bytes are counted and reported as unmanaged, with the
    /// reason, but neither limited nor reclaimed. Its floor and promise end.
    ///
    /// # Errors
    /// If the holder has bytes at present; they would change sides.
    pub fn decline(&self, reason: impl Into<String>) -> Result<(), GovernorError> {
        let reason = reason.into();
        self.account.shared.edit(|ledger| match ledger.holders.get_mut(&self.account.id) {
            Some(holder) if holder.used > 0 => Err(GovernorError::Spec {
                what: format!("'{}' has {} B; release them before declining to manage it", holder.name, holder.used),
            }),
            Some(holder) => {
                holder.declined = Some(reason);
                holder.terms = Terms::default();
                ledger.generation += 1;
                Ok(())
            }
            None => Ok(()),
        })
    }

    /// This holder's figures.
    pub fn report(&self) -> HolderReport {
        let state = self.account.shared.lock();
        // The account lives at least as long as its handle.
        HolderReport::of(&state.ledger.holders[&self.account.id])
    }

    /// What a reservation of this holder could get at present. Another request may come first.
    pub fn room(&self) -> Room {
        let state = self.account.shared.lock();
        let (ledger, id) = (&state.ledger, self.account.id);
        let holder = &ledger.holders[&id];
        let unlimited = u64::MAX - holder.used;
        if !holder.managed() {
            return Room { free: unlimited, with_reclaim: unlimited };
        }
        let demand = ledger.demand(holder.pool, &Change::default(), &[]);
        let limit = u128::from(demand.limit);
        let held = limit.saturating_sub(demand.held) + u128::from(holder.withheld());
        let others = ledger.managed_in(holder.pool).filter(|(other, _)| *other != id);
        let reclaimable: u128 = others.map(|(_, h)| u128::from(h.reclaimable())).sum();
        let firm = match holder.reclaim {
            Some(_) => u128::MAX,
            None => limit.saturating_sub(demand.firm) + u128::from(holder.allowance()),
        };
        let granule = ledger.pools[holder.pool].granule;
        let whole = |bytes: u128| clamp(bytes.min(firm)) / granule * granule;
        Room { free: whole(held), with_reclaim: whole(held + reclaimable) }
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Holder").field(&self.report()).finish()
    }
}
