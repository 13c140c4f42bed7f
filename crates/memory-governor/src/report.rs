//! The books made readable: figures per pool and holder, and a table sorted by size.
//!
//! Ledger figures are charges. Physical figures stand beside them, each with the source that said so.

use std::fmt;

use crate::ledger::{HolderState, Ledger};
use crate::spec::{Pool, Role};

/// Who measured a physical figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The arena's own count of mapped granules.
    MapCount,
    /// The driver's figure for this process.
    Driver,
    /// NVML's figure for this process.
    Nvml,
    /// The operating system's figure for this process.
    Os,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::MapCount => "device map count",
            Source::Driver => "driver",
            Source::Nvml => "NVML",
            Source::Os => "operating system",
        })
    }
}

/// One source's figure for a pool, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Physical {
    /// The latest figure.
    pub bytes: u64,
    /// The largest figure so far.
    pub peak: u64,
    /// Bytes beyond what the ledger explained when the figure was taken. Must be 0.
    pub unaccounted: u64,
    /// The largest such excess so far.
    pub peak_unaccounted: u64,
}

/// One holder's figures, bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderReport {
    /// Name.
    pub name: String,
    /// What the bytes are for.
    pub role: Role,
    /// Reclaim priority; lower yields first.
    pub priority: u32,
    /// Charged: leases and open reservations.
    pub used: u64,
    /// Largest charge so far.
    pub peak: u64,
    /// The part of `used` reserved and not committed yet.
    pub reserved: u64,
    /// The part of `used` that could not be released.
    pub quarantined: u64,
    /// Set aside for it, used or not.
    pub floor: u64,
    /// Certain to be had in total.
    pub promise: u64,
    /// What it may yet take of its promise.
    pub allowance: u64,
    /// Promised, unused and beyond the floor: others may use it meanwhile.
    pub lent: u64,
    /// What it can be asked to yield.
    pub reclaimable: u64,
    /// What it has yielded so far.
    pub yielded: u64,
    /// Releases of more than was charged, times. Must be 0.
    pub underflows: u64,
    /// Why the governor has stepped aside for this holder; `used` then counts, but not against the limit.
    pub declined: Option<String>,
}

impl HolderReport {
    pub(crate) fn of(h: &HolderState) -> Self {
        let managed = h.managed();
        Self {
            name: h.name.clone(),
            role: h.role,
            priority: h.priority,
            used: h.used,
            peak: h.peak,
            reserved: h.reserved,
            quarantined: h.quarantined,
            floor: h.terms.floor,
            promise: h.terms.promise,
            allowance: if managed { h.allowance() } else { 0 },
            lent: if managed { h.lent() } else { 0 },
            reclaimable: h.reclaimable(),
            yielded: h.yielded,
            underflows: h.underflows,
            declined: h.declined.clone(),
        }
    }
}

/// One pool's figures, bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolReport {
    /// Which pool.
    pub pool: Pool,
    /// Hard limit.
    pub limit: u64,
    /// Mapping unit.
    pub granule: u64,
    /// Charged by all managed holders.
    pub used: u64,
    /// Largest charge so far.
    pub peak: u64,
    /// Set aside for holders below their floor.
    pub withheld: u64,
    /// Neither charged nor withheld.
    pub unassigned: u64,
    /// What holders may yet take of their promises.
    pub allowance: u64,
    /// Promised but not needed yet, hence open to others.
    pub lent: u64,
    /// The part of `lent` that others really use and will have to yield.
    pub on_loan: u64,
    /// What holders can be asked to yield.
    pub reclaimable: u64,
    /// Bytes of declined holders: counted, not limited.
    pub unmanaged: u64,
    /// Charge beyond the limit. Must be 0.
    pub oversubscribed: u64,
    /// The largest such excess so far. Must be 0.
    pub peak_oversubscribed: u64,
    /// Releases of more than was charged, times. Must be 0.
    pub underflows: u64,
    /// Requests refused, times.
    pub refused: u64,
    /// Requests under way or waiting, count.
    pub waiting: usize,
    /// Physical figures by source.
    pub physical: Vec<(Source, Physical)>,
    /// Largest excess of a physical figure over the ledger's; `None` if nobody has measured. Must be 0.
    pub unaccounted: Option<u64>,
    /// Holders, largest charge first.
    pub holders: Vec<HolderReport>,
}

impl PoolReport {
    pub(crate) fn of(ledger: &Ledger, pool: usize, waiting: usize) -> Self {
        let state = &ledger.pools[pool];
        let mut holders: Vec<_> = ledger.holders.values().filter(|h| h.pool == pool).map(HolderReport::of).collect();
        holders.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.name.cmp(&b.name)));
        let sum = |of: &dyn Fn(&HolderState) -> u64| -> u64 {
            ledger.managed_in(pool).fold(0u64, |sum, (_, h)| sum.saturating_add(of(h)))
        };
        let (used, withheld) = (ledger.used(pool), sum(&|h| h.withheld()));
        let claims = sum(&|h| h.used.max(h.terms.promise));
        let (all, lent) = (ledger.holders.values().filter(|h| h.pool == pool), sum(&|h| h.lent()));
        Self {
            pool: state.pool,
            limit: state.limit,
            granule: state.granule,
            used,
            peak: state.peak,
            withheld,
            unassigned: state.limit.saturating_sub(used.saturating_add(withheld)),
            allowance: sum(&|h| h.allowance()),
            lent,
            on_loan: claims.saturating_sub(state.limit).min(lent),
            reclaimable: sum(&|h| h.reclaimable()),
            unmanaged: all.filter(|h| !h.managed()).fold(0, |sum, h| sum.saturating_add(h.used)),
            oversubscribed: used.saturating_sub(state.limit),
            peak_oversubscribed: state.worst_oversubscribed,
            underflows: holders.iter().map(|h| h.underflows).sum(),
            refused: state.refused,
            waiting,
            physical: state.physical.iter().map(|(source, figure)| (*source, *figure)).collect(),
            unaccounted: state.physical.values().map(|p| p.unaccounted).max(),
            holders,
        }
    }

    /// The holder of that name.
    pub fn holder(&self, name: &str) -> Option<&HolderReport> {
        self.holders.iter().find(|h| h.name == name)
    }
}

/// All pools, as declared.
#[derive(Clone, PartialEq, Eq)]
pub struct Report {
    /// Pools, in the order of declaration.
    pub pools: Vec<PoolReport>,
}

impl Report {
    /// The figures of one pool.
    pub fn pool(&self, pool: Pool) -> Option<&PoolReport> {
        self.pools.iter().find(|p| p.pool == pool)
    }
}

/// A size for people: exact bytes, and MiB beside them from one MiB on.
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 1 << 20 => write!(f, "{n} B"),
            n if n.is_multiple_of(1 << 20) => write!(f, "{} MiB", n >> 20),
            n => write!(f, "{n} B ({:.1} MiB)", n as f64 / 1048576.0),
        }
    }
}

pub(crate) fn write_holders(f: &mut fmt::Formatter<'_>, holders: &[HolderReport]) -> fmt::Result {
    let (b, w) = ("bytes charged", 16);
    writeln!(f, "  {:<20} {:<9} {b:>w$} {:>w$} {:>w$} {:>w$}", "holder", "role", "peak", "allowance", "reclaimable")?;
    for h in holders {
        let (name, role) = (&h.name, h.role);
        let (used, peak, allowance, reclaimable) = (h.used, h.peak, h.allowance, h.reclaimable);
        write!(f, "  {name:<20} {role:<9} {used:>w$} {peak:>w$} {allowance:>w$} {reclaimable:>w$}")?;
        if let Some(reason) = &h.declined {
            write!(f, "  not managed: {reason}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}

impl fmt::Display for PoolReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, .. } = self;
        writeln!(f, "{pool}: charged {} of {}, peak {}", Bytes(self.used), Bytes(self.limit), Bytes(self.peak))?;
        writeln!(
            f,
            "  unassigned {}, withheld {}, lent {} (on loan {}), unmanaged {}",
            Bytes(self.unassigned),
            Bytes(self.withheld),
            Bytes(self.lent),
            Bytes(self.on_loan),
            Bytes(self.unmanaged)
        )?;
        for (source, figure) in &self.physical {
            let (bytes, peak) = (Bytes(figure.bytes), Bytes(figure.peak));
            writeln!(f, "  physical by {source}: {bytes}, peak {peak}, unaccounted {}", Bytes(figure.unaccounted))?;
        }
        if self.peak_oversubscribed > 0 || self.underflows > 0 {
            let over = Bytes(self.peak_oversubscribed);
            writeln!(f, "  BROKEN LEDGER: oversubscribed by up to {over}, {} underflows", self.underflows)?;
        }
        write_holders(f, &self.holders)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pools.iter().try_for_each(|pool| write!(f, "{pool}"))
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
