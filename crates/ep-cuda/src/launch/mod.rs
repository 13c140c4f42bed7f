//! One function a kernel: chooses variant, grid and block, and launches on a stream. Nothing here allocates.
