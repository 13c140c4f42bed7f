// Quantised linear layer for many rows at memory speed: planar 4-bit codes, a scale for every 32 columns, no zero points.
//
// The same division of work as linear_mma.cu (eight warps are the eight lanes, tensor cores give the exact dots), but
// weights come through a ring of STAGES pieces in shared memory, filled by asynchronous copies of whole lines, and the
// integer results become floats without a conversion: the accumulator of the tensor cores starts at the bits of 1.5 * 2^23
// less the zero points' part, so that its bits read as a float are 1.5 * 2^23 + dot, exactly, as long as |dot| < 2^22. The
// dots of the high and low bytes, each below 2^17, are joined by an fma that is exact (|256 high + low| < 2^24).
//
// The activations of a stage's columns come through the same ring: read by each warp from the cache, they would stand in
// the way of every product for hundreds of cycles. The weights of the first stages are asked for before the previous
// kernel's results are awaited.
//
// A block makes SETS * M * 16 weight rows times NT * 8 token rows. Launch: block SETS * 256, grid (row tiles of the segments,
// ceil(token rows / (NT * 8))), dynamic shared memory pipe_shared (src/launch/linear.rs). `x.ld` is a multiple of 8.
// Compute capability 8.0 and up. Compiled once for each format class (FORMAT) that has the option PIPE.
#include "copies.cuh"
#include "dot.cuh"

#if defined(PIPE) && __CUDA_ARCH__ >= 800

#define MAGIC 0x4b400000
#define MAGIC_FLOAT 12582912.0f

// c = a * b + {c0, c1, c0, c1}.
__device__ __forceinline__ void mma(int c[4], const u32 a[4], u32 b0, u32 b1, int c0, int c1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%10,%11};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}

// CHUNK: blocks of 32 columns in a stage. SETS: sets of eight warps, each with M tiles of weight rows of its own; they share
// the activations.
template <class S, bool W16, int SETS, int M, int NT, int CHUNK, int STAGES> __device__ __forceinline__ void pipe(const LinearArgs& a) {
    extern __shared__ __align__(16) u8 ring[];
    const int R = SETS * M * 16, THREADS = SETS * 256, SCALE = S::BYTES, PLANES = W16 ? 2 : 1, TOKENS = NT * 8;
    const int CODE_STRIDE = CHUNK * 16 + 16;  // bytes of a row's codes in a stage: 16 more keep the banks apart
    const int PIECES = CHUNK * SCALE / 16 + 1, SCALE_STRIDE = PIECES * 16;  // a row's scales, wherever they start
    // A stage: codes, scales, activation codes [block][high, low][token][32], their steps [block][token].
    const int X_AT = R * (CODE_STRIDE + SCALE_STRIDE), STEPS_AT = X_AT + CHUNK * TOKENS * PLANES * 32;
    const int STAGE = STEPS_AT + CHUNK * TOKENS * 8;
    const u32 warp = threadIdx.x >> 5 & 7, set_row = threadIdx.x / 256 * (M * 16);
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 kb = (a.x.cols + 31) / 32, ld = a.x.ld, first = blockIdx.y * NT * 8, stages = (kb + CHUNK - 1) / CHUNK;
    u32 unit = blockIdx.x;
    const LinearSegment& s = a.segment[find_segment(a, R, unit)];
    const u32 r0 = unit * R;
    const u64 scales_end = (u64)s.rows * kb * SCALE;

    // Sources of this thread's copies in stage 0, in pieces of 16 bytes.
    const u32 tid = threadIdx.x, CODES = R * CHUNK > THREADS ? R * CHUNK / THREADS : 1;
    u32 code_at[CODES];
#pragma unroll
    for (u32 i = 0; i < CODES; i++)
        code_at[i] = min(r0 + tid / CHUNK + i * (THREADS / CHUNK), s.rows - 1) * kb + tid % CHUNK;
    const u32 scale_at = (u32)((u64)min(r0 + tid / PIECES, s.rows - 1) * kb * SCALE / 16) + tid % PIECES;
    const bool has_scale = tid < R * PIECES;
    auto fill = [&](u32 stage) {
        u8* codes = ring + stage % STAGES * STAGE;
        if (tid < R * CHUNK && stage * CHUNK + tid % CHUNK < kb) {
#pragma unroll
            for (u32 i = 0; i < CODES; i++)
                copy16(codes + (tid / CHUNK + i * (THREADS / CHUNK)) * CODE_STRIDE + tid % CHUNK * 16,
                       s.planes[0] + (u64)(code_at[i] + stage * CHUNK) * 16, 16);
        }
        if (has_scale) {
            const u64 from = (u64)(scale_at + stage * (CHUNK * SCALE / 16)) * 16;
            if (from < scales_end)
                copy16(codes + R * CODE_STRIDE + tid * 16, s.planes[1] + from, (u32)min((u64)16, scales_end - from));
        }
    };
    // Columns past x.ld are left as they are: what comes of them is dropped.
    const u32 tokens = min((u32)TOKENS, ld - min(first, ld));
    const u32 X_PIECES = TOKENS * PLANES * 2, x_token = tid % X_PIECES / (PLANES * 2), x_piece = tid % (PLANES * 2);
    const u32 x_at = tid / X_PIECES * ld * (PLANES * 2) + first * (PLANES * 2) + tid % X_PIECES;
    auto fill_x = [&](u32 stage) {
        u8* x = ring + stage % STAGES * STAGE + X_AT;
        u8* to = x + ((tid / X_PIECES * PLANES + x_piece / 2) * TOKENS + x_token) * 32 + x_piece % 2 * 16;
#pragma unroll
        for (u32 i = 0; i < (CHUNK * X_PIECES + THREADS - 1) / THREADS; i++) {
            const u32 k = stage * CHUNK + i * (THREADS / X_PIECES);
            if ((CHUNK * X_PIECES >= THREADS || tid < CHUNK * X_PIECES) && k + tid / X_PIECES < kb && x_token < tokens)
                copy16(to + i * (THREADS * 16), a.x.codes + (u64)(x_at + k * ld * (PLANES * 2)) * 16, 16);
        }
        if (tid < CHUNK * TOKENS / 2) {
            const u32 k = stage * CHUNK + tid / (TOKENS / 2), token = tid % (TOKENS / 2) * 2;
            if (k < kb && token < tokens)
                copy16(x + (STEPS_AT - X_AT) + tid * 16, (const u8*)a.x.steps + ((u64)k * ld + first + token) * 8, 16);
        }
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++)
        if (i < stages) fill(i);
    // Where the scales of this thread's rows start in a stage's piece.
    u32 shift[M][2];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            shift[i][h] = (u32)((u64)min(r0 + set_row + i * 16 + h * 8 + g, s.rows - 1) * kb * SCALE & 15);
    allow_next();
    wait_for_previous();
    const u32 token_rows = step_rows(a.step, a.wanted);
    if (first >= token_rows) {
        await_all_copies();
        return;
    }
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) fill_x(i);
        commit_copies();
    }

    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = 0.0f;

    for (u32 stage = 0; stage < stages; stage++) {
        await_copies<STAGES - 2>();
        __syncthreads();
        if (stage + STAGES - 1 < stages) {
            fill(stage + STAGES - 1);
            fill_x(stage + STAGES - 1);
        }
        commit_copies();
        const u8* codes = ring + stage % STAGES * STAGE;
        const u8* scales = codes + R * CODE_STRIDE;
#pragma unroll
        for (int half = 0; half < CHUNK / 8; half++) {
            const u32 kk = half * 8 + warp, k = stage * CHUNK + kk;
            if (k >= kb) break;
            u32 w[M][4];
            Scale scale[M][2];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 row = set_row + i * 16 + h * 8 + g;
                    const u32 x = *(const u32*)(codes + row * CODE_STRIDE + kk * 16 + t * 4);
                    w[i][h] = (S::MIN ? x : x ^ a.flip) & 0x0f0f0f0fu;
                    w[i][h + 2] = (S::MIN ? x >> 4 : (x >> 4) ^ a.flip) & 0x0f0f0f0fu;
                    scale[i][h] = S::read(scales + row * SCALE_STRIDE + shift[i][h] + half * 8 * SCALE, warp);
                }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                // The even elements of 8 t .. 8 t + 7 meet the low nibbles of word t, the odd ones the high nibbles.
                const u8* b = codes + X_AT + (kk * PLANES * TOKENS + j * 8 + g) * 32 + 8 * t;
                const int2 high = *(const int2*)b;
                const int2 low = W16 ? *(const int2*)(b + TOKENS * 32) : make_int2(0, 0);
                const u32 high0 = __byte_perm(high.x, high.y, 0x6420), high1 = __byte_perm(high.x, high.y, 0x7531);
                const u32 low0 = __byte_perm(low.x, low.y, 0x6420), low1 = __byte_perm(low.x, low.y, 0x7531);
                const int4 ds = *(const int4*)(codes + STEPS_AT + (kk * TOKENS + j * 8 + 2 * t) * 8);
                const float d[2] = {__int_as_float(ds.x), __int_as_float(ds.z)};
                // 8 * sum = 256 * (8 * sum_high) + 8 * sum_low; nothing to take off where there is a minimum.
                const int middle[2] = {S::MIN ? 0 : ds.y, S::MIN ? 0 : ds.w};
                const int sum_high[2] = {W16 ? (middle[0] + 128) >> 8 : middle[0], W16 ? (middle[1] + 128) >> 8 : middle[1]};
                const int sum_low[2] = {middle[0] - 256 * sum_high[0], middle[1] - 256 * sum_high[1]};
                const float sum[2] = {S::MIN ? (float)ds.y : 0.0f, S::MIN ? (float)ds.w : 0.0f};
#pragma unroll
                for (int i = 0; i < M; i++) {
                    int c[4], e[4];
                    mma(c, w[i], high0, high1, MAGIC - 8 * sum_high[0], MAGIC - 8 * sum_high[1]);
                    if (W16) mma(e, w[i], low0, low1, MAGIC - 8 * sum_low[0], MAGIC - 8 * sum_low[1]);
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        float v = __fsub_rn(__int_as_float(c[q]), MAGIC_FLOAT);
                        if (W16) v = __fmaf_rn(v, 256.0f, __fsub_rn(__int_as_float(e[q]), MAGIC_FLOAT));
                        acc[i][j][q] = __fmaf_rn(v, __fmul_rn(scale[i][q >> 1].s, d[q & 1]), acc[i][j][q]);
                        if (S::MIN) acc[i][j][q] = __fmaf_rn(sum[q & 1], __fmul_rn(scale[i][q >> 1].m, d[q & 1]), acc[i][j][q]);
                    }
                }
            }
        }
    }
    await_all_copies();
    __syncthreads();
    const int P = NT * 8 + 1;
    float* lanes = (float*)ring;
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++)
                lanes[(warp * R + set_row + i * 16 + g + (q >> 1) * 8) * P + j * 8 + 2 * t + (q & 1)] = acc[i][j][q];
    __syncthreads();
    for (u32 e = threadIdx.x; e < R * NT * 8; e += THREADS) {
        const u32 r = e % R, c = e / R;
        if (r0 + r >= s.rows || first + c >= token_rows) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = lanes[(i * R + r) * P + c];
        store_output(a, s, r0 + r, first + c, tree8(v));
    }
}

// W: tiles of 16 weight rows, SETS * M.
#define KERNEL(W, SETS, M, NT, CHUNK, STAGES, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(256 * SETS, BLOCKS) pipe_w16_m##W##_n##NT(                  \
        const __grid_constant__ LinearArgs a) {                                                                       \
        pipe<SCALES, true, SETS, M, NT, CHUNK, STAGES>(a);                                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256 * SETS, BLOCKS) pipe_w8_m##W##_n##NT(                   \
        const __grid_constant__ LinearArgs a) {                                                                       \
        pipe<SCALES, false, SETS, M, NT, CHUNK, STAGES>(a);                                                      \
    }
KERNEL(1, 1, 1, 1, 16, 4, 3)
KERNEL(2, 1, 2, 1, 16, 4, 2)
KERNEL(4, 2, 2, 1, 16, 4, 1)
KERNEL(2, 1, 2, 2, 8, 4, 2)
KERNEL(4, 2, 2, 2, 8, 4, 1)
KERNEL(2, 1, 2, 4, 8, 4, 2)
KERNEL(4, 1, 4, 4, 8, 3, 1)

#endif
