// Causal attention over pages, in chunks of 32 absolute positions whose partial results combine in order.
//
// A warp computes a chunk for up to HG query heads of one KV head: first a lane a position (scores, maximum, weights), then
// a few elements of the values a lane. Two forms:
//   direct  one block a (token row, head group) walks all chunks, WARPS at a time, and combines as it goes. For many rows.
//           Launch: block 128, grid (token rows, head groups). Dynamic shared memory: direct_bytes.
//   split   blockIdx.z shares the chunks out; partial results go to memory; the last block of a (row, head group) to finish
//           combines them. For few rows. Launch: block 128, grid (token rows, head groups, splits), split_bytes.
// Head groups: kv_heads * ceil(heads / kv_heads / HG).
#include "attention.cuh"

// Eight neighbouring elements as floats; those past `n` are 0.
template <bool HALF> __device__ __forceinline__ void load8(const u8* p, u32 e, u32 n, bool vector, float v[8]) {
    if (vector) {
        if (HALF) {
            const uint4 x = *(const uint4*)(p + (size_t)e * 2);
            const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[2 * i] = f16_to_float((u16)w[i]);
                v[2 * i + 1] = f16_to_float((u16)(w[i] >> 16));
            }
        } else {
            const float4 x = *(const float4*)(p + (size_t)e * 4), y = *(const float4*)(p + (size_t)e * 4 + 16);
            v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
            v[4] = y.x; v[5] = y.y; v[6] = y.z; v[7] = y.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = e + i < n ? (HALF ? f16_to_float(((const u16*)p)[e + i]) : ((const float*)p)[e + i]) : 0.0f;
    }
}

// Four neighbouring elements of a value.
template <bool HALF> __device__ __forceinline__ void load4e(const u8* p, u32 e, u32 n, bool vector, float v[4]) {
    if (vector) {
        if (HALF) {
            const uint2 x = *(const uint2*)(p + (size_t)e * 2);
            v[0] = f16_to_float((u16)x.x); v[1] = f16_to_float((u16)(x.x >> 16));
            v[2] = f16_to_float((u16)x.y); v[3] = f16_to_float((u16)(x.y >> 16));
        } else {
            const float4 x = *(const float4*)(p + (size_t)e * 4);
            v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = e + i < n ? (HALF ? f16_to_float(((const u16*)p)[e + i]) : ((const float*)p)[e + i]) : 0.0f;
    }
}

// One chunk by one warp. `query` is [HG][dim] in shared memory, rows past q.heads zero; `weights` [32][HG] is this warp's
// scratch. Writes out[h * out_stride + d], max[h * out_stride], sum[h * out_stride] for h < q.heads.
template <bool HALF, int HG>
__device__ __forceinline__ void chunk(const AttentionArgs& a, const Query& q, const float* query, float* weights, u32 c,
                                      float* out, float* max_out, float* sum_out, size_t out_stride) {
    const u32 lane = threadIdx.x & 31, dim = a.head_dim, size = HALF ? 2 : 4;
    const u32 from = max(c * 32, q.first), to = min(c * 32 + 31, q.position);  // visible positions
    const u32 position = c * 32 + lane;
    const bool visible = position >= from && position <= to;
    const bool vector8 = dim % 8 == 0, vector4 = dim % 4 == 0;
    const u8* key = kv_at(a.step, a.kv, a.kv.key_offset, q.table, visible ? position : to, q.kv_head);

    float acc[HG][8];
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[h][i] = 0.0f;
    const u32 whole = dim & ~7u;
    // Few heads leave registers for loads in flight.
#pragma unroll(HG <= 2 ? 8 : 2)
    for (u32 e = 0; e < whole; e += 8) {
        float k[8];
        load8<HALF>(key, e, dim, vector8, k);
#pragma unroll
        for (int h = 0; h < HG; h++) {
            const float* x = query + h * dim + e;
            float v[8];
            load8<false>((const u8*)x, 0, 8, vector8, v);
#pragma unroll
            for (int i = 0; i < 8; i++) acc[h][i] = __fmaf_rn(v[i], k[i], acc[h][i]);
        }
    }
    if (whole < dim) {  // no fma for elements that are not there
        float k[8];
        load8<HALF>(key, whole, dim, false, k);
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (whole + i < dim) acc[h][i] = __fmaf_rn(query[h * dim + whole + i], k[i], acc[h][i]);
    }

#pragma unroll
    for (int h = 0; h < HG; h++) {
        float s = __fmul_rn(tree8(acc[h]), a.scale);
        if (a.softcap > 0.0f) s = __fmul_rn(a.softcap, contract_tanh(__fdiv_rn(s, a.softcap)));
        float m = visible ? s : -__int_as_float(0x7f800000);
#pragma unroll
        for (int n = 16; n > 0; n >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, n));
        const float p = visible ? contract_exp(__fsub_rn(s, m)) : 0.0f;
        // Offset j is in lane j % 8 of the sum, added in increasing order.
        const u32 l = lane & 7;
        float sum = __shfl_sync(FULL, p, l);
#pragma unroll
        for (int n = 8; n < 32; n += 8) sum = __fadd_rn(sum, __shfl_sync(FULL, p, l + n));
        sum = tree8(sum);
        weights[lane * HG + h] = p;
        if (lane == 0 && h < q.heads) {
            max_out[h * out_stride] = m;
            sum_out[h * out_stride] = sum;
        }
    }
    __syncwarp();

    const u8* value0 = kv_at(a.step, a.kv, a.kv.value_offset, q.table, from, q.kv_head);
    const size_t step = (size_t)a.kv.token_stride * size;
    const u32 count = to - from + 1, offset = from - c * 32;
    for (u32 d = lane * 4; d < dim; d += 128) {
        float o[HG][4];
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[h][i] = 0.0f;
#pragma unroll(HG <= 2 ? 16 : 8)
        for (u32 j = 0; j < count; j++) {
            float v[4];
            load4e<HALF>(value0 + j * step, d, dim, vector4, v);
#pragma unroll
            for (int h = 0; h < HG; h++) {
                const float p = weights[(offset + j) * HG + h];
#pragma unroll
                for (int i = 0; i < 4; i++) o[h][i] = __fmaf_rn(p, v[i], o[h][i]);
            }
        }
#pragma unroll
        for (int h = 0; h < HG; h++)
            if (h < q.heads)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (d + i < dim) out[h * out_stride + d + i] = o[h][i];
    }
    __syncwarp();
}

// Shared memory, in floats. Direct: query HG * dim, weights WARPS * 32 * HG, parts WARPS * HG * (dim + 2), total HG * dim,
// then max, sum [HG], ea, eb [WARPS * HG]. Split: query, weights, ea, eb [32 * HG], max, sum [HG].
template <bool HALF, int HG> __device__ __forceinline__ void direct(const AttentionArgs& a) {
    extern __shared__ float4 shared4[];
    allow_next();
    Query q;
    const bool mine = block_query<HG>(a, q, blockIdx.x);
    wait_for_previous();
    if (!mine) return;
    const u32 dim = a.head_dim, warp = threadIdx.x >> 5, part = dim + 2;
    float* query = (float*)shared4;
    float* weights = query + HG * dim;
    float* parts = weights + WARPS * 32 * HG;
    float* total = parts + WARPS * HG * part;
    float *total_max = total + HG * dim, *total_sum = total_max + HG, *ea = total_sum + HG, *eb = ea + WARPS * HG;
    load_query<HG>(a, q, query);
    __syncthreads();
    const u32 c0 = q.first / 32, c1 = q.position / 32;
    for (u32 c = c0; c <= c1; c += WARPS) {
        if (c + warp <= c1) {
            float* to = parts + warp * HG * part;
            chunk<HALF, HG>(a, q, query, weights + warp * 32 * HG, c + warp, to, to + dim, to + dim + 1, part);
        }
        __syncthreads();
        const u32 n = min((u32)WARPS, c1 - c + 1);
        if (threadIdx.x < q.heads) {
            const u32 h = threadIdx.x;
            for (u32 i = 0; i < n; i++) {
                const float pm = parts[(i * HG + h) * part + dim], ps = parts[(i * HG + h) * part + dim + 1];
                if (c + i == c0) {
                    total_max[h] = pm;
                    total_sum[h] = ps;
                    continue;
                }
                const float m = fmaxf(total_max[h], pm);
                const float x = contract_exp(__fsub_rn(total_max[h], m)), y = contract_exp(__fsub_rn(pm, m));
                ea[i * HG + h] = x;
                eb[i * HG + h] = y;
                total_max[h] = m;
                total_sum[h] = __fmaf_rn(total_sum[h], x, __fmul_rn(ps, y));
            }
        }
        __syncthreads();
        for (u32 e = threadIdx.x; e < q.heads * dim; e += blockDim.x) {
            const u32 h = e / dim, d = e % dim;
            float o = total[e];
            for (u32 i = 0; i < n; i++) {
                const float v = parts[(i * HG + h) * part + d];
                o = c + i == c0 ? v : __fmaf_rn(o, ea[i * HG + h], __fmul_rn(v, eb[i * HG + h]));
            }
            total[e] = o;
        }
        __syncthreads();
    }
    float* out = a.out + ((size_t)q.row * a.heads + q.head) * dim;
    for (u32 e = threadIdx.x; e < q.heads * dim; e += blockDim.x) out[e] = __fdiv_rn(total[e], total_sum[e / dim]);
}

template <bool HALF, int HG> __device__ __forceinline__ void split(const AttentionArgs& a) {
    extern __shared__ float4 shared4[];
    __shared__ u32 last;
    allow_next();
    Query q;
    const bool mine = block_query<HG>(a, q, blockIdx.x);
    wait_for_previous();
    if (!mine) return;
    const u32 dim = a.head_dim, warp = threadIdx.x >> 5, part = dim + 2;
    float* query = (float*)shared4;
    float* weights = query + HG * dim;
    float *ea = weights + WARPS * 32 * HG, *eb = ea + 32 * HG, *sums = eb + 32 * HG;
    const u32 c0 = q.first / 32, n = q.position / 32 - c0 + 1;
    float* parts = a.partials + ((size_t)q.row * a.heads + q.head) * a.chunks * part;
    // Blocks without a chunk only take their ticket.
    if (blockIdx.z * WARPS < n) {
        load_query<HG>(a, q, query);
        __syncthreads();
        for (u32 i = blockIdx.z * WARPS + warp; i < n; i += gridDim.z * WARPS) {
            float* to = parts + (size_t)i * part;
            chunk<HALF, HG>(a, q, query, weights + warp * 32 * HG, c0 + i, to, to + dim, to + dim + 1,
                            (size_t)a.chunks * part);
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
    if (last) combine<HG>(a, q, parts, n, ea, eb, sums);
}

#define ATTENTION(NAME, HALF, HG)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, HG == 8 ? 2 : 4) attention_direct_##NAME##_h##HG(                                \
        const __grid_constant__ AttentionArgs a) {                                                                    \
        direct<HALF, HG>(a);                                                                                          \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, HG == 8 ? 2 : 4) attention_split_##NAME##_h##HG(                                 \
        const __grid_constant__ AttentionArgs a) {                                                                    \
        split<HALF, HG>(a);                                                                                           \
    }
ATTENTION(f16, true, 1)
ATTENTION(f16, true, 2)
ATTENTION(f16, true, 4)
ATTENTION(f16, true, 8)
ATTENTION(f32, false, 1)
ATTENTION(f32, false, 2)
ATTENTION(f32, false, 4)
ATTENTION(f32, false, 8)
