// Quantised linear layer for many rows at memory speed: planar 4-bit codes, a scale for every 32 columns, no zero points.
//
// The same division of work as linear_mma.cu (eight warps are the eight lanes, tensor cores give the exact dots), but
// weights come through a ring of STAGES pieces in shared memory, filled by asynchronous copies of whole lines, and the
// integer results become floats without a conversion: the accumulator of the tensor cores starts at the bits of 1.5 * 2^23
// less the zero points' part, so that its bits read as a float are 1.5 * 2^23 + dot, exactly, as long as |dot| < 2^22. The
// dots of the high and low bytes, each below 2^17, are joined by an fma that is exact (|256 high + low| < 2^24).
//
// A block makes M * 16 weight rows times NT * 8 token rows. Launch: block 256, grid (row tiles of the segments,
// ceil(token rows / (NT * 8))), dynamic shared memory pipe_shared (src/launch/linear.rs). `x.ld` is a multiple of 8.
// Compute capability 8.0 and up. Compiled once for each format class (FORMAT) that has the option PIPE.
#include "dot.cuh"

#if defined(PIPE) && __CUDA_ARCH__ >= 800

#define MAGIC 0x4b400000
#define MAGIC_FLOAT 12582912.0f
#define CHUNK 16                        // blocks of 32 columns in a stage
#define CODE_STRIDE (CHUNK * 16 + 16)   // bytes of a row's codes in a stage: 16 more keep the banks apart

// c = a * b + {c0, c1, c0, c1}.
__device__ __forceinline__ void mma(int c[4], const u32 a[4], u32 b0, u32 b1, int c0, int c1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%10,%11};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}

// Copies `n` of 16 bytes (the rest becomes zero) without waiting.
__device__ __forceinline__ void copy16(void* to, const void* from, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(n)
                 : "memory");
}

template <bool HALF, bool W16, int M, int NT, int STAGES> __device__ __forceinline__ void pipe(const LinearArgs& a) {
    extern __shared__ __align__(16) u8 ring[];
    const int R = M * 16, SCALE = HALF ? 2 : 4;
    const int PIECES = CHUNK * SCALE / 16 + 1, SCALE_STRIDE = PIECES * 16;  // a row's scales, wherever they start
    const int STAGE = R * (CODE_STRIDE + SCALE_STRIDE);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 kb = (a.x.cols + 31) / 32, ld = a.x.ld, first = blockIdx.y * NT * 8, stages = (kb + CHUNK - 1) / CHUNK;
    u32 unit = blockIdx.x;
    const LinearSegment& s = a.segment[find_segment(a, R, unit)];
    const u32 r0 = unit * R;
    const u64 scales_end = (u64)s.rows * kb * SCALE;

    auto fill = [&](u32 stage) {
        u8* codes = ring + stage % STAGES * STAGE;
        u8* scales = codes + R * CODE_STRIDE;
#pragma unroll
        for (int p = threadIdx.x; p < R * CHUNK; p += 256) {
            const u32 row = p / CHUNK, kk = p % CHUNK, k = stage * CHUNK + kk;
            if (k < kb)
                copy16(codes + row * CODE_STRIDE + kk * 16,
                       s.planes[0] + ((u64)min(r0 + row, s.rows - 1) * kb + k) * 16, 16);
        }
        for (int p = threadIdx.x; p < R * PIECES; p += 256) {
            const u32 row = p / PIECES, j = p % PIECES;
            const u64 from = (((u64)min(r0 + row, s.rows - 1) * kb + stage * CHUNK) * SCALE & ~15ull) + j * 16;
            if (from < scales_end)
                copy16(scales + row * SCALE_STRIDE + j * 16, s.planes[1] + from, (int)min((u64)16, scales_end - from));
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) fill(i);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // Where the scales of this thread's rows start in a stage's piece.
    u32 shift[M][2];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            shift[i][h] = (u32)((u64)min(r0 + i * 16 + h * 8 + g, s.rows - 1) * kb * SCALE & 15);
    wait_for_previous();
    allow_next();
    const u32 token_rows = step_rows(a.step, a.wanted);
    if (first >= token_rows) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }

    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = 0.0f;

    for (u32 stage = 0; stage < stages; stage++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        if (stage + STAGES - 1 < stages) fill(stage + STAGES - 1);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const u8* codes = ring + stage % STAGES * STAGE;
        const u8* scales = codes + R * CODE_STRIDE;
#pragma unroll
        for (int half = 0; half < CHUNK / 8; half++) {
            const u32 kk = half * 8 + warp, k = stage * CHUNK + kk;
            if (k >= kb) break;
            u32 w[M][4];
            float scale[M][2];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 row = i * 16 + h * 8 + g;
                    const u32 x = *(const u32*)(codes + row * CODE_STRIDE + kk * 16 + t * 4);
                    w[i][h] = (x ^ a.flip) & 0x0f0f0f0fu;
                    w[i][h + 2] = ((x >> 4) ^ a.flip) & 0x0f0f0f0fu;
                    const u8* from = scales + row * SCALE_STRIDE + shift[i][h] + kk * SCALE;
                    scale[i][h] = HALF ? f16_to_float(*(const u16*)from) : *(const float*)from;
                }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const u32 column = first + j * 8;
                if (column >= ld) break;
                // The even elements of 8 t .. 8 t + 7 meet the low nibbles of word t, the odd ones the high nibbles.
                const int* b = (const int*)a.x.codes + ((size_t)k * ld + column + g) * (W16 ? 16 : 8) + 2 * t;
                const int2 high = *(const int2*)b, low = W16 ? *(const int2*)(b + 8) : make_int2(0, 0);
                const u32 high0 = __byte_perm(high.x, high.y, 0x6420), high1 = __byte_perm(high.x, high.y, 0x7531);
                const u32 low0 = __byte_perm(low.x, low.y, 0x6420), low1 = __byte_perm(low.x, low.y, 0x7531);
                const int4 ds = *(const int4*)(a.x.steps + (size_t)k * ld + column + 2 * t);
                const float d[2] = {__int_as_float(ds.x), __int_as_float(ds.z)};
                // 8 * sum = 256 * (8 * sum_high) + 8 * sum_low
                const int sum_high[2] = {W16 ? (ds.y + 128) >> 8 : ds.y, W16 ? (ds.w + 128) >> 8 : ds.w};
                const int sum_low[2] = {ds.y - 256 * sum_high[0], ds.w - 256 * sum_high[1]};
#pragma unroll
                for (int i = 0; i < M; i++) {
                    int c[4], e[4];
                    mma(c, w[i], high0, high1, MAGIC - 8 * sum_high[0], MAGIC - 8 * sum_high[1]);
                    if (W16) mma(e, w[i], low0, low1, MAGIC - 8 * sum_low[0], MAGIC - 8 * sum_low[1]);
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        float v = __fsub_rn(__int_as_float(c[q]), MAGIC_FLOAT);
                        if (W16) v = __fmaf_rn(v, 256.0f, __fsub_rn(__int_as_float(e[q]), MAGIC_FLOAT));
                        acc[i][j][q] = __fmaf_rn(v, __fmul_rn(scale[i][q >> 1], d[q & 1]), acc[i][j][q]);
                    }
                }
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const int P = NT * 8 + 1;
    float* lanes = (float*)ring;
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++)
                lanes[(warp * R + i * 16 + g + (q >> 1) * 8) * P + j * 8 + 2 * t + (q & 1)] = acc[i][j][q];
    __syncthreads();
    for (u32 e = threadIdx.x; e < R * NT * 8; e += 256) {
        const u32 r = e % R, c = e / R;
        if (r0 + r >= s.rows || first + c >= token_rows) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = lanes[(i * R + r) * P + c];
        store_output(a, s, r0 + r, first + c, tree8(v));
    }
}

#define KERNEL(M, NT, STAGES, BLOCKS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) pipe_w16_m##M##_n##NT(                                  \
        const __grid_constant__ LinearArgs a) {                                                                       \
        pipe<(PIPE == 2), true, M, NT, STAGES>(a);                                                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) pipe_w8_m##M##_n##NT(                                   \
        const __grid_constant__ LinearArgs a) {                                                                       \
        pipe<(PIPE == 2), false, M, NT, STAGES>(a);                                                                   \
    }
KERNEL(1, 1, 6, 3)
KERNEL(2, 1, 4, 2)
KERNEL(1, 4, 6, 2)
KERNEL(2, 4, 4, 2)
KERNEL(4, 4, 4, 1)

#endif
