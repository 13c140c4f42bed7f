//! From one placement to another: what is unmapped, mapped and filled, and what stands when the device refuses.

use std::time::Instant;

use headrace_provider::{DeviceError, Place, RangeKind, Segment};

use super::{EpochReason, PagedWeights, Target};
use crate::placement::Placement;
use crate::schedule::segments;

type Result<T> = std::result::Result<T, DeviceError>;

impl PagedWeights {
    /// Changes the placement: old programs go first, then granules that nothing resident touches any more are given back,
    /// then new ones are mapped and filled. The caller holds the bytes of both placements' union where it promotes.
    ///
    /// # Errors
    /// The device's. What was promoted by then is cold again, what was to be demoted may be: [`PagedWeights::placement`] says
    /// what is so, and it is consistent with what is mapped.
    pub fn place(&mut self, target: Target, reason: EpochReason) -> Result<()> {
        let moved = self.move_to(target.placement, reason);
        if let Some(dynamic) = &mut self.dynamic {
            match moved {
                Ok(()) => dynamic.granted(target.held, &self.placement),
                Err(_) => dynamic.sync(&self.placement),
            }
        }
        moved
    }

    fn move_to(&mut self, target: Placement, reason: EpochReason) -> Result<()> {
        if target == self.placement {
            return Ok(());
        }
        self.end_epoch(reason);
        // Demotions: granules of the old placement that the kept pieces don't touch.
        let kept = Placement {
            resident: self.placement.resident.iter().zip(&target.resident).map(|(a, b)| *a && *b).collect(),
        };
        self.unmap_down_to(kept)?;
        // Promotions, piece by piece, so that a failure leaves whole pieces.
        for piece in 0..target.resident.len() {
            if target.resident[piece] && !self.placement.resident[piece] {
                self.promote(piece)?;
            }
        }
        Ok(())
    }

    /// Demotes whatever `kept` doesn't hold.
    fn unmap_down_to(&mut self, kept: Placement) -> Result<()> {
        let before = self.placement.mapped_runs(&self.layout, self.granule);
        let after = kept.mapped_runs(&self.layout, self.granule);
        let mut undone: Vec<(u64, u64)> = Vec::new();
        for (offset, bytes) in subtract(&before, &after) {
            if let Err(error) = self.provider.unmap(RangeKind::Weights, offset, bytes) {
                // Map what was unmapped already, and fill it again: the old placement stands, or as much of it as can.
                self.restore(&undone);
                return Err(error);
            }
            undone.push((offset, bytes));
        }
        self.placement = kept;
        Ok(())
    }

    /// Maps and fills granules that were unmapped a moment ago; pieces that can't be restored are cold from now on.
    fn restore(&mut self, runs: &[(u64, u64)]) {
        for &(offset, bytes) in runs {
            let touches = |p: &crate::layout::Piece| p.address < offset + bytes && offset < p.address + p.slab_bytes;
            let lost: Vec<usize> = self
                .layout
                .pieces
                .iter()
                .enumerate()
                .filter(|(i, p)| self.placement.resident[*i] && touches(p))
                .map(|(i, _)| i)
                .collect();
            let mapped = self.provider.map(RangeKind::Weights, offset, bytes).is_ok();
            for piece in lost {
                let loaded = mapped && self.load(piece).is_ok();
                self.placement.resident[piece] = loaded;
            }
        }
    }

    /// Unmaps a resident piece, whose granules others may go on using.
    pub(crate) fn demote(&mut self, piece: usize) -> Result<()> {
        let mut kept = self.placement.clone();
        kept.resident[piece] = false;
        self.unmap_down_to(kept)
    }

    /// Maps and fills a piece.
    pub(crate) fn promote(&mut self, piece: usize) -> Result<()> {
        let before = self.placement.mapped_runs(&self.layout, self.granule);
        let mut with = self.placement.clone();
        with.resident[piece] = true;
        let after = with.mapped_runs(&self.layout, self.granule);
        let added = subtract(&after, &before);
        let mut result = Ok(());
        let mut mapped = Vec::new();
        for &(offset, bytes) in &added {
            result = self.provider.map(RangeKind::Weights, offset, bytes);
            if result.is_err() {
                break;
            }
            mapped.push((offset, bytes));
        }
        let result = result.and_then(|()| self.load(piece));
        if result.is_err() {
            for (offset, bytes) in mapped {
                // A failure here leaves granules mapped that nothing uses; the ledger's check against the device's count
                // shows them as unaccounted.
                let _ = self.provider.unmap(RangeKind::Weights, offset, bytes);
            }
            return result;
        }
        self.placement = with;
        Ok(())
    }

    fn load(&mut self, piece: usize) -> Result<()> {
        let p = &self.layout.pieces[piece];
        let address = p.address;
        let segments: Vec<Segment> = segments(p, |offset| Place::Resident { offset: address + offset });
        let since = Instant::now();
        self.provider.load(&segments)?;
        self.counters.loading_nanos += u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counters.loaded_bytes += p.weight_bytes;
        Ok(())
    }

    /// A checksum of each resident piece's weights as the device has them, eight bytes at a time; `None` for a cold piece.
    ///
    /// # Errors
    /// The device's.
    pub fn checksums(&self) -> Result<Vec<Option<u64>>> {
        let mut buffer = Vec::new();
        let pieces = self.layout.pieces.iter().zip(&self.placement.resident);
        pieces
            .map(|(piece, resident)| {
                if !resident {
                    return Ok(None);
                }
                buffer.resize(piece.slab_bytes as usize, 0);
                self.provider.read(RangeKind::Weights, piece.address, &mut buffer)?;
                // A slab is a multiple of the plane alignment, and so of a word.
                let words = buffer.chunks_exact(8).map(|w| w.iter().fold(0u64, |sum, b| sum << 8 | u64::from(*b)));
                let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(29);
                Ok(Some(words.fold(0xcbf2_9ce4_8422_2325, mix)))
            })
            .collect()
    }
}

/// The parts of the runs `a` that no run of `b` covers. Both are increasing and disjoint.
fn subtract(a: &[(u64, u64)], b: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut out = Vec::new();
    for &(offset, bytes) in a {
        let mut at = offset;
        let end = offset + bytes;
        for &(other, len) in b.iter().filter(|(o, l)| *o < end && o + l > offset) {
            if other > at {
                out.push((at, other - at));
            }
            at = at.max(other + len);
        }
        if at < end {
            out.push((at, end - at));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtraction_of_runs() {
        assert_eq!(subtract(&[(0, 10)], &[]), [(0, 10)]);
        assert_eq!(subtract(&[(0, 10)], &[(0, 10)]), []);
        assert_eq!(subtract(&[(0, 10), (20, 5)], &[(2, 3), (8, 13)]), [(0, 2), (5, 3), (21, 4)]);
    }
}
