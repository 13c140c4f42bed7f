//! KV pages: geometry, layouts, page tables, the store trait, growth. No arithmetic, no device calls.
//!
//! Keys and values of earlier tokens are kept in **pages**. A page holds all layers of a fixed number of consecutive
//! positions of one sequence ([`KvGeometry`] says where in it). Pages are numbered; a store ([`KvPageStore`]) keeps
//! page `p` at `p * page_bytes` of one address range, on a device or on the host. A sequence is a **page table**: the
//! list of its pages in order. So sequences of any lengths share one range, and none needs a contiguous run of it.
//!
//! [`KvCache`] is the book-keeper: it knows lengths, page tables, holders of pages and promises, and touches no bytes.
//! An engine goes through it in the same order before every step:
//!
//! ```
//! # use headrace_kv::*;
//! # use headrace_numerics::elementwise::KvDtype;
//! # fn main() -> Result<(), KvError> {
//! # let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 2, dtype: KvDtype::F16,
//! #     layout: KvLayout::HeadMajor, page_tokens: 32 };
//! let mut store = VecStore::new(geometry);
//! let mut cache = KvCache::new(geometry, Buckets::new(1, 100, geometry.page_bytes() as u64, 4096)?)?;
//! cache.grow(&mut store, 1)?; // the floor: one bucket
//! let a = cache.create(2000)?; // admitted only if all can reach their maxima; takes no page
//!
//! let needed = cache.pages_needed(&[(a, 600)])?; // a prompt of 600 tokens
//! if let Some(bucket) = cache.growth_for(needed)? {
//!     cache.grow(&mut store, bucket.pages)?; // after the governor granted bucket.bytes
//! }
//! let appended = cache.append(a, 600)?; // page table and length; then the step writes positions 0..600
//! assert_eq!((appended.positions, cache.page_table(a)?.len()), (0..600, 19));
//!
//! let b = cache.fork(a, 700)?; // shares a's pages
//! cache.append(b, 1)?; // the partly filled page is shared: b gets its own
//! cache.copy_pages(&mut store)?; // do queued copies before the step
//! cache.rewind(b, 10)?; // any shorter length; a keeps its pages
//! cache.free(b)?;
//! # Ok(())
//! # }
//! ```
//!
//! Capacity grows along a geometric ladder ([`Buckets`]) and moves no byte. Lowest pages are used first, so that a
//! shrink finds free pages at the end. A call that returns an error has changed nothing.

#![forbid(unsafe_code)]

pub mod allocator;
mod bit_tree;
pub mod bucket;
pub mod cache;
pub mod error;
pub mod geometry;
pub mod growth;
pub mod sequence;
pub mod store;

pub use allocator::PageAllocator;
pub use bucket::{Bucket, Buckets};
pub use cache::KvCache;
pub use error::KvError;
pub use geometry::{KvGeometry, KvHalf, KvLayout};
pub use growth::KvStats;
pub use sequence::{Appended, Location, SequenceId};
pub use store::{KvPageStore, PageCopy, StoreError, VecStore};
