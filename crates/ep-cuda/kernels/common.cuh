// Small pieces that every kernel uses: exact conversions, the contract's exponential, loads, launch ordering.
//
// The contract allows a fused multiply-add only where it says so. Everything is compiled without contraction, and the
// arithmetic is written with the rounding intrinsics, so that no compiler setting can change a bit.
#pragma once
#include "abi.cuh"

#define FULL 0xffffffffu
#define BLOCK 32

__device__ __forceinline__ float f16_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 float_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }

// Element i of a vector of FloatType `type`.
__device__ __forceinline__ float float_at(const u8* p, u32 type, size_t i) {
    if (type == 0) return ((const float*)p)[i];
    u16 h = ((const u16*)p)[i];
    return type == 1 ? f16_to_float(h) : bf16_to_float(h);
}

// Weights are read once a step: evict them first, so that activations and pages stay in the cache.
__device__ __forceinline__ uint4 stream16(const void* p) { return __ldcs((const uint4*)p); }
__device__ __forceinline__ uint2 stream8(const void* p) { return __ldcs((const uint2*)p); }
// Sub-word pieces of a line come through the first-level cache: their neighbours are read next.
__device__ __forceinline__ u32 load4(const u8* p) { return __ldg((const u32*)p); }
__device__ __forceinline__ u16 load2(const u8* p) { return __ldg((const u16*)p); }

// A kernel may be launched while the one before it still runs (programmatic dependent launch). Until this returns it
// may read weights and the step descriptor, nothing else, and write nothing. Without that launch attribute, or before
// compute capability 9.0, both do nothing.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ u32 step_rows(const StepRef& s, u32 wanted) {
    return wanted ? s.header->wanted : s.header->rows;
}

// e^x of the contract: 0 below -104, infinity above 89, within 2 ulp between.
__device__ __forceinline__ float contract_exp(float x) {
    const float given = x;
    x = fminf(fmaxf(x, -104.0f), 89.0f);
    float n = rintf(__fmul_rn(x, 1.44269504088896340736f));
    float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = __fmaf_rn(p, r, 1.3981999e-3f);
    p = __fmaf_rn(p, r, 8.333452e-3f);
    p = __fmaf_rn(p, r, 4.1665796e-2f);
    p = __fmaf_rn(p, r, 1.6666665e-1f);
    p = __fmaf_rn(p, r, 5.0000001e-1f);
    float y = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
    int i = (int)n, half = i >> 1;
    y = __fmul_rn(y, __int_as_float((half + 127) << 23));
    y = __fmul_rn(y, __int_as_float((i - half + 127) << 23));
    return given != given ? given : y;  // no branch: several run side by side
}

__device__ __forceinline__ float contract_tanh(float x) {
    return __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(contract_exp(__fadd_rn(x, x)), 1.0f)));
}

// The last five levels of the halving tree, over the lanes of a warp; lane 0 has the sum.
__device__ __forceinline__ float warp_tree(float v) {
#pragma unroll
    for (int n = 16; n > 0; n >>= 1) v = __fadd_rn(v, __shfl_down_sync(FULL, v, n));
    return v;
}

// The tree over eight neighbouring threads; all eight have the sum (addition commutes).
__device__ __forceinline__ float tree8(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 4));
    v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 2));
    return __fadd_rn(v, __shfl_xor_sync(FULL, v, 1));
}

// The tree over eight registers.
__device__ __forceinline__ float tree8(const float v[8]) {
    float a = __fadd_rn(v[0], v[4]), b = __fadd_rn(v[1], v[5]), c = __fadd_rn(v[2], v[6]), d = __fadd_rn(v[3], v[7]);
    return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}
