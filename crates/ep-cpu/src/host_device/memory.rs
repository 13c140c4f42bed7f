//! The device's memory: four ranges over one capacity, mapped and unmapped for real.

use std::collections::BTreeMap;
use std::io;

use headrace_provider::{DeviceError, RangeKind};

use super::fault::DeviceProbe;
use super::{HostOptions, NAME};
use crate::granules::Granules;
use crate::memory::{Region, memory_bytes};

/// All ranges, and how much of the capacity is taken. The caller fences before anything is unmapped.
pub struct DeviceMemory {
    /// Mapping unit in bytes.
    pub granule: u64,
    capacity: u64,
    poison: bool,
    /// Staging ring.
    pub staging: Region,
    /// KV pages.
    pub kv: Region,
    /// Buffers of a step.
    pub workspace: Region,
    /// Resident weights; reserved when the model is known.
    pub weights: Option<Granules>,
    /// What a range was said to hold at most, and is held to.
    expected: BTreeMap<RangeKind, u64>,
    probe: DeviceProbe,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        super::fault::RANGES.into_iter().for_each(|range| self.probe.set_mapped(range, 0));
        self.probe.set_fixed(0);
    }
}

impl DeviceMemory {
    /// Nothing is reserved or backed yet.
    pub fn new(options: &HostOptions, probe: DeviceProbe) -> Result<DeviceMemory, DeviceError> {
        let page = crate::memory::page_bytes();
        let granule = options.granule;
        let size = usize::try_from(granule).ok().filter(|&g| g > 0 && g.is_multiple_of(page));
        let Some(size) = size else {
            return Err(
                NAME.invalid(format!("a granule of {granule} bytes: a multiple of the page, {page}, is needed"))
            );
        };
        let capacity = options.capacity.unwrap_or(memory_bytes() as u64) / granule * granule;
        // No range can back more than the capacity, nor than the machine has.
        let most = usize::try_from(capacity).unwrap_or(usize::MAX).min(memory_bytes());
        let region = |what: &str| {
            let region = Region::later(most, size).map_err(|e| NAME.no_memory(what, most as u64, e))?;
            Ok::<Region, DeviceError>(if options.poison { region.poisoned() } else { region })
        };
        Ok(DeviceMemory {
            granule,
            capacity,
            poison: options.poison,
            staging: region("staging addresses")?,
            kv: region("KV addresses")?,
            workspace: region("workspace addresses")?,
            weights: None,
            expected: BTreeMap::new(),
            probe,
        })
    }

    /// Notes what a range will hold at most: a device that takes it whole could map nothing beyond.
    pub fn expect_at_most(&mut self, range: RangeKind, bytes: u64) {
        self.expected.insert(range, bytes);
        match range {
            RangeKind::Staging => self.staging.expect(bytes),
            RangeKind::Kv => self.kv.expect(bytes),
            RangeKind::Workspace => self.workspace.expect(bytes),
            // Reserved in proportion to the model.
            RangeKind::Weights => {}
        }
    }

    fn is_expected(&self, range: RangeKind, end: u64) -> Result<(), DeviceError> {
        match self.expected.get(&range) {
            Some(&most) if end > most => {
                Err(NAME.invalid(format!("{range:?}: {end} bytes, where at most {most} were announced")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that `bytes` of what the device keeps would fit.
    pub fn fits_fixed(&self, bytes: u64) -> Result<(), DeviceError> {
        self.room("vectors and tables", bytes.checked_next_multiple_of(self.granule).unwrap_or(u64::MAX))
    }

    /// Takes `bytes`, in whole granules, for what the device keeps as long as it has a model, and reserves `addresses`
    /// bytes for its weights.
    pub fn attach(&mut self, bytes: u64, addresses: u64) -> Result<(), DeviceError> {
        let whole = bytes.checked_next_multiple_of(self.granule).unwrap_or(u64::MAX);
        self.fits_fixed(bytes)?;
        let refused = |e: &dyn ToString| NAME.no_memory("weight addresses", addresses, e.to_string());
        let size = usize::try_from(addresses).map_err(|e| refused(&e))?;
        let weights = Granules::reserve(size, self.granule as usize, self.poison).map_err(|e| refused(&e))?;
        self.weights = Some(weights);
        self.probe.set_fixed(whole);
        Ok(())
    }

    /// Bytes mapped in a range.
    pub fn mapped(&self, range: RangeKind) -> u64 {
        match range {
            RangeKind::Weights => self.weights.as_ref().map_or(0, |w| w.mapped() as u64),
            RangeKind::Staging => self.staging.mapped() as u64,
            RangeKind::Kv => self.kv.mapped() as u64,
            RangeKind::Workspace => self.workspace.mapped() as u64,
        }
    }

    /// Backs `0 .. bytes` of a range and nothing behind.
    pub fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError> {
        let whole = bytes.checked_next_multiple_of(self.granule);
        let whole = whole.ok_or_else(|| NAME.no_memory(format!("{range:?}"), bytes, "more than the address space"))?;
        self.is_expected(range, whole)?;
        if range == RangeKind::Weights {
            return self.resize_weights(whole);
        }
        self.room(&format!("{range:?}"), whole.saturating_sub(self.mapped(range)))?;
        let region = match range {
            RangeKind::Staging => &mut self.staging,
            RangeKind::Kv => &mut self.kv,
            RangeKind::Workspace | RangeKind::Weights => &mut self.workspace,
        };
        let refused = |e: io::Error| NAME.no_memory(format!("{range:?}"), bytes, e);
        let mapped = usize::try_from(whole).map_err(io::Error::other).and_then(|size| region.resize(size));
        let mapped = mapped.map_err(refused)? as u64;
        self.probe.set_mapped(range, mapped);
        Ok(mapped)
    }

    /// Backs granules of the weights that are not backed.
    pub fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.is_expected(range, offset.saturating_add(bytes))?;
        let weights = self.by_granules(range)?;
        let granules = weights.whole(offset, bytes).map_err(|e| NAME.invalid(format!("{range:?}: {e}")))?;
        if !weights.all(granules.clone(), false) {
            return Err(NAME.invalid(format!("{range:?}: some of bytes {offset} + {bytes} are mapped already")));
        }
        self.room("weights", bytes)?;
        let weights = self.by_granules(range)?;
        weights.map(granules).map_err(|e| NAME.no_memory("weights", bytes, e))?;
        self.count_weights();
        Ok(())
    }

    /// Gives granules of the weights back. On an error they and what they hold are as before.
    pub fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let weights = self.by_granules(range)?;
        let granules = weights.whole(offset, bytes).map_err(|e| NAME.invalid(format!("{range:?}: {e}")))?;
        if !weights.all(granules.clone(), true) {
            return Err(NAME.outside(range, offset, bytes));
        }
        weights.unmap(granules).map_err(|e| NAME.failed(format!("bytes {offset} + {bytes} can't be unmapped: {e}")))?;
        self.count_weights();
        Ok(())
    }

    /// Bytes to read; `None` if any isn't backed.
    pub fn bytes(&self, range: RangeKind, offset: u64, len: u64) -> Option<&[u8]> {
        let region = match range {
            RangeKind::Weights => return self.weights.as_ref()?.bytes(offset, len),
            RangeKind::Staging => &self.staging,
            RangeKind::Kv => &self.kv,
            RangeKind::Workspace => &self.workspace,
        };
        region.bytes().get(crate::errors::span(offset, len, region.mapped())?)
    }

    /// Bytes to write; `None` if any isn't backed.
    pub fn bytes_mut(&mut self, range: RangeKind, offset: u64, len: u64) -> Option<&mut [u8]> {
        let region = match range {
            RangeKind::Weights => return self.weights.as_mut()?.bytes_mut(offset, len),
            RangeKind::Staging => &mut self.staging,
            RangeKind::Kv => &mut self.kv,
            RangeKind::Workspace => &mut self.workspace,
        };
        let span = crate::errors::span(offset, len, region.mapped())?;
        region.bytes_mut().get_mut(span)
    }

    fn resize_weights(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let granule = self.granule;
        let weights = self.by_granules(RangeKind::Weights)?;
        let head = weights.whole(0, bytes).map_err(|e| NAME.no_memory("weights", bytes, e))?;
        let end = weights.reserved() / granule as usize;
        let missing: Vec<usize> = head.clone().filter(|&g| weights.all(g..g + 1, false)).collect();
        let surplus: Vec<usize> = (head.end..end).filter(|&g| weights.all(g..g + 1, true)).collect();
        self.room("weights", missing.len() as u64 * granule)?;
        let weights = self.by_granules(RangeKind::Weights)?;
        for (i, &g) in missing.iter().enumerate() {
            if let Err(error) = weights.map(g..g + 1) {
                for &undo in &missing[..i] {
                    let _ = weights.unmap(undo..undo + 1);
                }
                return Err(NAME.no_memory("weights", bytes, error));
            }
        }
        let mut result = Ok(bytes);
        for g in surplus {
            let unmapped = weights.unmap(g..g + 1);
            result = result.and(unmapped.map(|()| bytes).map_err(|e| NAME.failed(format!("granule {g}: {e}"))));
        }
        self.count_weights();
        result
    }

    fn by_granules(&mut self, range: RangeKind) -> Result<&mut Granules, DeviceError> {
        match range {
            RangeKind::Weights => self.weights.as_mut().ok_or_else(|| NAME.invalid("no model is attached")),
            _ => Err(NAME.invalid(format!("{range:?}: this range is backed from its start, by a new size"))),
        }
    }

    fn count_weights(&self) {
        self.probe.set_mapped(RangeKind::Weights, self.mapped(RangeKind::Weights));
    }

    /// Checks that `more` bytes are left of the capacity.
    fn room(&self, what: &str, more: u64) -> Result<(), DeviceError> {
        let taken = self.probe.total();
        match taken.checked_add(more) {
            Some(total) if total <= self.capacity => Ok(()),
            _ => Err(NAME.no_memory(what, more, format!("{taken} of {} bytes are taken", self.capacity))),
        }
    }
}
