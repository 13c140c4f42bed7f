//! What this process takes of a card once, however many providers it has on it: the context, measured when the first opens.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::overhead::Overhead;

/// The first provider's measurements. They hold as long as any provider lives, because so long the context does.
#[derive(Debug)]
pub struct Share {
    /// What context and kernels took.
    pub overhead: Overhead,
    /// Free bytes of the card once they were there.
    pub free_at_open: u64,
}

/// Shares by the card's bus address.
#[derive(Debug, Default)]
pub struct Shares(BTreeMap<String, Weak<Share>>);

static SHARES: Mutex<Shares> = Mutex::new(Shares(BTreeMap::new()));

impl Shares {
    /// All shares, for as long as a provider opens: two that opened at once would each measure the other.
    pub fn lock() -> MutexGuard<'static, Shares> {
        SHARES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The share of a card, if a provider lives that uses it.
    pub fn get(&self, bus_id: &str) -> Option<Arc<Share>> {
        self.0.get(bus_id).and_then(Weak::upgrade)
    }

    /// The first provider's share of a card.
    pub fn insert(&mut self, bus_id: &str, share: Share) -> Arc<Share> {
        let share = Arc::new(share);
        self.0.insert(bus_id.to_string(), Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overhead::OverheadSource;

    #[test]
    fn a_share_lives_as_long_as_a_provider() {
        let mut shares = Shares::default();
        let overhead = Overhead { bytes: 5, source: OverheadSource::Assumed };
        let first = shares.insert("0000:3b:00.0", Share { overhead, free_at_open: 7 });
        assert!(shares.get("0000:3b:00.0").is_some_and(|s| Arc::ptr_eq(&s, &first)));
        assert!(shares.get("0000:5e:00.0").is_none());
        drop(first);
        assert!(shares.get("0000:3b:00.0").is_none());
    }
}
