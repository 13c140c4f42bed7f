//! What a context and its kernels cost before anything is allocated: measured, with the name of the witness.

use crate::context::Context;
use crate::driver::Card;
use crate::nvml::Monitor;

/// Assumed where nothing measures it: more than contexts of today's drivers take.
pub const ASSUMED_BYTES: u64 = 768 << 20;

/// Who says what the overhead is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverheadSource {
    /// NVML's figure of this process.
    NvmlProcess,
    /// The growth of NVML's figure of the card while the context was made.
    NvmlCard,
    /// Nobody: [`ASSUMED_BYTES`].
    Assumed,
}

/// Bytes of the card that context and kernels take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overhead {
    /// Bytes.
    pub bytes: u64,
    /// Who says so.
    pub source: OverheadSource,
}

/// Looks at the card before and after a context is made.
#[derive(Debug)]
pub struct OverheadMeter {
    monitor: Option<Monitor>,
    card_before: Option<u64>,
}

fn judge(process: Option<u64>, card_before: Option<u64>, card_after: Option<u64>) -> Overhead {
    match (process, card_before, card_after) {
        (Some(bytes), _, _) if bytes > 0 => Overhead { bytes, source: OverheadSource::NvmlProcess },
        (_, Some(before), Some(after)) if after > before => {
            Overhead { bytes: after - before, source: OverheadSource::NvmlCard }
        }
        _ => Overhead { bytes: ASSUMED_BYTES, source: OverheadSource::Assumed },
    }
}

impl OverheadMeter {
    /// Looks at the card before a context is made.
    pub fn before(card: &Card) -> OverheadMeter {
        let monitor = Monitor::open(&card.bus_id);
        let card_before = monitor.as_ref().and_then(Monitor::card_bytes);
        OverheadMeter { monitor, card_before }
    }

    /// Looks again once context and kernels are there.
    pub fn after(&self, context: &Context) -> Overhead {
        let monitor = self.monitor.as_ref();
        let after = monitor.and_then(Monitor::card_bytes);
        let overhead = judge(monitor.and_then(Monitor::process_bytes), self.card_before, after);
        let name = context.name();
        match overhead.source {
            OverheadSource::Assumed => {
                log::warn!("{name}: context and kernels can't be measured; {} bytes are assumed", overhead.bytes);
            }
            source => log::info!("{name}: context and kernels take {} bytes ({source:?})", overhead.bytes),
        }
        overhead
    }

    /// Bytes of the card that this process uses now, by NVML.
    pub fn process_bytes(&self) -> Option<u64> {
        self.monitor.as_ref().and_then(Monitor::process_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_witness_is_believed_and_named() {
        let source = |process, before, after| judge(process, before, after).source;
        assert_eq!(judge(Some(5), Some(1), Some(9)), Overhead { bytes: 5, source: OverheadSource::NvmlProcess });
        assert_eq!(judge(None, Some(1), Some(9)), Overhead { bytes: 8, source: OverheadSource::NvmlCard });
        assert_eq!(source(Some(0), Some(1), Some(9)), OverheadSource::NvmlCard);
        // Another process gave memory back meanwhile: no witness.
        assert_eq!(judge(None, Some(9), Some(1)), Overhead { bytes: ASSUMED_BYTES, source: OverheadSource::Assumed });
        assert_eq!(source(None, None, Some(9)), OverheadSource::Assumed);
    }
}
