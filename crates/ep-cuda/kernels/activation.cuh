// Quantisation of activations: blocks of 32, one element a lane of a warp.
#pragma once
#include "common.cuh"

// One element's code, and its block's step size and sum of codes (in every lane).
struct Quantised { int code, sum; float d; };

// What a block's codes are made with: each is `rint(factor * value)`, and `d * code` is about the value. From the largest
// magnitude of the block, as a pattern without sign: infinity and NaN are larger than every finite one.
struct QuantiseStep { float d, factor; };

template <bool W16> __device__ __forceinline__ QuantiseStep quantise_step(u32 largest) {
    const float max_code = W16 ? 32512.0f : 127.0f;
    const float amax = __uint_as_float(largest), inv = __fdiv_rn(max_code, amax);
    // Codes that can't be made are zero, whatever they are a factor of: also of infinity, which converts to zero as NaN.
    QuantiseStep step = {0.0f, 0.0f};
    if (largest >= 0x7f800000u) {
        step.d = amax;
    } else if ((__float_as_uint(inv) & 0x7fffffffu) < 0x7f800000u) {
        step.d = __fdiv_rn(amax, max_code);
        step.factor = inv;
    }
    return step;
}

template <bool W16> __device__ __forceinline__ Quantised quantise32(float v) {
    u32 bits = __float_as_uint(v) & 0x7fffffffu;
#if __CUDA_ARCH__ >= 800
    bits = __reduce_max_sync(FULL, bits);
#else
#pragma unroll
    for (int n = 16; n > 0; n >>= 1) bits = max(bits, __shfl_xor_sync(FULL, bits, n));
#endif
    const QuantiseStep step = quantise_step<W16>(bits);
    Quantised out = {__float2int_rn(__fmul_rn(v, step.factor)), 0, step.d};
#if __CUDA_ARCH__ >= 800
    out.sum = __reduce_add_sync(FULL, out.code);
#else
    out.sum = out.code;
#pragma unroll
    for (int n = 16; n > 0; n >>= 1) out.sum += __shfl_xor_sync(FULL, out.sum, n);
#endif
    return out;
}

// The two signed bytes of a 16-bit code.
__device__ __forceinline__ int high_byte(int code) { return (code + 128) >> 8; }
__device__ __forceinline__ int low_byte(int code) { return code - 256 * high_byte(code); }

// Quantises block k of row r into an activation in memory.
template <bool W16> __device__ __forceinline__ void quantise_block(const Activation& out, u32 r, u32 k, float v) {
    const u32 lane = threadIdx.x & 31;
    const Quantised q = quantise32<W16>(v);
    const size_t at = (size_t)k * out.ld + r;
    if (W16) {
        out.codes[at * 64 + lane] = (u8)high_byte(q.code);
        out.codes[at * 64 + 32 + lane] = (u8)low_byte(q.code);
    } else {
        out.codes[at * 32 + lane] = (u8)q.code;
    }
    if (lane == 0) out.steps[at] = make_int2(__float_as_int(q.d), q.sum);
}

// The contract's SwiGLU.
__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, contract_exp(-gate))), up);
}
