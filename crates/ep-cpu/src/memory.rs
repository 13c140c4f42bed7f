//! A reserved run of address space whose head is backed by memory: grows in place, and faults behind its end.

use std::io;
use std::ptr::NonNull;

/// Unit of mapping in bytes: a multiple of the page size of every platform that Headrace runs on.
pub const GRANULE: usize = 64 << 10;

/// Address space of a fixed size, of which `0 .. mapped` is readable and writable. Growth moves no byte; new bytes are
/// zero. What lies behind `mapped` faults when it is touched.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    reserved: usize,
    mapped: usize,
}

// SAFETY: a region owns its pages as a `Vec` owns its buffer; access to them goes through raw pointers whose users
// state their own reasons.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; `&Region` gives the address and nothing else.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves `bytes` of address space, rounded up to [`GRANULE`], and backs none of it.
    pub fn reserve(bytes: usize) -> io::Result<Region> {
        let reserved = bytes.max(1).checked_next_multiple_of(GRANULE).ok_or_else(too_large)?;
        // SAFETY: a new private anonymous mapping at an address of the system's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserved,
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
        Ok(Region { base, reserved, mapped: 0 })
    }

    /// First byte. Valid for `mapped()` bytes.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes backed now, a multiple of [`GRANULE`].
    pub fn mapped(&self) -> usize {
        self.mapped
    }

    /// The bytes that are backed.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `mapped` bytes are readable and initialised (zero at first); writers borrow the region mutably.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.mapped) }
    }

    /// The bytes that are backed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and the region is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.mapped) }
    }

    /// Backs `0 .. bytes` (rounded up to [`GRANULE`]) and gives everything behind back to the system. On an error
    /// nothing has changed. The caller makes sure that nothing uses what a smaller size takes away.
    pub fn resize(&mut self, bytes: usize) -> io::Result<usize> {
        let target = bytes.checked_next_multiple_of(GRANULE).ok_or_else(too_large)?;
        if target > self.reserved {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("only {} bytes of address space are reserved", self.reserved),
            ));
        }
        if target > self.mapped {
            self.protect(self.mapped, target, libc::PROT_READ | libc::PROT_WRITE)?;
        } else if target < self.mapped {
            self.protect(target, self.mapped, libc::PROT_NONE)?;
            // SAFETY: the range is ours, page-aligned and within the reservation. A failure leaves the pages to the
            // process without access to them; it can't happen for a private anonymous mapping.
            unsafe {
                libc::madvise(self.base.as_ptr().add(target).cast(), self.mapped - target, libc::MADV_DONTNEED);
            }
        }
        self.mapped = target;
        Ok(target)
    }

    fn protect(&self, from: usize, to: usize, access: i32) -> io::Result<()> {
        // SAFETY: `from <= to <= reserved`, both multiples of the page size, in a mapping that is ours alone.
        let rc = unsafe { libc::mprotect(self.base.as_ptr().add(from).cast(), to - from, access) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the whole mapping is ours and nothing can use it any more: users borrow the region.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.reserved);
        }
    }
}

/// Bytes of the machine's memory: no region can ever back more.
pub fn physical_bytes() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    usize::try_from(pages).unwrap_or(0).saturating_mul(usize::try_from(size).unwrap_or(0)).max(1 << 30)
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "more than the address space holds")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_keeps_address_and_contents_and_shrinking_forgets_them() {
        let mut r = Region::reserve(1 << 30).unwrap();
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
        let mut r = Region::reserve(GRANULE).unwrap();
        r.resize(GRANULE).unwrap();
        assert!(r.resize(GRANULE + 1).is_err());
        assert!(r.resize(usize::MAX).is_err());
        assert_eq!(r.mapped(), GRANULE);
    }
}
