//! The cache: puts every access to its policy, keeps the resident set and the counts. Moves no byte itself.

use std::sync::Arc;

use crate::layout::PieceLayout;
use crate::placement::Placement;
use crate::residency::policy::{Decision, PolicyKind, ResidencyPolicy};
use crate::residency::resident::{Limits, ResidentSet};
use crate::residency::trace::{ResidencyCounters, TensorTrace};

/// What an access finds, or has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// The piece is resident.
    Hit,
    /// The victims leave, then the piece is copied to its own address and stays.
    Retain {
        /// Resident pieces, in the order in which they leave.
        victims: Vec<usize>,
    },
    /// The piece passes through the staging ring.
    Bypass,
}

/// A residency cache over the pieces of a model.
///
/// [`ResidencyCache::look`] says what an access means and changes nothing. Whoever moves the bytes reports what has happened
/// with `evicted`, `retained`, `bypassed` and `hit`, so that a copy that failed leaves the books right.
#[derive(Debug)]
pub struct ResidencyCache {
    policy: Box<dyn ResidencyPolicy>,
    set: ResidentSet,
    pinned: Vec<bool>,
    clock: u64,
    counters: ResidencyCounters,
    /// For each piece, what became of its reads since the trace began.
    pieces: Vec<ResidencyCounters>,
}

impl ResidencyCache {
    /// Empty, and without room until [`ResidencyCache::set_limits`]. `pinned` has one flag a piece.
    /// `schedule` has the static schedule's pieces over the same addresses.
    pub fn new(
        layout: Arc<PieceLayout>,
        granule: u64,
        kind: PolicyKind,
        pinned: Vec<bool>,
        schedule: Option<Arc<PieceLayout>>,
    ) -> ResidencyCache {
        ResidencyCache {
            policy: kind.policy(),
            pieces: vec![ResidencyCounters::default(); layout.pieces.len()],
            set: ResidentSet::new(layout, granule, schedule),
            pinned,
            clock: 0,
            counters: ResidencyCounters::default(),
        }
    }

    /// The policy in charge.
    pub fn kind(&self) -> PolicyKind {
        self.policy.kind()
    }

    /// What is resident, reserved and allowed.
    pub fn set(&self) -> &ResidentSet {
        &self.set
    }

    /// Totals since the cache was made.
    pub fn counters(&self) -> &ResidencyCounters {
        &self.counters
    }

    /// What would be resident under other limits: the policy picks the victims. Changes nothing.
    pub fn within(&self, limits: Limits) -> Placement {
        self.set.relimited(limits, &self.pinned, self.policy.as_ref()).placement()
    }

    /// Changes the limits. The pieces that leave are those that [`ResidencyCache::within`] names, and they are counted as
    /// evicted here.
    pub fn set_limits(&mut self, limits: Limits) {
        let set = self.set.relimited(limits, &self.pinned, self.policy.as_ref());
        for piece in 0..self.pinned.len() {
            if self.set.is_resident(piece) && !set.is_resident(piece) {
                self.evicted(piece);
            }
        }
        self.set = set;
    }

    /// What a read of `piece` finds or asks for.
    pub fn look(&self, piece: usize) -> Access {
        if self.set.is_resident(piece) {
            return Access::Hit;
        }
        if self.set.is_reserved(piece) {
            return Access::Retain { victims: Vec::new() };
        }
        match self.policy.admit(&self.set, piece) {
            Decision::Retain { victims } => Access::Retain { victims },
            Decision::Bypass => Access::Bypass,
        }
    }

    /// A victim has been unmapped.
    pub fn evicted(&mut self, piece: usize) {
        self.set.set_resident(piece, false);
        let bytes = self.set.bytes(piece);
        self.count(piece, |c| {
            c.evictions += 1;
            c.evicted_bytes += bytes;
        });
    }

    /// The piece was resident and has been read.
    pub fn hit(&mut self, piece: usize) {
        let bytes = self.read(piece);
        self.count(piece, |c| {
            c.hits += 1;
            c.hit_bytes += bytes;
        });
    }

    /// The piece has been copied to its own address, where it stays.
    pub fn retained(&mut self, piece: usize) {
        self.set.set_resident(piece, true);
        let bytes = self.read(piece);
        self.count(piece, |c| {
            c.page_ins += 1;
            c.page_in_bytes += bytes;
        });
    }

    /// The piece has passed through the ring.
    pub fn bypassed(&mut self, piece: usize) {
        let bytes = self.read(piece);
        self.count(piece, |c| {
            c.page_ins += 1;
            c.page_in_bytes += bytes;
            c.bypassed_page_ins += 1;
            c.bypassed_bytes += bytes;
        });
    }

    /// Takes over what is resident in truth, after moves that were not this cache's own.
    pub fn sync(&mut self, placement: &Placement) {
        for (piece, &resident) in placement.resident.iter().enumerate() {
            if self.set.is_resident(piece) && !resident {
                self.evicted(piece);
            } else {
                self.set.set_resident(piece, resident);
            }
        }
    }

    /// What became of the reads of each tensor since the trace began, in read order. `describe` gives a tensor's name and
    /// bytes.
    pub fn trace(&self, describe: impl Fn(headrace_model::spec::TensorId) -> (String, u64)) -> Vec<TensorTrace> {
        let mut out: Vec<(headrace_model::spec::TensorId, TensorTrace)> = Vec::new();
        for (index, piece) in self.set.layout().pieces.iter().enumerate() {
            let counts = &self.pieces[index];
            for run in &piece.runs {
                // Layers may share a tensor, whose other reads stand further up.
                let known = out.iter().rposition(|(tensor, _)| *tensor == run.tensor);
                if known.is_none() {
                    let (name, bytes) = describe(run.tensor);
                    out.push((run.tensor, TensorTrace { name, bytes, ..TensorTrace::default() }));
                }
                // A piece that holds several tensors is read, copied and evicted as one; each tensor has its share of rows.
                let share = |bytes: u64| match piece.runs.len() {
                    1 => bytes,
                    _ => bytes * run.rows as u64 / piece.runs.iter().map(|r| r.rows as u64).sum::<u64>().max(1),
                };
                if let Some((_, t)) = out.iter_mut().rev().find(|(tensor, _)| *tensor == run.tensor) {
                    t.pieces += 1;
                    t.resident_pieces += u64::from(self.set.is_resident(index));
                    t.pinned |= self.pinned[index];
                    t.reads += counts.hits + counts.page_ins;
                    t.read_bytes += share(counts.hit_bytes + counts.page_in_bytes);
                    t.page_ins += counts.page_ins;
                    t.page_in_bytes += share(counts.page_in_bytes);
                    t.retained += counts.page_ins - counts.bypassed_page_ins;
                    t.retained_bytes += share(counts.page_in_bytes - counts.bypassed_bytes);
                    t.bypassed += counts.bypassed_page_ins;
                    t.bypassed_bytes += share(counts.bypassed_bytes);
                    t.evictions += counts.evictions;
                }
            }
        }
        out.into_iter().map(|(_, t)| t).collect()
    }

    /// Begins the trace anew. Totals go on.
    pub fn reset_trace(&mut self) {
        self.pieces.fill(ResidencyCounters::default());
    }

    /// Counts a read in the history; returns its bytes.
    fn read(&mut self, piece: usize) -> u64 {
        self.clock += 1;
        self.set.touch(piece, self.clock);
        self.set.bytes(piece)
    }

    fn count(&mut self, piece: usize, add: impl Fn(&mut ResidencyCounters)) {
        add(&mut self.counters);
        add(&mut self.pieces[piece]);
    }
}
