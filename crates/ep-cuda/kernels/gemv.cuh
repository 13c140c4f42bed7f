// Quantised linear layer for a few rows: integer dot products of four (dp4a), weights read once from memory.
//
// y[row][column + r] = w[r] . x[row] for every row r of the segments. Eight neighbouring threads share RPT weight rows;
// thread `lane` of them takes blocks lane, lane + 8, ..., which are the contract's eight lanes. The activations of R token
// rows lie in shared memory. Each thread keeps UN * RPT blocks of weights in flight: a slot is consumed and refilled at
// once with what comes UN steps later, also across the border to the next rows, so that loads never pause. The first
// loads are issued before the previous kernel's results are awaited.
//
// Launch: block 256; grid (any number of blocks, ceil(token rows / R)); warps take units of 4 * RPT rows, interleaved
// over the blocks, so that a small matrix still reaches every multiprocessor. Dynamic shared memory:
// R * blocks * (W16 ? 72 : 40) bytes. Activation of `x.ld` rows; rows beyond the step's are neither read nor written.
#pragma once
#include "dot.cuh"

template <class F, bool W16, int R, int RPT, int UN> __device__ __forceinline__ void gemv(const LinearArgs& a) {
    extern __shared__ int4 shared[];
    const int PIECES = W16 ? 4 : 2;
    const u32 kb = (a.x.cols + 31) / 32, lane = threadIdx.x & 7;
    const FormatParams params = {a.x.cols, a.group_shift, a.flip, a.scale_half};
    int4* pieces = shared;                                   // [R][PIECES][kb]
    int2* steps = (int2*)(shared + (size_t)R * PIECES * kb);  // [R][kb]

    // Units of this warp's four groups: warp-uniform start, one apart; all groups of a warp run the same loops.
    const u32 units = count_units(a, RPT);
    const u32 warp_units = (units + 3) / 4;
    const u32 group = (threadIdx.x & 31) >> 3;
    u32 unit = (threadIdx.x >> 5) * gridDim.x + blockIdx.x;   // in units of four
    const u32 stride = gridDim.x * (blockDim.x >> 5);

    typename F::Row rows[RPT];
    auto aim = [&](u32 warp_unit) {
        u32 u = min(warp_unit * 4 + group, units - 1);
        const LinearSegment& s = a.segment[find_segment(a, RPT, u)];
#pragma unroll
        for (int r = 0; r < RPT; r++) rows[r] = F::row(s.planes, min(u * RPT + r, s.rows - 1), params);
    };
    typename F::Raw raw[UN][RPT];
    if (unit < warp_units) {
        aim(unit);
#pragma unroll
        for (int i = 0; i < UN; i++) {
            u32 k = lane + 8 * i;
            if (k < kb) {
#pragma unroll
                for (int r = 0; r < RPT; r++) raw[i][r] = F::load(rows[r], k, params);
            }
        }
    }
    allow_next();
    wait_for_previous();

    const u32 token_rows = step_rows(a.step, a.wanted), first = blockIdx.y * R;
    if (first >= token_rows) return;
    const u32 ld = a.x.ld;
#pragma unroll
    for (int t = 0; t < R; t++) {
        u32 row = min(first + t, token_rows - 1);
        for (u32 i = threadIdx.x; i < kb * PIECES; i += blockDim.x) {
            u32 k = i / PIECES, j = i % PIECES;
            int4 v = ((const int4*)a.x.codes)[((size_t)k * ld + row) * PIECES + j];
            pieces[((size_t)t * PIECES + j) * kb + k] = F::PAIR ? pair_order(v) : v;
        }
        for (u32 k = threadIdx.x; k < kb; k += blockDim.x) steps[(size_t)t * kb + k] = a.x.steps[(size_t)k * ld + row];
    }
    __syncthreads();

    while (unit < warp_units) {
        float acc[R][RPT];
#pragma unroll
        for (int t = 0; t < R; t++)
#pragma unroll
            for (int r = 0; r < RPT; r++) acc[t][r] = 0.0f;
        const u32 next_unit = unit + stride;
        for (u32 k0 = 0; k0 < kb; k0 += 8 * UN) {
            // Where the refills come from: UN steps on, or the start of the next unit.
            u32 n0 = k0 + 8 * UN;
            bool more = true;
            if (n0 >= kb) {
                n0 = 0;
                more = next_unit < warp_units;
                if (more) aim(next_unit);
            }
#pragma unroll
            for (int i = 0; i < UN; i++) {
                const u32 k = k0 + 8 * i + lane, n = n0 + 8 * i + lane;
                int w[RPT][8];
                BlockFloats f[RPT];
                if (k < kb) {
#pragma unroll
                    for (int r = 0; r < RPT; r++) F::unpack(raw[i][r], k, params, w[r], f[r]);
                }
                if (more && n < kb) {
#pragma unroll
                    for (int r = 0; r < RPT; r++) raw[i][r] = F::load(rows[r], n, params);
                }
                if (k < kb) {
#pragma unroll
                    for (int t = 0; t < R; t++) {
                        ActBlock<W16> x;
#pragma unroll
                        for (int j = 0; j < PIECES; j++) {
                            int4 v = pieces[((size_t)t * PIECES + j) * kb + k];
                            int* to = j < 2 ? x.high + 4 * j : x.low + 4 * (j - 2);
                            to[0] = v.x;
                            to[1] = v.y;
                            to[2] = v.z;
                            to[3] = v.w;
                        }
                        int2 s = steps[(size_t)t * kb + k];
                        x.d = __int_as_float(s.x);
                        x.sum = s.y;
#pragma unroll
                        for (int r = 0; r < RPT; r++) acc[t][r] = add_block<F, W16>(acc[t][r], w[r], f[r], x);
                    }
                }
            }
        }
        u32 u = unit * 4 + group;
        const bool mine = u < units;
        u = min(u, units - 1);
        const LinearSegment& s = a.segment[find_segment(a, RPT, u)];
#pragma unroll
        for (int t = 0; t < R; t++)
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                float v = tree8(acc[t][r]);
                if (lane == 0 && mine && u * RPT + r < s.rows && first + t < token_rows)
                    store_output(a, s, u * RPT + r, first + t, v);
            }
        unit = next_unit;
    }
}

#define GEMV(R, RPT, UN, BLOCKS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                         \
        gemv_w16_r##R##_p##RPT##_u##UN(const __grid_constant__ LinearArgs a) {                                        \
        gemv<FORMAT, true, R, RPT, UN>(a);                                                                            \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                         \
        gemv_w8_r##R##_p##RPT##_u##UN(const __grid_constant__ LinearArgs a) {                                         \
        gemv<FORMAT, false, R, RPT, UN>(a);                                                                           \
    }
