//! The CUDA provider: the contract's kernels, compiled to PTX when the crate is built, and the device that runs steps
//! with them.
//!
//! `abi` holds what the host and the kernels share, `ptx` the embedded device code, `launch` one function a kernel.

pub mod abi;
pub mod launch;
pub mod ptx;
