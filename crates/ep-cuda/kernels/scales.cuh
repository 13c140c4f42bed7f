// How the scales and float minima of planar 4-bit codes lie in plane 1, one struct a kind. A group is those of eight blocks of 32
// columns of a weight row, the contract's eight lanes in order.
//
// BYTES: of a block; a group has eight times as many, and starts at a multiple of 4, or of 16 for ScalesK. MIN: there is a float
// minimum, and codes are unsigned; else 8 is taken off each code.
#pragma once
#include "common.cuh"

// What block `lane` of a group adds: scale, and minimum where there is one.
struct Scale { float s, m; };

struct ScalesHalf {
    static const int BYTES = 2;
    static const bool MIN = false;
    static __device__ __forceinline__ Scale read(const u8* group, u32 lane) {
        return {f16_to_float(*(const u16*)(group + lane * 2)), 0.0f};
    }
};

struct ScalesFloat {
    static const int BYTES = 4;
    static const bool MIN = false;
    static __device__ __forceinline__ Scale read(const u8* group, u32 lane) { return {*(const float*)(group + lane * 4), 0.0f}; }
};

// Binary16: scale, minimum.
struct ScalesMin {
    static const int BYTES = 4;
    static const bool MIN = true;
    static __device__ __forceinline__ Scale read(const u8* group, u32 lane) {
        const u32 v = *(const u32*)(group + lane * 4);
        return {f16_to_float((u16)v), f16_to_float((u16)(v >> 16))};
    }
};

// A number below 2^23 as a float, without a conversion.
__device__ __forceinline__ float small_float(u32 n) { return __fsub_rn(__uint_as_float(0x4b000000u | n), 8388608.0f); }

// A super-block: binary16 d and dmin, then for each block a byte, the scale in six bits and the minimum's low two, then for each a
// nibble, the minimum's high four. Both products are exact.
__device__ __forceinline__ Scale super_scale(uint4 v, u32 lane) {
    const u32 packed = __byte_perm(v.y, v.z, lane);
    const u32 m = packed >> 6 & 3u | (v.w >> lane * 4 & 15u) << 2;
    return {__fmul_rn(f16_to_float((u16)v.x), small_float(packed & 63u)),
            __fmul_rn(-f16_to_float((u16)(v.x >> 16)), small_float(m))};
}

// Of six bits: signed bytes for both halves of a block; their steps lie elsewhere.
struct ScalesSix {
    static const int BYTES = 2;
    static const bool MIN = false;
    static __device__ __forceinline__ Scale read(const u8* group, u32 lane) {
        const u32 v = *(const u16*)(group + lane * 2);
        return {(float)(signed char)(v & 255u), (float)(signed char)(v >> 8)};
    }
};

struct ScalesK {
    static const int BYTES = 2;
    static const bool MIN = true;
    static __device__ __forceinline__ Scale read(const u8* group, u32 lane) { return super_scale(*(const uint4*)group, lane); }
};
