//! A driver without a card, for tests: it keeps what was asked of it, and refuses on demand.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use crate::calls::Calls;
use crate::context::Context;
use crate::driver::{Card, CudaError, Driver};
use crate::faults::Faults;

/// The handle of a fake context.
pub(crate) const OWN: usize = 1;

/// What the fake was asked for.
#[derive(Debug, Default)]
pub(crate) struct FakeCalls {
    contexts: Mutex<Vec<usize>>,
    refuse: AtomicBool,
    stack: AtomicUsize,
    pinned: Mutex<BTreeMap<usize, Box<[u8]>>>,
    registered: Mutex<BTreeMap<usize, usize>>,
    /// Sum of all bytes of mappings, read when their registrations ended: they were still mapped.
    read_at_end: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refusal(call: &str) -> CudaError {
    CudaError { call: call.to_string(), code: 1, text: "refused by the fake".to_string() }
}

impl FakeCalls {
    pub(crate) fn set_contexts(&self, contexts: &[usize]) {
        *lock(&self.contexts) = contexts.to_vec();
    }

    pub(crate) fn contexts(&self) -> Vec<usize> {
        lock(&self.contexts).clone()
    }

    pub(crate) fn top(&self) -> Option<usize> {
        lock(&self.contexts).last().copied()
    }

    pub(crate) fn replace_top(&self, context: usize) {
        let mut contexts = lock(&self.contexts);
        contexts.pop();
        contexts.push(context);
    }

    pub(crate) fn refuse_pushes(&self, refuse: bool) {
        self.refuse.store(refuse, Ordering::Relaxed);
    }

    /// Bytes of pinned buffers and of registrations that live.
    pub(crate) fn locked(&self) -> (u64, u64) {
        let pinned = lock(&self.pinned).values().map(|b| b.len() as u64).sum();
        (pinned, lock(&self.registered).values().map(|&b| b as u64).sum())
    }

    pub(crate) fn read_at_end(&self) -> u64 {
        self.read_at_end.load(Ordering::Relaxed)
    }
}

impl Calls for FakeCalls {
    fn current(&self) -> Result<sys::CUcontext, CudaError> {
        Ok(std::ptr::without_provenance_mut(self.top().unwrap_or(0)))
    }

    fn push(&self, context: sys::CUcontext) -> Result<(), CudaError> {
        if self.refuse.load(Ordering::Relaxed) {
            return Err(refusal("push"));
        }
        lock(&self.contexts).push(context.addr());
        Ok(())
    }

    fn pop(&self) -> Result<(), CudaError> {
        lock(&self.contexts).pop().map(drop).ok_or_else(|| refusal("pop"))
    }

    fn stack_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.stack.load(Ordering::Relaxed))
    }

    fn set_stack_bytes(&self, bytes: usize) -> Result<(), CudaError> {
        self.stack.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        Ok((1 << 30, 1 << 31))
    }

    fn release(&self, _device: sys::CUdevice) -> Result<(), CudaError> {
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<(NonNull<u8>, u64), CudaError> {
        let mut memory = vec![0u8; bytes].into_boxed_slice();
        let base = NonNull::from(&mut memory[..]).cast::<u8>();
        lock(&self.pinned).insert(base.addr().get(), memory);
        Ok((base, base.addr().get() as u64))
    }

    unsafe fn unpin(&self, base: NonNull<u8>) -> Result<(), CudaError> {
        lock(&self.pinned).remove(&base.addr().get()).map(drop).ok_or_else(|| refusal("unpin"))
    }

    unsafe fn register(&self, base: *const u8, bytes: usize) -> Result<u64, CudaError> {
        lock(&self.registered).insert(base.addr(), bytes);
        Ok(base.addr() as u64)
    }

    unsafe fn unregister(&self, base: *const u8) -> Result<(), CudaError> {
        let bytes = lock(&self.registered).remove(&base.addr()).ok_or_else(|| refusal("unregister"))?;
        // SAFETY: by the trait's contract the bytes are still mapped. They must be: else this faults.
        let sum = unsafe { std::slice::from_raw_parts(base, bytes) }.iter().map(|&b| u64::from(b)).sum();
        self.read_at_end.fetch_add(sum, Ordering::Relaxed);
        Ok(())
    }
}

impl Context {
    /// A context of the fake, whose card can register file mappings.
    pub(crate) fn fake(calls: &Arc<FakeCalls>) -> Arc<Context> {
        let card = Card {
            ordinal: 0,
            name: "fake".to_string(),
            capability: (9, 0),
            total_bytes: 1 << 31,
            multiprocessors: 1,
            bus_id: "fake".to_string(),
            read_only_registration: true,
            virtual_memory: true,
            device: -1,
        };
        let raw = std::ptr::without_provenance_mut(OWN);
        Context::assemble(card, Driver { version: 12_000 }, raw, Faults::default(), calls.clone())
    }
}
