// Activations: root-mean-square norm, SwiGLU or nothing, then quantisation in blocks of 32 and, where an unquantised
// matrix follows, floats.
//
// Launch: block 256, grid (parts, token rows). Every block of a row computes the row's norm for itself (a row is read from
// the cache) and then makes the blocks part * 8 + warp, ... of it: one warp a block of 32.
#include "activation.cuh"

// Element i of the activation, stored as a float and as part of its block.
template <bool W16>
__device__ __forceinline__ void emit(const QuantiseArgs& a, u32 r, u32 k, float v) {
    const u32 i = k * 32 + (threadIdx.x & 31);
    if (a.floats && i < a.out.cols) a.out.floats[(size_t)r * a.out.cols + i] = v;
    if (a.codes) quantise_block<W16>(a.out, r, k, v);
}

// `1 / sqrt(sum of squares / n + eps)` of a row: 256 lanes, one a thread; the tree. All threads get it.
__device__ __forceinline__ float row_norm(const float* x, u32 n, float eps) {
    __shared__ float lanes[128];
    float sum = 0.0f;
    // Many loads in flight, also for the last elements: the latency of memory is most of this kernel.
    const u32 t = threadIdx.x, MANY = 20;
    for (u32 from = t; from < n; from += 256 * MANY) {
        float v[MANY];
#pragma unroll
        for (u32 q = 0; q < MANY; q++) v[q] = from + q * 256 < n ? x[from + q * 256] : 0.0f;
#pragma unroll
        for (u32 q = 0; q < MANY; q++)
            if (from + q * 256 < n) sum = __fmaf_rn(v[q], v[q], sum);
    }
    if (t >= 128) lanes[t - 128] = sum;
    __syncthreads();
    if (t < 128) lanes[t] = sum = __fadd_rn(sum, lanes[t]);
    __syncthreads();
    if (t < 64) sum = __fadd_rn(sum, lanes[t + 64]);
    __syncthreads();
    if (t < 64) lanes[t] = sum;
    __syncthreads();
    if (t < 32) {
        sum = warp_tree(__fadd_rn(sum, lanes[t + 32]));
        if (t == 0) lanes[0] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
    }
    __syncthreads();
    return lanes[0];
}

template <bool W16> __device__ __forceinline__ void norm(const QuantiseArgs& a) {
    const u32 r = blockIdx.y, n = a.out.cols, kb = (n + 31) / 32, lane = threadIdx.x & 31;
    u32 k = blockIdx.x * 8 + (threadIdx.x >> 5), i = k * 32 + lane;
    float weight = i < n ? float_at(a.weight, a.weight_type, i) : 0.0f;
    allow_next();
    wait_for_previous();
    if (r >= step_rows(a.step, a.wanted)) return;
    const float* x = a.src + (size_t)(a.gather ? a.step.wanted[r] : r) * a.src_ld;
    float own = i < n ? x[i] : 0.0f;
    const float inv = row_norm(x, n, a.eps);
    while (k < kb) {
        emit<W16>(a, r, k, i < n ? __fmul_rn(__fmul_rn(own, inv), weight) : 0.0f);
        k += gridDim.x * 8;
        i = k * 32 + lane;
        if (i < n) {
            own = x[i];
            weight = float_at(a.weight, a.weight_type, i);
        }
    }
}

// SWIGLU: the source row holds the gates, then the ups, `cols` each.
template <bool W16, bool SWIGLU> __device__ __forceinline__ void plain(const QuantiseArgs& a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y, n = a.out.cols, kb = (n + 31) / 32, lane = threadIdx.x & 31;
    if (r >= step_rows(a.step, a.wanted)) return;
    const float* x = a.src + (size_t)r * a.src_ld;
    for (u32 k = blockIdx.x * 8 + (threadIdx.x >> 5); k < kb; k += gridDim.x * 8) {
        const u32 i = k * 32 + lane;
        float v = 0.0f;
        if (i < n) {
            v = x[i];
            if (SWIGLU) v = swiglu(v, x[n + i]);
        }
        emit<W16>(a, r, k, v);
    }
}

#define KERNEL(NAME, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ QuantiseArgs a) { __VA_ARGS__(a); }
KERNEL(norm_w16, norm<true>)
KERNEL(norm_w8, norm<false>)
KERNEL(quantise_w16, plain<true, false>)
KERNEL(quantise_w8, plain<false, false>)
KERNEL(swiglu_w16, plain<true, true>)
KERNEL(swiglu_w8, plain<false, true>)
