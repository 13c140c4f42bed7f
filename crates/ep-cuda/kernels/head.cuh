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
// its kind asks. `x` is the head in the row. One warp. 128 elements are loaded before the first of them is put.
template <class Put>
__device__ __forceinline__ void rotate_head(const RopeArgs& a, const float* x, u32 h, u32 position, const Put& put) {
    const u32 lane = threadIdx.x & 31, PAIRS = 2, SINGLES = 4;
    const bool query = h < a.heads, value = h >= a.heads + a.kv_heads;
    const u8* weight = value ? nullptr : query ? a.q_norm : a.k_norm;
    const u32 type = query ? a.q_norm_type : a.k_norm_type;
    const u32 rotated = value ? 0 : a.dims, half = rotated / 2;
    const float* cosines = a.cos + (size_t)position * (a.dims / 2);
    const float* sines = a.sin + (size_t)position * (a.dims / 2);
    const float inv = weight ? head_norm(x, a.head_dim, a.eps) : 1.0f;
    auto first = [&](u32 i) { return a.interleaved ? 2 * i : i; };
    auto second = [&](u32 i) { return a.interleaved ? 2 * i + 1 : i + half; };
    auto normed = [&](float e, u32 i) {
        return weight ? __fmul_rn(__fmul_rn(e, inv), float_at(weight, type, i)) : e;
    };
#pragma unroll 1
    for (u32 from = lane; from < half; from += 32 * PAIRS) {
        float p[PAIRS], q[PAIRS], c[PAIRS], s[PAIRS];
#pragma unroll
        for (u32 j = 0; j < PAIRS; j++) {
            const u32 i = from + j * 32;
            if (i < half) {
                p[j] = __ldcg(x + first(i));
                q[j] = __ldcg(x + second(i));
                c[j] = cosines[i];
                s[j] = sines[i];
            }
        }
#pragma unroll
        for (u32 j = 0; j < PAIRS; j++) {
            const u32 i = from + j * 32;
            if (i < half) {
                const float e = normed(p[j], first(i)), o = normed(q[j], second(i));
                put(first(i), __fmaf_rn(e, c[j], -__fmul_rn(o, s[j])));
                put(second(i), __fmaf_rn(o, c[j], __fmul_rn(e, s[j])));
            }
        }
    }
#pragma unroll 1
    for (u32 from = rotated + lane; from < a.head_dim; from += 32 * SINGLES) {
        float v[SINGLES];
#pragma unroll
        for (u32 j = 0; j < SINGLES; j++)
            if (from + j * 32 < a.head_dim) v[j] = __ldcg(x + from + j * 32);
#pragma unroll
        for (u32 j = 0; j < SINGLES; j++)
            if (from + j * 32 < a.head_dim) put(from + j * 32, normed(v[j], from + j * 32));
    }
}
