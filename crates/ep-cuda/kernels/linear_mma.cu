// Quantised linear layer for many rows: exact integer tensor cores (m16n8k32, m16n8k16), compute capability 8.0 and up.
//
// A block makes 32 weight rows times NT * 8 token rows. Its eight warps are the contract's eight lanes: warp w takes the
// blocks of 32 columns w, w + 8, ... A warp reads and unpacks one block of each of the 32 weight rows (a lane a row) into
// its own shared memory, multiplies, and adds the scaled integer dots to its float accumulators; at the end the lanes are
// added up in the contract's tree. Compiled once for each format class (FORMAT).
//
// Launch: block 256, grid (32-row tiles of the segments, ceil(token rows / (NT * 8))). `x.ld` is a multiple of 8.
// Token rows between the step's and x.ld are read (whatever they hold) and their results dropped.
#include "dot.cuh"

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

// c = a * b, exact: a 16 x 32 row-major, b 32 x 8 column-major, both signed bytes.
__device__ __forceinline__ void mma32(int c[4], const int a[4], const int b[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
}
__device__ __forceinline__ void mma16(int c[4], int a0, int a1, int b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// One warp's weights: 32 rows of 32 codes in natural order (12 words a row keep the banks apart), and their floats.
struct WarpTile { int codes[32][12]; int floats[32][4]; };

__device__ __forceinline__ void natural_words(int& even, int& odd) {
    int a = __byte_perm(even, odd, 0x5140), b = __byte_perm(even, odd, 0x7362);
    even = a;
    odd = b;
}

template <class F, bool W16, int NT> __device__ __forceinline__ void gemm(const LinearArgs& a) {
    extern __shared__ int4 shared[];  // WarpTile[8]; at the end float [8][32][NT * 8 + 1]
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 kb = (a.x.cols + 31) / 32, ld = a.x.ld, first = blockIdx.y * NT * 8;
    const int PLANES = W16 ? 2 : 1;
    const FormatParams params = {a.x.cols, a.group_shift, a.flip, a.scale_half};
    u32 unit = blockIdx.x;
    const LinearSegment& s = a.segment[find_segment(a, 32, unit)];
    const u32 r0 = unit * 32;
    const typename F::Row row = F::row(s.planes, min(r0 + lane, s.rows - 1), params);
    WarpTile& tile = ((WarpTile*)shared)[warp];

    typename F::Raw raw;
    if (warp < kb) raw = F::load(row, warp, params);
    allow_next();
    wait_for_previous();
    const u32 token_rows = step_rows(a.step, a.wanted);
    if (first >= token_rows) return;

    float acc[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = 0.0f;

    for (u32 k = warp; k < kb; k += 8) {
        int w[8];
        BlockFloats f;
        F::unpack(raw, k, params, w, f);
        if (k + 8 < kb) raw = F::load(row, k + 8, params);
        if (F::PAIR) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) natural_words(w[i], w[i + 1]);
        }
        __syncwarp();
        *(int4*)&tile.codes[lane][0] = make_int4(w[0], w[1], w[2], w[3]);
        *(int4*)&tile.codes[lane][4] = make_int4(w[4], w[5], w[6], w[7]);
        *(int4*)&tile.floats[lane][0] =
            make_int4(__float_as_int(f.s0), F::HALVES || F::MIN ? __float_as_int(f.s1) : 0, F::ZERO ? f.z0 : 0,
                      F::ZERO && F::HALVES ? f.z1 : 0);
        __syncwarp();
        int aw[2][4];
        int4 fl[2][2];  // floats of rows g and g + 8 of each tile of 16
#pragma unroll
        for (int i = 0; i < 2; i++) {
            aw[i][0] = tile.codes[i * 16 + g][t];
            aw[i][1] = tile.codes[i * 16 + g + 8][t];
            aw[i][2] = tile.codes[i * 16 + g][t + 4];
            aw[i][3] = tile.codes[i * 16 + g + 8][t + 4];
            fl[i][0] = *(int4*)&tile.floats[i * 16 + g][0];
            fl[i][1] = *(int4*)&tile.floats[i * 16 + g + 8][0];
        }
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const u32 column = first + j * 8;
            if (column >= ld) break;
            const int* b = (const int*)a.x.codes + ((size_t)k * ld + column + g) * (PLANES * 8);
            int high[2] = {__ldcg(b + t), __ldcg(b + t + 4)}, low[2] = {0, 0};
            if (W16) {
                low[0] = __ldcg(b + 8 + t);
                low[1] = __ldcg(b + 12 + t);
            }
            // {d, sum} of token rows 2 t and 2 t + 1: accumulators 0, 2 and 1, 3.
            const int4 ds = __ldcg((const int4*)(a.x.steps + (size_t)k * ld + column + 2 * t));
            const float d[2] = {__int_as_float(ds.x), __int_as_float(ds.z)};
            const int sum[2] = {ds.y, ds.w};
            int half_sums[2][4];
            if (F::HALVES && F::ZERO) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int e[4];
                    mma16(half_sums[h], 0x01010101, 0x01010101, high[h]);
                    if (W16) {
                        mma16(e, 0x01010101, 0x01010101, low[h]);
#pragma unroll
                        for (int q = 0; q < 4; q++) half_sums[h][q] = half_sums[h][q] * 256 + e[q];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int h = 0; h < (F::HALVES ? 2 : 1); h++) {
                    int c[4], e[4];
                    if (F::HALVES) {
                        mma16(c, aw[i][2 * h], aw[i][2 * h + 1], high[h]);
                        if (W16) mma16(e, aw[i][2 * h], aw[i][2 * h + 1], low[h]);
                    } else {
                        mma32(c, aw[i], high);
                        if (W16) mma32(e, aw[i], low);
                    }
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        int v = W16 ? c[q] * 256 + e[q] : c[q];
                        const int4& m = fl[i][q >> 1];
                        if (F::ZERO) v -= (h ? m.w : m.z) * (F::HALVES ? half_sums[h][q] : sum[q & 1]);
                        const float scale = __int_as_float(h ? m.y : m.x);
                        acc[i][j][q] = __fmaf_rn((float)v, __fmul_rn(scale, d[q & 1]), acc[i][j][q]);
                        if (F::MIN)
                            acc[i][j][q] = __fmaf_rn((float)sum[q & 1], __fmul_rn(__int_as_float(m.y), d[q & 1]),
                                                     acc[i][j][q]);
                    }
                }
            }
        }
    }
    __syncthreads();
    const int P = NT * 8 + 1;
    float* lanes = (float*)shared;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++)
                lanes[(warp * 32 + i * 16 + g + (q >> 1) * 8) * P + j * 8 + 2 * t + (q & 1)] = acc[i][j][q];
    __syncthreads();
    for (u32 e = threadIdx.x; e < 32 * NT * 8; e += 256) {
        const u32 r = e % 32, c = e / 32;
        if (r0 + r >= s.rows || first + c >= token_rows) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = lanes[(i * 32 + r) * P + c];
        store_output(a, s, r0 + r, first + c, tree8(v));
    }
}

#define GEMM(NT)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, FORMAT::HALVES ? 1 : 2) gemm_w16_n##NT(                         \
        const __grid_constant__ LinearArgs a) {                                                                       \
        gemm<FORMAT, true, NT>(a);                                                                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, FORMAT::HALVES ? 1 : 2) gemm_w8_n##NT(                          \
        const __grid_constant__ LinearArgs a) {                                                                       \
        gemm<FORMAT, false, NT>(a);                                                                                   \
    }
GEMM(1)
GEMM(4)

#endif
