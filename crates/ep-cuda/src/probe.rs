//! The machine's ceilings: the link by chunk size, the card's memory, the host's memory.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{CudaError, DriverProblem, check};
use crate::events::Event;
use crate::host_memory::PinnedBuffer;
use crate::physical::{CardMemory, Physical};
use crate::reader::Reader;
use crate::stream::Stream;

/// Chunks of host-to-device copies, in bytes.
pub const CHUNKS: [u64; 5] = [256 << 10, 1 << 20, 8 << 20, 32 << 20, 128 << 20];

/// Bytes that each measurement moves.
const MOVED: u64 = 256 << 20;

/// Repetitions, of which the median counts.
const TIMES: usize = 5;

/// What a card and its link can do. Speeds are in bytes a second.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// `cuda:N`.
    pub device: String,
    /// The card's name.
    pub card: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Driver API: 1000 * major + 10 * minor.
    pub driver: i32,
    /// Bytes of the card, and of those the bytes free now.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes of a granule.
    pub granule: u64,
    /// True if file mappings can be registered.
    pub read_only_registration: bool,
    /// `(chunk, bytes a second)` from pinned memory to the card.
    pub host_to_device: Vec<(u64, f64)>,
    /// Bytes a second from the card to pinned memory, in chunks of 32 MiB.
    pub device_to_host: f64,
    /// Bytes a second that a copy within the card reads; it writes as many.
    pub device_copy_read: f64,
    /// Bytes a second that kernels read from the card's memory; `None` if there is no kernel for the card.
    pub device_read: Option<f64>,
    /// Bytes a second that kernels read in place from pinned host memory; `None` if there is no kernel for the card.
    pub zero_copy_read: Option<f64>,
    /// Bytes a second that the memory's clock and width allow; `None` where the driver doesn't say.
    pub memory_peak: Option<f64>,
    /// Bytes a second of host memory, read by one thread.
    pub host_read: f64,
}

/// Bytes a second that the memory's clock and width allow: no figure of the card's memory can be above it.
pub fn memory_peak(context: &Context) -> Option<f64> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = |which: Attribute| {
        let mut value = 0;
        // SAFETY: the device is valid; the call writes one integer.
        let asked = unsafe { sys::cuDeviceGetAttribute(&mut value, which, context.card().device) };
        (check(asked, "cuDeviceGetAttribute").is_ok() && value > 0).then(|| f64::from(value))
    };
    let kilohertz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
    let bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
    // Two transfers a clock.
    Some(2.0 * kilohertz * 1e3 * bits / 8.0)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Seconds of the stream's work, by the device's clock.
fn timed(
    context: &Arc<Context>,
    stream: &Stream,
    mut work: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let (start, end) = (Event::timing(context)?, Event::timing(context)?);
    let mut seconds = Vec::with_capacity(TIMES);
    work()?;
    for _ in 0..TIMES {
        stream.record(&start)?;
        work()?;
        stream.record(&end)?;
        stream.wait()?;
        seconds.push(end.seconds_since(&start)?);
    }
    Ok(median(seconds))
}

/// Device memory for the time of a probe: granules mapped one after the other.
struct Area {
    memory: CardMemory,
    base: u64,
    reserved: u64,
    handles: Vec<<CardMemory as Physical>::Handle>,
}

impl Area {
    fn new(context: &Arc<Context>, bytes: u64) -> Result<Area, CudaError> {
        let memory = CardMemory::granules(context)?;
        let granule = memory.granule();
        let reserved = bytes.div_ceil(granule) * granule;
        let base = memory.reserve(reserved)?;
        let mut area = Area { memory, base, reserved, handles: Vec::new() };
        while (area.handles.len() as u64) * granule < reserved {
            let handle = area.memory.create()?;
            if let Err(error) = area.memory.map(base + area.handles.len() as u64 * granule, handle) {
                area.memory.release(handle)?;
                return Err(error);
            }
            area.handles.push(handle);
        }
        area.memory.allow(base, reserved)?;
        Ok(area)
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        let granule = self.memory.granule();
        for (i, handle) in self.handles.drain(..).enumerate() {
            let given = self.memory.unmap(self.base + i as u64 * granule).and_then(|()| self.memory.release(handle));
            if let Err(error) = given {
                log::error!("{error}");
            }
        }
        if let Err(error) = self.memory.unreserve(self.base, self.reserved) {
            log::error!("{error}");
        }
    }
}

/// Measures card `ordinal`. Takes about a second, 512 MiB of the card and 256 MiB of pinned memory for that time.
///
/// # Errors
/// [`DriverProblem`], in every variant.
pub fn probe(ordinal: usize) -> Result<Probe, DriverProblem> {
    let context = Context::open(ordinal)?;
    context.card().require_virtual_memory()?;
    let _current = context.bind()?;
    let (free_bytes, total_bytes) = context.memory_info()?;
    let stream = Stream::new(&context)?;
    let host = PinnedBuffer::new(&context, MOVED as usize)?;
    let area = Area::new(&context, 2 * MOVED)?;
    let copies = |chunk: u64, to_device: bool| {
        timed(&context, &stream, || {
            for at in (0..MOVED).step_by(chunk as usize) {
                let (bytes, pinned) = (chunk.min(MOVED - at) as usize, host.as_ptr().wrapping_add(at as usize));
                let device = area.base + at;
                // SAFETY: both areas hold `MOVED` bytes and live until the stream has been waited for.
                unsafe {
                    match to_device {
                        true => stream.copy_in(device, pinned, bytes)?,
                        false => stream.copy_out(pinned, device, bytes)?,
                    }
                }
            }
            Ok(())
        })
    };
    let speed = |seconds: f64| MOVED as f64 / seconds;
    let mut host_to_device = Vec::new();
    for chunk in CHUNKS {
        host_to_device.push((chunk, speed(copies(chunk, true)?)));
    }
    let device_to_host = speed(copies(32 << 20, false)?);
    let on_device = timed(&context, &stream, || {
        // SAFETY: the two halves of the area are mapped and apart.
        unsafe { stream.copy_on_device(area.base + MOVED, area.base, MOVED as usize) }
    })?;
    let reader = Reader::new(&context)?;
    let read = |source: u64, bytes: u64, sink: u64| -> Result<Option<f64>, CudaError> {
        let Some(reader) = &reader else { return Ok(None) };
        // SAFETY: both areas live until the stream has been waited for, which `timed` does.
        let seconds = timed(&context, &stream, || unsafe { reader.read(&stream, source, bytes, sink) })?;
        Ok(Some(bytes as f64 / seconds))
    };
    // All but the last granule, which takes what the kernel writes.
    let granule = area.memory.granule();
    let sink = area.base + area.reserved - granule;
    let device_read = read(area.base, area.reserved - granule, sink)?;
    let zero_copy_read = read(host.device(), MOVED, sink)?;
    stream.wait()?;
    Ok(Probe {
        device: context.name().to_string(),
        card: context.card().name.clone(),
        capability: context.card().capability,
        driver: context.driver().version,
        total_bytes,
        free_bytes,
        granule: area.memory.granule(),
        read_only_registration: context.card().read_only_registration,
        host_to_device,
        device_to_host,
        device_copy_read: speed(on_device),
        device_read,
        zero_copy_read,
        memory_peak: memory_peak(&context),
        host_read: host_read(host.bytes()),
    })
}

/// Bytes a second that one thread reads.
fn host_read(bytes: &[u8]) -> f64 {
    let mut seconds = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let start = Instant::now();
        let sum =
            bytes.chunks_exact(8).fold(0u64, |sum, b| sum.wrapping_add(b.try_into().map_or(0, u64::from_le_bytes)));
        std::hint::black_box(sum);
        seconds.push(start.elapsed().as_secs_f64());
    }
    bytes.len() as f64 / median(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_has_a_speed_and_the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        let speed = host_read(&vec![1; 16 << 20]);
        assert!(speed > 1e6 && speed.is_finite(), "{speed}");
    }
}
