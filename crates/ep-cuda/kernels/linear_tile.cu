// Quantised linear layer for many token rows: planar 4-bit codes, a scale for every 32 columns, no zero points.
//
// A cluster of 8 / LANES blocks makes R weight rows times TOKENS token rows; each block has LANES of the contract's eight
// lanes, so that a warp adds up blocks of 32 columns of one lane only and a large tile still fits the registers. Split by
// lane, the work also comes in more and smaller pieces. At the end the blocks of the cluster read each other's lanes.
//
// Weights and activations come through a ring of STAGES stages in shared memory, filled by asynchronous copies. A stage is
// PERIODS times eight blocks of 32 columns, of which a block of the cluster copies its own lanes.
//
// Codes become bytes of sixteen times the weight, signed where 8 is taken off, unsigned where there is a minimum: one shift, two
// permutations and two logical operations for eight of them, and no zero point is left to correct. The integer results become floats without a conversion: the tensor cores'
// accumulator starts at the bits of S = 1.5 * 2^19, a float whose unit is 1/16, so that its bits read as a float are S + dot,
// exactly. The dots of the high and low bytes are joined as fma(S + high, 256, -257 S) + (S + low); both steps are exact.
//
// Launch: cluster of 8 / LANES, block LANES * RG * TG * 32, grid (8 / LANES * token tiles, row tiles of the segments),
// dynamic shared memory tile_shared (src/launch/linear/tile.rs). `x.ld` is a multiple of 8, the columns a multiple of 256.
// Compute capability 9.0. Compiled once for each format class (FORMAT) that has the option PIPE or SIXBITS.
//
// Six bits have two scales a block of 32 columns and so two dots of 16; their unit is 1, and three steps make a float of them.
#include "cluster.cuh"

#ifdef SIXBITS
#define SIX_CLASS true
#else
#define SIX_CLASS false
#endif

#if (defined(PIPE) || defined(SIXBITS)) && __CUDA_ARCH__ >= 900

#define START 0x49400000  // 1.5 * 2^19, whose unit is 1/16
#define START_FLOAT 786432.0f

template <bool UNSIGNED> __device__ __forceinline__ void mma(int c[4], const u32 a[4], u32 b0, u32 b1, int start) {
    if (UNSIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
}

#define WHOLE 0x4b400000  // 1.5 * 2^23, whose unit is 1
#define WHOLE_FLOAT 12582912.0f

// Half a block: 16 columns.
__device__ __forceinline__ void mma_half(int c[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(WHOLE));
}

// SIDE: a block's lanes are neighbours (64 bytes of a weight row in one piece at LANES 4); else it has lanes l and l + 4,
// whose sums it adds up itself.
template <class S, bool SIX, bool W16, int LANES, bool SIDE, int RG, int TG, int M, int NT, int PERIODS, int STAGES>
__device__ __forceinline__ void tile(const LinearArgs& a) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 arrived[STAGES];
    const int CLUSTER = 8 / LANES, THREADS = LANES * RG * TG * 32, R = RG * M * 16, TOKENS = TG * NT * 8;
    const int SCALE = S::BYTES, PLANES = W16 ? 2 : 1, PAIRS = LANES / 2;
    // A period of a stage: codes [row][lane][16], scales [row][8], activation codes [lane][token][high, low][32], their steps
    // [lane][token]. The lanes of a row's codes are permuted to keep the banks apart.
    const int SCALES_AT = LANES * R * 16, X_AT = SCALES_AT + R * 8 * SCALE, STEPS_AT = X_AT + LANES * TOKENS * PLANES * 32;
    // Six bits: high bits [row][lane][8], then steps of super-blocks [row].
    const int HIGH_AT = STEPS_AT + LANES * TOKENS * 8, SUPER_AT = HIGH_AT + (SIX ? LANES * R * 8 : 0);
    const int PERIOD = SUPER_AT + (SIX ? R * 4 : 0), STAGE = PERIOD * PERIODS;
    const u32 rank = blockIdx.x % CLUSTER, first = blockIdx.x / CLUSTER * TOKENS;
    const u32 tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const u32 slot = tid / 32 % LANES, group = tid / 32 / LANES, row_at = group % RG * (M * 16), token_at = group / RG * (NT * 8);
    const u32 kb = a.x.cols / 32, periods = kb / 8, stages = (periods + PERIODS - 1) / PERIODS, ld = a.x.ld;
    // The contract's lane of a slot of this block: its block of 32 columns in every eight.
    auto lane_of = [&](u32 i) -> u32 { return SIDE ? rank * LANES + i : rank * PAIRS + i % PAIRS + i / PAIRS * 4; };
    u32 unit = blockIdx.y;
    const LinearSegment& s = a.segment[find_segment(a, R, unit)];
    const u32 r0 = unit * R;
    const u32 base = shared_at(ring);

    // A thread's copies of weights: pieces of 16 bytes, the same places in every period. Sources move on from period to period.
    auto place = [&](u32 row, u32 i) -> u32 {
        static_assert(LANES == 2 || LANES == 4 || LANES == 8, "banks");
        return LANES == 8 ? row * 128 + (i ^ row & 7) * 16 : LANES == 4 ? row * 64 + (i ^ row >> 1 & 3) * 16 : row * 32 + (i ^ row >> 2 & 1) * 16;
    };
    const int CODES = (LANES * R + THREADS - 1) / THREADS, SCALES = (R * SCALE / 2 + THREADS - 1) / THREADS;
    const u8 *codes_from[CODES], *scales_from[SCALES];
    u32 codes_to[CODES];
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        const u32 e = tid + i * THREADS;
        const u32 row = min(r0 + e / LANES, s.rows - 1);
        codes_from[i] = s.planes[0] + (SIX ? row * Planar6::row_bytes(a.x.cols) : (u64)row * kb * 16) + lane_of(e % LANES) * 16;
        codes_to[i] = base + place(e / LANES, e % LANES);
    }
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        const u32 e = tid + i * THREADS;
        const u32 row = min(r0 + e / (SCALE / 2), s.rows - 1);
        scales_from[i] = SIX ? s.planes[0] + row * Planar6::row_bytes(a.x.cols) + a.x.cols / 4 * 3
                             : s.planes[1] + (u64)row * kb * SCALE + e % (SCALE / 2) * 16;
    }
    // High bits follow a row's codes; where those of codes_from[i] begin. A thread copies steps for the row of its scales.
    const u8 *high_from[CODES], *super_from = nullptr;
    if (SIX) {
#pragma unroll
        for (int i = 0; i < CODES; i++) {
            const u32 e = tid + i * THREADS;
            high_from[i] = s.planes[0] + min(r0 + e / LANES, s.rows - 1) * Planar6::row_bytes(a.x.cols) + a.x.cols / 2 + lane_of(e % LANES) * 8;
        }
        super_from = scales_from[0] + a.x.cols / 16;
        static_assert(!SIX || R <= THREADS && PERIODS == 1, "a thread copies the scales of one row");
    }
    u32 period = 0;  // first of the next stage to be filled
    auto fill = [&](u32 put) {
#pragma unroll
        for (int p = 0; p < PERIODS; p++) {
            if (PERIODS > 1 && period + p >= periods) continue;
#pragma unroll
            for (int i = 0; i < CODES; i++)
                if (LANES * R % THREADS == 0 || tid + i * THREADS < LANES * R)
                    copy16(codes_to[i] + put + p * PERIOD, codes_from[i] + p * 128);
#pragma unroll
            for (int i = 0; i < SCALES; i++)
                if ((R * SCALE / 2) % THREADS == 0 || tid + i * THREADS < R * SCALE / 2)
                    copy16(base + SCALES_AT + (tid + i * THREADS) * 16 + put + p * PERIOD, scales_from[i] + p * 8 * SCALE);
        }
        if (SIX) {
#pragma unroll
            for (int i = 0; i < CODES; i++)
                if (LANES * R % THREADS == 0 || tid + i * THREADS < LANES * R) {
                    copy8(base + HIGH_AT + (tid + i * THREADS) * 8 + put, high_from[i]);
                    high_from[i] += 64;
                }
            if (tid < R) copy4(base + SUPER_AT + tid * 4 + put, super_from);
            super_from += 4;
        }
#pragma unroll
        for (int i = 0; i < CODES; i++) codes_from[i] += 128 * PERIODS;
#pragma unroll
        for (int i = 0; i < SCALES; i++) scales_from[i] += 8 * SCALE * PERIODS;
    };
    // Activations of a lane's block of columns lie side by side: bulk copies, by the first threads. Token rows past x.ld are left as
    // they are: what comes of them is dropped.
    const u32 bars = shared_at(arrived), tokens = min((u32)TOKENS, ld - min(first, ld));
    const u32 x_slot = tid % LANES, x_unit = tid < LANES ? PLANES * 32 : 8;
    const u8* x_from = (tid < LANES ? a.x.codes : (const u8*)a.x.steps) + ((u64)lane_of(x_slot) * ld + first) * x_unit;
    const u32 x_to = base + (tid < LANES ? X_AT : STEPS_AT) + x_slot * TOKENS * x_unit;
    auto fill_x = [&](u32 put, u32 slot) {
        if (tid >= 32) return;
        const u32 count = PERIODS == 1 ? 1 : min((u32)PERIODS, periods - period);
        if (tid == 0) phase_expect(bars + slot * 8, count * LANES * tokens * (PLANES * 32 + 8));
        __syncwarp();
        if (tid < 2 * LANES) {
            for (u32 p = 0; p < count; p++)
                bulk_copy(x_to + put + p * PERIOD, x_from + (u64)p * 8 * ld * x_unit, tokens * x_unit, bars + slot * 8);
            x_from += (u64)(8 * PERIODS) * ld * x_unit;
        }
    };
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) phase_init(bars + i * 8, 1);
        fence_async();
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < stages) fill(i * STAGE);
        commit_copies();
        period += PERIODS;
    }
    allow_next();
    wait_for_previous();
    const u32 token_rows = step_rows(a.step, a.wanted);
    if (first >= token_rows) {
        await_all_copies();
        return;
    }
    period = 0;
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < stages) fill_x(i * STAGE, i);
        period += PERIODS;
    }

    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = 0.0f;
    const u32 sign = S::MIN ? 0 : (a.flip & 0x80808080u) ^ 0x80808080u;
    // Where this thread's operands are in a period.
    const u32 codes_at = place(row_at + g, slot) + t * 4, scales_at = SCALES_AT + (row_at + g) * 8 * SCALE, klane = lane_of(slot);
    const u32 x_at = X_AT + (slot * TOKENS + token_at + g) * (PLANES * 32) + (SIX ? 4 : 8) * t;
    const u32 steps_at = STEPS_AT + (slot * TOKENS + token_at + 2 * t) * 8;

    u32 get = 0, at = 0, parity = 0;  // this stage: where it is, which of the ring, which round
    for (u32 stage = 0; stage < stages; stage++) {
        await_copies<STAGES - 2>();
        phase_await(bars + at * 8, parity);
        __syncthreads();
        if (stage + STAGES - 1 < stages) {
            const u32 put = get == 0 ? (STAGES - 1) * STAGE : get - STAGE;
            fill(put);
            fill_x(put, at == 0 ? STAGES - 1 : at - 1);
            period += PERIODS;
        }
        commit_copies();
#pragma unroll
        for (int p = 0; p < PERIODS; p++) {
            if (PERIODS > 1 && stage * PERIODS + p >= periods) break;
            const u8* from = ring + get + p * PERIOD;
            u32 w[M][4];
            Scale scale[M][2];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (SIX) {
                        // Elements 4 t to 4 t + 3 and 16 more: low bits, then high ones in pairs of even and odd elements.
                        const u8* at = from + codes_at - t * 2 + (i * 16 + h * 8) * (LANES * 16);
                        const u32 y = *(const u16*)at | (u32) * (const u16*)(at + 8) << 16, z = y >> 4;
                        const u8* more = from + HIGH_AT + ((row_at + i * 16 + h * 8 + g) * LANES + slot) * 8 + (t & 1) * 2;
                        const u32 high = (*(const u16*)more | (u32) * (const u16*)(more + 4) << 16) >> (t >> 1) * 4;
                        const u32 even = (y & 0x0f0f0f0fu) | (high & 0x03030303u) << 4, odd = (z & 0x0f0f0f0fu) | (high >> 2 & 0x03030303u) << 4;
                        w[i][h] = Planar6::centred(__byte_perm(even, odd, 0x5140));
                        w[i][h + 2] = Planar6::centred(__byte_perm(even, odd, 0x7362));
                        const float step = *(const float*)(from + SUPER_AT + (row_at + i * 16 + h * 8 + g) * 4);
                        const Scale both = S::read(from + scales_at + (i * 16 + h * 8) * 8 * SCALE, klane);
                        scale[i][h] = {__fmul_rn(step, both.s), __fmul_rn(step, both.m)};
                        continue;
                    }
                    const u32 x = *(const u32*)(from + codes_at + (i * 16 + h * 8) * (LANES * 16)), y = x << 4;
                    w[i][h] = (__byte_perm(y, x, 0x5140) & 0xf0f0f0f0u) ^ sign;
                    w[i][h + 2] = (__byte_perm(y, x, 0x7362) & 0xf0f0f0f0u) ^ sign;
                    scale[i][h] = S::read(from + scales_at + (i * 16 + h * 8) * 8 * SCALE, klane);
                }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (SIX) {
                    const u8* x = from + x_at + j * (PLANES * 256);
                    const float d[2] = {*(const float*)(from + steps_at + j * 64), *(const float*)(from + steps_at + j * 64 + 8)};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 high = *(const u32*)(x + half * 16), low = W16 ? *(const u32*)(x + 32 + half * 16) : 0;
#pragma unroll
                        for (int i = 0; i < M; i++) {
                            int c[4], e[4];
                            mma_half(c, w[i][2 * half], w[i][2 * half + 1], high);
                            if (W16) mma_half(e, w[i][2 * half], w[i][2 * half + 1], low);
#pragma unroll
                            for (int q = 0; q < 4; q++) {
                                float v = __fsub_rn(__int_as_float(c[q]), WHOLE_FLOAT);
                                if (W16) v = __fmaf_rn(v, 256.0f, __fsub_rn(__int_as_float(e[q]), WHOLE_FLOAT));
                                const float f = half ? scale[i][q >> 1].m : scale[i][q >> 1].s;
                                acc[i][j][q] = __fmaf_rn(v, __fmul_rn(f, d[q & 1]), acc[i][j][q]);
                            }
                        }
                    }
                    continue;
                }
                const uint2 high = *(const uint2*)(from + x_at + j * (PLANES * 256));
                const uint2 low = W16 ? *(const uint2*)(from + x_at + 32 + j * (PLANES * 256)) : make_uint2(0, 0);
                const float d[2] = {*(const float*)(from + steps_at + j * 64), *(const float*)(from + steps_at + j * 64 + 8)};
                float sum[2] = {0.0f, 0.0f};
                if (S::MIN) {
                    sum[0] = (float)*(const int*)(from + steps_at + j * 64 + 4);
                    sum[1] = (float)*(const int*)(from + steps_at + j * 64 + 12);
                }
#pragma unroll
                for (int i = 0; i < M; i++) {
                    int c[4], e[4];
                    mma<S::MIN>(c, w[i], high.x, high.y, START);
                    if (W16) mma<S::MIN>(e, w[i], low.x, low.y, START);
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        const float high_dot = __int_as_float(c[q]), low_dot = __int_as_float(e[q]);
                        const float v = W16 ? __fadd_rn(__fmaf_rn(high_dot, 256.0f, -257.0f * START_FLOAT), low_dot)
                                            : __fsub_rn(high_dot, START_FLOAT);
                        acc[i][j][q] = __fmaf_rn(v, __fmul_rn(scale[i][q >> 1].s, d[q & 1]), acc[i][j][q]);
                        if (S::MIN) acc[i][j][q] = __fmaf_rn(sum[q & 1], __fmul_rn(scale[i][q >> 1].m, d[q & 1]), acc[i][j][q]);
                    }
                }
            }
        }
        get += STAGE;
        if (++at == STAGES) {
            get = at = 0;
            parity ^= 1;
        }
    }
    await_all_copies();
    __syncthreads();

    // Sums of lanes, or of lanes l and l + 4: [SIDE ? LANES : PAIRS][token][LINE].
    const int LINE = R + 4, SUM = TOKENS * LINE;
    float* sums = (float*)ring;
    float* mine = sums + (SIDE ? slot : slot % PAIRS) * SUM + (token_at + 2 * t) * LINE + row_at + g;
#pragma unroll
    for (int half = 0; half < (SIDE ? 1 : 2); half++) {
        if (SIDE || slot / PAIRS == half)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        float* to = mine + (j * 8 + (q & 1)) * LINE + i * 16 + (q >> 1) * 8;
                        *to = half == 1 ? __fadd_rn(*to, acc[i][j][q]) : acc[i][j][q];
                    }
        if (CLUSTER == 1 || !SIDE && half == 0) __syncthreads();
    }
    if (CLUSTER > 1) cluster_sync();
    end_tile<CLUSTER, SIDE, LANES, R, TOKENS, THREADS>(a, s, sums, rank, r0, first, token_rows);
}

#define KERNEL(R, TOKENS, LANES, SIDE, RG, TG, M, NT, PERIODS, STAGES, BLOCKS)                                            \
    static_assert(R == RG * M * 16 && TOKENS == TG * NT * 8, "name");                                                   \
    extern "C" __global__ void __cluster_dims__(8 / LANES, 1, 1) __launch_bounds__(LANES* RG* TG * 32, BLOCKS)           \
        tile_w16_r##R##_t##TOKENS(const __grid_constant__ LinearArgs a) {                                                \
        tile<SCALES, SIX_CLASS, true, LANES, SIDE, RG, TG, M, NT, PERIODS, STAGES>(a);                                        \
    }                                                                                                                 \
    extern "C" __global__ void __cluster_dims__(8 / LANES, 1, 1) __launch_bounds__(LANES* RG* TG * 32, BLOCKS)           \
        tile_w8_r##R##_t##TOKENS(const __grid_constant__ LinearArgs a) {                                                 \
        tile<SCALES, SIX_CLASS, false, LANES, SIDE, RG, TG, M, NT, PERIODS, STAGES>(a);                                       \
    }
KERNEL(128, 64, 4, false, 2, 1, 4, 8, 1, 6, 1)
KERNEL(128, 32, 2, true, 4, 1, 2, 4, 1, 5, 2)
KERNEL(128, 16, 2, true, 4, 1, 2, 2, 1, 6, 2)

#endif
