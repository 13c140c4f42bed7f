// How a 32-wide block of a weight row is read and unpacked, one struct a format class.
//
// A format class has: Row (where a row's planes are), Raw (a block's bytes in registers), load, unpack. unpack gives
// eight words of four signed bytes and the block's floats. Natural order is element 4 i + j in byte j of word i; a PAIR
// format puts the even elements of 8 i .. 8 i + 7 in word 2 i and the odd ones in word 2 i + 1, which is what masking
// nibbles yields. Loads stay inside the planes and are aligned for any slab whose planes start at multiples of 16.
//
// ZERO: the codes of unpack still hold the zero point z; the dot takes off z times the sum of the activation codes.
// HALVES: each half of 16 elements (words 0-3, 4-7) has a scale (and zero point) of its own.
// MIN: there is a float minimum.
#pragma once
#include "scales.cuh"

struct FormatParams { u32 cols, group_shift, flip, scale_half; };

struct BlockFloats {
    float s0;  // scale of the block, or of its first half
    float s1;  // scale of the second half, or the minimum
    int z0, z1;
};

// Planar codes of 4 bits, scales for 32 or more columns. SH: binary16 scales. ZP: zero points in plane 2.
template <bool SH, bool ZP> struct Planar4 {
    static const bool PAIR = true, HALVES = false, MIN = false, ZERO = true;
    struct Row { const u8 *w, *s, *z; };
    struct Raw { uint4 w; u32 s; u32 z; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        u32 groups = (p.cols + (1u << p.group_shift) - 1) >> p.group_shift;
        Row o;
        o.w = planes[0] + r * ((size_t)groups << (p.group_shift - 1));
        o.s = planes[1] + r * groups * (SH ? 2 : 4);
        o.z = ZP ? planes[2] + r * ((groups + 1) / 2) : nullptr;
        return o;
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams& p) {
        u32 g = k >> (p.group_shift - 5);
        Raw o;
        o.w = stream16(r.w + (size_t)k * 16);
        o.s = SH ? (u32)load2(r.s + g * 2) : load4(r.s + g * 4);
        o.z = ZP ? (u32)__ldg(r.z + (g >> 1)) : 0;
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32 k, const FormatParams& p, int w[8],
                                                  BlockFloats& f) {
        const u32 x[4] = {o.w.x, o.w.y, o.w.z, o.w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = (int)((x[i] ^ p.flip) & 0x0f0f0f0fu);
            w[2 * i + 1] = (int)(((x[i] >> 4) ^ p.flip) & 0x0f0f0f0fu);
        }
        f.s0 = SH ? f16_to_float((u16)o.s) : __uint_as_float(o.s);
        f.z0 = ZP ? (int)((o.z >> (((k >> (p.group_shift - 5)) & 1) * 4)) & 15) : 8;
    }
};

// Planar codes of 4 bits with a float minimum, scales as S says.
template <class S> struct Planar4Min {
    static const bool PAIR = true, HALVES = false, MIN = true, ZERO = false;
    struct Row { const u8 *w, *s; };
    struct Raw { uint4 w; Scale f; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        const u32 kb = p.cols / 32;
        return {planes[0] + r * ((size_t)kb * 16), planes[1] + r * ((size_t)kb * S::BYTES)};
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        return {stream16(r.w + (size_t)k * 16), S::read(r.s + k / 8 * (8 * S::BYTES), k % 8)};
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        const u32 x[4] = {o.w.x, o.w.y, o.w.z, o.w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = (int)(x[i] & 0x0f0f0f0fu);
            w[2 * i + 1] = (int)((x[i] >> 4) & 0x0f0f0f0fu);
        }
        f.s0 = o.f.s;
        f.s1 = o.f.m;
    }
};

// Six bits in planes, all of a row one after the other: low bits, high bits, signed scales for every 16 columns, then a binary32 step
// for every 256.
struct Planar6 {
    static const bool PAIR = true, HALVES = true, MIN = false, ZERO = false;
    struct Row { const u8* w; };
    struct Raw { uint4 low; uint2 high; u32 scales; float d; };
    static __device__ __forceinline__ size_t row_bytes(u32 cols) { return cols / 16 * 13 + (cols / 64 + 15) / 16 * 16; }
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        return {planes[0] + r * row_bytes(p.cols)};
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams& p) {
        return {stream16(r.w + (size_t)k * 16), stream8(r.w + p.cols / 2 + (size_t)k * 8), load2(r.w + p.cols / 4 * 3 + k * 2),
                __uint_as_float(load4(r.w + p.cols / 16 * 13 + k / 8 * 4))};
    }
    // Codes less 32 as signed bytes; `v` holds six bits in each byte.
    static __device__ __forceinline__ u32 centred(u32 v) {
        v ^= 0x20202020u;
        return v | (v & 0x20202020u) * 6u;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        const u32 x[4] = {o.low.x, o.low.y, o.low.z, o.low.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 h = (i < 2 ? o.high.x : o.high.y) >> (i & 1) * 4;
            w[2 * i] = (int)centred((x[i] & 0x0f0f0f0fu) | (h & 0x03030303u) << 4);
            w[2 * i + 1] = (int)centred((x[i] >> 4 & 0x0f0f0f0fu) | (h >> 2 & 0x03030303u) << 4);
        }
        f.s0 = __fmul_rn(o.d, (float)(signed char)(o.scales & 255));
        f.s1 = __fmul_rn(o.d, (float)(signed char)(o.scales >> 8));
    }
};

__device__ __forceinline__ float planar_scale(const u8* s, u32 g, u32 half) {
    return half ? f16_to_float(load2(s + g * 2)) : __uint_as_float(load4(s + g * 4));
}

// Planar codes of 8 bits, scales for 32 or more columns. `flip` turns unsigned codes into signed ones; so the zero
// point of plane 2 loses 128 too.
struct Planar8 {
    static const bool PAIR = false, HALVES = false, MIN = false, ZERO = true;
    struct Row { const u8 *w, *s, *z; };
    struct Raw { uint4 a, b; float s; int z; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        u32 groups = (p.cols + (1u << p.group_shift) - 1) >> p.group_shift;
        Row o;
        o.w = planes[0] + r * ((size_t)groups << p.group_shift);
        o.s = planes[1] + r * groups * (p.scale_half ? 2 : 4);
        o.z = planes[2] ? planes[2] + r * groups : nullptr;
        return o;
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams& p) {
        u32 g = k >> (p.group_shift - 5);
        Raw o;
        o.a = stream16(r.w + (size_t)k * 32);
        o.b = stream16(r.w + (size_t)k * 32 + 16);
        o.s = planar_scale(r.s, g, p.scale_half);
        o.z = r.z ? (int)__ldg(r.z + g) - 128 : 0;
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams& p, int w[8], BlockFloats& f) {
        const u32 x[8] = {o.a.x, o.a.y, o.a.z, o.a.w, o.b.x, o.b.y, o.b.z, o.b.w};
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = (int)(x[i] ^ p.flip);
        f.s0 = o.s;
        f.z0 = o.z;
    }
};

// Planar codes with a scale for every 16 columns. The last block of a row may lack its second half: its scale is then
// the last one, its codes meet activation codes that are zero.
template <int BITS> struct PlanarHalves {
    static const bool PAIR = BITS == 4, HALVES = true, MIN = false, ZERO = true;
    struct Row { const u8 *w, *s, *z; };
    struct Raw { uint4 a, b; float s0, s1; int z0, z1; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        u32 groups = (p.cols + 15) / 16;
        Row o;
        o.w = planes[0] + r * ((size_t)groups * (BITS * 2));
        o.s = planes[1] + r * groups * (p.scale_half ? 2 : 4);
        o.z = planes[2] ? planes[2] + r * ((groups * BITS + 7) / 8) : nullptr;
        return o;
    }
    static __device__ __forceinline__ int zero(const Row& r, u32 g) {
        if (BITS == 4) return r.z ? (int)((__ldg(r.z + (g >> 1)) >> ((g & 1) * 4)) & 15) : 8;
        return r.z ? (int)__ldg(r.z + g) - 128 : 0;
    }
    static __device__ __forceinline__ uint4 half(const Row& r, u32 g) {
        if (BITS == 8) return stream16(r.w + (size_t)g * 16);
        uint2 v = stream8(r.w + (size_t)g * 8);
        return make_uint4(v.x, v.y, 0, 0);
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams& p) {
        u32 groups = (p.cols + 15) / 16, g = 2 * k;
        Raw o;
        o.a = half(r, g);
        o.s0 = planar_scale(r.s, g, p.scale_half);
        o.z0 = zero(r, g);
        bool second = g + 1 < groups;
        o.b = second ? half(r, g + 1) : make_uint4(0, 0, 0, 0);
        o.s1 = second ? planar_scale(r.s, g + 1, p.scale_half) : o.s0;
        o.z1 = second ? zero(r, g + 1) : 0;
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams& p, int w[8], BlockFloats& f) {
        if (BITS == 8) {
            const u32 x[8] = {o.a.x, o.a.y, o.a.z, o.a.w, o.b.x, o.b.y, o.b.z, o.b.w};
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = (int)(x[i] ^ p.flip);
        } else {
            const u32 x[4] = {o.a.x, o.a.y, o.b.x, o.b.y};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[2 * i] = (int)((x[i] ^ p.flip) & 0x0f0f0f0fu);
                w[2 * i + 1] = (int)(((x[i] >> 4) ^ p.flip) & 0x0f0f0f0fu);
            }
        }
        f.s0 = o.s0;
        f.s1 = o.s1;
        f.z0 = o.z0;
        f.z1 = o.z1;
    }
};

// A block that starts with two bytes and goes on with N words, at any even address: N words and one half-word are read.
template <int N> struct Odd { u32 w[N]; u32 head; };
template <int N> __device__ __forceinline__ Odd<N> load_odd(const u8* a) {
    bool up = ((u64)a & 2) != 0;
    const u8* p = a + (up ? 2 : 0);
    u32 x[N];
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = load4(p + 4 * i);
    u32 h = load2(a + (up ? 0 : 4 * N));
    Odd<N> o;
    o.head = up ? h : x[0] & 0xffffu;
#pragma unroll
    for (int i = 0; i < N; i++) {
        u32 shifted = __funnelshift_r(x[i], i + 1 < N ? x[i + 1] : h, 16);
        o.w[i] = up ? x[i] : shifted;
    }
    return o;
}

// 32 bytes at any even address.
__device__ __forceinline__ void load_even32(const u8* a, u32 w[8]) {
    if (((u64)a & 2) == 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = load4(a + 4 * i);
    } else {
        u32 low = load2(a);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 x = i < 7 ? load4(a + 2 + 4 * i) : (u32)load2(a + 30);
            w[i] = low | x << 16;
            low = x >> 16;
        }
    }
}

// Low nibbles are elements 0 to 15, high nibbles 16 to 31.
__device__ __forceinline__ void split_nibbles(const u32 x[4], int w[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = (int)(x[i] & 0x0f0f0f0fu);
        w[i + 4] = (int)((x[i] >> 4) & 0x0f0f0f0fu);
    }
}

// Bit j of the four low bits of n goes to bit 4 of byte j.
__device__ __forceinline__ int fifth_bits(u32 n) { return (int)((((n & 15u) * 0x00204081u) & 0x01010101u) << 4); }

// `BYTES` a block, one after the other, all in plane 0.
template <int BYTES> struct Blocks {
    struct Row { const u8* w; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        Row o;
        o.w = planes[0] + r * ((size_t)(p.cols / 32) * BYTES);
        return o;
    }
};

struct Q4_0 : Blocks<18> {
    static const bool PAIR = false, HALVES = false, MIN = false, ZERO = true;
    typedef Odd<4> Raw;
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        return load_odd<4>(r.w + (size_t)k * 18);
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        split_nibbles(o.w, w);
        f.s0 = f16_to_float((u16)o.head);
        f.z0 = 8;
    }
};

struct Q4_1 : Blocks<20> {
    static const bool PAIR = false, HALVES = false, MIN = true, ZERO = false;
    struct Raw { u32 w[4]; u32 head; };
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        const u8* a = r.w + (size_t)k * 20;
        Raw o;
        o.head = load4(a);
#pragma unroll
        for (int i = 0; i < 4; i++) o.w[i] = load4(a + 4 + 4 * i);
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        split_nibbles(o.w, w);
        f.s0 = f16_to_float((u16)o.head);
        f.s1 = f16_to_float((u16)(o.head >> 16));
    }
};

struct Q5_0 : Blocks<22> {
    static const bool PAIR = false, HALVES = false, MIN = false, ZERO = true;
    typedef Odd<5> Raw;
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        return load_odd<5>(r.w + (size_t)k * 22);
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        split_nibbles(o.w + 1, w);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] |= fifth_bits(o.w[0] >> (4 * i));
        f.s0 = f16_to_float((u16)o.head);
        f.z0 = 16;
    }
};

struct Q5_1 : Blocks<24> {
    static const bool PAIR = false, HALVES = false, MIN = true, ZERO = false;
    struct Raw { u32 w[6]; };
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        Raw o;
#pragma unroll
        for (int i = 0; i < 6; i++) o.w[i] = load4(r.w + (size_t)k * 24 + 4 * i);
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
        split_nibbles(o.w + 2, w);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] |= fifth_bits(o.w[1] >> (4 * i));
        f.s0 = f16_to_float((u16)o.w[0]);
        f.s1 = f16_to_float((u16)(o.w[0] >> 16));
    }
};

struct Q8_0 : Blocks<34> {
    static const bool PAIR = false, HALVES = false, MIN = false, ZERO = false;
    typedef Odd<8> Raw;
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        return load_odd<8>(r.w + (size_t)k * 34);
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32, const FormatParams&, int w[8], BlockFloats& f) {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = (int)o.w[i];
        f.s0 = f16_to_float((u16)o.head);
    }
};

// The super-blocks of 256: 16 bytes { d, dmin, twelve bytes of 6-bit scales and minima }, then codes. FIVE: 32 bytes of
// fifth bits before the nibbles. Source of the packing: ggml, `ggml-quants.c`, `get_scale_min_k4`.
template <bool FIVE> struct SuperK {
    static const bool PAIR = false, HALVES = false, MIN = true, ZERO = false;
    static const u32 BYTES = FIVE ? 176 : 144;
    struct Row { const u8* w; };
    struct Raw { uint4 head, a, b, ha, hb; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        Row o;
        o.w = planes[0] + r * ((size_t)(p.cols / 256) * BYTES);
        return o;
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        const u8* super = r.w + (size_t)(k / 8) * BYTES;
        const u8* codes = super + (FIVE ? 48 : 16) + (k % 8 / 2) * 32;
        Raw o;
        o.head = __ldg((const uint4*)super);
        o.a = __ldg((const uint4*)codes);
        o.b = __ldg((const uint4*)codes + 1);
        if (FIVE) {
            o.ha = __ldg((const uint4*)(super + 16));
            o.hb = __ldg((const uint4*)(super + 32));
        }
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32 k, const FormatParams&, int w[8], BlockFloats& f) {
        const u32 x[8] = {o.a.x, o.a.y, o.a.z, o.a.w, o.b.x, o.b.y, o.b.z, o.b.w};
        u32 j = k % 8, shift = (j & 1) * 4;
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = (int)((x[i] >> shift) & 0x0f0f0f0fu);
        if (FIVE) {
            const u32 h[8] = {o.ha.x, o.ha.y, o.ha.z, o.ha.w, o.hb.x, o.hb.y, o.hb.z, o.hb.w};
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] |= (int)(((h[i] >> j) & 0x01010101u) << 4);
        }
        u32 at = (j & 3) * 8;
        u32 q0 = (o.head.y >> at) & 255, q1 = (o.head.z >> at) & 255, q2 = (o.head.w >> at) & 255;
        u32 sc = j < 4 ? q0 & 63 : (q2 & 15) | (q0 >> 6) << 4;
        u32 m = j < 4 ? q1 & 63 : q2 >> 4 | (q1 >> 6) << 4;
        f.s0 = __fmul_rn(f16_to_float((u16)o.head.x), (float)sc);
        f.s1 = -__fmul_rn(f16_to_float((u16)(o.head.x >> 16)), (float)m);
    }
};

struct Q6_K {
    static const bool PAIR = false, HALVES = true, MIN = false, ZERO = false;
    struct Row { const u8* w; };
    struct Raw { u32 low[8], high[8]; u32 scales, d; };
    static __device__ __forceinline__ Row row(const u8* const* planes, size_t r, const FormatParams& p) {
        Row o;
        o.w = planes[0] + r * ((size_t)(p.cols / 256) * 210);
        return o;
    }
    static __device__ __forceinline__ Raw load(const Row& r, u32 k, const FormatParams&) {
        const u8* super = r.w + (size_t)(k / 8) * 210;
        u32 group = k % 8 / 4;
        Raw o;
        load_even32(super + group * 64 + (k & 1) * 32, o.low);
        load_even32(super + 128 + group * 32, o.high);
        o.scales = load2(super + 192 + (k % 8) * 2);
        o.d = load2(super + 208);
        return o;
    }
    static __device__ __forceinline__ void unpack(const Raw& o, u32 k, const FormatParams&, int w[8], BlockFloats& f) {
        u32 j = k % 4, shift = j < 2 ? 0 : 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 v = ((o.low[i] >> shift) & 0x0f0f0f0fu) | ((o.high[i] >> (2 * j)) & 0x03030303u) << 4;
            v ^= 0x20202020u;                           // v - 32 in six bits; then bit 5 is the sign
            w[i] = (int)(v | (v & 0x20202020u) * 6u);
        }
        float d = f16_to_float((u16)o.d);
        f.s0 = __fmul_rn(d, (float)(signed char)(o.scales & 255));
        f.s1 = __fmul_rn(d, (float)(signed char)(o.scales >> 8));
    }
};
