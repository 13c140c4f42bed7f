// Which row of an embedding table a token row reads.
#pragma once
#include "common.cuh"

// Row of the planes that token row r reads.
__device__ __forceinline__ size_t table_row(const EmbedArgs& a, u32 r) {
    if (a.gathered) return r;
    u32 token = a.step.rows[r].token;
    if (token & 0x80000000u) token = a.feedback[token & 0x7fffffffu];
    return token < a.vocab ? token : 0;
}
