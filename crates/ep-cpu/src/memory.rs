//! Reserved address space backed by memory as asked for: what isn't backed faults when it is touched.

use std::io;
use std::ptr::NonNull;

use crate::cgroup::memory_limit;

/// Unit of mapping in bytes of device `cpu`: a multiple of the page size of every platform that Headrace runs on.
pub const GRANULE: usize = 64 << 10;

/// Byte that fills memory whose contents mean nothing. As a float of any width, all ones is NaN, so that whatever is
/// computed from it is not finite, and a step that read it can't pass for a good one.
pub const POISON: u8 = 0xff;

/// Address space of a fixed size, none of it backed at first.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a reservation owns its pages as a `Vec` owns its buffer; access to them goes through raw pointers whose users
// state their own reasons.
unsafe impl Send for Reservation {}
// SAFETY: as for `Send`; `&Reservation` gives the address and nothing else.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `bytes`, a multiple of the page size.
    pub fn new(bytes: usize) -> io::Result<Reservation> {
        // SAFETY: a new private anonymous mapping at an address of the system's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(no_addresses(bytes, io::Error::last_os_error(), address_limit()));
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(too_large)?;
        Ok(Reservation { base, bytes })
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Backs `from .. to`, page-aligned and within the reservation. New bytes are zero. On an error nothing has changed.
    pub fn back(&self, from: usize, to: usize) -> io::Result<()> {
        let result = self.protect(from, to, libc::PROT_READ | libc::PROT_WRITE);
        if result.is_err() {
            // A failure in the middle may have changed a part.
            let _ = self.protect(from, to, libc::PROT_NONE);
        }
        result
    }

    /// Takes access to `from .. to`, page-aligned and within the reservation, and gives the pages back to the system. On
    /// an error the bytes are as before. The caller makes sure that nothing uses them.
    pub fn release(&self, from: usize, to: usize) -> io::Result<()> {
        if let Err(error) = self.protect(from, to, libc::PROT_NONE) {
            let _ = self.protect(from, to, libc::PROT_READ | libc::PROT_WRITE);
            return Err(error);
        }
        // SAFETY: the range is ours, page-aligned and within the reservation. A failure leaves the pages to the process
        // without access to them; it can't happen for a private anonymous mapping.
        unsafe {
            libc::madvise(self.base.as_ptr().add(from).cast(), to - from, libc::MADV_DONTNEED);
        }
        Ok(())
    }

    /// Fills backed bytes with [`POISON`].
    ///
    /// # Safety
    /// `from .. to` is backed, and nothing else reads or writes it meanwhile.
    pub unsafe fn poison(&self, from: usize, to: usize) {
        // SAFETY: backed and ours alone, by the caller's promise.
        unsafe { self.base.as_ptr().add(from).write_bytes(POISON, to - from) };
    }

    fn protect(&self, from: usize, to: usize, access: i32) -> io::Result<()> {
        // SAFETY: `from <= to <= bytes`, both multiples of the page size, in a mapping that is ours alone.
        let rc = unsafe { libc::mprotect(self.base.as_ptr().add(from).cast(), to - from, access) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the whole mapping is ours and nothing can use it any more: users borrow it.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

/// Address space of which `0 .. mapped` is readable and writable. Growth moves no byte.
#[derive(Debug)]
pub struct Region {
    /// Reserved when the first byte is mapped.
    space: Option<Reservation>,
    /// Bytes that will be reserved, a multiple of the granule; the most that `expect` may ask for.
    reserve: usize,
    most: usize,
    granule: usize,
    mapped: usize,
    poison: bool,
}

impl Region {
    /// Reserves `bytes` of address space, rounded up to `granule`, and backs none of it.
    pub fn reserve(bytes: usize, granule: usize) -> io::Result<Region> {
        let mut region = Region::later(bytes, granule)?;
        region.space = Some(Reservation::new(region.reserve)?);
        Ok(region)
    }

    /// Will reserve `bytes` of address space, rounded up to `granule`, once the first of them is mapped; or less, if
    /// [`Region::expect`] says so by then.
    ///
    /// # Errors
    /// For more bytes than addresses have.
    pub fn later(bytes: usize, granule: usize) -> io::Result<Region> {
        let reserve = bytes.max(1).checked_next_multiple_of(granule).ok_or_else(too_large)?;
        Ok(Region { space: None, reserve, most: reserve, granule, mapped: 0, poison: false })
    }

    /// The region will hold at most `bytes`: no more is reserved. Has an effect before the first byte is mapped.
    pub fn expect(&mut self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        self.reserve = bytes.checked_next_multiple_of(self.granule).unwrap_or(usize::MAX).min(self.most);
    }

    /// The region with new bytes that are [`POISON`] instead of zero.
    pub fn poisoned(self) -> Region {
        Region { poison: true, ..self }
    }

    /// First byte. Valid for `mapped()` bytes.
    pub fn base(&self) -> NonNull<u8> {
        // Aligned as a page is, where nothing can be read.
        let nowhere = std::num::NonZero::new(self.granule).map_or(NonNull::dangling(), NonNull::without_provenance);
        self.space.as_ref().map_or(nowhere, Reservation::base)
    }

    /// Bytes backed now, a multiple of the granule.
    pub fn mapped(&self) -> usize {
        self.mapped
    }

    /// The bytes that are backed.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `mapped` bytes are readable and initialised (zero or poison at first); writers borrow the region mutably.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.mapped) }
    }

    /// The bytes that are backed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and the region is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr(), self.mapped) }
    }

    /// Backs `0 .. bytes` (rounded up to the granule) and gives everything behind back to the system. On an error
    /// nothing has changed. The caller makes sure that nothing uses what a smaller size takes away.
    pub fn resize(&mut self, bytes: usize) -> io::Result<usize> {
        let target = bytes.checked_next_multiple_of(self.granule).ok_or_else(too_large)?;
        if target > self.reserve {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("only {} bytes of address space are set aside", self.reserve),
            ));
        }
        if target > self.mapped {
            let space = match self.space.take() {
                Some(space) => space,
                None => Reservation::new(self.reserve)?,
            };
            let space = self.space.insert(space);
            space.back(self.mapped, target)?;
            if self.poison {
                // SAFETY: these bytes were backed a moment ago, and the region is borrowed mutably.
                unsafe { space.poison(self.mapped, target) };
            }
        } else if target < self.mapped
            && let Some(space) = &self.space
        {
            space.release(target, self.mapped)?;
        }
        self.mapped = target;
        Ok(target)
    }
}

/// Bytes of memory that this process may take: the machine's, or what its control groups leave it, if that is less. No region can
/// ever back more.
pub fn memory_bytes() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let machine = usize::try_from(pages).unwrap_or(0).saturating_mul(usize::try_from(size).unwrap_or(0));
    let machine = if machine == 0 { 1 << 30 } else { machine };
    let group = memory_limit(std::path::Path::new("/")).and_then(|bytes| usize::try_from(bytes).ok());
    group.map_or(machine, |group| group.min(machine))
}

/// Bytes of address space that this process may have; `None` for no limit.
fn address_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the struct that it is given.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    (asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The error of `bytes` bytes of addresses that can't be had, with what to do about it.
fn no_addresses(bytes: usize, error: io::Error, limit: Option<u64>) -> io::Error {
    let advice = limit.map_or(String::new(), |limit| {
        format!("; this process may have {limit} bytes of addresses in all (ulimit -v): raise that, or lower max_context or max_batch")
    });
    io::Error::new(error.kind(), format!("{bytes} bytes of address space can't be reserved: {error}{advice}"))
}

/// Bytes of a page of the system.
pub fn page_bytes() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(GRANULE)
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "more than the address space holds")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_keeps_address_and_contents_and_shrinking_forgets_them() {
        let mut r = Region::reserve(1 << 30, GRANULE).unwrap();
        let base = r.base();
        assert_eq!(r.resize(1).unwrap(), GRANULE);
        r.bytes_mut().fill(7);
        assert_eq!(r.resize(5 * GRANULE).unwrap(), 5 * GRANULE);
        assert_eq!(r.base(), base);
        assert!(r.bytes()[..GRANULE].iter().all(|&b| b == 7));
        assert!(r.bytes()[GRANULE..].iter().all(|&b| b == 0));
        r.resize(0).unwrap();
        r.resize(GRANULE).unwrap();
        assert!(r.bytes().iter().all(|&b| b == 0));
    }

    #[test]
    fn addresses_are_reserved_when_they_are_needed_and_no_more_than_was_expected() {
        let mut r = Region::later(1 << 50, GRANULE).unwrap();
        assert!(r.bytes().is_empty() && r.mapped() == 0);
        r.expect(3 * GRANULE as u64 - 1);
        assert_eq!(r.resize(3 * GRANULE).unwrap(), 3 * GRANULE);
        r.bytes_mut().fill(1);
        assert!(r.resize(3 * GRANULE + 1).is_err());
        // Nothing can be expected beyond what was said at first, and that is too much to reserve: in words.
        let mut r = Region::later(1 << 60, GRANULE).unwrap();
        r.expect(u64::MAX);
        let error = r.resize(1).unwrap_err().to_string();
        assert!(error.contains(&format!("{} bytes of address space can't be reserved", 1u64 << 60)), "{error}");
        let limited = no_addresses(7, io::Error::from_raw_os_error(libc::ENOMEM), Some(99)).to_string();
        assert!(limited.contains("99 bytes of addresses") && limited.contains("ulimit -v"), "{limited}");
    }

    #[test]
    fn more_than_was_reserved_is_refused_and_changes_nothing() {
        let mut r = Region::reserve(GRANULE, GRANULE).unwrap();
        r.resize(GRANULE).unwrap();
        assert!(r.resize(GRANULE + 1).is_err());
        assert!(r.resize(usize::MAX).is_err());
        assert_eq!(r.mapped(), GRANULE);
    }
}
