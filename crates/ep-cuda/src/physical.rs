//! How a card's memory is taken: by the driver's virtual memory calls, which reserve addresses, make granules, map and unmap
//! them; or in plain allocations.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check};
use crate::faults::FaultPoint;
use crate::plain::PlainMemory;

/// What the arena needs of a device. The tests have one without a device, which fails on demand.
pub trait Physical {
    /// One granule of memory that isn't mapped anywhere.
    type Handle: Copy + std::fmt::Debug;

    /// Reserves `bytes` of addresses and returns the first.
    fn reserve(&self, bytes: u64) -> Result<u64, CudaError>;

    /// Gives reserved addresses back.
    fn unreserve(&self, address: u64, bytes: u64) -> Result<(), CudaError>;

    /// Takes one granule of memory from the device.
    fn create(&self) -> Result<Self::Handle, CudaError>;

    /// Gives a granule back to the device.
    fn release(&self, handle: Self::Handle) -> Result<(), CudaError>;

    /// Backs one granule of addresses.
    fn map(&self, address: u64, handle: Self::Handle) -> Result<(), CudaError>;

    /// Allows the device to read and write `bytes` of mapped addresses.
    fn allow(&self, address: u64, bytes: u64) -> Result<(), CudaError>;

    /// Takes the memory away from one granule of addresses. The granule lives on.
    fn unmap(&self, address: u64) -> Result<(), CudaError>;
}

/// Which of the ways that [`CardMemory`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Granules.
    Granules,
    /// Plain allocations.
    Plain,
}

/// The calls of a card.
#[derive(Debug)]
pub enum CardMemory {
    /// Granules that are mapped at addresses reserved for them.
    Granules(Granules),
    /// One plain allocation a range, for cards and drivers without virtual memory management, and for who wants no governor.
    Plain(PlainMemory),
}

impl CardMemory {
    /// Granules of the card.
    ///
    /// # Errors
    /// The driver's.
    pub fn granules(context: &Arc<Context>) -> Result<CardMemory, CudaError> {
        Ok(CardMemory::Granules(Granules::new(context)?))
    }

    /// Bytes of a granule: the unit in which memory is taken, and counted.
    pub fn granule(&self) -> u64 {
        match self {
            CardMemory::Granules(granules) => granules.granule,
            CardMemory::Plain(_) => PlainMemory::GRANULE,
        }
    }

    /// True if a range is allocated whole, so that its size has to be known before its first byte is used.
    pub fn takes_ranges_whole(&self) -> bool {
        matches!(self, CardMemory::Plain(_))
    }
}

impl Physical for CardMemory {
    type Handle = sys::CUmemGenericAllocationHandle;

    fn reserve(&self, bytes: u64) -> Result<u64, CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.reserve(bytes),
            CardMemory::Plain(plain) => plain.allocate(bytes),
        }
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.unreserve(address, bytes),
            CardMemory::Plain(plain) => plain.free(address),
        }
    }

    fn create(&self) -> Result<Self::Handle, CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.create(),
            // The range's allocation holds it already; so below.
            CardMemory::Plain(_) => Ok(0),
        }
    }

    fn release(&self, handle: Self::Handle) -> Result<(), CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.release(handle),
            CardMemory::Plain(_) => Ok(()),
        }
    }

    fn map(&self, address: u64, handle: Self::Handle) -> Result<(), CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.map(address, handle),
            CardMemory::Plain(_) => Ok(()),
        }
    }

    fn allow(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.allow(address, bytes),
            CardMemory::Plain(_) => Ok(()),
        }
    }

    fn unmap(&self, address: u64) -> Result<(), CudaError> {
        match self {
            CardMemory::Granules(granules) => granules.unmap(address),
            CardMemory::Plain(_) => Ok(()),
        }
    }
}

/// The driver's virtual memory calls.
#[derive(Debug)]
pub struct Granules {
    context: Arc<Context>,
    granule: u64,
}

impl Granules {
    /// Asks the driver for the card's granule.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Arc<Context>) -> Result<Granules, CudaError> {
        let _current = context.bind()?;
        let mut granule = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the properties are valid for the call; it writes one integer.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &properties(context), option) };
        check(result, "cuMemGetAllocationGranularity")?;
        Ok(Granules { context: context.clone(), granule: granule.max(1) as u64 })
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.card().device }
}

fn properties(context: &Context) -> sys::CUmemAllocationProp {
    // SAFETY: the struct is plain data of which zero is a valid value everywhere.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(context);
    properties
}

impl Physical for Granules {
    type Handle = sys::CUmemGenericAllocationHandle;

    fn reserve(&self, bytes: u64) -> Result<u64, CudaError> {
        let _current = self.context.bind()?;
        let mut address = 0;
        // SAFETY: the driver chooses addresses that nothing else has.
        let result = unsafe { sys::cuMemAddressReserve(&mut address, bytes as usize, 0, 0, 0) };
        check(result, format_args!("reservation of {bytes} bytes of addresses"))?;
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        // SAFETY: the arena reserved exactly this and has unmapped all of it.
        check(unsafe { sys::cuMemAddressFree(address, bytes as usize) }, "cuMemAddressFree")
    }

    fn create(&self) -> Result<Self::Handle, CudaError> {
        let _current = self.context.bind()?;
        self.context.faults().check(FaultPoint::Granule, self.granule)?;
        let mut handle = 0;
        // SAFETY: the properties are valid for the call; it writes one handle.
        let result = unsafe { sys::cuMemCreate(&mut handle, self.granule as usize, &properties(&self.context), 0) };
        check(result, format_args!("a granule of {} bytes", self.granule))?;
        Ok(handle)
    }

    fn release(&self, handle: Self::Handle) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        // SAFETY: the arena releases a handle once, after it has unmapped it.
        check(unsafe { sys::cuMemRelease(handle) }, "cuMemRelease")
    }

    fn map(&self, address: u64, handle: Self::Handle) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        // SAFETY: the arena maps only addresses that it reserved and that nothing backs.
        check(unsafe { sys::cuMemMap(address, self.granule as usize, 0, handle, 0) }, "cuMemMap")
    }

    fn allow(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        let access = sys::CUmemAccessDesc {
            location: location(&self.context),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: all of it has just been mapped; the description is valid for the call.
        check(unsafe { sys::cuMemSetAccess(address, bytes as usize, &access, 1) }, "cuMemSetAccess")
    }

    fn unmap(&self, address: u64) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        // SAFETY: exactly one mapping lies there, and a fence has waited for every stream.
        check(unsafe { sys::cuMemUnmap(address, self.granule as usize) }, "cuMemUnmap")
    }
}
