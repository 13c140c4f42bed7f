//! What a residency cache counts: totals, and a record of every tensor.

use serde::Serialize;

/// Totals of a cache. An access is one read of one piece; every byte count is of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ResidencyCounters {
    /// Accesses that found their piece resident.
    pub hits: u64,
    /// Bytes of hits.
    pub hit_bytes: u64,
    /// Accesses whose piece was copied from the host: retained or bypassed.
    pub page_ins: u64,
    /// Bytes of page-ins.
    pub page_in_bytes: u64,
    /// Page-ins that did not stay.
    pub bypassed_page_ins: u64,
    /// Bytes of page-ins that did not stay.
    pub bypassed_bytes: u64,
    /// Pieces that were evicted.
    pub evictions: u64,
    /// Bytes of evicted pieces.
    pub evicted_bytes: u64,
}

impl ResidencyCounters {
    /// The difference from an earlier state of the same totals.
    pub fn since(&self, before: &ResidencyCounters) -> ResidencyCounters {
        ResidencyCounters {
            hits: self.hits - before.hits,
            hit_bytes: self.hit_bytes - before.hit_bytes,
            page_ins: self.page_ins - before.page_ins,
            page_in_bytes: self.page_in_bytes - before.page_in_bytes,
            bypassed_page_ins: self.bypassed_page_ins - before.bypassed_page_ins,
            bypassed_bytes: self.bypassed_bytes - before.bypassed_bytes,
            evictions: self.evictions - before.evictions,
            evicted_bytes: self.evicted_bytes - before.evicted_bytes,
        }
    }

    /// Bytes of hits over all bytes read; `None` if nothing was read.
    pub fn byte_hit_rate(&self) -> Option<f64> {
        ratio(self.hit_bytes, self.hit_bytes + self.page_in_bytes)
    }

    /// Hits over accesses; `None` if nothing was read. It says little where sizes differ: see the rate by bytes.
    pub fn hit_rate(&self) -> Option<f64> {
        ratio(self.hits, self.hits + self.page_ins)
    }

    /// Bypassed bytes over the bytes of all page-ins; `None` if there was none.
    pub fn bypassed_share(&self) -> Option<f64> {
        ratio(self.bypassed_bytes, self.page_in_bytes)
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// What became of the reads of one tensor. A tensor of several pieces is read once a piece.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TensorTrace {
    /// Name in the file.
    pub name: String,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Pieces that it is cut into.
    pub pieces: u64,
    /// Pieces that are resident now.
    pub resident_pieces: u64,
    /// True if it is pinned.
    pub pinned: bool,
    /// Reads.
    pub reads: u64,
    /// Bytes of reads.
    pub read_bytes: u64,
    /// Reads for which bytes were copied from the host.
    pub page_ins: u64,
    /// Bytes of page-ins.
    pub page_in_bytes: u64,
    /// Page-ins that stayed.
    pub retained: u64,
    /// Bytes of page-ins that stayed.
    pub retained_bytes: u64,
    /// Page-ins that did not stay.
    pub bypassed: u64,
    /// Bytes of page-ins that did not stay.
    pub bypassed_bytes: u64,
    /// Times that a piece of it was evicted.
    pub evictions: u64,
}
