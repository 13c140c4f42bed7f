// The greedy choice: larger logit, then lower id; a logit that is not finite is reported instead. And the report of a
// finished step to the host.
//
// argmax. Launch: block 256, grid (parts, wanted rows). The last block of a row writes the result and restores the scratch.
// report. Launch: one block. After it the host may read the results and the flag.
#include "common.cuh"

// Orders as the floats do, -0 equal to +0; larger keys for lower ids.
__device__ __forceinline__ u64 key_of(float x, u32 id) {
    u32 b = __float_as_uint(__fadd_rn(x, 0.0f));
    b = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)b << 32 | (u32)~id;
}

extern "C" __global__ void __launch_bounds__(256) argmax(const __grid_constant__ ArgmaxArgs a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y;
    if (r >= a.step.header->wanted) return;
    const float* x = a.logits + (size_t)r * a.vocab;
    u64 best = 0;
    u32 bad = 0xffffffffu;
#pragma unroll 4
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < a.vocab; i += gridDim.x * 256) {
        const float v = x[i];
        if ((__float_as_uint(v) & 0x7f800000u) == 0x7f800000u) bad = min(bad, i);
        best = max(best, key_of(v, i));
    }
#pragma unroll
    for (int n = 16; n > 0; n >>= 1) {
        best = max(best, __shfl_xor_sync(FULL, best, n));
        bad = min(bad, __shfl_xor_sync(FULL, bad, n));
    }
    ArgmaxScratch* s = a.scratch + r;
    if ((threadIdx.x & 31) == 0) {
        atomicMax(&s->key, best);
        if (bad != 0xffffffffu) atomicMin(&s->bad, bad);
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&s->done, 1) + 1 != gridDim.x) return;
    __threadfence();
    const u64 key = atomicExch(&s->key, 0);
    ArgmaxResult result;
    result.token = ~(u32)key;
    result.bad = atomicExch(&s->bad, 0xffffffffu);
    s->done = 0;
    a.results[r] = result;
    if (a.feedback) a.feedback[r] = result.token;
}

extern "C" __global__ void __launch_bounds__(256) report(const __grid_constant__ ArgmaxArgs a) {
    allow_next();
    wait_for_previous();
    const u32 slot = a.step.header->slot;
    if (a.host_results)
        for (u32 r = threadIdx.x; r < a.step.header->wanted; r += blockDim.x)
            a.host_results[(size_t)slot * a.max_wanted + r] = a.results[r];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0 && a.host_flag) {
        __threadfence_system();
        *(volatile u32*)(a.host_flag + slot) = a.step.header->serial;
    }
}
