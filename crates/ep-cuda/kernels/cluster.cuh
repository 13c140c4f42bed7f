// What kernels share whose clusters of blocks have the contract's lanes shared out.
#pragma once
#include "copies.cuh"
#include "dot.cuh"

#if __CUDA_ARCH__ >= 900

// Shared address `at` in block `rank` of the cluster, and the float there.
__device__ __forceinline__ u32 cluster_at(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ float cluster_float(u32 at) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Adds up the lanes of a cluster's tile of R weight rows and TOKENS token rows, and stores what exists of it. Every block has its sums in
// shared memory at the same place, [SIDE ? LANES : LANES / 2][token][R + 4]: of lanes rank * LANES on, or of lanes l and l + 4 for
// LANES / 2 lanes from rank * LANES / 2 on. The cluster has met since they were written.
template <int CLUSTER, bool SIDE, int LANES, int R, int TOKENS, int THREADS>
__device__ __forceinline__ void end_tile(const LinearArgs& a, const LinearSegment& s, const float* sums, u32 rank, u32 r0, u32 first,
                                         u32 token_rows) {
    // Each block of the cluster ends a share of the token rows; a thread keeps to one weight row.
    const int PAIRS = LANES / 2, LINE = R + 4, SUM = TOKENS * LINE, ROUND = THREADS / R, SHARE = TOKENS / CLUSTER;
    static_assert(THREADS % R == 0 && TOKENS % CLUSTER == 0, "output");
    const u32 tid = threadIdx.x, r = tid % R, from = rank * SHARE;
    const u32 here = shared_at(sums) + r * 4;
    u32 there[CLUSTER];
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) there[i] = CLUSTER > 1 ? cluster_at(here, i) : here;
    const bool has_row = r0 + r < s.rows;
    const float bias = s.bias && has_row ? float_at(s.bias, s.bias_type, r0 + r) : 0.0f;
    float* out = a.out + s.column + r0 + r;
#pragma unroll 4
    for (u32 i = tid / R; i < SHARE; i += ROUND) {
        const u32 c = from + i;
        float v[8];
#pragma unroll
        for (int l = 0; l < (SIDE ? 8 : 4); l++) {
            const int owner = SIDE ? l / LANES : l / PAIRS, index = SIDE ? l % LANES : l % PAIRS;
            v[l] = CLUSTER > 1 ? cluster_float(there[owner] + (c * LINE + index * SUM) * 4) : sums[r + c * LINE + index * SUM];
        }
        float total = SIDE ? tree8(v) : __fadd_rn(__fadd_rn(v[0], v[2]), __fadd_rn(v[1], v[3]));
        if (s.bias) total = __fadd_rn(total, bias);
        if (!has_row || first + c >= token_rows) continue;
        float* to = out + (size_t)(first + c) * a.out_ld;
        if (s.accumulate) total = __fadd_rn(total, *to);
        *to = total;
    }
    if (CLUSTER > 1) cluster_sync();  // nobody's shared memory goes while another reads it
}

#endif
