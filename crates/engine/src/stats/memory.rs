//! Memory pools and their holders, and the physical figures beside them.

use headrace_memory_governor::{HolderReport, PoolReport, Source};
use headrace_provider::DeviceReport;
use serde::Serialize;

/// One holder's share of a pool, in bytes. Gauges, but for the peak, which starts again at a reset.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HolderStats {
    /// `weights`, `staging`, `kv`, `workspace`, `graphs`, `fixed`, `context`; another engine's end in `of engine N`.
    pub name: String,
    /// Charged now.
    pub used: u64,
    /// Largest charge.
    pub peak: u64,
    /// Promised and unused: others may use it meanwhile.
    pub lent: u64,
    /// What it can be asked to yield.
    pub reclaimable: u64,
}

/// What one source says of the physical memory that this process takes, in bytes. Gauges, but for the peaks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PhysicalStats {
    /// `map-count`: the device's own count of mapped granules; `driver`: by how much the card's free memory shrank, other
    /// processes' changes included; `nvml`: NVML's figure of this process.
    pub source: String,
    /// Now.
    pub bytes: u64,
    /// Largest figure seen: at load, at every change of what is mapped, and whenever stats are taken.
    pub peak: u64,
    /// Beyond what the ledger explained, at its largest.
    pub unaccounted: u64,
}

/// One pool of physical memory, in bytes. Gauges, but for the peaks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PoolStats {
    /// `device 0`.
    pub name: String,
    /// Hard limit.
    pub limit: u64,
    /// Charged now, by the ledger.
    pub used: u64,
    /// Largest charge.
    pub peak: u64,
    /// Neither charged nor withheld.
    pub unassigned: u64,
    /// Charge beyond the limit, at its largest. Must be 0.
    pub oversubscribed: u64,
    /// Releases of more than was charged, times. Must be 0.
    pub underflows: u64,
    /// Mapped now, by the device's own count.
    pub mapped: u64,
    /// Largest count.
    pub mapped_peak: u64,
    /// Mapped beyond what the ledger explains, at its largest. Must be 0.
    pub unaccounted: u64,
    /// What each source says of the memory that is really taken.
    pub physical: Vec<PhysicalStats>,
    /// What the holder `fixed` consists of, as `(name, bytes)`; what is set aside and not taken yet included.
    pub fixed_parts: Vec<(String, u64)>,
    /// Bytes that are counted and not limited: all of them under `placement = unmanaged`, else 0.
    pub unmanaged: u64,
    /// Shares.
    pub holders: Vec<HolderStats>,
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::MapCount => "map-count",
        Source::Driver => "driver",
        Source::Nvml => "nvml",
        Source::Os => "os",
    }
}

/// Parts of a charge of `used` bytes of which the device names `parts`.
fn fixed_parts(parts: &[(&'static str, u64)], used: u64) -> Vec<(String, u64)> {
    let named: u64 = parts.iter().map(|part| part.1).sum();
    let rest = ("set aside or rounded up", used.saturating_sub(named));
    let all = parts.iter().copied().chain([rest]).filter(|part| part.1 > 0);
    all.map(|(name, bytes)| (name.to_string(), bytes)).collect()
}

impl PoolStats {
    /// From the governor's report of one pool, and the device's of its own part.
    pub fn of(pool: &PoolReport, device: &DeviceReport) -> PoolStats {
        let physical = pool.physical.iter().find(|(s, _)| *s == Source::MapCount).map(|(_, p)| *p).unwrap_or_default();
        let holder = |h: &HolderReport| HolderStats {
            name: h.name.clone(),
            used: h.used,
            peak: h.peak,
            lent: h.lent,
            reclaimable: h.reclaimable,
        };
        let figure = |(source, p): &(Source, headrace_memory_governor::Physical)| PhysicalStats {
            source: source_name(*source).to_string(),
            bytes: p.bytes,
            peak: p.peak,
            unaccounted: p.peak_unaccounted,
        };
        let fixed = pool.holders.iter().find(|h| h.name == "fixed").map_or(0, |h| h.used);
        PoolStats {
            name: pool.pool.to_string(),
            limit: pool.limit,
            used: pool.used,
            peak: pool.peak,
            unassigned: pool.unassigned,
            oversubscribed: pool.peak_oversubscribed,
            underflows: pool.underflows,
            mapped: physical.bytes,
            mapped_peak: physical.peak,
            unaccounted: physical.peak_unaccounted,
            physical: pool.physical.iter().map(figure).collect(),
            fixed_parts: fixed_parts(&device.fixed, fixed),
            unmanaged: pool.unmanaged,
            holders: pool.holders.iter().map(holder).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_charge_sum_to_it() {
        let parts = fixed_parts(&[("vectors", 3), ("nothing", 0), ("tables", 4)], 16);
        let named = [("vectors", 3), ("tables", 4), ("set aside or rounded up", 9)];
        assert_eq!(parts, named.map(|(name, bytes)| (name.to_string(), bytes)).to_vec());
        assert_eq!(fixed_parts(&[("vectors", 3)], 3).len(), 1);
    }
}
