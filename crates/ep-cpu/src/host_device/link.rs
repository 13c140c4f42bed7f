//! What the host device's link carries, measured as a card's is: copies into the staging range, and reads in place.

use std::hint::black_box;
use std::time::{Duration, Instant};

use headrace_provider::{LinkCeilings, RangeKind};

use super::HostDevice;

/// Most bytes that a measurement moves.
const MOVED: u64 = 1 << 20;

/// Measurements, of which the fastest counts: what a ceiling is.
const TIMES: usize = 3;

/// Why a device of host memory alone has no ceilings of a link.
pub(super) const NO_LINK: &str = "this device was given no link: its memory is the host's own";

fn fastest(bytes: u64, mut work: impl FnMut()) -> f64 {
    let mut once = || {
        let start = Instant::now();
        work();
        bytes as f64 / start.elapsed().as_secs_f64().max(1e-9)
    };
    (0..TIMES).map(|_| once()).fold(0.0, f64::max)
}

impl HostDevice {
    /// Both ceilings of a link of `link` bytes a second.
    ///
    /// # Errors
    /// If nothing of the staging range is mapped.
    pub(super) fn measured_link(&mut self, link: u64) -> Result<LinkCeilings, String> {
        self.fence();
        // What the slots held is lost.
        self.forget_ring();
        // A hundredth of a second at most for each.
        let bytes = self.memory.mapped(RangeKind::Staging).min(MOVED).min(link.div_ceil(100));
        let in_place = self.options.in_place;
        let target = self.memory.bytes_mut(RangeKind::Staging, 0, bytes).filter(|t| !t.is_empty());
        let target = target.ok_or("nothing of the staging range is mapped")?;
        let source = vec![1u8; target.len()];
        let copies = fastest(bytes, || {
            // As the copy thread holds itself up.
            std::thread::sleep(Duration::from_secs_f64(bytes as f64 / link.max(1) as f64));
            target.copy_from_slice(black_box(&source));
        });
        let read = fastest(bytes, || {
            black_box(black_box(&source).iter().fold(0u64, |sum, &byte| sum.wrapping_add(u64::from(byte))));
        });
        Ok(LinkCeilings { copies, in_place: in_place.map_or(read, |declared| read.min(declared as f64)), memory: None })
    }
}
