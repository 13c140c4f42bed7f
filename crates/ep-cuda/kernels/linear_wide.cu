// Quantised linear layer for prompts: planar 4-bit codes, a scale for every 32 columns, no zero points.
//
// As linear_tile.cu, with the tensor cores' asynchronous form (wgmma): they read the activations from shared memory themselves, and
// it is the register file's bandwidth that bounds linear_tile.cu. A cluster of two blocks makes R weight rows times TOKENS token rows;
// a block has four of the contract's eight lanes, one for each of its four warpgroups.
//
// The dot of the high bytes, shifted by eight bits, is what the dot of the low bytes is added to; it stays below 2^23, so that its
// conversion is exact. Tokens are taken in two halves: while a warp adds up one, the tensor cores are at the other. Activations lie in
// shared memory as the instruction wants them: rows of 64 bytes (high, low; 32 bytes for 8-bit activations) whose pieces of 16 bytes
// are permuted by the row.
//
// Launch: cluster of 2, block 512, grid (2 * token tiles, row tiles of the segments), dynamic shared memory wide_shared
// (src/launch/linear/tile.rs). `x.ld` is a multiple of 8, the columns a multiple of 256. Compute capability 9.0 exactly (compute_90a).
// Compiled once for each format class (FORMAT) that has the option PIPE.
#include "cluster.cuh"

#if defined(PIPE) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d = a * b, or d + a * b if ADD: a 64 x 32 in the registers of a warpgroup, b 32 x 32 in shared memory by its descriptor. A group of
// its own.
template <bool UNSIGNED, bool ADD> __device__ __forceinline__ void wgmma(int d[16], const u32 a[4], u64 b) {
#define WGMMA(TYPE)                                                                                                         \
    asm volatile(                                                                                                         \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\nwgmma.fence.sync.aligned;\n"                                       \
        "wgmma.mma_async.sync.aligned.m64n32k32.s32." TYPE ".s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add;\n" \
        "wgmma.commit_group.sync.aligned;\n}"                                                                             \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0)                                              \
        : "memory")
    if (UNSIGNED)
        WGMMA("u8");
    else
        WGMMA("s8");
}
// Waits for all groups but the last LEFT; `d` is what the first of them made.
template <int LEFT> __device__ __forceinline__ void wgmma_wait(int d[16]) {
    asm volatile("wgmma.wait_group.sync.aligned %16;" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]) : "n"(LEFT) : "memory");
}

template <class S, bool W16, int STAGES> __device__ __forceinline__ void wide(const LinearArgs& a) {
    extern __shared__ __align__(1024) u8 ring[];
    // Of each stage of the ring: all copies have arrived. Every thread says so for its own copies, one stage early: at stage n for n + 1.
    // Whoever is at stage n has heard from all at n - 1, so all have left n - 2, whose place the copies of n + AHEAD take; no thread waits
    // for the others to be done with a stage, and one warpgroup multiplies while another adds up. (cp.async.mbarrier.arrive would announce
    // copies without a wait; the checker of races doesn't know it, nor one thread's word for its warp.)
    __shared__ u64 full[STAGES];
    const int AHEAD = STAGES - 2, LANES = 4, CLUSTER = 2, PAIRS = 2, THREADS = 512, M = 2, NT = 8, R = M * 64, TOKENS = NT * 8;
    const bool SIDE = false;
    const int SCALE = S::BYTES, ROW = W16 ? 64 : 32;  // bytes of a token row in a block of columns
    // A stage, eight blocks of 32 columns: activation codes [lane][token][ROW], codes [row][lane][16], scales [row][8], steps
    // [lane][token], where there is a minimum sums of codes [lane][token].
    const int CODES_AT = LANES * TOKENS * ROW, SCALES_AT = CODES_AT + LANES * R * 16, STEPS_AT = SCALES_AT + R * 8 * SCALE;
    const int SUMS_AT = STEPS_AT + LANES * TOKENS * 4;
    const int STAGE = (SUMS_AT + (S::MIN ? LANES * TOKENS * 4 : 0) + 1023) / 1024 * 1024, RING = STAGES * STAGE;
    const u32 rank = blockIdx.x % CLUSTER, first = blockIdx.x / CLUSTER * TOKENS;
    const u32 tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const u32 slot = tid / 128, row_at = tid / 32 % 4 * 16, token_at = 0;
    const u32 kb = a.x.cols / 32, stages = kb / 8, ld = a.x.ld;
    // The contract's lane of a slot of this block: its block of 32 columns in every eight.
    auto lane_of = [&](u32 i) -> u32 { return rank * PAIRS + i % PAIRS + i / PAIRS * 4; };
    u32 unit = blockIdx.y;
    const LinearSegment& s = a.segment[find_segment(a, R, unit)];
    const u32 r0 = unit * R;
    const u32 base = shared_at(ring);

    // A thread's copies: pieces of 16 bytes, and steps, the same places in every stage. Pieces of codes are permuted among eight.
    auto place = [&](u32 piece, u32 mask) -> u32 { return (piece ^ piece >> 3 & mask) * 16; };
    const u8* codes_from = s.planes[0] + ((u64)min(r0 + tid / LANES, s.rows - 1) * kb + lane_of(tid % LANES)) * 16;
    const u32 codes_to = base + CODES_AT + place(tid, 3);
    const u32 SCALE_PIECES = R * SCALE / 2;
    const bool has_scale = tid < SCALE_PIECES, has_step = tid >= THREADS - LANES * TOKENS;
    static_assert(SCALE_PIECES <= THREADS - LANES * TOKENS, "a thread has one of them");
    const u32 step = tid % (LANES * TOKENS);
    const u8* more_from =
        has_scale ? s.planes[1] + (u64)min(r0 + tid / (SCALE / 2), s.rows - 1) * kb * SCALE + tid % (SCALE / 2) * 16
                  : (const u8*)(a.x.steps + (u64)lane_of(step / TOKENS) * ld + min(first + step % TOKENS, ld - 1));
    const u32 more_to = base + (has_scale ? SCALES_AT + tid * 16 : STEPS_AT + step * 4), more_step = has_scale ? 8 * SCALE : 64 * ld;
    // Token rows past x.ld get the last one; what comes of them is dropped. Copy i of a thread is for the same token, two lanes on.
    const u32 PIECES = TOKENS * ROW / 16, COPIES = LANES * PIECES / THREADS;
    const u32 x_slot = tid / PIECES, token = tid % PIECES / (ROW / 16), piece = tid % (ROW / 16);
    const u8* x_from = a.x.codes + ((u64)lane_of(x_slot) * ld + min(first + token, ld - 1)) * ROW + piece * 16;
    const u32 x_to = base + place(tid, W16 ? 3 : 1);
    const size_t x_step = (size_t)(8 * ld) * ROW;
    auto copy_x = [&](u32 put, const u8* from) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) copy16(x_to + put + i * (2 * TOKENS * ROW), from + (u64)(i * 4 * ld) * ROW);
    };
    const u32 full_at = shared_at(full);
    if (tid == 0)
        for (int i = 0; i < STAGES; i++) phase_init(full_at + i * 8, THREADS);
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < AHEAD; i++)
        if (i < stages) {
            copy16(codes_to + i * STAGE, codes_from + i * 128);
            if (has_scale) copy16(more_to + i * STAGE, more_from + i * more_step);
        }
    allow_next();
    wait_for_previous();
    const u32 token_rows = step_rows(a.step, a.wanted);
    if (first >= token_rows) {
        await_all_copies();
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < AHEAD; i++) {
        if (i < stages) {
            copy_x(i * STAGE, x_from + i * x_step);
            if (has_step) copy4(more_to + i * STAGE, more_from + i * more_step);
            if (S::MIN && has_step) copy4(more_to + (SUMS_AT - STEPS_AT) + i * STAGE, more_from + 4 + i * more_step);
        }
        commit_copies();
    }
    codes_from += AHEAD * 128;
    x_from += AHEAD * x_step;
    more_from += AHEAD * more_step;
    await_copies<AHEAD - 1>();
    fence_async();
    phase_arrive(full_at);

    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = 0.0f;
    const u32 flip = (a.flip & 0x0f0f0f0fu) ^ 0x80808080u;
    const u32 codes_at = CODES_AT + place((row_at + g) * 4 + slot, 3) + t * 2;
    const u32 scales_at = SCALES_AT + (row_at + g) * 8 * SCALE, klane = lane_of(slot), steps_at = STEPS_AT + (slot * TOKENS + 2 * t) * 4;
    // Descriptor: the address and the distance of groups of eight rows in units of 16 bytes, the permutation. The same in all
    // threads of a warp, which the compiler doesn't see by itself.
    const u32 x_at = 1u << 16 | __shfl_sync(FULL, base + slot * TOKENS * ROW, 0) >> 4;
    auto descriptor = [&](u32 at) { return (u64)((W16 ? 2u : 3u) << 30 | 8 * ROW / 16) << 32 | at; };

    // This stage: where it is, which of the ring, the round's parity; where the stage to be filled is.
    u32 get = 0, at = 0, parity = 0, put = AHEAD * STAGE;
    for (u32 stage = 0; stage < stages; stage++) {
        await_copies<AHEAD - 2>();
        fence_async();  // copies are ordinary stores to the tensor cores
        if (stage + 1 < stages) phase_arrive(full_at + (at + 1 == STAGES ? 0 : at + 1) * 8);
        phase_await(full_at + at * 8, parity);
        if (stage + AHEAD < stages) {
            copy16(codes_to + put, codes_from);
            copy_x(put, x_from);
            if (has_scale) copy16(more_to + put, more_from);
            if (has_step) copy4(more_to + put, more_from);
            if (S::MIN && has_step) copy4(more_to + (SUMS_AT - STEPS_AT) + put, more_from + 4);
            codes_from += 128;
            x_from += x_step;
            more_from += more_step;
            put = put + STAGE == RING ? 0 : put + STAGE;
        }
        commit_copies();
        const u8* from = ring + get;
        const u32 x = x_at + (get >> 4);
        // 64 weight rows, in registers as the instruction wants them.
        auto decode = [&](int i, u32 w[4], Scale scale[2]) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // Elements 4 t to 4 t + 3 and 16 more: four nibbles each.
                const u8* at = from + codes_at + (i * 64 + h * 8) * 64;
                const u32 y = *(const u16*)at | (u32) * (const u16*)(at + 8) << 16, z = y >> 4;
                w[h] = __byte_perm(y, z, 0x5140) & 0x0f0f0f0fu;
                w[h + 2] = __byte_perm(y, z, 0x7362) & 0x0f0f0f0fu;
                if (!S::MIN) {
                    // The code in a byte, its top bit set; less eight; then the top bit is the sign.
                    w[h] = ((w[h] ^ flip) - 0x08080808u) ^ 0x80808080u;
                    w[h + 2] = ((w[h + 2] ^ flip) - 0x08080808u) ^ 0x80808080u;
                }
                scale[h] = S::read(from + scales_at + (i * 64 + h * 8) * 8 * SCALE, klane);
            }
        };
        // The high bytes' dots make way for the low bytes'.
        auto shift = [&](int d[16]) {
#pragma unroll
            for (int e = 0; e < 16; e++) d[e] <<= 8;
        };
        auto add = [&](int i, int half, const int d[16], const Scale scale[2]) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float step[2];  // of two token rows
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                             : "=f"(step[0]), "=f"(step[1])
                             : "r"(base + get + steps_at + (half * 4 + j) * 32));
                float sum[2] = {0.0f, 0.0f};
                if (S::MIN) {
                    int codes[2];
                    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                                 : "=r"(codes[0]), "=r"(codes[1])
                                 : "r"(base + get + (SUMS_AT - STEPS_AT) + steps_at + (half * 4 + j) * 32));
                    sum[0] = (float)codes[0];
                    sum[1] = (float)codes[1];
                }
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    float& to = acc[i][half * 4 + j][q];
                    to = __fmaf_rn((float)d[j * 4 + q], __fmul_rn(scale[q >> 1].s, step[q & 1]), to);
                    if (S::MIN) to = __fmaf_rn(sum[q & 1], __fmul_rn(scale[q >> 1].m, step[q & 1]), to);
                }
            }
        };
        const u32 HALF_AT = TOKENS / 2 * ROW / 16;
        int d[2][16];
        u32 w[M][4];
        Scale scale[M][2];
        decode(0, w[0], scale[0]);
        wgmma<S::MIN, false>(d[0], w[0], descriptor(x));
        wgmma<S::MIN, false>(d[1], w[0], descriptor(x + HALF_AT));
#pragma unroll
        for (int i = 0; i < M; i++) {
            if (W16) {
                wgmma_wait<1>(d[0]);
                shift(d[0]);
                wgmma<S::MIN, true>(d[0], w[i], descriptor(x + 2));
                wgmma_wait<1>(d[1]);
                shift(d[1]);
                wgmma<S::MIN, true>(d[1], w[i], descriptor(x + HALF_AT + 2));
            }
            if (i + 1 < M) decode(i + 1, w[i + 1], scale[i + 1]);
            wgmma_wait<1>(d[0]);
            add(i, 0, d[0], scale[i]);
            if (i + 1 < M) wgmma<S::MIN, false>(d[0], w[i + 1], descriptor(x));
            if (i + 1 < M) wgmma_wait<1>(d[1]); else wgmma_wait<0>(d[1]);
            add(i, 1, d[1], scale[i]);
            if (i + 1 < M) wgmma<S::MIN, false>(d[1], w[i + 1], descriptor(x + HALF_AT));
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
                        float* to = mine + (j * 8 + (q & 1)) * LINE + i * 64 + (q >> 1) * 8;
                        *to = half == 1 ? __fadd_rn(*to, acc[i][j][q]) : acc[i][j][q];
                    }
        if (CLUSTER == 1 || !SIDE && half == 0) __syncthreads();
    }
    if (CLUSTER > 1) cluster_sync();
    end_tile<CLUSTER, SIDE, LANES, R, TOKENS, THREADS>(a, s, sums, rank, r0, first, token_rows);
}

#define KERNEL(STAGES)                                                                                                    \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1) wide_w16(const __grid_constant__ LinearArgs a) { \
        wide<SCALES, true, STAGES>(a);                                                                              \
    }                                                                                                                 \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1) wide_w8(const __grid_constant__ LinearArgs a) {  \
        wide<SCALES, false, STAGES>(a);                                                                             \
    }
KERNEL(6)

#endif
