//! What can go wrong, and for a refused request the whole breakdown: who holds what, what is missing, what would do.

use std::fmt;

use crate::report::{Bytes, HolderReport, write_holders};
use crate::spec::Pool;

/// Everything the governor refuses. After any of these the ledger is as it was before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GovernorError {
    /// The bytes are not there.
    #[error(transparent)]
    Budget(#[from] Box<BudgetError>),
    /// The size does not fit in 64 bits once rounded up or summed.
    #[error("{bytes} B, rounded up to granules of {granule} B, does not fit in 64 bits")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
        /// The pool's granule, bytes.
        granule: u64,
    },
    /// The governor was built without this pool.
    #[error("there is no pool '{pool}'; declare it when the governor is made")]
    UnknownPool {
        /// The pool asked for.
        pool: Pool,
    },
    /// A declaration contradicts itself.
    #[error("{what}")]
    Spec {
        /// What is wrong with it.
        what: String,
    },
    /// A lease operation that doesn't fit the lease.
    #[error("{what}")]
    Lease {
        /// What is wrong with it.
        what: String,
    },
    /// A reclaim callback asked the governor for bytes or terms. It may release, read reports, and nothing else.
    #[error("a reclaim callback must not reserve or change limits; the transaction it serves would wait for itself")]
    Reentrant,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// What is free and what the others yielded is not enough.
    NotEnough,
    /// The bytes are there now but promised to others, and this holder could not give them back.
    Promised,
    /// Earlier requests of the same or better right wait for bytes; this one must not overtake them.
    Queued,
    /// A holder offered bytes and then failed to let them go.
    Eviction {
        /// The holder.
        holder: String,
        /// What it said.
        reason: String,
    },
}

/// A request that does not fit, with everything needed to see why. Nothing was changed.
#[derive(Clone, Debug)]
pub struct BudgetError {
    /// The pool that is short.
    pub pool: Pool,
    /// Who asked: a holder's name, or what was to change ("limit").
    pub requester: String,
    /// Bytes asked for, rounded up to the granule. For a change of limit, the limit asked for.
    pub asked: u64,
    /// Bytes short of fitting, after all that could be reclaimed; 0 where only the turn was missing.
    pub missing: u64,
    /// The pool's limit, bytes.
    pub limit: u64,
    /// The smallest limit with which the same request would have fitted, all else unchanged, in bytes.
    pub smallest_limit: Option<u64>,
    /// Why.
    pub refusal: Refusal,
    /// What each holder that was asked to yield offered: (name, asked bytes, offered bytes).
    pub yields: Vec<(String, u64, u64)>,
    /// All holders of the pool, largest first.
    pub holders: Vec<HolderReport>,
}

impl std::error::Error for BudgetError {}

impl fmt::Display for BudgetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, missing) = (Bytes(self.asked), Bytes(self.missing));
        write!(f, "{}: '{}' asked for {asked} under a limit of {}: ", self.pool, self.requester, Bytes(self.limit))?;
        match &self.refusal {
            Refusal::NotEnough => write!(f, "{missing} are missing")?,
            Refusal::Promised => write!(f, "{missing} of it are promised to others and could not be given back")?,
            Refusal::Queued => write!(f, "earlier requests wait for bytes and must not be overtaken")?,
            Refusal::Eviction { holder, reason } => {
                write!(f, "'{holder}' could not release what it offered: {reason}")?
            }
        }
        if let Some(limit) = self.smallest_limit {
            write!(f, "; a limit of {} would do", Bytes(limit))?;
        }
        for (name, asked, offered) in &self.yields {
            write!(f, "\n  asked '{name}' to yield {}, it offered {}", Bytes(*asked), Bytes(*offered))?;
        }
        writeln!(f)?;
        write_holders(f, &self.holders)
    }
}
