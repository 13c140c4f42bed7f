// More rows per thread and deeper loads for the 4-bit planar formats, where one row has to reach the memory's speed.
#include "gemv.cuh"

#define HOT(NAME, F)                                                                                                  \
    GEMV(NAME, F, 1, 1, 4, 3) GEMV(NAME, F, 1, 2, 2, 3) GEMV(NAME, F, 1, 2, 4, 2) GEMV(NAME, F, 2, 2, 2, 2)           \
    GEMV(NAME, F, 4, 2, 2, 2)
HOT(p4h, P4h)
HOT(p4hz, P4hz)
HOT(p4f, P4f)
HOT(p4fz, P4fz)
