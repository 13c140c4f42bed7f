// Embedding: one dequantised row of the table for each token row.
//
// Launch: block 128, grid (ceil(blocks of 32 / 128), token rows); a thread makes a block of 32. The table, or the rows that
// the host gathered, may lie in host memory that the device can read. Compiled once for each format class (FORMAT).
#include "formats.cuh"
#include "table_row.cuh"

template <class F> __device__ __forceinline__ void embed(const EmbedArgs& a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y, k = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= a.step.header->rows || k * 32 >= a.cols) return;
    const FormatParams params = {a.cols, a.group_shift, a.flip, a.scale_half};
    typename F::Row row = F::row(a.planes, table_row(a, r), params);
    int w[8];
    BlockFloats f;
    F::unpack(F::load(row, k, params), k, params, w, f);
    float* out = a.out + (size_t)r * a.cols + k * 32;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int word = F::PAIR ? i / 8 * 2 + i % 2 : i / 4, byte = F::PAIR ? i % 8 / 2 : i % 4;
        int q = (int)(signed char)(w[word] >> (8 * byte));
        const bool second = F::HALVES && i >= 16;
        if (F::ZERO) q -= second ? f.z1 : f.z0;
        const float s = second ? f.s1 : f.s0;
        if (k * 32 + i < a.cols) out[i] = F::MIN ? __fmaf_rn((float)q, s, f.s1) : __fmul_rn((float)q, s);
    }
}

extern "C" __global__ void __launch_bounds__(128) embed_rows(const __grid_constant__ EmbedArgs a) { embed<FORMAT>(a); }
