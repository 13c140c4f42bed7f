//! A range of which any granule may be backed, whatever its neighbours are.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use crate::memory::Reservation;

/// Reserved address space, backed granule by granule. New granules are poison, unless that is switched off.
#[derive(Debug)]
pub struct Granules {
    space: Reservation,
    granule: usize,
    backed: Vec<bool>,
    count: usize,
    poison: bool,
}

impl Granules {
    /// Reserves at least `bytes`.
    pub fn reserve(bytes: usize, granule: usize, poison: bool) -> io::Result<Granules> {
        let bytes = bytes.max(1).checked_next_multiple_of(granule).ok_or(io::ErrorKind::OutOfMemory)?;
        let backed = vec![false; bytes / granule];
        Ok(Granules { space: Reservation::new(bytes)?, granule, backed, count: 0, poison })
    }

    /// First byte. Only granules that are backed may be touched.
    pub fn base(&self) -> NonNull<u8> {
        self.space.base()
    }

    /// Bytes of address space.
    pub fn reserved(&self) -> usize {
        self.space.bytes()
    }

    /// Bytes backed.
    pub fn mapped(&self) -> usize {
        self.count * self.granule
    }

    /// The granules of `offset .. offset + bytes`, both multiples of the granule. The error says what is wrong.
    pub fn whole(&self, offset: u64, bytes: u64) -> Result<Range<usize>, String> {
        let granule = self.granule as u64;
        if !offset.is_multiple_of(granule) || !bytes.is_multiple_of(granule) {
            return Err(format!("bytes {offset} + {bytes} are not whole granules of {granule} bytes"));
        }
        let end = offset.checked_add(bytes).map(|end| end / granule);
        match end {
            Some(end) if end <= self.backed.len() as u64 => Ok((offset / granule) as usize..end as usize),
            _ => Err(format!("bytes {offset} + {bytes}, but only {} are reserved", self.space.bytes())),
        }
    }

    /// True if all bytes of `offset .. offset + bytes` are backed.
    pub fn is_mapped(&self, offset: u64, bytes: u64) -> bool {
        let granule = self.granule as u64;
        let end = offset.checked_add(bytes).map(|end| end.div_ceil(granule));
        match end {
            Some(end) if end <= self.backed.len() as u64 => {
                let first = (offset / granule).min(end) as usize;
                self.backed[first..end as usize].iter().all(|&b| b)
            }
            _ => false,
        }
    }

    /// True if `granules`, an answer of [`Granules::whole`], are all backed (`true`) or all not (`false`).
    pub fn all(&self, granules: Range<usize>, backed: bool) -> bool {
        self.backed[granules].iter().all(|&b| b == backed)
    }

    /// Backs granules that are not. On an error nothing has changed.
    pub fn map(&mut self, granules: Range<usize>) -> io::Result<()> {
        if granules.is_empty() {
            return Ok(());
        }
        let (from, to) = (granules.start * self.granule, granules.end * self.granule);
        self.space.back(from, to)?;
        if self.poison {
            // SAFETY: backed a moment ago, and nobody knows of it yet.
            unsafe { self.space.poison(from, to) };
        }
        self.count += granules.len();
        self.backed[granules].fill(true);
        Ok(())
    }

    /// Gives backed granules to the system. On an error they and their contents are as before. The caller makes sure that
    /// nothing uses them.
    pub fn unmap(&mut self, granules: Range<usize>) -> io::Result<()> {
        if granules.is_empty() {
            return Ok(());
        }
        self.space.release(granules.start * self.granule, granules.end * self.granule)?;
        self.count -= granules.len();
        self.backed[granules].fill(false);
        Ok(())
    }

    /// Bytes that are backed, to read; `None` if any is not.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        // SAFETY: backed, hence initialised (zero or poison at first); writers borrow `self` mutably.
        let at = |from: usize| unsafe { std::slice::from_raw_parts(self.base().as_ptr().add(from), len as usize) };
        self.is_mapped(offset, len).then(|| at(offset as usize))
    }

    /// Bytes that are backed, to write; `None` if any is not.
    pub fn bytes_mut(&mut self, offset: u64, len: u64) -> Option<&mut [u8]> {
        if !self.is_mapped(offset, len) {
            return None;
        }
        // SAFETY: as `bytes`, and `self` is borrowed mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr().add(offset as usize), len as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::POISON;

    #[test]
    fn granules_come_and_go_one_by_one() {
        let size = 1 << 16;
        let mut g = Granules::reserve(8 * size, size, true).unwrap();
        g.map(2..4).unwrap();
        g.map(6..7).unwrap();
        assert_eq!(g.mapped(), 3 * size);
        assert!(g.bytes(2 * size as u64, 2 * size as u64).unwrap().iter().all(|&b| b == POISON));
        g.bytes_mut(3 * size as u64, 4).unwrap().fill(1);
        assert!(g.bytes(4 * size as u64 - 1, 2).is_none() && g.bytes(u64::MAX, 2).is_none());
        g.unmap(2..3).unwrap();
        assert_eq!(g.bytes(3 * size as u64, 4).unwrap(), [1; 4]);
        g.unmap(3..4).unwrap();
        g.map(3..4).unwrap();
        assert_eq!(g.bytes(3 * size as u64, 4).unwrap(), [POISON; 4]);
        assert!(g.whole(0, 1).is_err() && g.whole(8 * size as u64, size as u64).is_err());
        assert!(g.whole(u64::MAX / size as u64 * size as u64, 2 * size as u64).is_err());
    }
}
