//! For tests: random models of any shape and format, a scalar reference executor, the plainest step program.
//!
//! A crate of its own, so that the tests of every provider, on any device, share one oracle.

pub mod model;
pub mod oracle;
pub mod program;
pub mod random;
pub mod weights;

pub use model::{ModelShape, random_model};
pub use oracle::{Oracle, OracleSequence};
pub use program::file_program;
pub use random::{bits, generator, random_floats};
