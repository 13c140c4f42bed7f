// Combines the partial results that attention_rows.cu leaves in memory, in the order of positions: 32 elements of a head a block.
//
// All warps bring tiles of TILE chunks into shared memory, up to SLOTS - 1 ahead. Of a tile, warp 1 makes the factors while warp 0 adds up
// the elements of the tile before and warp 2 the sums.
// Launch: block 128, grid (token rows, heads, head elements / 32). Compute capability 8.0 and up.
#include "attention.cuh"
#include "copies.cuh"

#if __CUDA_ARCH__ >= 800

#define TILE 64
#define SLOTS 4

template <int DIM> __device__ __forceinline__ void combine_rows(const AttentionArgs& a) {
    __shared__ __align__(16) float values[SLOTS][TILE][32];
    __shared__ float2 factors[2][TILE];
    __shared__ float sums[2][TILE], whole;
    const int PART = DIM + 2;
    const u32 tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, row = blockIdx.x, head = blockIdx.y;
    allow_next();
    wait_for_previous();
    if (row >= a.step.header->rows) return;
    const u32 position = a.step.rows[row].position;
    const u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0, n = position / 32 - first / 32 + 1;
    const float* parts = a.partials + ((size_t)row * a.heads + head) * a.chunks * PART;
    const u32 tiles = (n + TILE - 1) / TILE;

    auto fetch = [&](u32 k) {
        const float* from = parts + (size_t)k * TILE * PART + blockIdx.z * 32 + tid % 16 * 2;
        const u32 to = shared_at(&values[k % SLOTS][0][tid % 16 * 2]);
#pragma unroll
        for (u32 r = tid / 16, i = 0; i < TILE / 8; i++, r += 8)
            if (k * TILE + r < n)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + r * 128),
                             "l"(__cvta_generic_to_global(from + (size_t)r * PART))
                             : "memory");
        commit_copies();
    };
    // A lane's two chunks of a tile, 32 apart; those beyond the last repeat it.
    float2 next[2];
    auto ask = [&](u32 k) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) next[i] = __ldcg((const float2*)(parts + (size_t)min(k * TILE + i * 32 + lane, n - 1) * PART + DIM));
    };
    float run = 0.0f;  // maximum of the tiles before
    auto make = [&](u32 k) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float own = next[i].x;
            const bool starts = k == 0 && i == 0;
            float top = own;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const float other = __shfl_up_sync(FULL, top, d);
                if (lane >= d) top = fmaxf(other, top);
            }
            if (!starts) top = fmaxf(run, top);
            float before = __shfl_up_sync(FULL, top, 1);
            if (lane == 0) before = starts ? own : run;
            run = __shfl_sync(FULL, top, 31);
            factors[k & 1][i * 32 + lane] = make_float2(contract_exp(__fsub_rn(before, top)), contract_exp(__fsub_rn(own, top)));
            sums[k & 1][i * 32 + lane] = next[i].y;
        }
    };
#pragma unroll
    for (u32 k = 0; k < SLOTS - 1; k++) fetch(k);
    if (warp == 1) {
        ask(0);
        make(0);
        ask(1);
    }
    float total = 0.0f;
    for (u32 k = 0; k < tiles; k++) {
        await_copies<SLOTS - 2>();
        __syncthreads();
        fetch(k + SLOTS - 1);
        const u32 m = min(n - k * TILE, (u32)TILE);
        if (warp == 1 && k + 1 < tiles) {
            make(k + 1);
            ask(k + 2);
        }
        if (warp == 0 || warp == 2) {
            const float *v = warp == 0 ? &values[k % SLOTS][0][lane] : sums[k & 1];
            const u32 stride = warp == 0 ? 32 : 1;
            u32 i = 0;
            if (k == 0) {
                total = v[0];
                i = 1;
            }
#pragma unroll 8
            for (; i < m; i++) {
                const float2 f = factors[k & 1][i];
                total = __fmaf_rn(total, f.x, __fmul_rn(v[i * stride], f.y));
            }
        }
    }
    if (warp == 2 && lane == 0) whole = total;
    __syncthreads();
    if (warp == 0) {
        const u32 at = blockIdx.z * 32 + lane, d = DIM == 128 ? at % 64 / 2 * 4 + at / 64 * 2 + at % 2 : at;
        a.out[((size_t)row * a.heads + head) * DIM + d] = __fdiv_rn(total, whole);
    }
}

extern "C" __global__ void __launch_bounds__(128) combine_d64(const __grid_constant__ AttentionArgs a) { combine_rows<64>(a); }
extern "C" __global__ void __launch_bounds__(128) combine_d128(const __grid_constant__ AttentionArgs a) { combine_rows<128>(a); }

#endif
