// Causal attention of single rows: binary16 keys and values, heads of 64 or 128 elements.
//
// A worker, a warp, takes a chunk at a time for up to HG query heads of one KV head (attention_chunk.cuh). It brings keys and values into
// shared memory by asynchronous copies of whole lines: the keys of its next chunk while it weighs the values of this one. Partial
// results of chunks must be combined in the order of positions.
//   direct  the last warp of a block has no chunks: it combines what the workers leave in shared memory, a slot each.
//           Launch: block (workers + 1) warps, at least two workers, grid (token rows or fewer, head groups). With AttentionArgs.chunks = 0 it leaves out
//           the rows that attention_tile.cu takes.
//   split   blockIdx.z shares the chunks out; partial results go to memory, where attention_combine.cu combines them.
//           Launch: block any number of warps, grid (token rows, head groups, splits).
// At most `most_warps` warps a block. Dynamic shared memory: staged_bytes (src/launch/attention.rs). Compute capability 8.0 and up.
#include "attention.cuh"
#include "attention_chunk.cuh"

#if __CUDA_ARCH__ >= 800

// More heads need more registers a thread; so does, for reasons of the assembler's, the combining form of three heads of 128.
template <int DIM, int HG> __device__ constexpr int most_warps(bool split) {
    return HG > 5 || (!split && DIM == 128 && HG == 3) ? 4 : split ? 6 : 5;
}

// A worker's shared memory.
template <int DIM, int HG> struct Worker {
    u8 keys[Staged<DIM>::KEYS];
    u8 values[Staged<DIM>::VALUES];
    float weights[HG * 32];
    // Here, as registers are few: chunks that it handed over so far, the row, its page table, its KV head, and where the chunk that was looked
    // up starts in the store, but for the offset of keys or values.
    u32 turn, row, table, kv_head;
    u64 from;
    u32 first, reserved;  // the first position that is seen
};

// Where a worker's chunks go, and where in the store they are. The page of a chunk is looked up one chunk ahead.
template <int DIM, int HG> struct Walk {
    const AttentionArgs& a;
    const Query& q;
    Worker<DIM, HG>& own;
    __device__ __forceinline__ void look_up(u32 c) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0 && c * 32 <= q.position) {
            const u32 chunks = a.kv.page_tokens / 32, index = chunks == 1 ? c : c / chunks, token = (c - index * chunks) * 32;
            const u64 element = (u64)own.kv_head * a.kv.head_stride + (u64)token * a.kv.token_stride;
            own.from = (u64)a.kv.base + a.step.pages[own.table + index] * a.kv.page_bytes + element * 2;
        }
        __syncwarp();
    }
    // Asks for the keys or the values of chunk c, which was looked up.
    __device__ __forceinline__ void fetch(bool value, u32 c) {
        const u8* from = (const u8*)own.from + (value ? a.kv.value_offset : a.kv.key_offset);
        const u32 n = min(q.position - c * 32 + 1, 32u);
        const size_t stride = (size_t)a.kv.token_stride * 2;
        if (value)
            copy_rows<DIM, Staged<DIM>::VALUE_ROW>(shared_at(own.values), from, stride, n);
        else
            copy_rows<DIM, Staged<DIM>::KEY_ROW>(shared_at(own.keys), from, stride, n);
    }
};

// The chunks i, i + step, ... below n, counted from the row's first chunk, by one warp. `put(i, top, sum, out)` takes what each comes to: maxima
// and sums as score_chunk leaves them, and the lane's elements of every head.
template <int DIM, int HG, class Put>
__device__ __forceinline__ void work(const AttentionArgs& a, const Query& q, Worker<DIM, HG>& own, u32 i, u32 step, const Put& put) {
    const u32 lane = threadIdx.x & 31, c0 = q.first / 32, n = q.position / 32 - c0 + 1;
    if (i >= n) return;
    Walk<DIM, HG> walk = {a, q, own};
    __syncwarp();
    if (lane == 0) {
        own.table = q.table;
        own.kv_head = q.kv_head;
        own.first = q.first;
    }
    walk.look_up(c0 + i);
    walk.fetch(false, c0 + i);
    commit_copies();
    walk.fetch(true, c0 + i);
    commit_copies();
    walk.look_up(c0 + i + step);
    float query[HG][DIM / 8];
    const float* x = a.qkv + (size_t)q.row * a.qkv_ld + (size_t)q.head * DIM + (lane >> 2);
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int e = 0; e < DIM / 8; e++) query[h][e] = h < q.heads ? __ldcg(x + h * DIM + e * 8) : 0.0f;
#pragma unroll 1
    for (; i < n; i += step) {
        const u32 c = c0 + i, from = max(c * 32, own.first) - c * 32, to = min(c * 32 + 31, q.position) - c * 32;
        float top[HG], sum[(HG + 3) / 4], out[HG][Staged<DIM>::OWN];
        await_rows<1>();
        score_chunk<DIM, HG>(query, shared_at(own.keys), from, to, a.scale, a.softcap, own.weights, top, sum);
        if (i + step < n) walk.fetch(false, c + step);
        commit_copies();
        await_rows<1>();
        weigh_chunk<DIM, HG>(own.values, own.weights, from, to, out);
        if (i + step < n) walk.fetch(true, c + step);
        commit_copies();
        walk.look_up(c + step + step);
        put(i, top, sum, out);
    }
}

// Hands `put(h, top, sum)` the maxima and sums that this lane speaks for: of heads lane / 8, 4 + lane / 8.
template <int HG, class Put>
__device__ __forceinline__ void each_sum(const float top[HG], const float sum[(HG + 3) / 4], const Put& put) {
    const u32 own = (threadIdx.x & 31) >> 3;
#pragma unroll
    for (int q = 0; q < (HG + 3) / 4; q++) {
        float t = top[q * 4];
#pragma unroll
        for (int h = 1; h < 4 && q * 4 + h < HG; h++) t = own == h ? top[q * 4 + h] : t;
        if (q * 4 + own < HG) put(q * 4 + own, t, sum[q]);
    }
}

#if __CUDA_ARCH__ < 900
__device__ __forceinline__ void phase_await(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN%=:\nmbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN%=;\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
#endif

// Where workers leave partial results, after their own memory: a slot each, then barriers for "there" and for "read".
template <int DIM, int HG> struct Slot {
    float out[HG * DIM], top[8], sum[8];
};
template <int DIM, int HG> struct Slots {
    u32 workers;
    __device__ __forceinline__ Slots() : workers((blockDim.x >> 5) - 1) {}
    __device__ __forceinline__ Slot<DIM, HG>& at(u32 j) const {
        extern __shared__ __align__(16) u8 raw[];
        return ((Slot<DIM, HG>*)(raw + workers * sizeof(Worker<DIM, HG>)))[j];
    }
    __device__ __forceinline__ u32 full(u32 j) const { return shared_at(&at(workers)) + j * 8; }
    __device__ __forceinline__ u32 empty(u32 j) const { return full(workers) + j * 8; }
    // Before the first use: every barrier in its first phase.
    __device__ __forceinline__ void init() const {
        if (threadIdx.x < 2 * workers) phase_init(full(threadIdx.x), 32);
        __syncthreads();
    }
};

// Combines a row's chunks in order, two at a time: lanes 0 to 7 make the factors of what was before the first of them, 8 to 15 those of
// the first, 16 to 31 the same for the second, a head each. Bit j of `phases` is the phase of slot j that comes next.
template <int DIM, int HG>
__device__ __forceinline__ void combine_slots(const AttentionArgs& a, const Query& q, const Slots<DIM, HG>& slots, u32& phases) {
    const int OWN = HG * DIM / 32;
    const u32 lane = threadIdx.x & 31, n = q.position / 32 - q.first / 32 + 1, head = min(lane & 7, (u32)HG - 1);
    const bool second = lane & 16, after = lane & 8;
    float total[OWN], run = 0.0f, sum = 0.0f;
    u32 j = 0;
#pragma unroll 1
    for (u32 i = 0; i < n; i += 2) {
        const bool both = i + 1 < n;
        const u32 j0 = j, j1 = j + 1 == slots.workers ? 0 : j + 1;
        j = j1 + 1 == slots.workers ? 0 : j1 + 1;
        phase_await(slots.full(j0), phases >> j0 & 1);
        phases ^= 1u << j0;
        if (both) {
            phase_await(slots.full(j1), phases >> j1 & 1);
            phases ^= 1u << j1;
        }
        const Slot<DIM, HG>&s0 = slots.at(j0), &s1 = slots.at(both ? j1 : j0);
        const float top0 = s0.top[head], top1 = s1.top[head], sum0 = s0.sum[head], sum1 = s1.sum[head];
        const float before = i == 0 ? top0 : run, m0 = fmaxf(before, top0), m1 = fmaxf(m0, top1);
        const float m = second ? m1 : m0, f = contract_exp(__fsub_rn(after ? (second ? top1 : top0) : (second ? m0 : before), m));
        const float x0 = __shfl_sync(FULL, f, head), y0 = __shfl_sync(FULL, f, 8 + head);
        const float x1 = __shfl_sync(FULL, f, 16 + head), y1 = __shfl_sync(FULL, f, 24 + head);
        sum = i == 0 ? sum0 : __fmaf_rn(sum, x0, __fmul_rn(sum0, y0));
        if (both) sum = __fmaf_rn(sum, x1, __fmul_rn(sum1, y1));
        run = both ? m1 : m0;
#pragma unroll
        for (int h = 0; h < HG; h++) {
            const float a0 = __shfl_sync(FULL, f, h), b0 = __shfl_sync(FULL, f, 8 + h);
            const float a1 = __shfl_sync(FULL, f, 16 + h), b1 = __shfl_sync(FULL, f, 24 + h);
#pragma unroll
            for (int k = 0; k < DIM / 32; k++) {
                const int e = h * (DIM / 32) + k;
                const float v0 = s0.out[e * 32 + lane], v1 = s1.out[e * 32 + lane];
                total[e] = i == 0 ? v0 : __fmaf_rn(total[e], a0, __fmul_rn(v0, b0));
                if (both) total[e] = __fmaf_rn(total[e], a1, __fmul_rn(v1, b1));
            }
        }
        phase_arrive(slots.empty(j0));
        if (both) phase_arrive(slots.empty(j1));
    }
    float* out = a.out + ((size_t)q.row * a.heads + q.head) * DIM;
#pragma unroll
    for (int e = 0; e < OWN; e++) {
        const float whole = __shfl_sync(FULL, sum, e / (DIM / 32));
        if (e / (DIM / 32) < q.heads) out[e * 32 + lane] = __fdiv_rn(total[e], whole);
    }
}

template <int DIM, int HG> __device__ __forceinline__ void rows_direct(const AttentionArgs& a) {
    extern __shared__ __align__(16) u8 raw[];
    const int OWN = Staged<DIM>::OWN;
    const Slots<DIM, HG> slots;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    allow_next();
    slots.init();
    wait_for_previous();
    Query q;
    if (warp == slots.workers) {
        u32 phases = 0;
        for (u32 row = blockIdx.x; block_query<HG>(a, q, row); row += gridDim.x)
            if (a.chunks != 0 || !one_sequence(a.step, row / ROWS * ROWS)) combine_slots<DIM, HG>(a, q, slots, phases);
        return;
    }
    Worker<DIM, HG>& own = ((Worker<DIM, HG>*)raw)[warp];
    auto put = [&](u32, const float top[HG], const float sum[(HG + 3) / 4], const float out[HG][OWN]) {
        const u32 turn = own.turn;
        __syncwarp();
        if (lane == 0) own.turn = turn + 1;
        phase_await(slots.empty(warp), ~turn & 1);
        Slot<DIM, HG>& to = slots.at(warp);
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int k = 0; k < OWN; k += 2) *(float2*)(to.out + h * DIM + lane * OWN + k) = make_float2(out[h][k], out[h][k + 1]);
        each_sum<HG>(top, sum, [&](u32 h, float t, float s) {
            to.top[h] = t;
            to.sum[h] = s;
        });
        phase_arrive(slots.full(warp));
    };
    own.turn = 0;
    own.row = blockIdx.x;
    while (block_query<HG>(a, q, own.row)) {
        if (a.chunks != 0 || !one_sequence(a.step, own.row / ROWS * ROWS)) work<DIM, HG>(a, q, own, warp, slots.workers, put);
        __syncwarp();
        if (lane == 0) own.row += gridDim.x;
        __syncwarp();
    }
}

// A partial result in memory: the elements as the lanes have them, pair by pair, then maximum and sum.
template <int DIM, int HG> __device__ __forceinline__ void rows_split(const AttentionArgs& a) {
    extern __shared__ __align__(16) u8 raw[];
    const int PART = DIM + 2, OWN = Staged<DIM>::OWN;
    allow_next();
    wait_for_previous();
    Query q;
    if (!block_query<HG>(a, q, blockIdx.x)) return;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    float* parts = a.partials + ((size_t)q.row * a.heads + q.head) * a.chunks * PART;
    auto put = [&](u32 i, const float top[HG], const float sum[(HG + 3) / 4], const float out[HG][OWN]) {
#pragma unroll
        for (int h = 0; h < HG; h++) {
            if (h >= q.heads) continue;
            float* to = parts + ((size_t)h * a.chunks + i) * PART + lane * 2;
#pragma unroll
            for (int k = 0; k < OWN; k += 2) *(float2*)(to + k * 32) = make_float2(out[h][k], out[h][k + 1]);
        }
        each_sum<HG>(top, sum, [&](u32 h, float t, float s) {
            if ((lane & 7) == 0 && h < q.heads) *(float2*)(parts + ((size_t)h * a.chunks + i) * PART + DIM) = make_float2(t, s);
        });
    };
    work<DIM, HG>(a, q, ((Worker<DIM, HG>*)raw)[warp], blockIdx.z * warps + warp, gridDim.z * warps, put);
}

#define ATTENTION(DIM, HG)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * most_warps<DIM, HG>(false), 2) rows_direct_d##DIM##_h##HG(                \
        const __grid_constant__ AttentionArgs a) {                                                                    \
        rows_direct<DIM, HG>(a);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * most_warps<DIM, HG>(true), 2) rows_split_d##DIM##_h##HG(                 \
        const __grid_constant__ AttentionArgs a) {                                                                    \
        rows_split<DIM, HG>(a);                                                                                       \
    }
#define ALL(DIM) ATTENTION(DIM, 1) ATTENTION(DIM, 2) ATTENTION(DIM, 3) ATTENTION(DIM, 4) ATTENTION(DIM, 5) ATTENTION(DIM, 6)
ALL(64)
ALL(128)

#endif
