//! Host provider: SIMD kernels, thread pool, host device.
