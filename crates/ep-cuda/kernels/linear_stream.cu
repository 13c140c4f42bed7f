// Quantised linear layer for one token row at memory speed: planar 4-bit codes, a scale for every 32 columns, no zero
// points, columns a multiple of 512.
//
// Weights go to shared memory by asynchronous copies, through a ring that belongs to one warp: D steps of 8 blocks of each
// of its rows, so that nothing waits for another warp and loads go on across the border to the next rows. The first D - 1
// steps, and hints for `ahead` more bytes of each row, are issued before the previous kernel's results are awaited; the next
// kernel may start when a warp has issued its last copy: so the memory never rests between kernels. That needs room for two such kernels on a multiprocessor.
//
// Lane l of a warp has rows 4 * r + l % 4 of the 4 * RPT rows of a unit, and of them the blocks l / 4, l / 4 + 8, ...: the
// contract's lanes. Four neighbours so read the same activations. Copies are made in another order, eight neighbours a
// whole line (parts of lines cost half of the memory's rate), and swizzled to keep the banks apart.
//
// Launch: block any number of warps, grid (blocks, token rows); units of 4 * RPT rows are interleaved over the blocks.
// Dynamic shared memory: blocks of 32 * (W16 ? 72 : 40) + warps * RPT * (D * 512 + (D / 2 + 1) * 64 * scale bytes). Compute capability
// 8.0 and up. Compiled once for each format class (FORMAT) that has the option PIPE.
#include "copies.cuh"
#include "dot.cuh"

#if defined(PIPE) && __CUDA_ARCH__ >= 800

// Asks for bytes to come to the second-level cache; no effect before compute capability 9.0.
__device__ __forceinline__ void ask_ahead(const u8* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
#endif
}

// Makes shared pieces [piece][block] and steps [block] {d, staged_sum} of token row `row`.
template <class S, bool W16> __device__ __forceinline__ void stage_row(const Activation& x, u32 row, int4* pieces, int2* steps) {
    const u32 PIECES = W16 ? 4 : 2, kb = x.cols / 32;
    const int4* codes = (const int4*)x.codes + (size_t)row * PIECES;
    const size_t block = (size_t)x.ld * PIECES;
    for (u32 i = threadIdx.x; i < kb * PIECES; i += 4 * blockDim.x) {
        int4 v[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 p = i + q * blockDim.x;
            if (p < kb * PIECES) v[q] = __ldcg(codes + p / PIECES * block + p % PIECES);
        }
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 p = i + q * blockDim.x;
            if (p < kb * PIECES) pieces[p % PIECES * kb + p / PIECES] = pair_order(v[q]);
        }
    }
    for (u32 k = threadIdx.x; k < kb; k += blockDim.x) {
        int2 s = __ldcg(x.steps + (size_t)k * x.ld + row);
        s.y = staged_sum<S>(s.y);
        steps[k] = s;
    }
}

template <class S, bool W16, int RPT, int D> __device__ __forceinline__ void stream(const LinearArgs& a) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 PIECES = W16 ? 4 : 2, SCALE = S::BYTES, PER_ROW = SCALE;  // 16-byte pieces of 16 scales
    // The ring: D steps of codes, then D / 2 + 1 pairs of steps of scales.
    const u32 SLOT = RPT * 512, PAIR = RPT * 64 * SCALE, PAIRS = D / 2 + 1;
    const u32 kb = a.x.cols / 32, steps_of_row = kb / 8;
    int4* pieces = (int4*)shared;
    int2* steps = (int2*)(shared + (size_t)kb * PIECES * 16);
    const u32 lane = threadIdx.x & 31, klane = lane >> 2, group = lane & 3, warp = threadIdx.x >> 5;
    u8* ring = shared + (size_t)kb * (PIECES * 16 + 8) + warp * (D * SLOT + PAIRS * PAIR);
    const u32 ring_at = shared_at(ring);

    const u32 units = count_units(a, 4 * RPT), stride = gridDim.x * (blockDim.x >> 5);
    u32 unit = warp * gridDim.x + blockIdx.x;

    // What is copied next: step `from_step` of unit `from_unit`.
    u32 from_unit = unit, from_step = 0;
    u32 from_pair = 0;
    const u32 copy_row = lane >> 3, copy_k = lane & 7, to_code = (copy_row * 8 + (copy_k ^ copy_row * 2)) * 16;
    const u32 scale_row = lane / PER_ROW;  // copies scales if below 4 * RPT
    const u8 *code[RPT], *scale = nullptr;
    auto aim = [&]() {
        u32 u = from_unit;
        const LinearSegment& s = a.segment[find_segment(a, 4 * RPT, u)];
#pragma unroll
        for (int r = 0; r < RPT; r++)
            code[r] = s.planes[0] + ((size_t)min(u * (4 * RPT) + r * 4 + copy_row, s.rows - 1) * kb + copy_k) * 16;
        scale = s.planes[1] + (size_t)min(u * (4 * RPT) + scale_row, s.rows - 1) * kb * SCALE + lane % PER_ROW * 16;
    };
    auto issue = [&](u32 slot) {
        if (from_unit < units) {
            const u32 to = ring_at + slot * SLOT + to_code;
#pragma unroll
            for (int r = 0; r < RPT; r++) copy16(to + r * 512, code[r] + from_step * 128);
            if ((from_step & 1) == 0) {
                if (scale_row < 4 * RPT)
                    copy16(ring_at + D * SLOT + from_pair * PAIR + lane * 16, scale + from_step * (8 * SCALE));
                from_pair = from_pair + 1 == PAIRS ? 0 : from_pair + 1;
            }
            if (++from_step == steps_of_row) {
                from_step = 0;
                from_unit += stride;
                if (from_unit < units)
                    aim();
                else
                    allow_next();  // not sooner: what the next kernel asks for early would be pushed out again
            }
        }
        commit_copies();
    };
    if (unit < units) {
        aim();
        if (D - 1 < steps_of_row && a.ahead && copy_k == 0) {
            const u32 rest = min((steps_of_row - (D - 1)) * 128, a.ahead);
#pragma unroll
            for (int r = 0; r < RPT; r++) ask_ahead(code[r] + (D - 1) * 128, rest);
        }
    }
#pragma unroll 1
    for (u32 i = 0; i < D - 1; i++) issue(i);
    wait_for_previous();

    const u32 row = blockIdx.y;
    if (row >= step_rows(a.step, a.wanted)) {
        await_all_copies();
        return;
    }
    stage_row<S, W16>(a.x, row, pieces, steps);
    __syncthreads();

    u32 slot = 0, pair = 0;
    const u32 from_code = (group * 8 + (klane ^ group * 2)) * 16;
    for (; unit < units; unit += stride) {
        float acc[RPT];
#pragma unroll
        for (int r = 0; r < RPT; r++) acc[r] = 0.0f;
        const int4* px = pieces + klane;
        const int2* ps = steps + klane;
#pragma unroll(S::MIN && W16 && RPT > 1 ? 1 : 2)  // more does not fit the registers
        for (u32 step = 0; step < steps_of_row; step++, px += 8, ps += 8) {
            await_copies<D - 2>();
            __syncwarp();  // the others' copies are there, and they have left the slot that is filled now
            issue(slot == 0 ? D - 1 : slot - 1);
            const u8* at = ring + slot * SLOT + from_code;
            const u8* scales = ring + D * SLOT + pair * PAIR + (step & 1) * 8 * SCALE;
            if (step & 1) pair = pair + 1 == PAIRS ? 0 : pair + 1;
            slot = slot + 1 == D ? 0 : slot + 1;
            int x[PIECES * 4];
#pragma unroll
            for (u32 j = 0; j < PIECES; j++) {
                const int4 v = px[j * kb];
                x[4 * j] = v.x;
                x[4 * j + 1] = v.y;
                x[4 * j + 2] = v.z;
                x[4 * j + 3] = v.w;
            }
            const int2 ds = *ps;
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                const uint4 c = *(const uint4*)(at + r * 512);
                const u8* sc = scales + (r * 4 + group) * (16 * SCALE);
                acc[r] = add_planar<S, W16>(acc[r], c, a.flip, x, ds, S::read(sc, klane));
            }
        }
        u32 u = unit;
        const LinearSegment& s = a.segment[find_segment(a, 4 * RPT, u)];
#pragma unroll
        for (int r = 0; r < RPT; r++) {
            float v = acc[r];
            v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 16));
            v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 8));
            v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 4));
            const u32 to = u * (4 * RPT) + r * 4 + group;
            if (klane == 0 && to < s.rows) store_output(a, s, to, row, v);
        }
    }
}

#define KERNEL(RPT, D)                                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 2) stream_w16_p##RPT##_d##D(const __grid_constant__ LinearArgs a) { \
        stream<SCALES, true, RPT, D>(a);                                                                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 2) stream_w8_p##RPT##_d##D(const __grid_constant__ LinearArgs a) {  \
        stream<SCALES, false, RPT, D>(a);                                                                        \
    }
KERNEL(1, 8)
KERNEL(1, 12)
KERNEL(2, 6)
KERNEL(2, 10)

#endif
