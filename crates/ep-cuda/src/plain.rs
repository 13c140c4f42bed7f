//! Plain allocations of a card's memory: a range is one of them, taken whole and given back whole.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check};
use crate::faults::FaultPoint;

/// Memory without virtual memory management.
#[derive(Debug)]
pub struct PlainMemory {
    context: Arc<Context>,
}

impl PlainMemory {
    /// The unit in which large allocations take a card's memory, in bytes: what a granule is on today's cards.
    pub const GRANULE: u64 = 2 << 20;

    /// Memory of the card that `context` is on. Takes none yet.
    pub fn new(context: &Arc<Context>) -> PlainMemory {
        PlainMemory { context: context.clone() }
    }

    /// Takes `bytes` bytes and returns the first one's address.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(&self, bytes: u64) -> Result<u64, CudaError> {
        let _current = self.context.bind()?;
        self.context.faults().check(FaultPoint::Granule, bytes)?;
        let mut address = 0;
        // SAFETY: the context is current; the call writes one address.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
        check(result, format_args!("an allocation of {bytes} bytes"))?;
        Ok(address)
    }

    /// Gives an allocation back.
    ///
    /// # Errors
    /// The driver's.
    pub fn free(&self, address: u64) -> Result<(), CudaError> {
        let _current = self.context.bind()?;
        // SAFETY: the arena frees an allocation once, after a fence has waited for every stream.
        check(unsafe { sys::cuMemFree_v2(address) }, "cuMemFree")
    }
}
