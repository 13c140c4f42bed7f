// Embedding from an unquantised table. Launch: block 128, grid (any, token rows).
#include "table_row.cuh"

template <int TYPE> __device__ __forceinline__ void embed_dense(const EmbedArgs& a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y, k = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= a.step.header->rows) return;
    const u8* row = a.planes[0] + table_row(a, r) * a.cols * (TYPE == 0 ? 4 : 2);
    for (u32 i = k; i < a.cols; i += gridDim.x * blockDim.x) a.out[(size_t)r * a.cols + i] = float_at(row, TYPE, i);
}

#define EMBED_DENSE(NAME, TYPE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME(const __grid_constant__ EmbedArgs a) {             \
        embed_dense<TYPE>(a);                                                                                         \
    }
EMBED_DENSE(f32, 0)
EMBED_DENSE(f16, 1)
EMBED_DENSE(bf16, 2)
