//! The stacks of a card's threads: made small while Headrace is the first to use a card, and as they were found afterwards.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::calls::Calls;
use crate::driver::CudaError;

/// Bytes of stack of a thread on the card: the least that drivers take.
pub(crate) const STACK_BYTES: usize = 16;

/// What is known of the stacks of one card's primary context.
#[derive(Debug, Default)]
struct Stacks {
    /// Contexts of this crate that are open on the card.
    users: usize,
    /// What the limit was, and what it became when it was changed; `None` where it wasn't.
    changed: Option<(usize, usize)>,
}

/// The stacks of every card, by a number that stands for its primary context.
#[derive(Debug, Default)]
pub(crate) struct CardStacks(Mutex<BTreeMap<i32, Stacks>>);

/// Those of this process.
pub(crate) static STACKS: CardStacks = CardStacks(Mutex::new(BTreeMap::new()));

impl CardStacks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, Stacks>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a context of this crate on `card`, which is current. `first`: nothing else in the process had opened the card before.
    ///
    /// Then the stacks are taken back: a context sets 1 KiB aside for every thread that could ever run at once, which is half of
    /// what a context costs on a large card. The crate's kernels have none, and the driver gives a kernel what it was compiled with
    /// in any case.
    ///
    /// # Errors
    /// The driver's: stacks stay as they are. The context is noted all the same.
    pub(crate) fn opened(&self, calls: &dyn Calls, card: i32, first: bool) -> Result<(), CudaError> {
        let mut all = self.lock();
        let stacks = all.entry(card).or_default();
        stacks.users += 1;
        if !first || stacks.users > 1 {
            return Ok(());
        }
        let found = calls.stack_bytes()?;
        calls.set_stack_bytes(STACK_BYTES)?;
        // Drivers may round up.
        stacks.changed = Some((found, calls.stack_bytes()?));
        Ok(())
    }

    /// Notes that a context on `card` is about to be given up; it is current. The last one puts the stacks back, unless somebody
    /// else has changed them meanwhile.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn closes(&self, calls: &dyn Calls, card: i32) -> Result<(), CudaError> {
        let mut all = self.lock();
        let Some(stacks) = all.get_mut(&card) else { return Ok(()) };
        stacks.users = stacks.users.saturating_sub(1);
        if stacks.users > 0 {
            return Ok(());
        }
        let changed = stacks.changed;
        all.remove(&card);
        match changed {
            Some((found, became)) if calls.stack_bytes()? == became => calls.set_stack_bytes(found),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeCalls;

    #[test]
    fn stacks_are_small_while_a_context_lives_and_as_found_afterwards() {
        let (stacks, calls) = (CardStacks::default(), FakeCalls::default());
        calls.set_stack_bytes(1024).unwrap();
        stacks.opened(&calls, 0, true).unwrap();
        assert_eq!(calls.stack_bytes().unwrap(), STACK_BYTES);
        // A second engine: by then the card is open, by ourselves.
        stacks.opened(&calls, 0, false).unwrap();
        stacks.closes(&calls, 0).unwrap();
        assert_eq!(calls.stack_bytes().unwrap(), STACK_BYTES, "the other one still has its own");
        stacks.closes(&calls, 0).unwrap();
        assert_eq!(calls.stack_bytes().unwrap(), 1024);
    }

    #[test]
    fn stacks_of_a_card_that_somebody_else_opened_or_changed_are_theirs() {
        let (stacks, calls) = (CardStacks::default(), FakeCalls::default());
        calls.set_stack_bytes(2048).unwrap();
        stacks.opened(&calls, 0, false).unwrap();
        assert_eq!(calls.stack_bytes().unwrap(), 2048);
        stacks.closes(&calls, 0).unwrap();
        stacks.opened(&calls, 0, true).unwrap();
        calls.set_stack_bytes(4096).unwrap();
        stacks.closes(&calls, 0).unwrap();
        assert_eq!(calls.stack_bytes().unwrap(), 4096);
    }
}
