// Quantised linear layer for one to four token rows, see gemv.cuh. Compiled once for each format class (FORMAT).
//
// The suffixes are token rows, weight rows a thread, blocks in flight of each; the last number of GEMV is what
// src/launch/linear.rs calls `blocks`: blocks that fit on a multiprocessor by their registers.
#include "gemv.cuh"

GEMV(1, 1, 2, 3)
GEMV(4, 1, 1, 2)

#ifdef HOT
// Where one row has to reach the memory's speed: a small matrix needs depth, a large one fewer reads of activations.
GEMV(1, 1, 4, 3)
GEMV(1, 1, 8, 2)
GEMV(1, 2, 2, 3)
GEMV(1, 2, 4, 2)
GEMV(2, 2, 2, 2)
GEMV(4, 2, 2, 2)
#endif
