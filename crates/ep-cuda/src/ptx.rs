//! The device code that the build compiled, by compute capability.
