// Norms over heads where the model has them, rotary embedding of queries and keys, keys and values into their pages.
//
// Launch: block 128, grid (ceil((heads + 2 kv_heads) / 4), token rows): a warp a head. Queries are rewritten in place;
// keys and values are only stored, rounded to the pages' type.
#include "kv.cuh"

// Root-mean-square norm of a head: 256 lanes, lane t + 32 j in register j of thread t.
__device__ __forceinline__ float head_norm(const float* x, u32 n, float eps) {
    const u32 t = threadIdx.x & 31;
    float lanes[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        lanes[j] = 0.0f;
        for (u32 i = t + 32 * j; i < n; i += 256) lanes[j] = __fmaf_rn(x[i], x[i], lanes[j]);
    }
#pragma unroll
    for (int m = 4; m > 0; m >>= 1)
#pragma unroll
        for (int j = 0; j < m; j++) lanes[j] = __fadd_rn(lanes[j], lanes[j + m]);
    const float sum = __shfl_sync(FULL, warp_tree(lanes[0]), 0);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
}

extern "C" __global__ void __launch_bounds__(128) rope_append(const __grid_constant__ RopeArgs a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y, lane = threadIdx.x & 31;
    if (r >= a.step.header->rows) return;
    const u32 h = blockIdx.x * 4 + (threadIdx.x >> 5), all = a.heads + 2 * a.kv_heads;
    if (h >= all) return;
    const StepRow row = a.step.rows[r];
    float* x = a.qkv + ((size_t)r * all + h) * a.head_dim;
    const bool query = h < a.heads, value = h >= a.heads + a.kv_heads;

    const u8* weight = value ? nullptr : query ? a.q_norm : a.k_norm;
    const u32 type = query ? a.q_norm_type : a.k_norm_type;
    const float inv = weight ? head_norm(x, a.head_dim, a.eps) : 1.0f;
    auto element = [&](u32 i) {
        float v = x[i];
        return weight ? __fmul_rn(__fmul_rn(v, inv), float_at(weight, type, i)) : v;
    };

    u8* page = nullptr;
    if (!query) {
        const u32 head = h - a.heads - (value ? a.kv_heads : 0);
        page = kv_at(a.step, a.kv, value ? a.kv.value_offset : a.kv.key_offset, row.table, row.position, head);
    }
    auto put = [&](u32 i, float v) {
        if (query) x[i] = v;
        else if (a.kv.half) ((u16*)page)[i] = float_to_f16(v);
        else ((float*)page)[i] = v;
    };

    const u32 rotated = value ? 0 : a.dims, half = rotated / 2;
    const float* cosines = a.cos + (size_t)row.position * (a.dims / 2);
    const float* sines = a.sin + (size_t)row.position * (a.dims / 2);
    for (u32 i = lane; i < half; i += 32) {
        const u32 ia = a.interleaved ? 2 * i : i, ib = a.interleaved ? 2 * i + 1 : i + half;
        const float p = element(ia), q = element(ib), c = cosines[i], s = sines[i];
        put(ia, __fmaf_rn(p, c, -__fmul_rn(q, s)));
        put(ib, __fmaf_rn(q, c, __fmul_rn(p, s)));
    }
    for (u32 i = rotated + lane; i < a.head_dim; i += 32) put(i, element(i));
}
