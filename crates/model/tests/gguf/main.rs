//! Tests of the GGUF loader: made files, damaged files, real files, and values against an independent reader.

#![allow(clippy::unwrap_used, clippy::panic)] // A test may fail.

mod dequantise;
mod hostile;
mod model;
mod mutate;
mod reader;
mod real;
mod seeds;
mod split;
mod truncate;
mod writer;
