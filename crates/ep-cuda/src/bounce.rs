//! The bounded pool of pinned buffers: for loads out of memory that the copy engine can't read, and, where the driver refuses
//! to pin weights, for the copies of a captured step.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, check};
use crate::events::Event;
use crate::host_memory::PinnedBuffer;
use crate::host_weights::HostRows;
use crate::stream::Stream;

/// Bytes of one buffer of the pool.
pub const BOUNCE_BYTES: usize = 32 << 20;

/// Buffers of the pool: one is filled while the other is copied.
pub const BOUNCE_BUFFERS: usize = 2;

struct Bounce {
    buffer: PinnedBuffer,
    /// When it was last copied out of; made when it first is.
    copied: Option<Event>,
    busy: bool,
}

/// The pool. It takes no memory before it is used.
#[derive(Default)]
pub struct BouncePool {
    buffers: Vec<Bounce>,
    next: usize,
}

/// One part of a captured copy: the host fills a buffer at every replay, and the copy engine reads that.
#[derive(Debug)]
pub struct Fill {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
    /// Where in the copy the part begins.
    offset: u64,
}

// SAFETY: a description of a copy; it is made by the driver's thread, in the order of one stream.
unsafe impl Send for Fill {}

extern "C" fn fill(data: *mut c_void) {
    // SAFETY: `data` is the `Fill` that was captured, which its graph keeps. Its source stays for as long as the model does, and
    // its target is a buffer of the pool that nothing else uses while a step runs: loads wait for steps.
    unsafe {
        let part = &*data.cast::<Fill>();
        part.to.copy_from_nonoverlapping(part.from, part.bytes);
    }
}

impl BouncePool {
    /// Bytes of pinned memory taken.
    pub fn pinned_bytes(&self) -> u64 {
        (self.buffers.len() * BOUNCE_BYTES) as u64
    }

    /// Takes the buffers, if that hasn't been done.
    ///
    /// # Errors
    /// The driver's: not even the pool can be pinned.
    pub fn take(&mut self, context: &Arc<Context>) -> Result<(), CudaError> {
        while self.buffers.len() < BOUNCE_BUFFERS {
            let buffer = PinnedBuffer::new(context, BOUNCE_BYTES)?;
            self.buffers.push(Bounce { buffer, copied: None, busy: false });
        }
        Ok(())
    }

    /// Queues a copy of `rows` to `to` on `stream`, by way of the pool.
    ///
    /// # Errors
    /// The driver's; rows that can't be laid out, or of which one is longer than a buffer.
    pub fn copy(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        rows: &HostRows<'_>,
        to: u64,
    ) -> Result<(), String> {
        self.take(context).map_err(|e| e.to_string())?;
        let step = rows.step(BOUNCE_BYTES);
        if step > BOUNCE_BYTES {
            return Err(format!("a row of {step} bytes; {BOUNCE_BYTES} at most are laid out anew"));
        }
        for from in (0..rows.len).step_by(step) {
            let bytes = step.min(rows.len - from);
            let Some(slot) = self.buffers.get_mut(self.next) else { break };
            self.next = (self.next + 1) % BOUNCE_BUFFERS;
            let copied = match slot.copied.take() {
                Some(event) => event,
                None => Event::ordering(context).map_err(|e| e.to_string())?,
            };
            let copied = slot.copied.insert(copied);
            if slot.busy {
                copied.wait().map_err(|e| e.to_string())?;
            }
            rows.write(from, &mut slot.buffer.bytes_mut()[..bytes])?;
            // SAFETY: the buffer isn't written again before `copied` has happened; the caller has checked the target.
            let queued = unsafe { stream.copy_in(to + from as u64, slot.buffer.as_ptr(), bytes) };
            queued.and_then(|()| stream.record(copied)).map_err(|e| e.to_string())?;
            slot.busy = true;
        }
        Ok(())
    }

    /// The parts of a copy of `bytes` that is captured. The pool has to be taken.
    pub fn fills(&self, bytes: &[u8]) -> Vec<Fill> {
        let buffers = self.buffers.iter().cycle();
        let parts = bytes.chunks(BOUNCE_BYTES).zip(buffers).enumerate();
        let fill = |(i, (part, slot)): (usize, (&[u8], &Bounce))| {
            let (from, to) = (part.as_ptr(), slot.buffer.as_ptr());
            Fill { from, to, bytes: part.len(), offset: (i * BOUNCE_BYTES) as u64 }
        };
        parts.map(fill).collect()
    }
}

impl Fill {
    /// Queues the part on `stream`, which is being captured: the host's copy into the buffer, then the copy to `to`.
    ///
    /// # Safety
    /// The part stays where it is as long as the graph is launched; `to` is mapped whenever it is. Nothing else fills buffers of the pool
    /// while the graph runs.
    pub unsafe fn capture(&self, stream: &Stream, to: u64) -> Result<(), CudaError> {
        let data = std::ptr::from_ref(self).cast_mut().cast::<c_void>();
        // SAFETY: by this function's contract `data` is there whenever the function is called.
        check(unsafe { sys::cuLaunchHostFunc(stream.raw(), Some(fill), data) }, "cuLaunchHostFunc")?;
        // SAFETY: by this function's contract; the buffer lives as long as the pool.
        unsafe { stream.copy_in(to + self.offset, self.to, self.bytes) }
    }
}
