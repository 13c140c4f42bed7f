//! Reserved address space backed by memory as asked for: what isn't backed faults when it is touched.

use std::io;
use std::ptr::NonNull;

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
            return Err(io::Error::last_os_error());
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

/// A reservation of which `0 .. mapped` is readable and writable. Growth moves no byte.
#[derive(Debug)]
pub struct Region {
    space: Reservation,
    granule: usize,
    mapped: usize,
    poison: bool,
}

impl Region {
    /// Reserves `bytes` of address space, rounded up to `granule`, and backs none of it.
    pub fn reserve(bytes: usize, granule: usize) -> io::Result<Region> {
        let reserved = bytes.max(1).checked_next_multiple_of(granule).ok_or_else(too_large)?;
        Ok(Region { space: Reservation::new(reserved)?, granule, mapped: 0, poison: false })
    }

    /// The region with new bytes that are [`POISON`] instead of zero.
    pub fn poisoned(self) -> Region {
        Region { poison: true, ..self }
    }

    /// First byte. Valid for `mapped()` bytes.
    pub fn base(&self) -> NonNull<u8> {
        self.space.base()
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
        if target > self.space.bytes() {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("only {} bytes of address space are reserved", self.space.bytes()),
            ));
        }
        if target > self.mapped {
            self.space.back(self.mapped, target)?;
            if self.poison {
                // SAFETY: these bytes were backed a moment ago, and the region is borrowed mutably.
                unsafe { self.space.poison(self.mapped, target) };
            }
        } else if target < self.mapped {
            self.space.release(target, self.mapped)?;
        }
        self.mapped = target;
        Ok(target)
    }
}

/// Bytes of the machine's memory: no region can ever back more.
pub fn physical_bytes() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    usize::try_from(pages).unwrap_or(0).saturating_mul(usize::try_from(size).unwrap_or(0)).max(1 << 30)
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
    fn more_than_was_reserved_is_refused_and_changes_nothing() {
        let mut r = Region::reserve(GRANULE, GRANULE).unwrap();
        r.resize(GRANULE).unwrap();
        assert!(r.resize(GRANULE + 1).is_err());
        assert!(r.resize(usize::MAX).is_err());
        assert_eq!(r.mapped(), GRANULE);
    }
}
