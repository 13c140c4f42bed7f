//! What a residency policy decides, and the names of those there are.

use std::fmt::Debug;

use crate::residency::fixed::Static;
use crate::residency::policies::{ByteAware, Largest, Lru, Mru, Smallest, Stable};
use crate::residency::resident::ResidentSet;

/// What happens to a piece that was read and was not resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is copied to its own address and stays. The victims leave first, in this order.
    Retain {
        /// Resident pieces, none of them reserved.
        victims: Vec<usize>,
    },
    /// It passes through the staging ring and nothing changes.
    Bypass,
}

/// Decides what stays in device memory. A policy sees the pieces, their sizes and their history through the
/// [`ResidentSet`] and changes nothing itself.
///
/// Reserved pieces (pinned ones, and those of [`ResidencyPolicy::fixed_set`]) are never put to a policy: their room is kept
/// free for them, they are retained at their first access, and they are nobody's victims.
pub trait ResidencyPolicy: Debug + Send + Sync {
    /// Which one it is.
    fn kind(&self) -> PolicyKind;

    /// The resident pieces that are not reserved, the first to go first. Asked on a miss by the default
    /// [`ResidencyPolicy::admit`], and when the budget shrinks.
    fn order(&self, set: &ResidentSet) -> Vec<usize>;

    /// Whether to retain `piece`, which is neither resident nor reserved, and which victims to evict for it.
    fn admit(&self, set: &ResidentSet, piece: usize) -> Decision {
        set.make_room(piece, self.order(set))
    }

    /// Pieces to keep whatever is read, for a policy that knows them in advance. `set` holds the pinned pieces as reserved.
    fn fixed_set(&self, _set: &ResidentSet) -> Vec<usize> {
        Vec::new()
    }
}

/// The policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// A fixed set, chosen before the first step to keep as many bytes as possible.
    Static,
    /// Keeps what it has once retained; what no longer fits passes through. A scan can't wash it out.
    Stable,
    /// Evicts what was read the longest ago.
    Lru,
    /// Evicts what was read last.
    Mru,
    /// Evicts the smallest piece.
    Smallest,
    /// Evicts the largest piece.
    Largest,
    /// Retains a piece only for victims with fewer bytes in all.
    ByteAware,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [PolicyKind; 7] = [
        PolicyKind::Static,
        PolicyKind::Stable,
        PolicyKind::Lru,
        PolicyKind::Mru,
        PolicyKind::Smallest,
        PolicyKind::Largest,
        PolicyKind::ByteAware,
    ];

    /// Name in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::Static => "static",
            PolicyKind::Stable => "stable",
            PolicyKind::Lru => "lru",
            PolicyKind::Mru => "mru",
            PolicyKind::Smallest => "smallest",
            PolicyKind::Largest => "largest",
            PolicyKind::ByteAware => "byte-aware",
        }
    }

    /// The policy of that name.
    pub fn parse(name: &str) -> Option<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|k| k.name() == name)
    }

    /// A policy of this kind.
    pub fn policy(self) -> Box<dyn ResidencyPolicy> {
        match self {
            PolicyKind::Static => Box::new(Static),
            PolicyKind::Stable => Box::new(Stable),
            PolicyKind::Lru => Box::new(Lru),
            PolicyKind::Mru => Box::new(Mru),
            PolicyKind::Smallest => Box::new(Smallest),
            PolicyKind::Largest => Box::new(Largest),
            PolicyKind::ByteAware => Box::new(ByteAware),
        }
    }
}
