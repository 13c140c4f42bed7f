// Unquantised linear layer (F32, F16, BF16): 64 lanes of fma, element k in lane k % 64, then the halving tree.
//
// Eight threads share a weight row: thread t holds lanes 8 t .. 8 t + 7, which are one 16-byte load of 16-bit weights.
// Launch: block 256 (32 weight rows a turn), grid (any, ceil(token rows / R)). The activation is read as floats through
// the cache. Rows of any length and alignment: VECTOR needs cols % 8 == 0.
#include "dot.cuh"

template <int TYPE, bool VECTOR>
__device__ __forceinline__ void weights8(const u8* row, u32 k, u32 cols, float w[8]) {
    if (VECTOR) {
        if (TYPE == 0) {
            uint4 a = stream16(row + (size_t)k * 4), b = stream16(row + (size_t)k * 4 + 16);
            const u32 x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = __uint_as_float(x[i]);
        } else {
            uint4 a = stream16(row + (size_t)k * 2);
            const u32 x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[2 * i] = TYPE == 1 ? f16_to_float((u16)x[i]) : bf16_to_float((u16)x[i]);
                w[2 * i + 1] = TYPE == 1 ? f16_to_float((u16)(x[i] >> 16)) : bf16_to_float((u16)(x[i] >> 16));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = k + i < cols ? float_at(row, TYPE, k + i) : 0.0f;
    }
}

template <int TYPE, bool VECTOR, int R> __device__ __forceinline__ void dense(const LinearArgs& a) {
    allow_next();
    wait_for_previous();
    const u32 token_rows = step_rows(a.step, a.wanted), first = blockIdx.y * R;
    if (first >= token_rows) return;
    const u32 cols = a.x.cols, t = threadIdx.x & 7, units = count_units(a, 1);
    const size_t row_bytes = (size_t)cols * (TYPE == 0 ? 4 : 2);
    for (u32 base = blockIdx.x * 32; base < units; base += gridDim.x * 32) {
        u32 u = base + (threadIdx.x >> 3);
        const bool mine = u < units;
        u = min(u, units - 1);
        const LinearSegment& s = a.segment[find_segment(a, 1, u)];
        const u8* row = s.planes[0] + u * row_bytes;
        float acc[R][8];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int i = 0; i < 8; i++) acc[r][i] = 0.0f;
#pragma unroll 2
        for (u32 k = 8 * t; k < cols; k += 64) {
            float w[8];
            weights8<TYPE, VECTOR>(row, k, cols, w);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float* x = a.x.floats + (size_t)min(first + r, token_rows - 1) * cols + k;
                if (VECTOR) {
                    float4 p = *(const float4*)x, q = *(const float4*)(x + 4);
                    const float v[8] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int i = 0; i < 8; i++) acc[r][i] = __fmaf_rn(w[i], v[i], acc[r][i]);
                } else {
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (k + i < cols) acc[r][i] = __fmaf_rn(w[i], x[i], acc[r][i]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            // Lanes 32, 16 and 8 apart are 4, 2 and 1 threads apart; then the eight lanes of a thread.
#pragma unroll
            for (int i = 0; i < 8; i++) acc[r][i] = tree8(acc[r][i]);
            float v = tree8(acc[r]);
            if (t == 0 && mine && first + r < token_rows) store_output(a, s, u, first + r, v);
        }
    }
}

#define DENSE(NAME, TYPE, R)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) dense_##NAME##_r##R(const __grid_constant__ LinearArgs a) {     \
        dense<TYPE, true, R>(a);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) dense_##NAME##_odd_r##R(const __grid_constant__ LinearArgs a) { \
        dense<TYPE, false, R>(a);                                                                                     \
    }
DENSE(f32, 0, 1)
DENSE(f32, 0, 4)
DENSE(f16, 1, 1)
DENSE(f16, 1, 4)
DENSE(bf16, 2, 1)
DENSE(bf16, 2, 4)
