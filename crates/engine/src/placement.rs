//! Which pieces are resident under a budget, and the granules that takes.
//!
//! The order in which pieces become cold is fixed once: a low-discrepancy sequence over the read order. So the cold pieces of
//! any budget are spread evenly, the link works all the time, and a smaller budget's cold set contains a larger one's: a
//! change of budget touches only the difference.

use crate::layout::PieceLayout;

/// For each piece, whether it stays in device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One flag a piece, in read order.
    pub resident: Vec<bool>,
}

impl Placement {
    /// Everything resident.
    pub fn all_resident(layout: &PieceLayout) -> Placement {
        Placement { resident: vec![true; layout.pieces.len()] }
    }

    /// The placement with the fewest cold pieces, in the fixed order, whose granules take at most `budget` bytes.
    pub fn within(layout: &PieceLayout, granule: u64, budget: u64) -> Placement {
        let order = cold_order(layout.pieces.len());
        let mut placement = Placement::all_resident(layout);
        let mut granules = GranuleCount::new(layout, granule, &placement);
        for &piece in &order {
            if granules.bytes() <= budget {
                break;
            }
            placement.resident[piece] = false;
            granules.drop_piece(layout, piece);
        }
        // The last step may have freed more than was needed: take back what still fits, smallest loss first.
        for &piece in order.iter().rev() {
            if !placement.resident[piece] {
                let mut with = granules.clone();
                with.add_piece(layout, piece);
                if with.bytes() <= budget {
                    placement.resident[piece] = true;
                    granules = with;
                }
            }
        }
        placement
    }

    /// The placement with the most cold pieces, in the fixed order, whose weights take at most `cold` bytes.
    pub fn with_cold(layout: &PieceLayout, cold: u64) -> Placement {
        let mut placement = Placement::all_resident(layout);
        let mut left = cold;
        for piece in cold_order(layout.pieces.len()) {
            match left.checked_sub(layout.pieces[piece].weight_bytes) {
                Some(rest) => left = rest,
                None => break,
            }
            placement.resident[piece] = false;
        }
        placement
    }

    /// The cold pieces that kernels read in place: those that become cold first, up to `budget` bytes of weights. So they are
    /// spread evenly, and they stay the same ones when others become cold as well.
    pub fn host_mapped(&self, layout: &PieceLayout, budget: u64) -> Vec<bool> {
        let mut mapped = vec![false; self.resident.len()];
        let mut left = budget;
        for piece in cold_order(layout.pieces.len()) {
            if left == 0 {
                break;
            }
            if !self.resident[piece]
                && let Some(rest) = left.checked_sub(layout.pieces[piece].weight_bytes)
            {
                (mapped[piece], left) = (true, rest);
            }
        }
        mapped
    }

    /// Bytes of weights in the pieces that [`Placement::host_mapped`] picks.
    pub fn host_mapped_bytes(&self, layout: &PieceLayout, budget: u64) -> u64 {
        let pieces = layout.pieces.iter().zip(self.host_mapped(layout, budget));
        pieces.filter(|(_, mapped)| *mapped).map(|(piece, _)| piece.weight_bytes).sum()
    }

    /// True if something has to go through the ring: a cold piece that isn't read in place within `budget` bytes.
    pub fn streams(&self, layout: &PieceLayout, budget: u64) -> bool {
        match budget {
            0 => self.resident.iter().any(|r| !r),
            _ => self
                .host_mapped(layout, budget)
                .iter()
                .zip(&self.resident)
                .any(|(mapped, resident)| !mapped && !resident),
        }
    }

    /// Bytes of the granules that the resident pieces touch.
    pub fn mapped_bytes(&self, layout: &PieceLayout, granule: u64) -> u64 {
        GranuleCount::new(layout, granule, self).bytes()
    }

    /// The granules that the resident pieces touch, as increasing, disjoint `(offset, bytes)` runs.
    pub fn mapped_runs(&self, layout: &PieceLayout, granule: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (piece, _) in layout.pieces.iter().zip(&self.resident).filter(|(_, r)| **r) {
            let start = piece.address / granule * granule;
            let end = (piece.address + piece.slab_bytes).next_multiple_of(granule);
            match runs.last_mut() {
                Some((offset, bytes)) if *offset + *bytes >= start => *bytes = end - *offset,
                _ => runs.push((start, end - start)),
            }
        }
        runs
    }

    /// Indices of the cold pieces, in read order.
    pub fn cold(&self) -> impl Iterator<Item = usize> + '_ {
        self.resident.iter().enumerate().filter(|(_, r)| !**r).map(|(i, _)| i)
    }

    /// Bytes of weights in cold pieces: what a step streams or reads in place.
    pub fn cold_bytes(&self, layout: &PieceLayout) -> u64 {
        self.cold().map(|i| layout.pieces[i].weight_bytes).sum()
    }
}

/// Piece indices in the order in which they become cold: the van der Corput sequence, base 2, scaled to `pieces`; last pieces
/// first, so that the head of a step, which the first copies have least time for, stays longest.
pub(crate) fn cold_order(pieces: usize) -> Vec<usize> {
    let bits = usize::BITS - pieces.saturating_sub(1).leading_zeros();
    let mut order = Vec::with_capacity(pieces);
    for i in 0..1usize << bits {
        let at = if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
        if at < pieces {
            order.push(pieces - 1 - at);
        }
    }
    order
}

/// How many resident pieces touch each granule.
#[derive(Clone, Debug)]
pub(crate) struct GranuleCount {
    granule: u64,
    touched: Vec<u32>,
    mapped: u64,
}

impl GranuleCount {
    pub(crate) fn new(layout: &PieceLayout, granule: u64, placement: &Placement) -> GranuleCount {
        let granules = layout.range_bytes.div_ceil(granule) as usize;
        let mut count = GranuleCount { granule, touched: vec![0; granules], mapped: 0 };
        for (i, _) in placement.resident.iter().enumerate().filter(|(_, r)| **r) {
            count.add_piece(layout, i);
        }
        count
    }

    fn span(&self, layout: &PieceLayout, piece: usize) -> std::ops::Range<usize> {
        let p = &layout.pieces[piece];
        (p.address / self.granule) as usize..(p.address + p.slab_bytes).div_ceil(self.granule) as usize
    }

    pub(crate) fn add_piece(&mut self, layout: &PieceLayout, piece: usize) {
        for g in self.span(layout, piece) {
            self.mapped += u64::from(self.touched[g] == 0);
            self.touched[g] += 1;
        }
    }

    pub(crate) fn drop_piece(&mut self, layout: &PieceLayout, piece: usize) {
        for g in self.span(layout, piece) {
            self.touched[g] -= 1;
            self.mapped -= u64::from(self.touched[g] == 0);
        }
    }

    /// Bytes of granules that `piece` would add.
    pub(crate) fn added_bytes(&self, layout: &PieceLayout, piece: usize) -> u64 {
        self.span(layout, piece).filter(|&g| self.touched[g] == 0).count() as u64 * self.granule
    }

    /// Bytes of granules that some resident piece touches.
    pub(crate) fn bytes(&self) -> u64 {
        self.mapped * self.granule
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cold_order_is_a_permutation_and_spreads_evenly() {
        for pieces in [0usize, 1, 2, 3, 7, 64, 100, 337] {
            let mut order = cold_order(pieces);
            for count in 1..=pieces {
                let mut cold: Vec<usize> = order[..count].to_vec();
                cold.sort();
                let even = pieces as f64 / count as f64;
                let gaps = cold.windows(2).map(|w| (w[1] - w[0]) as f64);
                assert!(gaps.fold(0.0, f64::max) <= 2.0 * even + 2.0, "{pieces} {count}");
            }
            order.sort();
            assert_eq!(order, (0..pieces).collect::<Vec<_>>());
        }
    }
}
