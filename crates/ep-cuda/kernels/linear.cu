// Quantised linear layers for one to four rows, every format: see gemv.cuh. The formats that models use most also have
// the variants of linear_hot.cu.
#include "gemv.cuh"

#define GENERIC(NAME, F) GEMV(NAME, F, 1, 1, 2, 3) GEMV(NAME, F, 4, 1, 1, 2)
FOR_EACH_FORMAT(GENERIC)
