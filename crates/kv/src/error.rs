//! What can go wrong with KV pages. An operation that returns an error has changed nothing.

use crate::store::StoreError;

/// Why an operation on KV pages was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A geometry that no page can have.
    #[error("KV geometry: {what}")]
    Geometry {
        /// What is wrong with it.
        what: String,
    },
    /// A ladder of buckets that can't exist.
    #[error("KV buckets: {what}")]
    Buckets {
        /// What is wrong with it.
        what: String,
    },
    /// Fewer pages are free than the operation needs. Grow, then ask again.
    #[error("{needed} KV pages needed, {free} free of {capacity}")]
    OutOfPages {
        /// Pages that the operation needs.
        needed: usize,
        /// Pages free now.
        free: usize,
        /// Pages of the store now.
        capacity: usize,
    },
    /// The sequence could not reach its declared maximum beside those admitted before it.
    #[error(
        "a sequence of at most {max_length} tokens needs {pages} KV pages; {promised} of {limit} are promised to others"
    )]
    NotAdmissible {
        /// Declared maximum in tokens.
        max_length: usize,
        /// Pages of that maximum.
        pages: usize,
        /// Pages promised to the other sequences.
        promised: usize,
        /// Pages of the largest bucket.
        limit: usize,
    },
    /// The sequence would outgrow the maximum that it was admitted with.
    #[error("{asked} tokens asked of a sequence admitted with at most {max_length}")]
    LengthExceeded {
        /// Length asked for, in tokens.
        asked: usize,
        /// Declared maximum in tokens.
        max_length: usize,
    },
    /// A rewind to a length beyond the present one.
    #[error("can't rewind a sequence of {length} tokens to {asked}")]
    RewindForward {
        /// Length now, in tokens.
        length: usize,
        /// Length asked for, in tokens.
        asked: usize,
    },
    /// The sequence was freed, or belongs to another cache.
    #[error("no such KV sequence")]
    UnknownSequence,
    /// A page that nobody holds, or beyond the capacity.
    #[error("KV page {page} is not in use")]
    PageNotInUse {
        /// The page.
        page: u32,
    },
    /// As many holders as a reference count can count.
    #[error("KV page {page} has too many holders")]
    TooManyReferences {
        /// The page.
        page: u32,
    },
    /// A shrink that would cut pages in use.
    #[error("can't shrink to {capacity} KV pages: {in_use} pages beyond are in use, the highest is {highest}")]
    PagesInUse {
        /// Capacity asked for, in pages.
        capacity: usize,
        /// Pages in use at or beyond it.
        in_use: usize,
        /// The highest page in use.
        highest: u32,
    },
    /// A shrink while copies wait: they may read pages that the shrink would cut.
    #[error("{copies} page copies are pending; do them before a shrink")]
    CopiesPending {
        /// Copies that wait.
        copies: usize,
    },
    /// New buckets that end below what is mapped or promised already.
    #[error("buckets end at {limit} KV pages; {promised} are promised and {capacity} are mapped")]
    LimitTooLow {
        /// Pages of the largest new bucket.
        limit: usize,
        /// Pages promised to sequences.
        promised: usize,
        /// Pages of the store now.
        capacity: usize,
    },
    /// The store holds pages of another geometry.
    #[error("the store's pages have another geometry than the cache's")]
    GeometryMismatch,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}
