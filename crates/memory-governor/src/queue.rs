//! Who is next: first come, first served, among requests that could take each other's bytes.

use std::collections::VecDeque;

use crate::sync::ThreadId;

/// The better right goes first: a change of terms, then what was promised, then everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Right {
    /// Beyond the holder's promise.
    Open,
    /// Within the holder's promise: no other request has a claim on these bytes.
    Promised,
    /// A change of limit or terms. It never waits for bytes, and others may wait for it.
    Terms,
}

/// Whether a waiting request may act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It may.
    Go,
    /// Another acts, or is about to.
    Wait,
    /// Everybody ahead waits for bytes to be freed.
    Stuck,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    right: Right,
    pools: Vec<usize>,
    running: Option<ThreadId>,
    /// Generation of the ledger in which this request was last found not to fit.
    blocked_at: Option<u64>,
}

impl Waiter {
    fn meets(&self, pools: &[usize]) -> bool {
        self.pools.iter().any(|pool| pools.contains(pool))
    }
}

/// Requests in order of arrival. Some of them run callbacks at present; at most one per pool.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiters: VecDeque<Waiter>,
    next: u64,
}

impl Queue {
    pub(crate) fn enter(&mut self, pools: Vec<usize>, right: Right) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiters.push_back(Waiter { ticket, right, pools, running: None, blocked_at: None });
        ticket
    }

    pub(crate) fn leave(&mut self, ticket: u64) {
        self.waiters.retain(|w| w.ticket != ticket);
    }

    /// Whether a request that is not in the queue may act at once.
    pub(crate) fn is_clear(&self, pools: &[usize], right: Right) -> bool {
        !self.waiters.iter().any(|w| w.meets(pools) && (w.running.is_some() || w.right >= right))
    }

    /// Whether the request may act. It is stuck if everybody ahead is: blocked, or stuck behind a blocked one.
    pub(crate) fn turn(&self, ticket: u64, generation: u64) -> Turn {
        let mut turns = Vec::with_capacity(self.waiters.len());
        for (at, mine) in self.waiters.iter().enumerate() {
            let mut turn = Turn::Go;
            if self.waiters.iter().any(|w| w.ticket != mine.ticket && w.running.is_some() && w.meets(&mine.pools)) {
                turn = Turn::Wait;
            }
            for (other, theirs) in self.waiters.iter().zip(&turns).take(at) {
                if turn != Turn::Wait && other.right >= mine.right && other.meets(&mine.pools) {
                    let stalled = *theirs == Turn::Stuck || other.blocked_at == Some(generation);
                    turn = if stalled { Turn::Stuck } else { Turn::Wait };
                }
            }
            if mine.ticket == ticket {
                return turn;
            }
            turns.push(turn);
        }
        Turn::Go
    }

    pub(crate) fn start(&mut self, ticket: u64, thread: ThreadId) {
        self.edit(ticket, |w| w.running = Some(thread));
    }

    pub(crate) fn stop(&mut self, ticket: u64) {
        self.edit(ticket, |w| w.running = None);
    }

    pub(crate) fn block(&mut self, ticket: u64, generation: u64) {
        self.edit(ticket, |w| w.blocked_at = Some(generation));
    }

    pub(crate) fn is_blocked(&self, ticket: u64, generation: u64) -> bool {
        self.waiters.iter().any(|w| w.ticket == ticket && w.blocked_at == Some(generation))
    }

    /// Whether `thread` is inside a callback of a transaction.
    pub(crate) fn runs_on(&self, thread: ThreadId) -> bool {
        self.waiters.iter().any(|w| w.running == Some(thread))
    }

    /// Requests that have not been served yet on this pool.
    pub(crate) fn waiting(&self, pool: usize) -> usize {
        self.waiters.iter().filter(|w| w.pools.contains(&pool)).count()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    fn edit(&mut self, ticket: u64, change: impl FnOnce(&mut Waiter)) {
        if let Some(waiter) = self.waiters.iter_mut().find(|w| w.ticket == ticket) {
            change(waiter);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn equal_rights_go_in_order_and_better_ones_first() {
        let mut queue = Queue::default();
        let open = queue.enter(vec![0], Right::Open);
        let later = queue.enter(vec![0], Right::Open);
        let promised = queue.enter(vec![0], Right::Promised);
        let elsewhere = queue.enter(vec![1], Right::Open);
        assert_eq!(queue.turn(open, 0), Turn::Go);
        assert_eq!(queue.turn(later, 0), Turn::Wait);
        assert_eq!(queue.turn(promised, 0), Turn::Go);
        assert_eq!(queue.turn(elsewhere, 0), Turn::Go);
        queue.block(open, 0);
        assert_eq!(queue.turn(later, 0), Turn::Stuck);
        assert_eq!(queue.turn(later, 1), Turn::Wait, "the one ahead is about to try again");
        let last = queue.enter(vec![0], Right::Open);
        assert_eq!(queue.turn(last, 1), Turn::Wait);
        queue.block(promised, 0);
        assert_eq!(queue.turn(last, 0), Turn::Stuck, "behind one that is stuck itself");
        queue.leave(last);
        queue.start(promised, crate::sync::current().id());
        assert_eq!(queue.turn(open, 0), Turn::Wait);
        assert!(!queue.is_clear(&[0], Right::Terms));
        assert!(queue.is_clear(&[2], Right::Open));
        queue.leave(promised);
        assert!(queue.is_clear(&[0], Right::Terms));
    }
}
