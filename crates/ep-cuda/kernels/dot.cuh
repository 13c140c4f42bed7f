// The contract's quantised dot: one block's integer dots and what they add to a lane.
#pragma once
#include "formats.cuh"

// An activation block in registers, in the order of the weight's words: high bytes, and low bytes if W16.
template <bool W16> struct ActBlock {
    int high[8], low[W16 ? 8 : 1];
    float d;
    int sum;
};

// Dot of words `from .. from + N`: exact in any order.
template <bool W16, int N> __device__ __forceinline__ int int_dot(const int* w, const ActBlock<W16>& x, int from) {
    int a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        a = __dp4a(w[from + i], x.high[from + i], a);
        if (W16) b = __dp4a(w[from + i], x.low[W16 ? from + i : 0], b);
    }
    return W16 ? a * 256 + b : a;
}

// Sum of the activation codes of words `from .. from + 4`.
template <bool W16> __device__ __forceinline__ int half_sum(const ActBlock<W16>& x, int from) {
    const int ones[8] = {0x01010101, 0x01010101, 0x01010101, 0x01010101,
                         0x01010101, 0x01010101, 0x01010101, 0x01010101};
    return int_dot<W16, 4>(ones, x, from);
}

// Natural order to PAIR order: words a, b become the even and the odd elements of both.
__device__ __forceinline__ void pair_words(int& a, int& b) {
    int even = __byte_perm(a, b, 0x6420), odd = __byte_perm(a, b, 0x7531);
    a = even;
    b = odd;
}
__device__ __forceinline__ int4 pair_order(int4 v) {
    pair_words(v.x, v.y);
    pair_words(v.z, v.w);
    return v;
}

// Adds one block to its lane, in the contract's order.
template <class F, bool W16>
__device__ __forceinline__ float add_block(float lane, const int w[8], const BlockFloats& f, const ActBlock<W16>& x) {
    if (F::HALVES) {
        int a = int_dot<W16, 4>(w, x, 0), b = int_dot<W16, 4>(w, x, 4);
        if (F::ZERO) {
            a -= f.z0 * half_sum<W16>(x, 0);
            b -= f.z1 * half_sum<W16>(x, 4);
        }
        lane = __fmaf_rn((float)a, __fmul_rn(f.s0, x.d), lane);
        return __fmaf_rn((float)b, __fmul_rn(f.s1, x.d), lane);
    }
    int a = int_dot<W16, 8>(w, x, 0);
    if (F::ZERO) a -= f.z0 * x.sum;
    lane = __fmaf_rn((float)a, __fmul_rn(f.s0, x.d), lane);
    if (F::MIN) lane = __fmaf_rn((float)x.sum, __fmul_rn(f.s1, x.d), lane);
    return lane;
}

// What goes with the step `d` of an activation block for planar codes: -8 times the sum of its codes, which takes the middle off; or
// the sum as a float, which the minimum is multiplied by.
template <class S> __device__ __forceinline__ int staged_sum(int sum) {
    return S::MIN ? __float_as_int((float)sum) : -8 * sum;
}

// Adds one block of planar 4-bit codes to its lane: `x` holds the activation's codes as PAIR formats want them, high bytes and then, if
// W16, low ones; `ds` is {d, staged_sum}.
template <class S, bool W16>
__device__ __forceinline__ float add_planar(float lane, uint4 codes, u32 flip, const int* x, int2 ds, Scale scale) {
    const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
    int high = S::MIN || W16 ? 0 : ds.y, low = S::MIN ? 0 : ds.y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int even = (int)((S::MIN ? w[i] : w[i] ^ flip) & 0x0f0f0f0fu);
        const int odd = (int)((S::MIN ? w[i] >> 4 : (w[i] >> 4) ^ flip) & 0x0f0f0f0fu);
        high = __dp4a(odd, x[2 * i + 1], __dp4a(even, x[2 * i], high));
        if (W16) low = __dp4a(odd, x[(W16 ? 8 : 0) + 2 * i + 1], __dp4a(even, x[(W16 ? 8 : 0) + 2 * i], low));
    }
    const int dot = W16 ? high * 256 + low : high;
    const float d = __int_as_float(ds.x);
    lane = __fmaf_rn((float)dot, __fmul_rn(scale.s, d), lane);
    if (S::MIN) lane = __fmaf_rn(__int_as_float(ds.y), __fmul_rn(scale.m, d), lane);
    return lane;
}

// Bias, then residual, then the store: output `column` of row `row`.
__device__ __forceinline__ void store_output(const LinearArgs& a, const LinearSegment& s, u32 r, u32 row, float v) {
    if (s.bias) v = __fadd_rn(v, float_at(s.bias, s.bias_type, r));
    float* out = a.out + (size_t)row * a.out_ld + s.column + r;
    if (s.accumulate) v = __fadd_rn(v, *out);
    *out = v;
}

// Finds unit `u` among the segments, which have ceil(rows / per) units each; `u` becomes the unit in the segment. A unit
// past the last is clamped to the last.
__device__ __forceinline__ u32 find_segment(const LinearArgs& a, u32 per, u32& u) {
    u32 s = 0;
    while (true) {
        u32 n = (a.segment[s].rows + per - 1) / per;
        if (u < n) return s;
        if (s + 1 == a.segments) {
            u = n - 1;
            return s;
        }
        u -= n;
        s++;
    }
}

__device__ __forceinline__ u32 count_units(const LinearArgs& a, u32 per) {
    u32 n = 0;
    for (u32 s = 0; s < a.segments; s++) n += (a.segment[s].rows + per - 1) / per;
    return n;
}
