//! Weights on a device with memory of its own: what is mapped, the programs of the epoch, the change from one placement to
//! another. Bytes are granted elsewhere (`budget`); this file moves them.

use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_provider::{DeviceError, Place, ProgramId, Provider, RangeKind, Segment, StepInput, StepOutput};

use crate::layout::PieceLayout;
use crate::options::EngineOptions;
use crate::placement::Placement;
use crate::schedule::{Ring, Schedule, segments};

/// Why an epoch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpochReason {
    /// The model was loaded.
    Load,
    /// KV grew and took bytes from the weights.
    KvGrowth,
    /// KV shrank and the weights took bytes back.
    KvShrink,
    /// The limit was changed.
    Limit,
    /// A step failed, and the ring was filled anew.
    Recovery,
}

impl EpochReason {
    /// Every reason.
    pub const ALL: [EpochReason; 5] =
        [EpochReason::Load, EpochReason::KvGrowth, EpochReason::KvShrink, EpochReason::Limit, EpochReason::Recovery];

    /// Name in stats.
    pub const fn name(self) -> &'static str {
        match self {
            EpochReason::Load => "load",
            EpochReason::KvGrowth => "kv-growth",
            EpochReason::KvShrink => "kv-shrink",
            EpochReason::Limit => "limit",
            EpochReason::Recovery => "recovery",
        }
    }
}

/// What this file counts. Totals since the engine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedCounters {
    /// Bytes copied by steps and prologues.
    pub streamed_bytes: u64,
    /// Bytes that steps read where they stay.
    pub resident_bytes_read: u64,
    /// Bytes of embedding rows that steps took from the host.
    pub host_mapped_bytes: u64,
    /// Bytes of weights that the host's cores read and multiplied in place of a device.
    pub host_computed_bytes: u64,
    /// Bytes copied to become resident, at load and by promotions.
    pub loaded_bytes: u64,
    /// Programs recorded for steps.
    pub captures: u64,
    /// Steps replayed.
    pub replays: u64,
    /// Epochs by reason, in the order of [`EpochReason::ALL`].
    pub epochs: [u64; EpochReason::ALL.len()],
}

/// The programs of the present epoch.
struct Epoch {
    schedule: Schedule,
    step: ProgramId,
    prologue: Option<ProgramId>,
    /// True while the ring holds what the next step expects.
    primed: bool,
}

/// The weights of one model on one device.
pub struct PagedWeights {
    provider: Box<dyn Provider>,
    model: Arc<ModelSpec>,
    options: EngineOptions,
    layout: PieceLayout,
    granule: u64,
    placement: Placement,
    ring: Ring,
    epoch: Option<Epoch>,
    reason: EpochReason,
    counters: PagedCounters,
}

impl PagedWeights {
    /// Nothing mapped yet; `provider` has the model attached.
    pub fn new(
        provider: Box<dyn Provider>,
        model: Arc<ModelSpec>,
        options: EngineOptions,
        layout: PieceLayout,
    ) -> PagedWeights {
        PagedWeights {
            granule: provider.info().granule,
            provider,
            model,
            options,
            placement: Placement { resident: vec![false; layout.pieces.len()] },
            layout,
            ring: Ring::default(),
            epoch: None,
            reason: EpochReason::Load,
            counters: PagedCounters::default(),
        }
    }

    /// The device.
    pub fn provider(&self) -> &dyn Provider {
        self.provider.as_ref()
    }

    /// The device, for ranges other than the weights and the ring.
    pub fn provider_mut(&mut self) -> &mut dyn Provider {
        self.provider.as_mut()
    }

    /// Pieces.
    pub fn layout(&self) -> &PieceLayout {
        &self.layout
    }

    /// Mapping unit in bytes.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// Which pieces are resident.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The ring as it is mapped.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Counters.
    pub fn counters(&self) -> &PagedCounters {
        &self.counters
    }

    /// The present epoch's programs; `None` between a change and the next step.
    pub fn schedule(&self) -> Option<&Schedule> {
        self.epoch.as_ref().map(|e| &e.schedule)
    }

    /// Bytes of granules that the resident pieces take.
    pub fn mapped_bytes(&self) -> u64 {
        self.placement.mapped_bytes(&self.layout, self.granule)
    }

    /// Changes the placement: old programs go first, then granules that nothing resident touches any more are given back,
    /// then new ones are mapped and filled. The caller holds the bytes of both placements' union where it promotes.
    ///
    /// # Errors
    /// The device's. What was promoted by then is cold again, what was to be demoted may be: [`PagedWeights::placement`] says
    /// what is so, and it is consistent with what is mapped.
    pub fn place(&mut self, target: Placement, reason: EpochReason) -> Result<(), DeviceError> {
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
    fn unmap_down_to(&mut self, kept: Placement) -> Result<(), DeviceError> {
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

    fn promote(&mut self, piece: usize) -> Result<(), DeviceError> {
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

    fn load(&mut self, piece: usize) -> Result<(), DeviceError> {
        let p = &self.layout.pieces[piece];
        let address = p.address;
        let segments: Vec<Segment> = segments(p, |offset| Place::Resident { offset: address + offset });
        self.provider.load(&segments)?;
        self.counters.loaded_bytes += p.weight_bytes;
        Ok(())
    }

    /// A checksum (FNV-1a) of each resident piece's weights as the device has them; `None` for a cold piece.
    ///
    /// # Errors
    /// The device's.
    pub fn checksums(&self) -> Result<Vec<Option<u64>>, DeviceError> {
        let mut buffer = Vec::new();
        let pieces = self.layout.pieces.iter().zip(&self.placement.resident);
        pieces
            .map(|(piece, resident)| {
                if !resident {
                    return Ok(None);
                }
                buffer.resize(piece.slab_bytes as usize, 0);
                self.provider.read(RangeKind::Weights, piece.address, &mut buffer)?;
                let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
                Ok(Some(buffer.iter().fold(0xcbf2_9ce4_8422_2325, fnv)))
            })
            .collect()
    }

    /// Maps or unmaps the ring, once its bytes are granted.
    ///
    /// # Errors
    /// The device's; the ring is as before then.
    pub fn set_ring(&mut self, ring: Ring) -> Result<(), DeviceError> {
        if ring != self.ring {
            self.end_epoch(self.reason);
            self.provider.resize(RangeKind::Staging, u64::from(ring.slots) * ring.slot_bytes)?;
            self.ring = ring;
        }
        Ok(())
    }

    /// Drops the programs. The next step records new ones.
    fn end_epoch(&mut self, reason: EpochReason) {
        if let Some(epoch) = self.epoch.take() {
            self.provider.discard(epoch.step);
            if let Some(prologue) = epoch.prologue {
                self.provider.discard(prologue);
            }
        }
        self.reason = reason;
    }

    /// Runs one step; records the epoch's programs and fills the ring first where that is due.
    ///
    /// # Errors
    /// The device's. The ring is filled anew before the next step then.
    pub fn run(&mut self, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        let mut epoch = match self.epoch.take() {
            Some(epoch) => epoch,
            None => self.begin_epoch()?,
        };
        let result = self.run_epoch(&mut epoch, input, output);
        if result.is_err() {
            epoch.primed = false;
            self.reason = EpochReason::Recovery;
        }
        self.epoch = Some(epoch);
        result
    }

    fn begin_epoch(&mut self) -> Result<Epoch, DeviceError> {
        let schedule = Schedule::new(&self.model, &self.options, &self.layout, &self.placement, self.ring);
        let step = self.provider.record(schedule.step.clone())?;
        let prologue = match schedule.prologue.instrs.is_empty() {
            true => None,
            false => match self.provider.record(schedule.prologue.clone()) {
                Ok(id) => Some(id),
                Err(error) => {
                    self.provider.discard(step);
                    return Err(error);
                }
            },
        };
        self.counters.captures += 1;
        let reason = EpochReason::ALL.iter().position(|r| *r == self.reason).unwrap_or(0);
        self.counters.epochs[reason] += 1;
        log::info!(
            "epoch ({}): {} of {} pieces cold, {} bytes streamed a step",
            self.reason.name(),
            self.placement.cold().count(),
            self.layout.pieces.len(),
            schedule.streamed_bytes
        );
        Ok(Epoch { schedule, step, prologue, primed: false })
    }

    fn run_epoch(&mut self, epoch: &mut Epoch, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        if !epoch.primed {
            if let Some(prologue) = epoch.prologue {
                self.provider.run(prologue, &StepInput::default(), output)?;
                self.counters.streamed_bytes += epoch.schedule.prologue_bytes;
            }
            epoch.primed = true;
        }
        self.provider.run(epoch.step, input, output)?;
        self.counters.streamed_bytes += epoch.schedule.streamed_bytes;
        self.counters.resident_bytes_read += epoch.schedule.resident_bytes;
        let embedding = self.model.tensor(self.model.embedding);
        self.counters.host_mapped_bytes += (embedding.bytes() / embedding.rows.max(1) * input.rows.len()) as u64;
        self.counters.replays += 1;
        Ok(())
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
