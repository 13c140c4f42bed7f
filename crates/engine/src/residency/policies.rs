//! The policies that learn from what was read: each is an order of eviction, two have a rule of admission of their own.

use std::cmp::Reverse;

use crate::residency::policy::{Decision, PolicyKind, ResidencyPolicy};
use crate::residency::resident::ResidentSet;

/// See [`PolicyKind::Stable`].
#[derive(Debug)]
pub(crate) struct Stable;

impl ResidencyPolicy for Stable {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Stable
    }

    /// Only when the budget shrinks. The end of the read order first: it is the last that a scan would retain anew.
    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        let mut order = set.evictable();
        order.reverse();
        order
    }

    fn admit(&self, set: &ResidentSet, piece: usize) -> Decision {
        set.make_room(piece, Vec::new())
    }
}

/// See [`PolicyKind::Lru`].
#[derive(Debug)]
pub(crate) struct Lru;

impl ResidencyPolicy for Lru {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Lru
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        let mut order = set.evictable();
        order.sort_by_key(|&p| set.last_read(p));
        order
    }
}

/// See [`PolicyKind::Mru`].
#[derive(Debug)]
pub(crate) struct Mru;

impl ResidencyPolicy for Mru {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Mru
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        let mut order = set.evictable();
        order.sort_by_key(|&p| Reverse(set.last_read(p)));
        order
    }
}

/// See [`PolicyKind::Smallest`].
#[derive(Debug)]
pub(crate) struct Smallest;

impl ResidencyPolicy for Smallest {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Smallest
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        let mut order = set.evictable();
        order.sort_by_key(|&p| (set.bytes(p), set.last_read(p)));
        order
    }
}

/// See [`PolicyKind::Largest`].
#[derive(Debug)]
pub(crate) struct Largest;

impl ResidencyPolicy for Largest {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Largest
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        let mut order = set.evictable();
        order.sort_by_key(|&p| (Reverse(set.bytes(p)), set.last_read(p)));
        order
    }
}

/// See [`PolicyKind::ByteAware`]. The bytes kept never fall, so under a cyclic scan it comes to rest.
#[derive(Debug)]
pub(crate) struct ByteAware;

impl ResidencyPolicy for ByteAware {
    fn kind(&self) -> PolicyKind {
        PolicyKind::ByteAware
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        Smallest.order(set)
    }

    fn admit(&self, set: &ResidentSet, piece: usize) -> Decision {
        let gain = set.bytes(piece);
        let order = self.order(set);
        let cost = |victims: &[usize]| victims.iter().map(|&v| set.bytes(v)).sum::<u64>();
        // The smallest single victim that is enough, or many small ones less those that turn out not to be needed.
        let single = order.iter().find(|&&v| set.fits(piece, &[v])).map(|&v| vec![v]);
        let many = match set.make_room(piece, order) {
            Decision::Retain { mut victims } => {
                for i in (0..victims.len()).rev() {
                    let spared = victims.remove(i);
                    if !set.fits(piece, &victims) {
                        victims.insert(i, spared);
                    }
                }
                Some(victims)
            }
            Decision::Bypass => None,
        };
        match [single, many].into_iter().flatten().min_by_key(|v| cost(v)) {
            Some(victims) if cost(&victims) < gain => Decision::Retain { victims },
            _ => Decision::Bypass,
        }
    }
}
