//! KV pages: geometry, layouts, page tables, the store trait, growth. No arithmetic, no device calls.

#![forbid(unsafe_code)]

pub mod geometry;

pub use geometry::{KvGeometry, KvHalf, KvLayout};
