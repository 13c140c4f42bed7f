// The parts of chain.cu that are not linear layers: the grid's barrier, the attention of one row, activations.
#pragma once
#include "activation.cuh"
#include "head.cuh"

enum ChainKind { CHAIN_LINEAR, CHAIN_ATTEND, CHAIN_COMBINE, CHAIN_SWIGLU };

// Says that this block has done its part of a task. A warp without copies under way says it: its release waits for none.
__device__ __forceinline__ void grid_arrive(u32* barrier) {
    __syncthreads();
    if (threadIdx.x == blockDim.x - 32) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(barrier) : "memory");
}

// Waits until `count` arrivals were made; what those blocks wrote before is visible after, to loads that pass the
// first-level cache.
__device__ __forceinline__ void grid_wait(u32* barrier, u32 count) {
    if (count != 0) {
        if (threadIdx.x == blockDim.x - 32) {
            u32 seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(barrier) : "memory");
            } while (seen < count);
        }
        __syncthreads();
    }
}

// The last block to end leaves the barrier as the next launch wants it: zero.
__device__ __forceinline__ void grid_leave(u32* barrier) {
    if (threadIdx.x == 0 && atomicAdd(barrier + 1, 1) == gridDim.x - 1) {
        barrier[0] = 0;
        barrier[1] = 0;
    }
}

__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ void meet(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Elements of a key in shared memory: whole groups of eight pieces of eight, which the swizzle permutes.
__device__ __forceinline__ u32 key_stride(u32 dim) { return (dim + 63) / 64 * 64; }

// A unit of attention: a chunk of a key head. Heads change fastest, so that a warp's next unit often has the same queries.
struct Unit { u32 head, chunk, from, to; };

__device__ __forceinline__ Unit attention_unit(u32 u, u32 heads, u32 first, u32 position) {
    Unit x;
    x.head = u % heads;
    x.chunk = first / 32 + u / heads;
    x.from = max(x.chunk * 32, first);
    x.to = min(x.chunk * 32 + 31, position);
    return x;
}

__device__ __forceinline__ u32 first_visible(const AttentionArgs& a, u32 position) {
    return a.window && position + 1 > a.window ? position + 1 - a.window : 0;
}

// A warp asks for the keys and values that its block will read in attention, while the others multiply.
__device__ __forceinline__ void ask_for_pages(const AttentionArgs& a, const StepRow& row) {
    const u32 first = first_visible(a, row.position), n = row.position / 32 - first / 32 + 1;
    const u32 bytes = a.head_dim * 2, lines = (bytes + 127) / 128;
    for (u32 u = blockIdx.x; u < n * a.kv_heads; u += gridDim.x) {
        const Unit x = attention_unit(u, a.kv_heads, first, row.position);
        const u32 count = (x.to - x.from + 1) * lines * 2;
        for (u32 i = threadIdx.x & 31; i < count; i += 32) {
            const u32 position = x.from + i / (lines * 2), part = i % (lines * 2);
            const u64 offset = part < lines ? a.kv.key_offset : a.kv.value_offset;
            prefetch_line(kv_at(a.step, a.kv, offset, row.table, position, x.head) + part % lines * 128);
        }
    }
}

// Rotation, keys and values into their pages, and the partial results of every chunk. A warp has a query head of a key
// head's group; `slots` groups of warps work at once, each on a chunk whose keys and values its warps bring to shared
// memory together: the pages' as they are, the row's own from the projection. Binary16 pages; heads a multiple of 32.
//
// Warps without a chunk meet as often as the others, here and in `combine`: the checker of races takes the barriers that a warp
// has passed for a clock.
__device__ __forceinline__ void attend(const AttentionArgs& a, const RopeArgs& r, u32 slots, u32* barrier, u32 done) {
    extern __shared__ __align__(128) u8 area[];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dim = a.head_dim, MANY = 2;
    const u32 share = a.heads / a.kv_heads, slot = min(warp / share, slots), mine = warp % share;
    const u32 threads = slot < slots ? share * 32 : blockDim.x - slots * share * 32;
    const StepRow row = a.step.rows[0];
    const u32 position = row.position, first = first_visible(a, position), n = position / 32 - first / 32 + 1;
    const u32 stride = key_stride(dim) * 2, pieces = dim / 8, units = n * a.kv_heads;
    u8* keys = area + slot * 64 * stride;
    float* query = (float*)(area + slots * 64 * stride) + warp * (dim + 32);
    auto piece_at = [&](u32 p, u32 piece) { return keys + p * stride + ((piece & ~7u) + ((piece ^ p) & 7)) * 16; };
    auto value_at = [&](u32 p, u32 piece) { return keys + (p + 32) * stride + piece * 16; };
    const u32 step = a.kv.token_stride * 2;
    const u64 to_value = a.kv.value_offset - a.kv.key_offset;

    // Pieces of a unit that this thread brings.
    const u32 p0 = (mine * 32 + lane) / pieces, piece0 = (mine * 32 + lane) % pieces;
    const u32 skip = threads / pieces, skip_pieces = threads % pieces;
    auto forward = [&](u32& p, u32& piece) {
        p += skip;
        piece += skip_pieces;
        if (piece >= pieces) {
            piece -= pieces;
            p++;
        }
    };
    auto bring = [&](u32 u) {
        const Unit x = attention_unit(u, a.kv_heads, first, position);
        const u32 offset = x.from & 31, stored = min(x.to + 1, position) - x.from;
        const u8* key0 = kv_at(a.step, a.kv, a.kv.key_offset, row.table, x.from, x.head);
        u32 p = p0, piece = piece0;
#pragma unroll 1
        while (p < stored) {
            uint4 k[MANY], v[MANY];
            u32 at = p, e = piece;
#pragma unroll
            for (u32 q = 0; q < MANY; q++) {
                if (at < stored) {
                    const u8* from = key0 + (size_t)at * step + e * 16;
                    k[q] = __ldcg((const uint4*)from);
                    v[q] = __ldcg((const uint4*)(from + to_value));
                }
                forward(at, e);
            }
#pragma unroll
            for (u32 q = 0; q < MANY; q++) {
                if (p < stored) {
                    *(uint4*)piece_at(offset + p, piece) = k[q];
                    *(uint4*)value_at(offset + p, piece) = v[q];
                }
                forward(p, piece);
            }
        }
    };
    u32 queried = ~0u;
#pragma unroll 1
    for (u32 round = blockIdx.x;; round += slots * gridDim.x) {
        const u32 u = round + slot * gridDim.x;
        const bool works = slot < slots && u < units;
        // What earlier steps stored is there already.
        if (works) bring(u);
        if (round == blockIdx.x) grid_wait(barrier, done);
        if (round >= units) break;
        if (!works) {
            meet(1 + slot, threads);
            meet(1 + slot, threads);
            continue;
        }
        const Unit x = attention_unit(u, a.kv_heads, first, position);
        const bool own = x.chunk == position / 32;  // its last position is the row's
        const u32 offset = x.from & 31, count = x.to - x.from + 1;
        const u32 head = x.head * share + mine;
        // The query, then the row's own key and value: two warps, or one after the other.
#pragma unroll 1
        for (u32 kind = 0; kind < 3; kind++) {
            const bool wanted = kind == 0 ? queried != head : own && mine == min(kind - 1, share - 1);
            if (!wanted) continue;
            const u32 h = kind == 0 ? head : a.heads + (kind - 1) * a.kv_heads + x.head;
            const u64 offset = kind == 2 ? a.kv.value_offset : a.kv.key_offset;
            u16* page = (u16*)kv_at(a.step, a.kv, offset, row.table, position, x.head);
            rotate_head(r, a.qkv + (size_t)h * dim, h, position, [&](u32 i, float e) {
                if (kind == 0) {
                    query[i] = e;
                } else {
                    u8* piece = kind == 2 ? value_at(position & 31, i / 8) : piece_at(position & 31, i / 8);
                    page[i] = ((u16*)piece)[i % 8] = float_to_f16(e);
                }
            });
        }
        queried = head;
        meet(1 + slot, threads);

        // Scores: a lane a position.
        float acc[8];
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] = 0.0f;
        const bool visible = lane >= offset && lane < offset + count;
        if (visible) {
#pragma unroll 2
            for (u32 e = 0; e < pieces; e++) {
                const uint4 k = *(const uint4*)piece_at(lane, e);
                const float4 q0 = *(const float4*)(query + e * 8), q1 = *(const float4*)(query + e * 8 + 4);
                const u32 w[4] = {k.x, k.y, k.z, k.w};
                const float q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
                for (int i = 0; i < 8; i++)
                    acc[i] = __fmaf_rn(q[i], f16_to_float((u16)(i & 1 ? w[i / 2] >> 16 : w[i / 2])), acc[i]);
            }
        }
        float s = __fmul_rn(tree8(acc), a.scale);
        if (a.softcap > 0.0f) s = __fmul_rn(a.softcap, contract_tanh(__fdiv_rn(s, a.softcap)));
        float m = visible ? s : -__int_as_float(0x7f800000);
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, d));
        const float e = visible ? contract_exp(__fsub_rn(s, m)) : 0.0f;
        // Offset j is in lane j % 8 of the sum, added in increasing order.
        float sum = __shfl_sync(FULL, e, lane & 7);
#pragma unroll
        for (int d = 8; d < 32; d += 8) sum = __fadd_rn(sum, __shfl_sync(FULL, e, (lane & 7) + d));
        sum = tree8(sum);
        float* weights = query + dim;
        weights[lane] = e;
        __syncwarp();

        float* out = a.partials + ((size_t)head * a.chunks + x.chunk - first / 32) * (dim + 2);
        if (lane == 0) {
            out[dim] = m;
            out[dim + 1] = sum;
        }
        for (u32 d = lane * 4; d < dim; d += 128) {
            float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
            for (u32 j = offset; j < offset + count; j++) {
                const uint2 e = *(const uint2*)(keys + (j + 32) * stride + d * 2);
                const float w = weights[j];
                o[0] = __fmaf_rn(w, f16_to_float((u16)e.x), o[0]);
                o[1] = __fmaf_rn(w, f16_to_float((u16)(e.x >> 16)), o[1]);
                o[2] = __fmaf_rn(w, f16_to_float((u16)e.y), o[2]);
                o[3] = __fmaf_rn(w, f16_to_float((u16)(e.y >> 16)), o[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) out[d + i] = o[i];
        }
        meet(1 + slot, threads);
    }
}

// Combines the partial results in order and quantises: a group of warps for each block of 32 elements. All partial results
// of up to 128 chunks are asked for at once; the factors of all are made side by side, and one warp adds.
#define COMBINE_WARPS 8
#define COMBINE_CHUNKS 128
struct CombineArea {
    float values[COMBINE_CHUNKS * 32];
    float4 factors[COMBINE_CHUNKS];  // of what was summed before, of the chunk's values, the chunk's share of the sum
    float largest[COMBINE_CHUNKS / 32];
    float reserved[4];
};

template <bool W16>
__device__ __forceinline__ void combine(const AttentionArgs& a, const Activation& to, u32* barrier, u32 done) {
    extern __shared__ __align__(128) u8 area[];
    const u32 lane = threadIdx.x & 31, dim = a.head_dim, group = threadIdx.x / (32 * COMBINE_WARPS);
    const u32 warp = (threadIdx.x >> 5) % COMBINE_WARPS, groups = blockDim.x / (32 * COMBINE_WARPS);
    const u32 EACH = COMBINE_CHUNKS / COMBINE_WARPS, threads = 32 * COMBINE_WARPS;
    const StepRow row = a.step.rows[0];
    const u32 first = first_visible(a, row.position), n = row.position / 32 - first / 32 + 1, part = dim + 2;
    const u32 blocks = a.heads * dim / 32, chunks = a.chunks;
    CombineArea& shared = ((CombineArea*)area)[group];
    grid_wait(barrier, done);
    for (u32 round = blockIdx.x; round < blocks; round += groups * gridDim.x) {
        const u32 k = round + group * gridDim.x;
        if (k >= blocks) {
            for (u32 base = 0; base < n; base += COMBINE_CHUNKS)
                for (u32 i = 0; i < 3; i++) meet(1 + group, threads);
            continue;
        }
        const float* parts = a.partials + (size_t)(k * 32 / dim) * chunks * part;
        const u32 d = k * 32 % dim + lane;
        float o = 0.0f, sum = 0.0f, carry = 0.0f;
#pragma unroll 1
        for (u32 base = 0; base < n; base += COMBINE_CHUNKS) {
            const u32 m = min((u32)COMBINE_CHUNKS, n - base);
            const float* from = parts + (size_t)base * part;
            float v[EACH];
#pragma unroll
            for (u32 i = 0; i < EACH; i++) v[i] = __ldcg(from + min(warp + i * COMBINE_WARPS, m - 1) * part + d);
            // The first warps make the factors of 32 chunks each. Beyond the last chunk it is repeated.
            const u32 j = warp * 32 + lane;
            const bool factors = warp * 32 < m;
            float own = 0.0f, weight = 0.0f, top = 0.0f;
            if (factors) {
                const float* at = from + (size_t)min(j, m - 1) * part + dim;
                own = __ldcg(at);
                weight = __ldcg(at + 1);
                top = own;
#pragma unroll
                for (int q = 1; q < 32; q <<= 1) {
                    const float other = __shfl_up_sync(FULL, top, q);
                    if (lane >= q) top = fmaxf(other, top);
                }
                if (lane == 31) shared.largest[warp] = top;
            }
#pragma unroll
            for (u32 i = 0; i < EACH; i++) shared.values[(warp + i * COMBINE_WARPS) * 32 + lane] = v[i];
            meet(1 + group, threads);
            if (factors) {
                float before = base > 0 ? carry : shared.largest[0];
                for (u32 w = 0; w < warp; w++) before = fmaxf(before, shared.largest[w]);
                const bool starts = base == 0 && warp == 0;
                if (!starts) top = fmaxf(before, top);
                float last = __shfl_up_sync(FULL, top, 1);
                if (lane == 0) last = starts ? own : before;
                const float y = contract_exp(__fsub_rn(own, top));
                shared.factors[j] = make_float4(contract_exp(__fsub_rn(last, top)), y, __fmul_rn(weight, y), weight);
            }
            carry = base > 0 ? carry : shared.largest[0];
            for (u32 h = 0; h * 32 < m; h++) carry = fmaxf(carry, shared.largest[h]);
            meet(1 + group, threads);
            if (warp == 0) {
                u32 from = 0;
                if (base == 0) {
                    o = shared.values[lane];
                    sum = shared.factors[0].w;
                    from = 1;
                }
#pragma unroll 8
                for (u32 i = from; i < m; i++) {
                    const float4 f = shared.factors[i];
                    sum = __fmaf_rn(sum, f.x, f.z);
                    o = __fmaf_rn(o, f.x, __fmul_rn(shared.values[i * 32 + lane], f.y));
                }
            }
            if (base + COMBINE_CHUNKS < n) meet(1 + group, threads);
        }
        if (warp == 0) quantise_block<W16>(to, 0, k, __fdiv_rn(o, sum));
        meet(1 + group, threads);
    }
}

// SwiGLU and quantisation: a warp a block of 32 elements.
template <bool W16>
__device__ __forceinline__ void swiglu_blocks(const QuantiseArgs& a, u32* barrier, u32 done) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, n = a.out.cols;
    const float* src = a.src;
    grid_wait(barrier, done);
    for (u32 k = warp * gridDim.x + blockIdx.x; k < n / 32; k += warps * gridDim.x) {
        const float gate = __ldcg(src + k * 32 + lane), up = __ldcg(src + n + k * 32 + lane);
        quantise_block<W16>(a.out, 0, k, swiglu(gate, up));
    }
}
