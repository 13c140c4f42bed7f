// The parts of chain.cu that are not linear layers: the grid's barrier, the attention of one row, activations.
#pragma once
#include "activation.cuh"
#include "head.cuh"

enum ChainKind { CHAIN_LINEAR, CHAIN_ATTEND, CHAIN_COMBINE, CHAIN_SWIGLU };

// Says that this block has done its part of a task.
__device__ __forceinline__ void grid_arrive(u32* barrier) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(barrier, 1);
    }
}

// Waits until `count` arrivals were made; what those blocks wrote before is visible after, to loads that pass the
// first-level cache.
__device__ __forceinline__ void grid_wait(u32* barrier, u32 count) {
    if (count != 0) {
        if (threadIdx.x == 0) {
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

// Where the pieces of a unit of attention are: unit u is chunk u % n of key head u / n.
struct Unit { u32 head, chunk, from, to; };

__device__ __forceinline__ Unit attention_unit(u32 u, u32 n, u32 first, u32 position) {
    Unit x;
    x.head = u / n;
    x.chunk = first / 32 + u % n;
    x.from = max(x.chunk * 32, first);
    x.to = min(x.chunk * 32 + 31, position);
    return x;
}

__device__ __forceinline__ u32 first_visible(const AttentionArgs& a, u32 position) {
    return a.window && position + 1 > a.window ? position + 1 - a.window : 0;
}

// Asks for the keys and values that this block will read in attention, a layer's linear part earlier.
__device__ __forceinline__ void ask_for_pages(const AttentionArgs& a, const StepRow& row) {
    const u32 first = first_visible(a, row.position), n = row.position / 32 - first / 32 + 1;
    const u32 bytes = a.head_dim * 2, lines = (bytes + 127) / 128;
    for (u32 u = blockIdx.x; u < n * a.kv_heads; u += gridDim.x) {
        const Unit x = attention_unit(u, n, first, row.position);
        const u32 count = (x.to - x.from + 1) * lines * 2;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            const u32 position = x.from + i / (lines * 2), part = i % (lines * 2);
            const u64 offset = part < lines ? a.kv.key_offset : a.kv.value_offset;
            prefetch_line(kv_at(a.step, a.kv, offset, row.table, position, x.head) + part % lines * 128);
        }
    }
}

// Rotation, keys and values into their pages, and the partial results of every chunk. A warp has a query head of a key
// head's group; `slots` groups of warps work at once, each on a chunk whose keys its warps bring to shared memory
// together: pages' keys as they are, the row's own key from the projection. Binary16 pages; heads a multiple of 32.
__device__ __forceinline__ void attend(const AttentionArgs& a, const RopeArgs& r, u8* area, u32 slots) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dim = a.head_dim;
    const u32 share = a.heads / a.kv_heads, slot = warp / share, mine = warp % share, threads = share * 32;
    if (slot >= slots) return;
    const StepRow row = a.step.rows[0];
    const u32 position = row.position, first = first_visible(a, position), n = position / 32 - first / 32 + 1;
    const u32 stride = key_stride(dim) * 2, pieces = dim / 8;
    u8* keys = area + slot * 32 * stride;
    float* query = (float*)(area + slots * 32 * stride) + warp * (dim + 32);
    float* weights = query + dim;
    auto piece_at = [&](u32 p, u32 piece) { return keys + p * stride + ((piece & ~7u) + ((piece ^ p) & 7)) * 16; };

    for (u32 u = slot * gridDim.x + blockIdx.x; u < n * a.kv_heads; u += slots * gridDim.x) {
        const Unit x = attention_unit(u, n, first, position);
        const bool own = x.chunk == position / 32;  // its last position is the row's
        const u32 count = x.to - x.from + 1, offset = x.from - x.chunk * 32, stored = count - own;
        const u32 head = x.head * share + mine;

        const u8* key0 = kv_at(a.step, a.kv, a.kv.key_offset, row.table, x.from, x.head);
        const u8* value0 = kv_at(a.step, a.kv, a.kv.value_offset, row.table, x.from, x.head);
        const size_t step = (size_t)a.kv.token_stride * 2;
#pragma unroll 4
        for (u32 i = mine * 32 + lane; i < stored * pieces; i += threads) {
            const u32 p = i / pieces, piece = i % pieces;
            *(uint4*)piece_at(offset + p, piece) = *(const uint4*)(key0 + p * step + piece * 16);
        }
        rotate_head(r, a.qkv + (size_t)head * dim, head, position, [&](u32 i, float v) { query[i] = v; });
        const float* own_value = a.qkv + (size_t)(a.heads + a.kv_heads + x.head) * dim;
        if (own && mine == 0) {
            u16* page = (u16*)kv_at(a.step, a.kv, a.kv.key_offset, row.table, position, x.head);
            const float* k = a.qkv + (size_t)(a.heads + x.head) * dim;
            rotate_head(r, k, a.heads + x.head, position, [&](u32 i, float v) {
                const u16 h = float_to_f16(v);
                ((u16*)piece_at(position & 31, i / 8))[i % 8] = h;
                page[i] = h;
            });
            page = (u16*)kv_at(a.step, a.kv, a.kv.value_offset, row.table, position, x.head);
            for (u32 i = lane; i < dim; i += 32) page[i] = float_to_f16(__ldcg(own_value + i));
        }
        meet(1 + slot, threads);

        // Scores: a lane a position.
        float acc[8];
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] = 0.0f;
        const bool visible = lane >= offset && lane < offset + count;
        if (visible) {
#pragma unroll 4
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
        const float p = visible ? contract_exp(__fsub_rn(s, m)) : 0.0f;
        // Offset j is in lane j % 8 of the sum, added in increasing order.
        float sum = __shfl_sync(FULL, p, lane & 7);
#pragma unroll
        for (int d = 8; d < 32; d += 8) sum = __fadd_rn(sum, __shfl_sync(FULL, p, (lane & 7) + d));
        sum = tree8(sum);
        weights[lane] = p;
        __syncwarp();

        float* out = a.partials + ((size_t)head * a.chunks + u % n) * (dim + 2);
        if (lane == 0) {
            out[dim] = m;
            out[dim + 1] = sum;
        }
        for (u32 d = lane * 4; d < dim; d += 128) {
            float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
            for (u32 j = 0; j < stored; j++) {
                const uint2 v = *(const uint2*)(value0 + j * step + d * 2);
                const float w = weights[offset + j];
                o[0] = __fmaf_rn(w, f16_to_float((u16)v.x), o[0]);
                o[1] = __fmaf_rn(w, f16_to_float((u16)(v.x >> 16)), o[1]);
                o[2] = __fmaf_rn(w, f16_to_float((u16)v.y), o[2]);
                o[3] = __fmaf_rn(w, f16_to_float((u16)(v.y >> 16)), o[3]);
            }
            if (own) {
                const float4 v = __ldcg((const float4*)(own_value + d));
                const float w = weights[position & 31];
                o[0] = __fmaf_rn(w, f16_to_float(float_to_f16(v.x)), o[0]);
                o[1] = __fmaf_rn(w, f16_to_float(float_to_f16(v.y)), o[1]);
                o[2] = __fmaf_rn(w, f16_to_float(float_to_f16(v.z)), o[2]);
                o[3] = __fmaf_rn(w, f16_to_float(float_to_f16(v.w)), o[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) out[d + i] = o[i];
        }
        meet(1 + slot, threads);
    }
}

// Combines the partial results in order and quantises: a warp a block of 32 elements.
template <bool W16> __device__ __forceinline__ void combine(const AttentionArgs& a, const Activation& to) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, dim = a.head_dim;
    const StepRow row = a.step.rows[0];
    const u32 first = first_visible(a, row.position), n = row.position / 32 - first / 32 + 1, part = dim + 2;
    for (u32 k = warp * gridDim.x + blockIdx.x; k < a.heads * dim / 32; k += warps * gridDim.x) {
        const u32 head = k * 32 / dim, d = k * 32 % dim + lane;
        const float* parts = a.partials + (size_t)head * a.chunks * part;
        float o = 0.0f, sum = 0.0f, carry = 0.0f;
        for (u32 base = 0; base < n; base += 32) {
            const u32 m = min(32u, n - base);
            const float* p = parts + (size_t)(base + min(lane, m - 1)) * part + dim;
            const float own = __ldcg(p), weight = __ldcg(p + 1);
            // Running maxima by a scan, then every factor at once.
            float top = base > 0 && lane == 0 ? fmaxf(carry, own) : own;
#pragma unroll
            for (int q = 1; q < 32; q <<= 1) {
                const float other = __shfl_up_sync(FULL, top, q);
                if (lane >= q) top = fmaxf(other, top);
            }
            float before = __shfl_up_sync(FULL, top, 1);
            if (lane == 0) before = base > 0 ? carry : own;
            const float x = contract_exp(__fsub_rn(before, top)), y = contract_exp(__fsub_rn(own, top));
            const float scaled = __fmul_rn(weight, y);
#pragma unroll 8
            for (u32 i = 0; i < m; i++) {
                const float v = __ldcg(parts + (size_t)(base + i) * part + d);
                const float xi = __shfl_sync(FULL, x, i), yi = __shfl_sync(FULL, y, i);
                const float si = __shfl_sync(FULL, scaled, i), wi = __shfl_sync(FULL, weight, i);
                const bool start = base + i == 0;
                sum = start ? wi : __fmaf_rn(sum, xi, si);
                o = start ? v : __fmaf_rn(o, xi, __fmul_rn(v, yi));
            }
            carry = __shfl_sync(FULL, top, m - 1);
        }
        quantise_block<W16>(to, 0, k, __fdiv_rn(o, sum));
    }
}

// SwiGLU and quantisation: a warp a block of 32 elements.
template <bool W16> __device__ __forceinline__ void swiglu_blocks(const QuantiseArgs& a) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, n = a.out.cols;
    for (u32 k = warp * gridDim.x + blockIdx.x; k < n / 32; k += warps * gridDim.x) {
        const float gate = __ldcg(a.src + k * 32 + lane), up = __ldcg(a.src + n + k * 32 + lane);
        quantise_block<W16>(a.out, 0, k, swiglu(gate, up));
    }
}
