// Causal attention of single rows: binary16 keys and values, heads of 64 or 128 elements.
//
// As attention.cu, but a warp brings a chunk's keys and values into shared memory by asynchronous copies of whole lines, the keys of
// its next chunk while it weighs the values of this one. A block has all query heads of one KV head (HG), or a part of them.
//   direct  one block a (token row, head group) walks all chunks, WARPS at a time, and combines as it goes.
//           Launch: block 128, grid (token rows or fewer, head groups). With AttentionArgs.chunks = 0 it leaves out the rows that
//           attention_tile.cu takes.
//   split   blockIdx.z shares the chunks out; partial results go to memory; the last block of a (row, head group) to finish
//           combines them. Launch: block 128, grid (token rows, head groups, splits).
// Dynamic shared memory: staged_bytes (src/launch/attention.rs). Compute capability 8.0 and up.
#include "attention.cuh"
#include "attention_chunk.cuh"

#if __CUDA_ARCH__ >= 800

// A block's shared memory: keys and values of each warp, queries, weights of each warp, and what combining needs: parts of each
// warp (direct), factors.
template <int DIM, int HG> struct Shared {
    static const int HP = (HG + 3) / 4 * 4, PART = DIM + 2;
    u8 keys[WARPS][Staged<DIM>::KEYS];
    u8 values[WARPS][Staged<DIM>::VALUES];
    float query[HG * DIM];
    float weights[WARPS][32 * HP];
    float before[32 * HG], after[32 * HG], sums[8];
};

// Where a warp's chunks go, and where in the store they are. The page of a chunk is looked up one chunk ahead.
template <int DIM> struct Walk {
    const AttentionArgs& a;
    const Query& q;
    u8 *keys, *values;
    u32 page;
    __device__ __forceinline__ void look_up(u32 c) {
        if (c * 32 <= q.position) page = a.step.pages[q.table + c * 32 / a.kv.page_tokens];
    }
    // Asks for the keys or the values of chunk c, whose page was looked up.
    __device__ __forceinline__ void fetch(bool value, u32 c) {
        const u64 element = (u64)q.kv_head * a.kv.head_stride + (u64)(c * 32 % a.kv.page_tokens) * a.kv.token_stride;
        const u8* from = a.kv.base + page * a.kv.page_bytes + (value ? a.kv.value_offset : a.kv.key_offset) + element * 2;
        const u32 n = min(q.position - c * 32 + 1, 32u);
        const size_t stride = (size_t)a.kv.token_stride * 2;
        if (value)
            copy_rows<DIM, Staged<DIM>::VALUE_ROW>(shared_at(values), from, stride, n);
        else
            copy_rows<DIM, Staged<DIM>::KEY_ROW>(shared_at(keys), from, stride, n);
    }
};

// One chunk, whose keys and values are under way; asks for those of chunk `next` if that is below `end`.
template <int DIM, int HG>
__device__ __forceinline__ void staged_chunk(Walk<DIM>& walk, const float* query, float* weights, u32 c, u32 next, u32 end,
                                             float top[HG], float sum[HG], float out[HG][Staged<DIM>::OWN]) {
    const u32 from = max(c * 32, walk.q.first) - c * 32, to = min(c * 32 + 31, walk.q.position) - c * 32;
    await_rows<1>();
    score_chunk<DIM, HG>(query, walk.keys, from, to, walk.a.scale, walk.a.softcap, weights, top, sum);
    if (next < end) walk.fetch(false, next);
    commit_copies();
    await_rows<1>();
    weigh_chunk<DIM, HG>(walk.values, weights, from, to, out);
    if (next < end) walk.fetch(true, next);
    commit_copies();
    walk.look_up(next + next - c);
}

template <int DIM, int HG> __device__ __forceinline__ void direct_row(const AttentionArgs& a, const Query& q) {
    extern __shared__ __align__(16) u8 raw[];
    typedef Shared<DIM, HG> S;
    S& s = *(S*)raw;
    // Parts of two rounds, [2][WARPS][HG][PART]: one is read while the next is written.
    float* parts = (float*)(raw + sizeof(S)) + WARPS * HG * S::PART;
    const int PART = S::PART, OWN = Staged<DIM>::OWN, ELEMENTS = (HG * DIM + 127) / 128;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 c0 = q.first / 32, end = q.position / 32 + 1;
    Walk<DIM> walk = {a, q, s.keys[warp], s.values[warp], 0};
    walk.look_up(c0 + warp);
    if (c0 + warp < end) walk.fetch(false, c0 + warp);
    commit_copies();
    if (c0 + warp < end) walk.fetch(true, c0 + warp);
    commit_copies();
    walk.look_up(c0 + warp + WARPS);
    load_query<HG>(a, q, s.query);
    __syncthreads();
    float total[ELEMENTS], total_max = 0.0f, total_sum = 0.0f;  // the last two of head lane % 8, in warp 0
    int other = WARPS * HG * PART;
    for (u32 c = c0; c < end; c += WARPS) {
        other = -other;
        parts += other;
        if (c + warp < end) {
            float top[HG], sum[HG], out[HG][OWN];
            staged_chunk<DIM, HG>(walk, s.query, s.weights[warp], c + warp, c + warp + WARPS, end, top, sum, out);
#pragma unroll
            for (int h = 0; h < HG; h++) {
                float* to = parts + (warp * HG + h) * PART;
#pragma unroll
                for (int i = 0; i < OWN; i += 2) *(float2*)(to + lane * OWN + i) = make_float2(out[h][i], out[h][i + 1]);
                if (lane == 0) *(float2*)(to + DIM) = make_float2(top[h], sum[h]);
            }
        }
        __syncthreads();
        const u32 n = min((u32)WARPS, end - c);
        if (warp == 0) {  // a lane for each part and head
            const u32 h = min(lane % 8, (u32)HG - 1), i = min(lane / 8, n - 1);
            float m = c == c0 ? parts[h * PART + DIM] : total_max, before = m;
            for (u32 k = 0; k <= i; k++) {
                before = m;
                m = fmaxf(m, parts[(k * HG + h) * PART + DIM]);
            }
            const float x = contract_exp(__fsub_rn(before, m));
            const float y = contract_exp(__fsub_rn(parts[(i * HG + h) * PART + DIM], m));
            const float weight = parts[(i * HG + h) * PART + DIM + 1], scaled = __fmul_rn(weight, y);
            if (lane % 8 < HG) {
                s.before[lane / 8 * HG + h] = x;
                s.after[lane / 8 * HG + h] = y;
            }
            for (u32 k = 0; k < n; k++) {
                const u32 from = k * 8 + lane % 8;
                const float xk = __shfl_sync(FULL, x, from), sk = __shfl_sync(FULL, scaled, from);
                const float wk = __shfl_sync(FULL, weight, from);
                total_sum = c + k == c0 ? wk : __fmaf_rn(total_sum, xk, sk);
            }
            total_max = __shfl_sync(FULL, m, (n - 1) * 8 + lane % 8);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            if (i >= n) continue;
#pragma unroll
            for (int t = 0; t < ELEMENTS; t++) {
                const u32 e = threadIdx.x + t * 128, h = e / DIM, d = e % DIM;
                if (HG * DIM % 128 != 0 && e >= HG * DIM) continue;
                const float v = parts[(i * HG + h) * PART + d];
                total[t] = i == 0 && c == c0 ? v : __fmaf_rn(total[t], s.before[i * HG + h], __fmul_rn(v, s.after[i * HG + h]));
            }
        }
    }
    if (warp == 0 && lane < HG) s.sums[lane] = total_sum;
    __syncthreads();
    float* out = a.out + ((size_t)q.row * a.heads + q.head) * DIM;
#pragma unroll
    for (int t = 0; t < ELEMENTS; t++) {
        const u32 e = threadIdx.x + t * 128;
        if (e < q.heads * DIM) out[e] = __fdiv_rn(total[t], s.sums[e / DIM]);
    }
}

template <int DIM, int HG> __device__ __forceinline__ void rows_direct(const AttentionArgs& a) {
    allow_next();
    wait_for_previous();
    Query q;
    for (u32 row = blockIdx.x; block_query<HG>(a, q, row); row += gridDim.x)
        if (a.chunks != 0 || !one_sequence(a.step, row / ROWS * ROWS)) direct_row<DIM, HG>(a, q);
}

template <int DIM, int HG> __device__ __forceinline__ void rows_split(const AttentionArgs& a) {
    extern __shared__ __align__(16) u8 raw[];
    __shared__ u32 last;
    typedef Shared<DIM, HG> S;
    S& s = *(S*)raw;
    const int PART = S::PART, OWN = Staged<DIM>::OWN;
    allow_next();
    Query q;
    const bool mine = block_query<HG>(a, q, blockIdx.x);
    wait_for_previous();
    if (!mine) return;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 c0 = q.first / 32, n = q.position / 32 - c0 + 1, step = gridDim.z * WARPS, mine0 = blockIdx.z * WARPS + warp;
    float* parts = a.partials + ((size_t)q.row * a.heads + q.head) * a.chunks * PART;
    Walk<DIM> walk = {a, q, s.keys[warp], s.values[warp], 0};
    // Blocks without a chunk only take their ticket.
    if (blockIdx.z * WARPS < n) {
        walk.look_up(c0 + mine0);
        if (mine0 < n) walk.fetch(false, c0 + mine0);
        commit_copies();
        if (mine0 < n) walk.fetch(true, c0 + mine0);
        commit_copies();
        walk.look_up(c0 + mine0 + step);
        load_query<HG>(a, q, s.query);
        __syncthreads();
        for (u32 i = mine0; i < n; i += step) {
            float top[HG], sum[HG], out[HG][OWN];
            staged_chunk<DIM, HG>(walk, s.query, s.weights[warp], c0 + i, c0 + i + step, c0 + n, top, sum, out);
#pragma unroll
            for (int h = 0; h < HG; h++) {
                if (h >= q.heads) continue;
                float* to = parts + ((size_t)h * a.chunks + i) * PART;
#pragma unroll
                for (int k = 0; k < OWN; k += 2) *(float2*)(to + lane * OWN + k) = make_float2(out[h][k], out[h][k + 1]);
                if (lane == 0) *(float2*)(to + DIM) = make_float2(top[h], sum[h]);
            }
        }
    }
    __threadfence();
    __syncthreads();
    u32* ticket = a.tickets + (size_t)q.row * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) + 1 == gridDim.z;
        if (last) *ticket = 0;
        __threadfence();
    }
    __syncthreads();
    if (last) combine<HG, DIM>(a, q, parts, n, s.before, s.after, s.sums);
}

#define ATTENTION(DIM, HG)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 2) rows_direct_d##DIM##_h##HG(const __grid_constant__ AttentionArgs a) { \
        rows_direct<DIM, HG>(a);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 2) rows_split_d##DIM##_h##HG(const __grid_constant__ AttentionArgs a) {  \
        rows_split<DIM, HG>(a);                                                                                       \
    }
#define ALL(DIM) ATTENTION(DIM, 1) ATTENTION(DIM, 2) ATTENTION(DIM, 3) ATTENTION(DIM, 4) ATTENTION(DIM, 5) ATTENTION(DIM, 6) ATTENTION(DIM, 7) ATTENTION(DIM, 8)
ALL(64)
ALL(128)

#endif
