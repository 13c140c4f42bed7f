// What happens to one head of a token row before attention: its norm where the model has one, and its rotation.
#pragma once
#include "kv.cuh"

// Root-mean-square norm of a head by a warp: 256 lanes, lane t + 32 j in register j of thread t.
__device__ __forceinline__ float head_norm(const float* x, u32 n, float eps) {
    const u32 t = threadIdx.x & 31;
    float lanes[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        lanes[j] = 0.0f;
        for (u32 i = t + 32 * j; i < n; i += 256) {
            const float v = __ldcg(x + i);
            lanes[j] = __fmaf_rn(v, v, lanes[j]);
        }
    }
#pragma unroll
    for (int m = 4; m > 0; m >>= 1)
#pragma unroll
        for (int j = 0; j < m; j++) lanes[j] = __fadd_rn(lanes[j], lanes[j + m]);
    const float sum = __shfl_sync(FULL, warp_tree(lanes[0]), 0);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
}

// Hands every element of head `h` (queries, then keys, then values) of a row to `put(i, value)`, normed and rotated as
// its kind asks. `x` is the head in the row. One warp.
template <class Put>
__device__ __forceinline__ void rotate_head(const RopeArgs& a, const float* x, u32 h, u32 position, const Put& put) {
    const u32 lane = threadIdx.x & 31;
    const bool query = h < a.heads, value = h >= a.heads + a.kv_heads;
    const u8* weight = value ? nullptr : query ? a.q_norm : a.k_norm;
    const u32 type = query ? a.q_norm_type : a.k_norm_type;
    const float inv = weight ? head_norm(x, a.head_dim, a.eps) : 1.0f;
    auto element = [&](u32 i) {
        const float v = __ldcg(x + i);
        return weight ? __fmul_rn(__fmul_rn(v, inv), float_at(weight, type, i)) : v;
    };
    const u32 rotated = value ? 0 : a.dims, half = rotated / 2;
    const float* cosines = a.cos + (size_t)position * (a.dims / 2);
    const float* sines = a.sin + (size_t)position * (a.dims / 2);
    for (u32 i = lane; i < half; i += 32) {
        const u32 ia = a.interleaved ? 2 * i : i, ib = a.interleaved ? 2 * i + 1 : i + half;
        const float p = element(ia), q = element(ib), c = cosines[i], s = sines[i];
        put(ia, __fmaf_rn(p, c, -__fmul_rn(q, s)));
        put(ib, __fmaf_rn(q, c, __fmul_rn(p, s)));
    }
    for (u32 i = rotated + lane; i < a.head_dim; i += 32) put(i, element(i));
}
