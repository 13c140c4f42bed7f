// One chunk of 32 positions for the query heads of one KV head by one warp, binary16 keys and values in shared memory.
//
// Scores: lane 4 g + t has the contract's lane g of eight positions, two neighbours of each eight: that is what a transposed matrix load
// gives it. Its part of the queries, elements g, g + 8, ..., stays in registers for all chunks, so that a key is read from shared memory
// once for all heads. Values: a few elements a lane, positions in order.
// Rows of keys are KEY_ROW bytes apart, which keeps the banks apart; rows of values VALUE_ROW.
#pragma once
#include "copies.cuh"
#include "kv.cuh"

#if __CUDA_ARCH__ >= 800

template <int DIM> struct Staged {
    static const int VALUE_ROW = DIM * 2, KEY_ROW = VALUE_ROW + 16, KEYS = 32 * KEY_ROW, VALUES = 32 * VALUE_ROW;
    static const int OWN = DIM / 32;  // elements of a value for each lane, neighbours
};

// Copies `n` rows of DIM elements, `stride` bytes apart, to rows `ROW` bytes apart in shared memory, by one warp, without waiting.
template <int DIM, int ROW> __device__ __forceinline__ void copy_rows(u32 to, const u8* from, size_t stride, u32 n) {
    const int PIECES = DIM / 8, AT_ONCE = 32 / PIECES;
    const u32 lane = threadIdx.x & 31, piece = lane % PIECES, row = lane / PIECES;
    to += row * ROW + piece * 16;
    from += row * stride + piece * 16;
    if (n == 32 && stride == DIM * 2) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) copy16(to + i * (AT_ONCE * ROW), from + i * (AT_ONCE * DIM * 2));
    } else {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            if (row + i * AT_ONCE < n) copy16(to + i * (AT_ONCE * ROW), from);
            from += AT_ONCE * stride;
        }
    }
}

// For the whole warp.
template <int N> __device__ __forceinline__ void await_rows() {
    await_copies<N>();
    __syncwarp();
}

// Two neighbouring elements.
__device__ __forceinline__ float2 half_pair(u32 x) {
    return make_float2(f16_to_float((u16)x), f16_to_float((u16)(x >> 16)));
}

// Four matrices of 8 x 8 halves, transposed: of the matrix whose row r lane 8 m + r points at, lane 4 g + t gets column g of rows 2 t and
// 2 t + 1 in x[m].
__device__ __forceinline__ void load_transposed(u32 at, u32 x[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// Integers in the order of the floats that have these bits, and back.
__device__ __forceinline__ int in_order(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The position of a chunk whose score a lane has.
__device__ __forceinline__ u32 scored_position() {
    const u32 lane = threadIdx.x & 31;
    return (lane & 4) * 4 + (lane & 16) / 2 + (lane & 3) * 2 + (lane >> 3 & 1);
}

// Weights of the chunk's positions `from` .. `to` (offsets 0 to 31) of HG heads: into weights[HG][32]; what is not visible gets 0.
// `query[h][i]` is element 8 i + lane / 4 of head h. Every lane gets the maxima; lane 8 (h % 4) + l the sum of head h in sum[h / 4].
template <int DIM, int HG>
__device__ __forceinline__ void score_chunk(const float (&query)[HG][DIM / 8], u32 keys, u32 from, u32 to, float scale,
                                            float softcap, float* weights, float top[HG], float sum[(HG + 3) / 4]) {
    const u32 lane = threadIdx.x & 31;
    // Rows 0 to 15 of a block of eight elements, then of the next block.
    const u32 key = keys + (lane & 15) * Staged<DIM>::KEY_ROW + (lane >> 4) * 16;
    float score[HG];
#pragma unroll
    for (int h = 0; h < HG; h++) score[h] = 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        float acc[HG][4];  // positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the half
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int p = 0; p < 4; p++) acc[h][p] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            u32 x[4];
            load_transposed(key + half * 16 * Staged<DIM>::KEY_ROW + i * 32, x);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float2 k0 = half_pair(x[2 * b]), k1 = half_pair(x[2 * b + 1]);
#pragma unroll
                for (int h = 0; h < HG; h++) {
                    acc[h][0] = __fmaf_rn(query[h][2 * i + b], k0.x, acc[h][0]);
                    acc[h][1] = __fmaf_rn(query[h][2 * i + b], k0.y, acc[h][1]);
                    acc[h][2] = __fmaf_rn(query[h][2 * i + b], k1.x, acc[h][2]);
                    acc[h][3] = __fmaf_rn(query[h][2 * i + b], k1.y, acc[h][3]);
                }
            }
        }
        // The tree over the contract's lanes: a lane keeps half of its positions at each of the first two levels, and one of the two
        // halves' at the last.
        const bool high = lane & 16, odd = lane & 8, second = lane & 4;
#pragma unroll
        for (int h = 0; h < HG; h++) {
            float t[2];
#pragma unroll
            for (int p = 0; p < 2; p++)
                t[p] = __fadd_rn(high ? acc[h][p + 2] : acc[h][p], __shfl_xor_sync(FULL, high ? acc[h][p] : acc[h][p + 2], 16));
            const float u = __fadd_rn(odd ? t[1] : t[0], __shfl_xor_sync(FULL, odd ? t[0] : t[1], 8));
            // The first half's waits for the second's.
            score[h] = half == 0 ? u : __fadd_rn(second ? u : score[h], __shfl_xor_sync(FULL, second ? score[h] : u, 4));
        }
    }
#pragma unroll
    for (int h = 0; h < HG; h++) score[h] = __fmul_rn(score[h], scale);
    if (softcap > 0.0f) {
#pragma unroll
        for (int h = 0; h < HG; h++) score[h] = __fmul_rn(softcap, contract_tanh(__fdiv_rn(score[h], softcap)));
    }
    const u32 at = scored_position();
    const bool visible = at >= from && at <= to;
#pragma unroll
    for (int h = 0; h < HG; h++) {
        const int own = visible ? in_order(__float_as_int(score[h])) : (int)0x80000000;
        top[h] = __int_as_float(in_order(__reduce_max_sync(FULL, own)));
    }
#pragma unroll
    for (int h = 0; h < HG; h++) {
        const float p = contract_exp(__fsub_rn(score[h], top[h]));
        weights[h * 32 + at] = visible ? p : 0.0f;
    }
    __syncwarp();
    // Offset j is in lane j % 8 of the sum, added in increasing order: eight lanes a head.
#pragma unroll
    for (int q = 0; q < (HG + 3) / 4; q++) {
        const float* w = weights + min(q * 4 + (int)(lane >> 3), HG - 1) * 32 + (lane & 7);
        sum[q] = tree8(__fadd_rn(__fadd_rn(__fadd_rn(w[0], w[8]), w[16]), w[24]));
    }
}

// What positions `from` .. `to` add up to: the lane's elements of HG heads.
template <int DIM, int HG>
__device__ __forceinline__ void weigh_chunk(const u8* values, const float* weights, u32 from, u32 to,
                                            float out[HG][Staged<DIM>::OWN]) {
    const int OWN = Staged<DIM>::OWN;
    const u8* own = values + (threadIdx.x & 31) * (OWN * 2);
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int i = 0; i < OWN; i++) out[h][i] = 0.0f;
    auto value = [&](u32 j, float v[OWN]) {
        const u8* at = own + j * Staged<DIM>::VALUE_ROW;
        if (OWN == 4) {
            const uint2 x = *(const uint2*)at;
            const float2 a = half_pair(x.x), b = half_pair(x.y);
            v[0] = a.x; v[1] = a.y; v[OWN - 2] = b.x; v[OWN - 1] = b.y;
        } else {
            const float2 a = half_pair(*(const u32*)at);
            v[0] = a.x; v[1] = a.y;
        }
    };
    if (from == 0 && to == 31) {
#pragma unroll 1
        for (u32 j = 0; j < 32; j += 4) {
            float p[HG][4];
#pragma unroll
            for (int h = 0; h < HG; h++) {
                const float4 x = *(const float4*)(weights + h * 32 + j);
                p[h][0] = x.x; p[h][1] = x.y; p[h][2] = x.z; p[h][3] = x.w;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float v[OWN];
                value(j + k, v);
#pragma unroll
                for (int h = 0; h < HG; h++)
#pragma unroll
                    for (int i = 0; i < OWN; i++) out[h][i] = __fmaf_rn(p[h][k], v[i], out[h][i]);
            }
        }
    } else {  // nothing is added for what is not visible, not even a zero
#pragma unroll 1
        for (u32 j = from; j <= to; j++) {
            float v[OWN];
            value(j, v);
#pragma unroll
            for (int h = 0; h < HG; h++)
#pragma unroll
                for (int i = 0; i < OWN; i++) out[h][i] = __fmaf_rn(weights[h * 32 + j], v[i], out[h][i]);
        }
    }
    __syncwarp();
}

#endif
