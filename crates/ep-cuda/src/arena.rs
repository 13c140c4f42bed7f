//! The arena: address ranges reserved once, granules mapped into them and taken away again. Addresses never change, and
//! nothing is keyed by one.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::driver::CudaError;
use crate::granules::{GranuleSet, covering, exact};
use crate::physical::Physical;
use crate::stream::Fenced;

/// Why the arena refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// Not whole granules.
    #[error("bytes {offset} + {bytes} are not whole granules of {granule}")]
    Unaligned {
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes of a granule.
        granule: u64,
    },
    /// Outside the reserved addresses.
    #[error("bytes {offset} + {bytes} are beyond the {reserved} that are reserved")]
    Beyond {
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes of the range.
        reserved: u64,
    },
    /// Some of it is mapped already.
    #[error("bytes {offset} + {bytes} are partly mapped already")]
    Mapped {
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
    },
    /// Some of it isn't mapped.
    #[error("bytes {offset} + {bytes} are not all mapped")]
    NotMapped {
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

#[derive(Debug)]
struct AddressRange<H> {
    base: u64,
    reserved: u64,
    mapped: GranuleSet,
    handles: BTreeMap<u64, H>,
}

/// Address ranges, each with its own granules, and a pool of granules that wait to be used again.
#[derive(Debug)]
pub struct Arena<P: Physical> {
    physical: P,
    granule: u64,
    ranges: Vec<AddressRange<P::Handle>>,
    pool: Vec<P::Handle>,
    pool_limit: usize,
    /// Granules whose unmapping or release failed: nobody knows their state, so they stay charged and are never used again.
    quarantined: u64,
}

impl<P: Physical> Arena<P> {
    /// Reserves one range of addresses for each of `reserved`, in bytes, rounded up to the granule; for 0 one that has none until
    /// [`Arena::reserve`]. Takes no memory, but where the device takes ranges whole.
    ///
    /// # Errors
    /// [`ArenaError::Driver`]; what was reserved until then is given back.
    pub fn new(physical: P, granule: u64, reserved: &[u64]) -> Result<Arena<P>, ArenaError> {
        let granule = granule.max(1);
        let ranges = Vec::with_capacity(reserved.len());
        let mut arena = Arena { physical, granule, ranges, pool: Vec::new(), pool_limit: 0, quarantined: 0 };
        for &bytes in reserved {
            arena.ranges.push(AddressRange {
                base: 0,
                reserved: 0,
                mapped: GranuleSet::default(),
                handles: BTreeMap::new(),
            });
            if bytes > 0 {
                arena.reserve(arena.ranges.len() - 1, bytes)?;
            }
        }
        Ok(arena)
    }

    /// Gives a range that has none yet `bytes` bytes of addresses, rounded up to the granule.
    ///
    /// # Errors
    /// [`ArenaError::Driver`], and nothing has changed; [`ArenaError::Mapped`] for a range that has addresses.
    pub fn reserve(&mut self, range: usize, bytes: u64) -> Result<(), ArenaError> {
        let reserved = bytes.max(1).div_ceil(self.granule).saturating_mul(self.granule);
        match self.ranges.get_mut(range) {
            Some(r) if r.reserved == 0 => {
                r.base = self.physical.reserve(reserved)?;
                r.reserved = reserved;
                Ok(())
            }
            _ => Err(ArenaError::Mapped { offset: 0, bytes }),
        }
    }

    /// How it takes memory.
    pub fn physical(&self) -> &P {
        &self.physical
    }

    /// Keeps up to `granules` unmapped granules for later instead of giving them back. They stay charged.
    ///
    /// # Errors
    /// [`ArenaError::Driver`] if a granule above the new limit can't be given back; it is quarantined.
    pub fn set_pool_limit(&mut self, granules: usize) -> Result<(), ArenaError> {
        self.pool_limit = granules;
        while self.pool.len() > granules {
            if let Some(handle) = self.pool.pop() {
                self.physical.release(handle).inspect_err(|_| self.quarantined += 1)?;
            }
        }
        Ok(())
    }

    /// Bytes of a granule.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// First address of a range. It never changes once the range has addresses.
    pub fn base(&self, range: usize) -> u64 {
        self.ranges.get(range).map_or(0, |r| r.base)
    }

    /// Bytes of addresses of a range.
    pub fn reserved(&self, range: usize) -> u64 {
        self.ranges.get(range).map_or(0, |r| r.reserved)
    }

    /// Bytes mapped in a range.
    pub fn mapped(&self, range: usize) -> u64 {
        self.ranges.get(range).map_or(0, |r| r.mapped.count() * self.granule)
    }

    /// Bytes behind the last mapped granule of a range.
    pub fn end(&self, range: usize) -> u64 {
        self.ranges.get(range).map_or(0, |r| r.mapped.end() * self.granule)
    }

    /// Bytes of granules that wait to be used again.
    pub fn pooled_bytes(&self) -> u64 {
        self.pool.len() as u64 * self.granule
    }

    /// Bytes of granules that are lost to a failure of the driver, and stay charged.
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantined * self.granule
    }

    /// Everything that the arena holds of the device: mapped, pooled, quarantined.
    pub fn charged_bytes(&self) -> u64 {
        let mapped: u64 = (0..self.ranges.len()).map(|r| self.mapped(r)).sum();
        mapped + self.pooled_bytes() + self.quarantined_bytes()
    }

    /// The address of byte `offset`, if `offset .. offset + bytes` is mapped.
    ///
    /// # Errors
    /// [`ArenaError::NotMapped`].
    pub fn address(&self, range: usize, offset: u64, bytes: u64) -> Result<u64, ArenaError> {
        let mapped = covering(offset, bytes, self.granule)
            .is_some_and(|g| self.ranges.get(range).is_some_and(|r| r.mapped.contains(&g)));
        match mapped {
            true => Ok(self.base(range) + offset),
            false => Err(ArenaError::NotMapped { offset, bytes }),
        }
    }

    fn granules(&self, range: usize, offset: u64, bytes: u64) -> Result<Range<u64>, ArenaError> {
        let reserved = self.reserved(range);
        if offset.checked_add(bytes).is_none_or(|end| end > reserved) {
            return Err(ArenaError::Beyond { offset, bytes, reserved });
        }
        exact(offset, bytes, self.granule).ok_or(ArenaError::Unaligned { offset, bytes, granule: self.granule })
    }

    /// Backs `offset .. offset + bytes`, whole granules of which none is mapped. On an error nothing has changed.
    ///
    /// # Errors
    /// [`ArenaError`], in every variant but `NotMapped`.
    pub fn map(&mut self, range: usize, offset: u64, bytes: u64) -> Result<(), ArenaError> {
        let granules = self.granules(range, offset, bytes)?;
        if self.ranges.get(range).is_none_or(|r| r.mapped.touches(&granules)) {
            return Err(ArenaError::Mapped { offset, bytes });
        }
        self.back(range, std::slice::from_ref(&granules))
    }

    /// Takes the memory of `offset .. offset + bytes` away: whole granules that are all mapped. The proof says that nothing
    /// is using them. On an error they are all still mapped and hold what they held. A granule that the driver won't take
    /// back once it is unmapped is quarantined.
    ///
    /// # Errors
    /// [`ArenaError::NotMapped`], [`ArenaError::Unaligned`], [`ArenaError::Beyond`], [`ArenaError::Driver`].
    pub fn unmap(&mut self, _fenced: &Fenced<'_>, range: usize, offset: u64, bytes: u64) -> Result<(), ArenaError> {
        let granules = self.granules(range, offset, bytes)?;
        if self.ranges.get(range).is_none_or(|r| !r.mapped.contains(&granules)) {
            return Err(ArenaError::NotMapped { offset, bytes });
        }
        self.take_away(range, granules)
    }

    /// Maps or unmaps so that `0 .. bytes`, rounded up to the granule, and nothing else of the range is backed. Returns the
    /// bytes mapped. On an error while growing nothing has changed.
    ///
    /// # Errors
    /// [`ArenaError::Beyond`], [`ArenaError::Driver`].
    pub fn resize(&mut self, fenced: &Fenced<'_>, range: usize, bytes: u64) -> Result<u64, ArenaError> {
        let reserved = self.reserved(range);
        if bytes > reserved {
            return Err(ArenaError::Beyond { offset: 0, bytes, reserved });
        }
        let target = bytes.div_ceil(self.granule);
        let Some(r) = self.ranges.get(range) else { return Err(ArenaError::NotMapped { offset: 0, bytes }) };
        let (gaps, tail) = (r.mapped.gaps(&(0..target)), r.mapped.within(&(target..r.mapped.end().max(target))));
        self.back(range, &gaps)?;
        for run in tail {
            self.unmap(fenced, range, run.start * self.granule, (run.end - run.start) * self.granule)?;
        }
        Ok(target * self.granule)
    }

    /// Backs runs of granules, all or none.
    fn back(&mut self, range: usize, runs: &[Range<u64>]) -> Result<(), ArenaError> {
        for (done, run) in runs.iter().enumerate() {
            if let Err(error) = self.back_run(range, run.clone()) {
                for run in &runs[..done] {
                    if let Err(error) = self.take_away(range, run.clone()) {
                        log::error!("{error}");
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn back_run(&mut self, range: usize, run: Range<u64>) -> Result<(), ArenaError> {
        let (base, granule) = (self.base(range), self.granule);
        let mut done = Ok(());
        let mut reached = run.start;
        for number in run.clone() {
            let handle = match self.pool.pop() {
                Some(handle) => Ok(handle),
                None => self.physical.create(),
            };
            let mapped = handle.and_then(|handle| match self.physical.map(base + number * granule, handle) {
                Ok(()) => Ok(handle),
                Err(error) => {
                    self.put_back(handle);
                    Err(error)
                }
            });
            match mapped {
                Ok(handle) => {
                    if let Some(r) = self.ranges.get_mut(range) {
                        r.handles.insert(number, handle);
                    }
                    reached = number + 1;
                }
                Err(error) => {
                    done = Err(error);
                    break;
                }
            }
        }
        if done.is_ok() && !run.is_empty() {
            done = self.physical.allow(base + run.start * granule, (run.end - run.start) * granule);
        }
        if let Some(r) = self.ranges.get_mut(range) {
            r.mapped.insert(run.start..reached);
        }
        let Err(error) = done else { return Ok(()) };
        if let Err(second) = self.take_away(range, run.start..reached) {
            log::error!("{second}");
        }
        Err(error.into())
    }

    /// Unmaps granules that are all mapped, all or none: if the driver refuses one, those before it are mapped again, with
    /// what they held. One that can't even be mapped again is quarantined.
    fn take_away(&mut self, range: usize, run: Range<u64>) -> Result<(), ArenaError> {
        let (base, granule) = (self.base(range), self.granule);
        for number in run.clone() {
            if let Err(error) = self.physical.unmap(base + number * granule) {
                self.map_again(range, run.start..number);
                return Err(error.into());
            }
        }
        for number in run.clone() {
            if let Some(handle) = self.ranges.get_mut(range).and_then(|r| r.handles.remove(&number)) {
                self.put_back(handle);
            }
        }
        if let Some(r) = self.ranges.get_mut(range) {
            r.mapped.remove(run);
        }
        Ok(())
    }

    fn map_again(&mut self, range: usize, run: Range<u64>) {
        let base = self.base(range);
        for number in run {
            let address = base + number * self.granule;
            let Some(r) = self.ranges.get_mut(range) else { return };
            let Some(&handle) = r.handles.get(&number) else { continue };
            let again = self.physical.map(address, handle).and_then(|()| self.physical.allow(address, self.granule));
            if let Err(error) = again {
                log::error!("{error}; {} bytes stay charged", self.granule);
                r.handles.remove(&number);
                r.mapped.remove(number..number + 1);
                self.quarantined += 1;
            }
        }
    }

    /// An unmapped granule into the pool, or back to the device.
    fn put_back(&mut self, handle: P::Handle) {
        if self.pool.len() < self.pool_limit {
            self.pool.push(handle);
        } else if let Err(error) = self.physical.release(handle) {
            log::error!("{error}; {} bytes stay charged", self.granule);
            self.quarantined += 1;
        }
    }
}

impl<P: Physical> Drop for Arena<P> {
    fn drop(&mut self) {
        self.pool_limit = 0;
        for range in 0..self.ranges.len() {
            let runs = self.ranges[range].mapped.within(&(0..u64::MAX));
            let mut clean = true;
            for run in runs {
                if let Err(error) = self.take_away(range, run) {
                    log::error!("{error}");
                    clean = false;
                }
            }
            let (base, reserved) = (self.base(range), self.reserved(range));
            if clean
                && reserved > 0
                && let Err(error) = self.physical.unreserve(base, reserved)
            {
                log::error!("{error}");
            }
        }
        for handle in std::mem::take(&mut self.pool) {
            if let Err(error) = self.physical.release(handle) {
                log::error!("{error}");
            }
        }
    }
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;
