//! What a card's link to the host carries: copies into the card's memory, and reads in place by kernels. Each is measured once in
//! a process for a card, in some tens of milliseconds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::context::Context;
use crate::driver::CudaError;
use crate::events::Event;
use crate::host_memory::PinnedBuffer;
use crate::reader::Reader;
use crate::stream::Stream;

/// Bytes of pinned memory that a measurement reads, at most: a piece of the size that the link carries at full speed.
const LINK_BYTES: u64 = 32 << 20;

/// Seconds of work after which a link is awake: one that has rested begins slower (51 instead of 55 GB/s on an H200).
const AWAKE: f64 = 0.03;

/// Rounds without a faster one after which the fastest counts: what a ceiling is.
const STALE: usize = 4;

/// Seconds of work that are enough in any case.
const ENOUGH: f64 = 0.3;

/// What is known of a card's link, in bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Known {
    /// The largest chunk that copies were measured with.
    chunk: u64,
    /// What they reached; 0 as long as nobody measured.
    copies: f64,
    /// What reads in place reached.
    in_place: Option<f64>,
}

static LINKS: Mutex<BTreeMap<usize, Known>> = Mutex::new(BTreeMap::new());

/// What this process knows of the link of card `ordinal`.
fn known(ordinal: usize) -> Known {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).copied().unwrap_or_default()
}

fn learn(ordinal: usize, known: Known) {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner).insert(ordinal, known);
}

/// Bytes a second of `work`, which queues `bytes` bytes on the stream, at its fastest.
fn fastest(
    context: &Arc<Context>,
    stream: &Stream,
    bytes: u64,
    mut work: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let (start, end) = (Event::timing(context)?, Event::timing(context)?);
    let (mut best, mut spent, mut stale) = (0.0, 0.0, 0);
    while spent < ENOUGH && (spent < AWAKE || stale < STALE) {
        stream.record(&start)?;
        let queued = work();
        // Whatever was queued is over before the memory that it uses can go.
        stream.record(&end).and_then(|()| stream.wait())?;
        queued?;
        let seconds = end.seconds_since(&start)?.max(1e-9);
        let speed = bytes as f64 / seconds;
        spent += seconds;
        stale = if speed > best * 1.002 { 0 } else { stale + 1 };
        best = f64::max(best, speed);
    }
    Ok(best)
}

/// Bytes a second that copies of up to 32 MiB from pinned memory to `to` reach, where `bytes` bytes are mapped. Measured again only
/// for larger chunks than before.
///
/// # Errors
/// The driver's.
pub fn copies(context: &Arc<Context>, stream: &Stream, to: u64, bytes: u64) -> Result<f64, CudaError> {
    let chunk = bytes.min(LINK_BYTES);
    let ordinal = context.card().ordinal;
    let before = known(ordinal);
    if before.copies > 0.0 && before.chunk >= chunk {
        return Ok(before.copies);
    }
    let _current = context.bind()?;
    let host = PinnedBuffer::new(context, chunk as usize)?;
    // Enough copies that the first one's latency doesn't count.
    let count = (2 * LINK_BYTES).div_ceil(chunk.max(1)).min(64);
    let speed = fastest(context, stream, count * chunk, || {
        // SAFETY: `bytes` bytes are mapped at `to`; both live until the stream was waited for.
        (0..count).try_for_each(|_| unsafe { stream.copy_in(to, host.as_ptr(), chunk as usize) })
    })?;
    let speed = speed.max(before.copies);
    learn(ordinal, Known { chunk, copies: speed, ..before });
    Ok(speed)
}

/// Bytes a second at which kernels read pinned memory in place, if this process has measured it.
pub fn known_in_place(context: &Context) -> Option<f64> {
    known(context.card().ordinal).in_place
}

/// Bytes a second at which kernels read 32 MiB of pinned memory in place. Measured once; 4 bytes at `sink` may be written.
///
/// # Errors
/// The driver's.
pub fn in_place(context: &Arc<Context>, stream: &Stream, reader: &Reader, sink: u64) -> Result<f64, CudaError> {
    if let Some(speed) = known_in_place(context) {
        return Ok(speed);
    }
    let _current = context.bind()?;
    let host = PinnedBuffer::new(context, LINK_BYTES as usize)?;
    let speed = fastest(context, stream, 2 * LINK_BYTES, || {
        // SAFETY: the buffer lives until the stream was waited for; the sink is the caller's.
        (0..2).try_for_each(|_| unsafe { reader.read(stream, host.device(), LINK_BYTES, sink) })
    })?;
    let ordinal = context.card().ordinal;
    learn(ordinal, Known { in_place: Some(speed), ..known(ordinal) });
    Ok(speed)
}
