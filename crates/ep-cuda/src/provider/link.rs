//! The link's ceilings as the provider measures them, with the ring that it streams through.

use headrace_provider::{LinkCeilings, RangeKind};

use super::{CudaProvider, range_index};
use crate::link;
use crate::probe::memory_peak;
use crate::reader::Reader;

impl CudaProvider {
    /// Measures copies once in a process, into the `bytes` of a ring that was just mapped and holds nothing yet. A failure is no
    /// reason not to stream: the ceiling stays unknown.
    pub(super) fn measure_copies(&mut self, bytes: u64) {
        let staging = self.arena.address(range_index(RangeKind::Staging), 0, bytes).map_err(|e| e.to_string());
        let measured = staging.and_then(|to| {
            link::copies(&self.context, &self.streams.copy, to, bytes).map_err(|error| error.to_string())
        });
        match measured {
            Ok(speed) => {
                log::info!("{}: the link carries {:.1} GB/s", self.context.name(), speed / 1e9);
                self.link = Some(speed);
            }
            Err(error) => log::warn!("{}: the link can't be measured: {error}", self.context.name()),
        }
    }

    /// Loads the kernel that reads in place, unless this process knows already what it would find; what the kernel takes of the
    /// card counts among the fixed bytes.
    pub(super) fn ready_reader(&mut self) -> Result<(), String> {
        if self.reader.is_some() || link::known_in_place(&self.context).is_some() {
            return Ok(());
        }
        let name = self.context.name().to_string();
        let failed = |error: crate::driver::CudaError| format!("{name}: {error}");
        let (before, _) = self.context.memory_info().map_err(failed)?;
        self.reader = Reader::new(&self.context).map_err(failed)?;
        let (after, _) = self.context.memory_info().map_err(failed)?;
        self.kernel_bytes += before.saturating_sub(after);
        self.reader.as_ref().map(|_| ()).ok_or_else(|| format!("{name}: there is no kernel for this card"))
    }

    /// Copies as they were measured when the ring was mapped, and reads in place.
    pub(super) fn measure_both(&mut self) -> Result<LinkCeilings, String> {
        let copies = self.link.ok_or_else(|| format!("{}: copies can't be measured", self.context.name()))?;
        let in_place = match (link::known_in_place(&self.context), &self.reader) {
            (Some(speed), _) => speed,
            (None, None) => return Err(format!("{}: no kernel was loaded that reads in place", self.context.name())),
            (None, Some(reader)) => {
                let sink = self.arena.address(range_index(RangeKind::Staging), 0, 4).map_err(|e| e.to_string())?;
                let measured = link::in_place(&self.context, &self.streams.compute, reader, sink);
                measured.map_err(|error| format!("{}: {error}", self.context.name()))?
            }
        };
        log::info!("{}: kernels read {:.1} GB/s in place", self.context.name(), in_place / 1e9);
        Ok(LinkCeilings { copies, in_place, memory: memory_peak(&self.context) })
    }
}
