//! The memory of the device: what is mapped where, and copies into it.

use headrace_provider::{DeviceError, Place, RangeKind, Segment};

use super::{CudaProvider, range_index};
use crate::arena::{Arena, ArenaError};
use crate::physical::CardMemory;
use crate::plan::{plane_bytes, slab};
use crate::upload::PieceKey;

impl CudaProvider {
    pub(super) fn arena_error(&self, what: &str, bytes: u64, error: ArenaError) -> DeviceError {
        match error {
            ArenaError::Driver(e) if e.is_out_of_memory() => self.context.no_memory(what, bytes, e),
            ArenaError::Beyond { .. } => self.context.no_memory(what, bytes, error),
            ArenaError::Driver(e) => self.context.failed(e),
            other => self.context.invalid(format!("{what}: {other}")),
        }
    }

    pub(super) fn mapped_bytes(&self, range: RangeKind) -> u64 {
        self.arena.mapped(range_index(range))
    }

    /// Where ranges are allocated whole, allocates one that hasn't been, for all that was said of it and at least for `bytes`.
    pub(super) fn ready_range(&mut self, range: usize, bytes: u64, what: &str) -> Result<(), DeviceError> {
        if bytes == 0 || self.arena.reserved(range) > 0 || !self.arena.physical().takes_ranges_whole() {
            return Ok(());
        }
        let bytes = self.whole.get(range).map_or(bytes, |&whole| whole.max(bytes));
        self.arena.reserve(range, bytes).map_err(|e| self.arena_error(what, bytes, e))
    }

    /// Maps so that `0 .. bytes` of a private range is backed; it never shrinks.
    pub(super) fn grow(&mut self, range: usize, bytes: u64, what: &str) -> Result<(), DeviceError> {
        let mapped = self.arena.mapped(range);
        let granule = self.arena.granule();
        let target = bytes.div_ceil(granule).saturating_mul(granule);
        if target <= mapped {
            return Ok(());
        }
        self.ready_range(range, target, what)?;
        self.arena.map(range, mapped, target - mapped).map_err(|e| self.arena_error(what, target - mapped, e))
    }

    pub(super) fn address(&self, range: usize, offset: u64, bytes: u64, what: &str) -> Result<u64, DeviceError> {
        self.arena.address(range, offset, bytes).map_err(|e| self.arena_error(what, bytes, e))
    }

    /// Copies host bytes to the device and waits.
    pub(super) fn put(&mut self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller has checked that `to` is mapped; the stream is waited for before `bytes` can change.
        let copied = unsafe { self.streams.compute.copy_in(to, bytes.as_ptr(), bytes.len()) };
        copied.and_then(|()| self.streams.compute.wait()).map_err(|e| self.context.failed(e))
    }

    pub(super) fn fence_and<T>(
        &mut self,
        what: &str,
        bytes: u64,
        work: impl FnOnce(&mut Arena<CardMemory>, &crate::stream::Fenced<'_>) -> Result<T, ArenaError>,
    ) -> Result<T, DeviceError> {
        let fenced = self.streams.fence().map_err(|e| self.context.failed(e))?;
        let done = work(&mut self.arena, &fenced);
        done.map_err(|e| self.arena_error(what, bytes, e))
    }

    /// Fails if a program touches what isn't mapped.
    pub(super) fn check_needs(&self, needs: &[(RangeKind, u64, u64)]) -> Result<(), DeviceError> {
        for &(range, offset, bytes) in needs {
            if self.arena.address(range_index(range), offset, bytes).is_err() {
                let what = format!("the program needs bytes {offset} + {bytes} of {range:?}; map them first");
                return Err(self.context.invalid(what));
            }
        }
        Ok(())
    }

    /// Copies segments to where they say, and waits.
    pub(super) fn load_segments(&mut self, segments: &[Segment]) -> Result<(), DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let model = attached.model.clone();
        let mut jobs = Vec::new();
        for segment in segments {
            let (range, offset) = match segment.place {
                Place::Resident { offset } => (RangeKind::Weights, offset),
                Place::Slot { slot, offset } if self.slot_bytes > 0 => {
                    (RangeKind::Staging, (u64::from(slot)).saturating_mul(self.slot_bytes).saturating_add(offset))
                }
                place => return Err(self.context.invalid(format!("{place:?} can't be loaded"))),
            };
            let tensor = model.tensors.get(segment.tensor.0);
            let slab = tensor.and_then(|t| slab(t, segment.rows).map(|s| (t, s)));
            let (tensor, (planes, bytes)) = slab.ok_or_else(|| self.context.invalid(format!("no {segment:?}")))?;
            let to = self.address(range_index(range), offset, bytes, &tensor.name)?;
            for (plane, at) in planes.iter().enumerate().take(tensor.format.planes()) {
                let key = PieceKey { tensor: segment.tensor.0, plane, row: segment.row, rows: segment.rows };
                if plane_bytes(tensor, plane, segment.rows).is_some_and(|n| n > 0) {
                    jobs.push((key, to + at));
                }
            }
        }
        let Some(uploader) = &mut self.uploader else { return Err(self.context.invalid("no model is attached")) };
        // A step in flight may still read what is about to be overwritten.
        let waited = self.streams.compute.wait();
        let mut done = waited.map_err(|e| e.to_string());
        for (key, to) in jobs {
            done = done.and_then(|()| uploader.upload(&self.streams.load, key, to));
        }
        // Whatever was queued is waited for, also after an error.
        let waited = self.streams.load.wait().map_err(|e| e.to_string());
        done.and(waited).map_err(|e| self.context.failed(e))
    }

    /// Copies bytes inside a range, in order with the steps.
    pub(super) fn copy_in_range(
        &mut self,
        range: RangeKind,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let what = format!("{range:?}");
        let from = self.address(range_index(range), from, bytes, &what)?;
        let to = self.address(range_index(range), to, bytes, &what)?;
        if from.abs_diff(to) < bytes {
            return Err(self.context.invalid(format!("{what}: a copy of {bytes} bytes onto themselves")));
        }
        // SAFETY: both runs are mapped and apart; unmapping waits for the stream.
        let copied = unsafe { self.streams.compute.copy_on_device(to, from, bytes as usize) };
        copied.map_err(|e| self.context.failed(e))
    }
}
