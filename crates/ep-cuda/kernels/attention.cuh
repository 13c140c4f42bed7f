// What the forms of attention share: a block's queries, and the combination of partial results in order.
#pragma once
#include "kv.cuh"

#define WARPS 4
// Rows of the step that attention_tile.cu takes together.
#define ROWS 8

struct Query { u32 row, kv_head, head, heads; u32 position, first, table; };

// True if at least two rows exist of the ROWS from `first` on, all of one sequence.
__device__ __forceinline__ bool one_sequence(const StepRef& s, u32 first) {
    const u32 rows = s.header->rows;
    if (first + 1 >= rows) return false;
    const u32 table = s.rows[first].table, end = min(first + ROWS, rows);
    bool same = true;
#pragma unroll
    for (u32 i = 1; i < ROWS; i++) same &= first + i >= end || s.rows[first + i].table == table;
    return same;
}

// Which query heads of a row this block has; false if the row does not exist.
template <int HG> __device__ __forceinline__ bool block_query(const AttentionArgs& a, Query& q, u32 row_number) {
    q.row = row_number;
    if (q.row >= a.step.header->rows) return false;
    const u32 share = a.heads / a.kv_heads, groups = (share + HG - 1) / HG;
    q.kv_head = blockIdx.y / groups;
    const u32 from = blockIdx.y % groups * HG;
    q.head = q.kv_head * share + from;
    q.heads = min((u32)HG, share - from);
    const StepRow row = a.step.rows[q.row];
    q.position = row.position;
    q.table = row.table;
    q.first = a.window && row.position + 1 > a.window ? row.position + 1 - a.window : 0;
    return true;
}

// Queries of the block's heads into shared memory; missing heads are zero.
template <int HG> __device__ __forceinline__ void load_query(const AttentionArgs& a, const Query& q, float* query) {
    const u32 dim = a.head_dim;
    const float* x = a.qkv + (size_t)q.row * a.qkv_ld + (size_t)q.head * dim;
    for (u32 i = threadIdx.x; i < HG * dim; i += blockDim.x) query[i] = i < q.heads * dim ? x[i] : 0.0f;
}

// Combines `n` partial results of the block's heads, in order. Partial i of head h: parts[h][i * (dim + 2)]. MOST: the most
// elements of a head.
template <int HG, int MOST = 256>
__device__ __forceinline__ void combine(const AttentionArgs& a, const Query& q, const float* parts, u32 n, float* ea,
                                        float* eb, float* sums) {
    const u32 dim = a.head_dim, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = dim + 2;
    const size_t head_stride = (size_t)a.chunks * part;
    const u32 elements = q.heads * dim;
    const int OWN = (HG * MOST + 127) / 128;  // of 128 threads, at most HG * MOST elements
    float o[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) o[i] = 0.0f;
    float carry_max[(HG + WARPS - 1) / WARPS], carry_sum[(HG + WARPS - 1) / WARPS];
    for (u32 base = 0; base < n; base += 32) {
        const u32 m = min(32u, n - base);
        // A warp takes heads warp, warp + WARPS, ...: running maxima by a scan, then every factor at once.
#pragma unroll
        for (int t = 0; t < (HG + WARPS - 1) / WARPS; t++) {
            const u32 h = warp + t * WARPS;
            if (h >= q.heads) continue;
            const float* p = parts + h * head_stride + (size_t)(base + min(lane, m - 1)) * part + dim;
            const float own = __ldcg(p), weight = __ldcg(p + 1);
            float top = own;
            if (base > 0 && lane == 0) top = fmaxf(carry_max[t], own);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const float other = __shfl_up_sync(FULL, top, d);
                if (lane >= d) top = fmaxf(other, top);
            }
            float before = __shfl_up_sync(FULL, top, 1);
            if (lane == 0) before = base > 0 ? carry_max[t] : own;
            const float x = contract_exp(__fsub_rn(before, top)), y = contract_exp(__fsub_rn(own, top));
            ea[lane * HG + h] = x;
            eb[lane * HG + h] = y;
            const float scaled = __fmul_rn(weight, y);
            float sum = carry_sum[t];
#pragma unroll 8
            for (u32 i = 0; i < m; i++) {
                const float xi = __shfl_sync(FULL, x, i), si = __shfl_sync(FULL, scaled, i),
                            wi = __shfl_sync(FULL, weight, i);
                sum = base + i == 0 ? wi : __fmaf_rn(sum, xi, si);
            }
            carry_sum[t] = sum;
            carry_max[t] = __shfl_sync(FULL, top, m - 1);
            if (lane == 0) sums[h] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < OWN; t++) {
            const u32 e = threadIdx.x + t * 128;
            if (e >= elements) continue;
            const u32 h = e / dim, d = e % dim;
            const float* p = parts + h * head_stride + (size_t)base * part + d;
#pragma unroll(HG <= 2 ? 16 : 8)
            for (u32 i = 0; i < m; i++) {
                const float v = __ldcg(p + (size_t)i * part);
                o[t] = base + i == 0 ? v : __fmaf_rn(o[t], ea[i * HG + h], __fmul_rn(v, eb[i * HG + h]));
            }
        }
        __syncthreads();
    }
    float* out = a.out + ((size_t)q.row * a.heads + q.head) * dim;
#pragma unroll
    for (int t = 0; t < OWN; t++) {
        const u32 e = threadIdx.x + t * 128;
        if (e < elements) out[e] = __fdiv_rn(o[t], sums[e / dim]);
    }
}
