//! The resident set: which pieces are there, which have room kept for them, and what else fits.

use std::sync::Arc;

use crate::layout::PieceLayout;
use crate::placement::{GranuleCount, Placement};
use crate::residency::policy::{Decision, ResidencyPolicy};

/// What a resident set may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of granules that resident pieces may touch: what the device grants.
    pub capacity: u64,
    /// Bytes of weights that may be kept: what the policies compete for.
    pub budget: u64,
}

/// The pieces in device memory under some limits.
///
/// A piece is **held** if it is resident, or **reserved**: room is kept for it although it may not have been read yet. Every
/// question about room counts held pieces.
#[derive(Clone, Debug)]
pub struct ResidentSet {
    layout: Arc<PieceLayout>,
    granule: u64,
    /// The static schedule's pieces over the same addresses, each a run of this layout's.
    schedule: Option<Arc<PieceLayout>>,
    limits: Limits,
    resident: Vec<bool>,
    reserved: Vec<bool>,
    granules: GranuleCount,
    held_bytes: u64,
    /// When each piece was last read, counted in accesses; 0 for never.
    last_read: Vec<u64>,
}

impl ResidentSet {
    /// Nothing held, nothing allowed. `schedule` has the static schedule's pieces over the same addresses.
    pub fn new(layout: Arc<PieceLayout>, granule: u64, schedule: Option<Arc<PieceLayout>>) -> ResidentSet {
        let pieces = layout.pieces.len();
        let none = Placement { resident: vec![false; pieces] };
        ResidentSet {
            granules: GranuleCount::new(&layout, granule, &none),
            layout,
            granule,
            schedule,
            limits: Limits { capacity: 0, budget: 0 },
            resident: none.resident,
            reserved: vec![false; pieces],
            held_bytes: 0,
            last_read: vec![0; pieces],
        }
    }

    /// The pieces.
    pub fn layout(&self) -> &Arc<PieceLayout> {
        &self.layout
    }

    /// Mapping unit in bytes.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// The static schedule's pieces, if it is known.
    pub fn schedule(&self) -> Option<&PieceLayout> {
        self.schedule.as_deref()
    }

    /// What it may take.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes of weights of a piece.
    pub fn bytes(&self, piece: usize) -> u64 {
        self.layout.pieces[piece].weight_bytes
    }

    /// True if the piece is in device memory.
    pub fn is_resident(&self, piece: usize) -> bool {
        self.resident[piece]
    }

    /// True if room is kept for the piece.
    pub fn is_reserved(&self, piece: usize) -> bool {
        self.reserved[piece]
    }

    /// When the piece was last read, counted in accesses; 0 for never.
    pub fn last_read(&self, piece: usize) -> u64 {
        self.last_read[piece]
    }

    /// Bytes of weights that resident pieces hold.
    pub fn resident_bytes(&self) -> u64 {
        (0..self.resident.len()).filter(|&p| self.resident[p]).map(|p| self.bytes(p)).sum()
    }

    /// What is resident.
    pub fn placement(&self) -> Placement {
        Placement { resident: self.resident.clone() }
    }

    /// Resident pieces that are not reserved, in read order.
    pub fn evictable(&self) -> Vec<usize> {
        (0..self.resident.len()).filter(|&p| self.resident[p] && !self.reserved[p]).collect()
    }

    /// True if `piece` could be held once `without` are gone.
    pub fn fits(&self, piece: usize, without: &[usize]) -> bool {
        let mut trial = self.trial();
        without.iter().for_each(|&v| trial.drop(self, v));
        trial.fits(self, piece)
    }

    /// Retains `piece` at the cost of the first pieces of `order`, as many as it takes; bypasses it if all are not enough.
    pub fn make_room(&self, piece: usize, order: Vec<usize>) -> Decision {
        let mut trial = self.trial();
        let mut victims = Vec::new();
        let mut order = order.into_iter();
        while !trial.fits(self, piece) {
            let Some(victim) = order.next() else { return Decision::Bypass };
            trial.drop(self, victim);
            victims.push(victim);
        }
        Decision::Retain { victims }
    }

    /// The piece has been read, at access number `clock`.
    pub(crate) fn touch(&mut self, piece: usize, clock: u64) {
        self.last_read[piece] = clock;
    }

    /// The piece is in device memory now, or no longer.
    pub(crate) fn set_resident(&mut self, piece: usize, resident: bool) {
        let was = self.held(piece);
        self.resident[piece] = resident;
        self.account(piece, was);
    }

    /// Bytes held once room is kept for those pieces of `order`, one after the other, that fit.
    pub(crate) fn reserving(&self, order: &[usize]) -> u64 {
        let mut trial = self.clone();
        order.iter().for_each(|&p| trial.reserve(p));
        trial.held_bytes
    }

    /// Keeps room for a piece, if it fits.
    fn reserve(&mut self, piece: usize) {
        let was = self.held(piece);
        let more = self.granules.added_bytes(&self.layout, piece);
        let fits = self.held_bytes + self.bytes(piece) <= self.limits.budget
            && self.granules.bytes() + more <= self.limits.capacity;
        if was || fits {
            self.reserved[piece] = true;
            self.account(piece, was);
        }
    }

    /// This set under other limits: what is reserved is chosen anew, and what doesn't fit any more is no longer resident.
    /// Pinned pieces have room first, in read order, then those of the policy's fixed set.
    pub(crate) fn relimited(&self, limits: Limits, pinned: &[bool], policy: &dyn ResidencyPolicy) -> ResidentSet {
        let mut reserved = ResidentSet::new(self.layout.clone(), self.granule, self.schedule.clone());
        reserved.limits = limits;
        (0..pinned.len()).filter(|&p| pinned[p]).for_each(|p| reserved.reserve(p));
        policy.fixed_set(&reserved).into_iter().for_each(|p| reserved.reserve(p));
        // Room that is kept for absent pieces counts from the start, so that what stays leaves it free.
        let mut set = ResidentSet { limits, ..self.clone() };
        for piece in 0..set.reserved.len() {
            let was = set.held(piece);
            set.reserved[piece] = reserved.reserved[piece];
            set.account(piece, was);
        }
        for victim in policy.order(&set) {
            if set.within_limits() {
                break;
            }
            set.set_resident(victim, false);
        }
        set
    }

    fn within_limits(&self) -> bool {
        self.granules.bytes() <= self.limits.capacity && self.held_bytes <= self.limits.budget
    }

    fn held(&self, piece: usize) -> bool {
        self.resident[piece] || self.reserved[piece]
    }

    fn account(&mut self, piece: usize, was_held: bool) {
        match (was_held, self.held(piece)) {
            (false, true) => {
                self.granules.add_piece(&self.layout, piece);
                self.held_bytes += self.bytes(piece);
            }
            (true, false) => {
                self.granules.drop_piece(&self.layout, piece);
                self.held_bytes -= self.bytes(piece);
            }
            _ => {}
        }
    }

    fn trial(&self) -> Trial {
        Trial { granules: self.granules.clone(), held_bytes: self.held_bytes }
    }
}

/// A copy of the account on which victims are tried.
struct Trial {
    granules: GranuleCount,
    held_bytes: u64,
}

impl Trial {
    fn drop(&mut self, set: &ResidentSet, piece: usize) {
        self.granules.drop_piece(&set.layout, piece);
        self.held_bytes -= set.bytes(piece);
    }

    fn fits(&self, set: &ResidentSet, piece: usize) -> bool {
        set.held(piece)
            || (self.held_bytes + set.bytes(piece) <= set.limits.budget
                && self.granules.bytes() + self.granules.added_bytes(&set.layout, piece) <= set.limits.capacity)
    }
}
