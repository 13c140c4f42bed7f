//! The books: what every pool and holder has, and whether a change fits. No threads and no callbacks in here.
//!
//! Two sums decide. `held` is the sum of max(used, floor): bytes that are in use or set aside. `firm` is the sum of what
//! can't be talked away: a holder's promise, or its use where that is more and the holder can't give bytes back.
//! A change fits if neither exceeds the limit. Reclaim cures a shortage of the first; nothing cures the second.

use std::collections::BTreeMap;
use std::sync::Weak;

use crate::error::GovernorError;
use crate::reclaim::Reclaim;
use crate::report::{Physical, Source};
use crate::spec::{HolderSpec, Pool, PoolSpec, Role, Terms, round_up};

/// Identity of a holder; never used twice. The order is the order of registration.
pub(crate) type HolderId = u64;

/// One pool's limit and extremes.
#[derive(Debug)]
pub(crate) struct PoolState {
    pub pool: Pool,
    pub limit: u64,
    pub granule: u64,
    pub peak: u64,
    pub worst_oversubscribed: u64,
    pub refused: u64,
    pub physical: BTreeMap<Source, Physical>,
}

/// One holder's account.
pub(crate) struct HolderState {
    pub pool: usize,
    pub name: String,
    pub role: Role,
    pub priority: u32,
    pub terms: Terms,
    /// Leases and open reservations, bytes.
    pub used: u64,
    /// The part of `used` that is not committed yet, bytes.
    pub reserved: u64,
    /// The part of `used` that could not be released, bytes.
    pub quarantined: u64,
    pub peak: u64,
    pub yielded: u64,
    pub underflows: u64,
    /// Why the governor has stepped aside; its bytes are then counted, but not against the limit.
    pub declined: Option<String>,
    pub reclaim: Option<Weak<dyn Reclaim>>,
    /// Whether its handle still lives; a closed account disappears with its last byte.
    pub open: bool,
}

impl HolderState {
    /// Bytes it may yet take of its promise.
    pub(crate) fn allowance(&self) -> u64 {
        self.terms.promise.saturating_sub(self.used)
    }

    /// Bytes in use beyond its promise.
    pub(crate) fn borrowed(&self) -> u64 {
        self.used.saturating_sub(self.terms.promise)
    }

    /// Bytes it could be asked to yield.
    pub(crate) fn reclaimable(&self) -> u64 {
        if self.managed() && self.reclaim.is_some() { self.borrowed() } else { 0 }
    }

    /// Bytes set aside for it and not in use.
    pub(crate) fn withheld(&self) -> u64 {
        self.terms.floor.saturating_sub(self.used)
    }

    /// Promised bytes that others may use meanwhile.
    pub(crate) fn lent(&self) -> u64 {
        self.terms.promise - self.used.max(self.terms.floor).min(self.terms.promise)
    }

    pub(crate) fn managed(&self) -> bool {
        self.declined.is_none()
    }
}

/// Something to be done as a whole or not at all.
#[derive(Debug, Default)]
pub(crate) struct Change {
    /// Bytes to be granted, multiples of the granule; a holder occurs at most once.
    pub grants: Vec<(HolderId, u64)>,
    /// A new limit.
    pub limit: Option<(usize, u64)>,
    /// New terms of a holder.
    pub terms: Option<(HolderId, Terms)>,
}

impl Change {
    /// Whether the change is made on this holder's behalf.
    pub(crate) fn asks_for(&self, id: HolderId) -> bool {
        self.grants.iter().any(|g| g.0 == id) || self.terms.is_some_and(|t| t.0 == id)
    }
}

/// What a pool would need for a change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    pub held: u128,
    pub firm: u128,
    pub firm_before: u128,
    pub limit: u64,
    pub limit_before: u64,
}

impl Demand {
    /// Bytes that reclaim would have to bring.
    pub(crate) fn missing(&self) -> u64 {
        clamp(self.held.saturating_sub(u128::from(self.limit)))
    }

    /// Bytes by which the change breaks a promise; no reclaim can bring them.
    pub(crate) fn over_promised(&self) -> u64 {
        if self.firm <= self.firm_before && self.limit >= self.limit_before {
            return 0;
        }
        clamp(self.firm.saturating_sub(u128::from(self.limit)))
    }
}

pub(crate) fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Where the bytes of a grant came from; the three parts sum to the grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// From what was set aside for the holder, bytes.
    pub own: u64,
    /// From unassigned bytes of the pool.
    pub unassigned: u64,
    /// From other holders, which yielded them, bytes.
    pub reclaimed: u64,
}

/// All accounts.
#[derive(Default)]
pub(crate) struct Ledger {
    pub pools: Vec<PoolState>,
    pub holders: BTreeMap<HolderId, HolderState>,
    /// Rises with everything that could let a blocked request succeed.
    pub generation: u64,
    next_holder: HolderId,
}

impl Ledger {
    pub(crate) fn new(specs: impl IntoIterator<Item = PoolSpec>) -> Result<Self, GovernorError> {
        let mut ledger = Self::default();
        for PoolSpec { pool, limit, granule } in specs {
            let fault = match granule {
                0 => Some("has a granule of 0 B; it is at least 1"),
                _ if ledger.pool(pool).is_ok() => Some("is declared twice"),
                _ => None,
            };
            if let Some(fault) = fault {
                return Err(GovernorError::Spec { what: format!("pool '{pool}' {fault}") });
            }
            let (peak, worst_oversubscribed, refused, physical) = (0, 0, 0, BTreeMap::new());
            ledger.pools.push(PoolState { pool, limit, granule, peak, worst_oversubscribed, refused, physical });
        }
        Ok(ledger)
    }

    pub(crate) fn pool(&self, pool: Pool) -> Result<usize, GovernorError> {
        self.pools.iter().position(|p| p.pool == pool).ok_or(GovernorError::UnknownPool { pool })
    }

    /// Opens an account without terms.
    pub(crate) fn open(&mut self, pool: usize, spec: HolderSpec) -> HolderId {
        let id = self.next_holder;
        self.next_holder += 1;
        let HolderSpec { name, role, priority, .. } = spec;
        let holder = HolderState {
            pool,
            name,
            role,
            priority,
            terms: Terms::default(),
            used: 0,
            reserved: 0,
            quarantined: 0,
            peak: 0,
            yielded: 0,
            underflows: 0,
            declined: None,
            reclaim: None,
            open: true,
        };
        self.holders.insert(id, holder);
        id
    }

    /// Takes a holder's terms away; its account ends with its last byte.
    pub(crate) fn close(&mut self, id: HolderId) {
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.open = false;
            holder.terms = Terms::default();
        }
        self.generation += 1;
        self.drop_if_done(id);
    }

    fn drop_if_done(&mut self, id: HolderId) {
        if self.holders.get(&id).is_some_and(|h| !h.open && h.used == 0) {
            self.holders.remove(&id);
        }
    }

    pub(crate) fn granule_of(&self, id: HolderId) -> u64 {
        self.holders.get(&id).map_or(1, |h| self.pools[h.pool].granule)
    }

    pub(crate) fn round_up_for(&self, id: HolderId, bytes: u64) -> Result<u64, GovernorError> {
        round_up(bytes, self.granule_of(id))
    }

    /// The pools a change concerns, ascending.
    pub(crate) fn pools_of(&self, change: &Change) -> Vec<usize> {
        let holders = change.grants.iter().map(|g| g.0).chain(change.terms.map(|t| t.0));
        let mut pools: Vec<usize> = holders.filter_map(|id| self.holders.get(&id)).map(|h| h.pool).collect();
        pools.extend(change.limit.map(|l| l.0));
        pools.sort_unstable();
        pools.dedup();
        pools
    }

    pub(crate) fn managed_in(&self, pool: usize) -> impl Iterator<Item = (HolderId, &HolderState)> {
        self.holders.iter().filter(move |(_, h)| h.pool == pool && h.managed()).map(|(id, h)| (*id, h))
    }

    /// What `pool` would need if `change` were made and `offers` (holder, bytes) were retired.
    pub(crate) fn demand(&self, pool: usize, change: &Change, offers: &[(HolderId, u64)]) -> Demand {
        let limit = self.pools[pool].limit;
        let mut demand = Demand { held: 0, firm: 0, firm_before: 0, limit, limit_before: limit };
        if let Some((_, limit)) = change.limit.filter(|l| l.0 == pool) {
            demand.limit = limit;
        }
        for (id, holder) in self.managed_in(pool) {
            let sum = |list: &[(HolderId, u64)]| -> u128 {
                list.iter().filter(|item| item.0 == id).map(|item| u128::from(item.1)).sum()
            };
            let terms = change.terms.filter(|t| t.0 == id).map_or(holder.terms, |t| t.1);
            let used = (u128::from(holder.used) + sum(&change.grants)).saturating_sub(sum(offers));
            let firm = |terms: Terms, used: u128| match holder.reclaim {
                Some(_) => u128::from(terms.promise),
                None => u128::from(terms.promise).max(used),
            };
            demand.held += used.max(u128::from(terms.floor));
            demand.firm += firm(terms, used);
            demand.firm_before += firm(holder.terms, u128::from(holder.used));
        }
        demand
    }

    /// Whether the change can be made without anybody's help.
    pub(crate) fn fits(&self, change: &Change, offers: &[(HolderId, u64)]) -> bool {
        self.pools_of(change).into_iter().all(|pool| {
            let demand = self.demand(pool, change, offers);
            demand.missing() == 0 && demand.over_promised() == 0
        })
    }

    /// Whether every grant comes out of bytes that are set aside for its holder anyway (or aren't managed at all), so
    /// that no other request could ever have a claim on them.
    pub(crate) fn concerns_nobody(&self, change: &Change) -> bool {
        change.limit.is_none()
            && change.terms.is_none()
            && change
                .grants
                .iter()
                .all(|(id, bytes)| self.holders.get(id).is_some_and(|h| !h.managed() || *bytes <= h.withheld()))
    }

    /// Whether every grant lies within its holder's promise.
    pub(crate) fn is_promised(&self, change: &Change) -> bool {
        change.grants.iter().all(|(id, bytes)| self.holders.get(id).is_some_and(|h| *bytes <= h.allowance()))
    }

    /// Makes a change that fits, after retiring `offers`. The only place where `used` grows.
    pub(crate) fn apply(&mut self, change: &Change, offers: &[(HolderId, u64)]) -> Result<Vec<Sources>, GovernorError> {
        for &(id, bytes) in &change.grants {
            let used = self.holders.get(&id).map_or(0, |h| h.used);
            if used.checked_add(bytes).is_none() {
                return Err(GovernorError::TooLarge { bytes, granule: self.granule_of(id) });
            }
        }
        let mut yielded = vec![0u64; self.pools.len()];
        for &(id, bytes) in offers {
            if let Some(holder) = self.holders.get_mut(&id) {
                holder.yielded = holder.yielded.saturating_add(bytes);
                yielded[holder.pool] = yielded[holder.pool].saturating_add(bytes);
            }
            self.discharge(id, bytes);
        }
        if let Some((pool, limit)) = change.limit {
            self.pools[pool].limit = limit;
        }
        if let Some((id, terms)) = change.terms
            && let Some(holder) = self.holders.get_mut(&id)
        {
            holder.terms = terms;
        }
        let sources = change.grants.iter().map(|&(id, bytes)| self.charge(id, bytes, &mut yielded)).collect();
        if change.limit.is_some() || change.terms.is_some() {
            self.generation += 1;
        }
        for pool in self.pools_of(change) {
            self.note_extremes(pool);
        }
        Ok(sources)
    }

    fn charge(&mut self, id: HolderId, bytes: u64, yielded: &mut [u64]) -> Sources {
        let Some(holder) = self.holders.get_mut(&id) else { return Sources::default() };
        let own = bytes.min(holder.withheld());
        let reclaimed = (bytes - own).min(yielded[holder.pool]);
        yielded[holder.pool] -= reclaimed;
        holder.used += bytes;
        holder.reserved += bytes;
        holder.peak = holder.peak.max(holder.used);
        Sources { own, unassigned: bytes - own - reclaimed, reclaimed }
    }

    fn note_extremes(&mut self, pool: usize) {
        let used = self.used(pool);
        let state = &mut self.pools[pool];
        state.peak = state.peak.max(used);
        state.worst_oversubscribed = state.worst_oversubscribed.max(used.saturating_sub(state.limit));
    }

    /// Marks reserved bytes as committed.
    pub(crate) fn commit(&mut self, id: HolderId, bytes: u64) {
        if let Some(holder) = self.holders.get_mut(&id) {
            take(&mut holder.reserved, bytes, &mut holder.underflows);
        }
    }

    /// The only place where `used` shrinks.
    pub(crate) fn discharge(&mut self, id: HolderId, bytes: u64) {
        if let Some(holder) = self.holders.get_mut(&id) {
            take(&mut holder.used, bytes, &mut holder.underflows);
        }
        self.generation += 1;
        self.drop_if_done(id);
    }

    /// Bytes charged to the pool. Never more than the limit, so the sum fits.
    pub(crate) fn used(&self, pool: usize) -> u64 {
        self.managed_in(pool).fold(0, |sum, (_, h)| sum.saturating_add(h.used))
    }
}

fn take(figure: &mut u64, bytes: u64, underflows: &mut u64) {
    match figure.checked_sub(bytes) {
        Some(rest) => *figure = rest,
        None => {
            *figure = 0;
            *underflows += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> (Ledger, HolderId) {
        let mut ledger = Ledger::new([PoolSpec { pool: Pool::Host, limit: 10, granule: 1 }]).unwrap();
        let id = ledger.open(0, HolderSpec::new("x", Role::Other, 0));
        (ledger, id)
    }

    #[test]
    fn g9_releasing_more_than_was_charged_is_counted() {
        let (mut ledger, id) = ledger();
        ledger.apply(&Change { grants: vec![(id, 3)], ..Change::default() }, &[]).unwrap();
        ledger.discharge(id, 4);
        assert_eq!((ledger.holders[&id].used, ledger.holders[&id].underflows), (0, 1));
    }

    #[test]
    fn g9_a_charge_beyond_the_limit_would_be_seen() {
        let (mut ledger, id) = ledger();
        let change = Change { grants: vec![(id, 11)], ..Change::default() };
        assert!(!ledger.fits(&change, &[]));
        ledger.apply(&change, &[]).unwrap();
        assert_eq!(ledger.pools[0].worst_oversubscribed, 1);
    }

    #[test]
    fn g6_sums_that_leave_64_bits_are_refused() {
        let (mut ledger, id) = ledger();
        ledger.holders.get_mut(&id).unwrap().declined = Some("test".into());
        ledger.apply(&Change { grants: vec![(id, u64::MAX)], ..Change::default() }, &[]).unwrap();
        let more = ledger.apply(&Change { grants: vec![(id, 1)], ..Change::default() }, &[]);
        assert!(matches!(more, Err(GovernorError::TooLarge { .. })));
        assert_eq!(ledger.holders[&id].used, u64::MAX);
    }
}
