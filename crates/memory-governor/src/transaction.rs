//! How a change is made: wait for the turn, look whether it fits, ask others to yield, and do it all or nothing.
//!
//! Everything foreign (callbacks, waiting) happens without the lock. What keeps the books still meanwhile is the queue:
//! while one transaction runs on a pool nobody else is charged there; releases go on, they only help.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{BudgetError, GovernorError, Refusal};
use crate::lease::Lease;
use crate::ledger::{Change, HolderId, Ledger, Sources};
use crate::pressure::{Events, Subscribers};
use crate::queue::{Queue, Right, Turn};
use crate::reclaim::{Ask, Reclaim};
use crate::report::HolderReport;
use crate::spec::round_up;
use crate::sync::{Monitor, MutexGuard, current};

/// What the one lock guards.
pub(crate) struct State {
    pub ledger: Ledger,
    pub queue: Queue,
    pub subscribers: Subscribers,
}

/// The governor's state, shared by all handles and leases.
pub(crate) struct Shared(Monitor<State>);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    pub(crate) fn new(ledger: Ledger) -> Arc<Self> {
        let state = State { ledger, queue: Queue::default(), subscribers: Subscribers::default() };
        Arc::new(Self(Monitor::new(state)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Edits the books in one step, then wakes who waits and tells who listens.
    pub(crate) fn edit<R>(&self, edit: impl FnOnce(&mut Ledger) -> R) -> R {
        let mut state = self.lock();
        let result = edit(&mut state.ledger);
        let events = self.settle(&mut state);
        drop(state);
        events.fire();
        result
    }

    fn settle(&self, state: &mut State) -> Events {
        if !state.queue.is_empty() {
            self.0.notify_all();
        }
        state.subscribers.crossed(&state.ledger)
    }
}

/// How long a request may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// No waiting and no reclaim: free bytes, now.
    Try,
    /// Waits for running transactions, but never for somebody to release bytes.
    Turn,
    /// Waits for bytes as well.
    Until(Instant),
}

/// A place in the queue, given up whatever happens.
struct Place<'a> {
    shared: &'a Shared,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.shared.lock().queue.leave(self.ticket);
        self.shared.0.notify_all();
    }
}

/// Makes the change or leaves everything as it was. Returns where each grant came from.
pub(crate) fn run(shared: &Arc<Shared>, change: &Change, patience: Patience) -> Result<Vec<Sources>, GovernorError> {
    let result = make(shared, change, patience);
    if let Err(GovernorError::Budget(error)) = &result {
        let mut state = shared.lock();
        let mut events = Events::default();
        if let Ok(pool) = state.ledger.pool(error.pool) {
            state.ledger.pools[pool].refused += 1;
            events = state.subscribers.refused(&state.ledger, pool, error.missing);
        }
        drop(state);
        events.fire();
    }
    result
}

fn make(shared: &Arc<Shared>, change: &Change, patience: Patience) -> Result<Vec<Sources>, GovernorError> {
    let mut state = shared.lock();
    if !state.queue.is_empty() && state.queue.runs_on(current().id()) {
        return Err(GovernorError::Reentrant);
    }
    let pools = state.ledger.pools_of(change);
    let right = if change.limit.is_some() || change.terms.is_some() {
        Right::Terms
    } else if state.ledger.is_promised(change) {
        Right::Promised
    } else {
        Right::Open
    };
    let clear = state.queue.is_clear(&pools, right);
    if state.ledger.concerns_nobody(change) || (clear && state.ledger.fits(change, &[])) {
        return finish(shared, state, change);
    }
    if let Patience::Try = patience {
        let refusal = (!clear).then_some(Refusal::Queued);
        return Err(budget_error(&state.ledger, change, &[], Vec::new(), refusal));
    }
    let place = Place { shared, ticket: state.queue.enter(pools, right) };
    drop(state);
    in_turn(&place, shared, change, patience)
}

fn finish(shared: &Shared, mut state: MutexGuard<'_, State>, change: &Change) -> Result<Vec<Sources>, GovernorError> {
    let sources = state.ledger.apply(change, &[])?;
    let events = shared.settle(&mut state);
    drop(state);
    events.fire();
    Ok(sources)
}

fn in_turn(
    place: &Place<'_>,
    shared: &Arc<Shared>,
    change: &Change,
    patience: Patience,
) -> Result<Vec<Sources>, GovernorError> {
    let ticket = place.ticket;
    let mut last = None;
    let mut state = shared.lock();
    loop {
        let generation = state.ledger.generation;
        let blocked = state.queue.is_blocked(ticket, generation);
        let turn = if blocked { Turn::Wait } else { state.queue.turn(ticket, generation) };
        if turn == Turn::Go {
            if state.ledger.fits(change, &[]) {
                return finish(shared, state, change);
            }
            state.queue.start(ticket, current().id());
            drop(state);
            let error = match reclaim(shared, change) {
                Err(error @ GovernorError::Budget(_)) => error,
                done => return done,
            };
            state = shared.lock();
            state.queue.stop(ticket);
            if let Patience::Turn = patience {
                return Err(error);
            }
            // The generation from before the attempt: what was released during it is a reason to try again.
            state.queue.block(ticket, generation);
            shared.0.notify_all();
            last = Some(error);
            continue;
        }
        let until = match patience {
            Patience::Until(until) => Some(until),
            Patience::Turn | Patience::Try => None,
        };
        let late = until.is_some_and(|until| Instant::now() >= until);
        if late || (until.is_none() && turn == Turn::Stuck) {
            let queued = || budget_error(&state.ledger, change, &[], Vec::new(), Some(Refusal::Queued));
            return Err(last.unwrap_or_else(queued));
        }
        state = shared.0.wait(state, until);
    }
}

/// One holder's offer.
struct Offer {
    holder: HolderId,
    name: String,
    callback: Arc<dyn Reclaim>,
    leases: Vec<Lease>,
    evicted: bool,
}

/// What was offered so far. Unless the change is made, everybody gets their leases back, last one first.
#[derive(Default)]
struct Offers {
    list: Vec<Offer>,
    yields: Vec<(String, u64, u64)>,
}

impl Offers {
    fn bytes(&self) -> Vec<(HolderId, u64)> {
        self.list.iter().map(|o| (o.holder, o.leases.iter().map(Lease::bytes).sum())).collect()
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        while let Some(offer) = self.list.pop() {
            offer.callback.restore(offer.leases, offer.evicted);
        }
    }
}

fn reclaim(shared: &Arc<Shared>, change: &Change) -> Result<Vec<Sources>, GovernorError> {
    let mut offers = Offers::default();
    let curable = |ledger: &Ledger| {
        ledger.pools_of(change).into_iter().all(|pool| ledger.demand(pool, change, &[]).over_promised() == 0)
    };
    let (victims, requester) = {
        let state = shared.lock();
        let victims = if curable(&state.ledger) { victims(&state.ledger, change) } else { Vec::new() };
        (victims, requester(&state.ledger, change))
    };
    for victim in victims {
        gather(shared, change, victim, &requester, &mut offers);
    }
    {
        let state = shared.lock();
        let bytes = offers.bytes();
        if !state.ledger.fits(change, &bytes) {
            return Err(budget_error(&state.ledger, change, &bytes, offers.yields.clone(), None));
        }
    }
    for at in 0..offers.list.len() {
        let offer = &mut offers.list[at];
        if let Err(error) = offer.callback.evict(&offer.leases) {
            let refusal = Refusal::Eviction { holder: offer.name.clone(), reason: error.to_string() };
            let (bytes, yields) = (offers.bytes(), offers.yields.clone());
            let state = shared.lock();
            return Err(budget_error(&state.ledger, change, &bytes, yields, Some(refusal)));
        }
        offer.evicted = true;
    }
    let bytes = offers.bytes();
    let mut state = shared.lock();
    if !state.ledger.fits(change, &bytes) {
        return Err(budget_error(&state.ledger, change, &bytes, offers.yields.clone(), None));
    }
    let sources = state.ledger.apply(change, &bytes)?;
    let events = shared.settle(&mut state);
    drop(state);
    for offer in offers.list.drain(..) {
        offer.leases.into_iter().for_each(Lease::forget);
    }
    events.fire();
    Ok(sources)
}

/// Asks one holder for what is still missing.
fn gather(shared: &Arc<Shared>, change: &Change, victim: HolderId, requester: &str, offers: &mut Offers) {
    let (ask, name, callback) = {
        let state = shared.lock();
        let ledger = &state.ledger;
        let Some(holder) = ledger.holders.get(&victim) else { return };
        let missing = ledger.demand(holder.pool, change, &offers.bytes()).missing();
        let pool = &ledger.pools[holder.pool];
        let bytes = round_up(missing, pool.granule).unwrap_or(missing).min(holder.borrowed());
        if bytes == 0 {
            return; // before the upgrade: the last reference to a holder must not be dropped under the lock
        }
        let Some(callback) = holder.reclaim.as_ref().and_then(|weak| weak.upgrade()) else { return };
        (Ask { pool: pool.pool, bytes, requester: requester.to_owned() }, holder.name.clone(), callback)
    };
    let offered = callback.offer(&ask);
    let (leases, foreign): (Vec<_>, Vec<_>) = offered.into_iter().partition(|l| l.belongs_to(shared, victim));
    if !foreign.is_empty() {
        callback.restore(foreign, false);
    }
    offers.yields.push((name.clone(), ask.bytes, leases.iter().map(Lease::bytes).sum()));
    offers.list.push(Offer { holder: victim, name, callback, leases, evicted: false });
}

/// Who may be asked to yield, in the order of asking. The requester is never among them.
fn victims(ledger: &Ledger, change: &Change) -> Vec<HolderId> {
    let mut victims: Vec<(u32, HolderId)> = Vec::new();
    for pool in ledger.pools_of(change) {
        let can = ledger.managed_in(pool).filter(|(id, h)| !change.asks_for(*id) && h.reclaimable() > 0);
        victims.extend(can.map(|(id, h)| (h.priority, id)));
    }
    victims.sort_unstable();
    victims.into_iter().map(|(_, id)| id).collect()
}

fn requester(ledger: &Ledger, change: &Change) -> String {
    let ids = change.grants.iter().map(|g| g.0).chain(change.terms.map(|t| t.0));
    let names: Vec<&str> = ids.filter_map(|id| ledger.holders.get(&id)).map(|h| h.name.as_str()).collect();
    if names.is_empty() { "limit".to_owned() } else { names.join(" + ") }
}

fn budget_error(
    ledger: &Ledger,
    change: &Change,
    offers: &[(HolderId, u64)],
    yields: Vec<(String, u64, u64)>,
    refusal: Option<Refusal>,
) -> GovernorError {
    let pools = ledger.pools_of(change);
    let demands = || pools.iter().map(|pool| (*pool, ledger.demand(*pool, change, offers)));
    let hopeless = demands().find(|(_, demand)| demand.over_promised() > 0);
    let short = hopeless.or_else(|| demands().find(|(_, demand)| demand.missing() > 0)).or_else(|| demands().next());
    let Some((pool, demand)) = short else {
        return GovernorError::Spec { what: "the change concerns no pool".to_owned() };
    };
    let (missing, promised) = (demand.missing(), demand.over_promised());
    let in_pool = |id: HolderId| ledger.holders.get(&id).is_some_and(|h| h.pool == pool);
    let granted = change.grants.iter().filter(|g| in_pool(g.0)).fold(0u64, |sum, g| sum.saturating_add(g.1));
    let asked = change.limit.map(|l| l.1).or(change.terms.map(|t| t.1.promise)).unwrap_or(granted);
    // Where promises are what stands in the way, nobody was asked to yield yet: assume that they would.
    let needed = if promised > 0 { demand.firm } else { demand.firm.max(demand.held) };
    let mut holders: Vec<_> = ledger.holders.values().filter(|h| h.pool == pool).map(HolderReport::of).collect();
    holders.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.name.cmp(&b.name)));
    let promises_elsewhere = ledger.managed_in(pool).any(|(id, h)| !change.asks_for(id) && h.allowance() > 0);
    let default = if promised > 0 && promises_elsewhere { Refusal::Promised } else { Refusal::NotEnough };
    GovernorError::Budget(Box::new(BudgetError {
        pool: ledger.pools[pool].pool,
        requester: requester(ledger, change),
        asked,
        missing: if promised > 0 { promised } else { missing },
        limit: demand.limit_before,
        smallest_limit: u64::try_from(needed).ok(),
        refusal: refusal.unwrap_or(default),
        yields,
        holders,
    }))
}
