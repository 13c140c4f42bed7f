//! Continuous generation: requests join and leave while others decode.
//!
//! [`Batcher`] is the whole of it as a plain state machine: submit, cancel, step, events. [`Server`] is a thread that keeps one
//! going for callers on other threads, and [`Request`] is what such a caller holds.

pub mod batcher;
mod bound;
pub mod draft;
mod feed;
pub mod server;

pub use batcher::{Batcher, Event, Outcome, RequestId};
pub use feed::{News, Request};
pub use server::{Server, SharedEngine};
