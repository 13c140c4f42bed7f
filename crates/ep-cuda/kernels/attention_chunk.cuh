// One chunk of 32 positions for the query heads of one KV head by one warp, binary16 keys and values in shared memory.
//
// Scores: two lanes two positions; a key's piece of sixteen bytes has one element for each of the contract's eight lanes, and each of the
// two takes four. Queries are broadcast. Values: a few elements a lane, positions in order. Rows of keys are KEY_ROW bytes apart, which keeps the banks
// apart; rows of values VALUE_ROW.
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
    const int PIECES = DIM / 8;
    const u32 lane = threadIdx.x & 31, piece = lane % PIECES, row = lane / PIECES;
    to += row * ROW + piece * 16;
    from += row * stride + piece * 16;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const u32 ahead = i * (32 / PIECES);
        if (row + ahead < n)
            copy16(to + ahead * ROW, from + ahead * stride);
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

// Weights of the chunk's positions `from` .. `to` (offsets 0 to 31) of HG heads: into weights[32][HP], HP the multiple of 4 at or
// above HG; what is not visible gets 0. `query` is [HG][DIM]. Every lane gets the maxima and sums.
template <int DIM, int HG>
__device__ __forceinline__ void score_chunk(const float* query, const u8* keys, u32 from, u32 to, float scale, float softcap,
                                            float* weights, float top[HG], float sum[HG]) {
    const int HP = (HG + 3) / 4 * 4;
    const u32 lane = threadIdx.x & 31;
    // Two lanes have positions lane / 2 and lane / 2 + 16, four of the contract's eight lanes each; then each ends one, `at`.
    const u32 half = lane & 1, at = lane / 2 + 16 * half;
    const bool visible = at >= from && at <= to;
    const u8* key = keys + lane / 2 * Staged<DIM>::KEY_ROW + half * 8;
    float acc[HG][2][4];
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[h][i][j] = 0.0f;
#pragma unroll 4
    for (int e = 0; e < DIM; e += 8) {
        float4 k[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint2 x = *(const uint2*)(key + i * 16 * Staged<DIM>::KEY_ROW + e * 2);
            const float2 b = half_pair(x.x), d = half_pair(x.y);
            k[i] = make_float4(b.x, b.y, d.x, d.y);
        }
#pragma unroll
        for (int h = 0; h < HG; h++) {
            const float4 q = *(const float4*)(query + h * DIM + e + half * 4);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                acc[h][i][0] = __fmaf_rn(q.x, k[i].x, acc[h][i][0]);
                acc[h][i][1] = __fmaf_rn(q.y, k[i].y, acc[h][i][1]);
                acc[h][i][2] = __fmaf_rn(q.z, k[i].z, acc[h][i][2]);
                acc[h][i][3] = __fmaf_rn(q.w, k[i].w, acc[h][i][3]);
            }
        }
    }
    float score[HG];
#pragma unroll
    for (int h = 0; h < HG; h++) {
        float t[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float mine = half ? acc[h][1][j] : acc[h][0][j], give = half ? acc[h][0][j] : acc[h][1][j];
            t[j] = __fadd_rn(mine, __shfl_xor_sync(FULL, give, 1));
        }
        score[h] = __fmul_rn(__fadd_rn(__fadd_rn(t[0], t[2]), __fadd_rn(t[1], t[3])), scale);
    }
    if (softcap > 0.0f) {
#pragma unroll
        for (int h = 0; h < HG; h++) score[h] = __fmul_rn(softcap, contract_tanh(__fdiv_rn(score[h], softcap)));
    }
    float p[HP];
#pragma unroll
    for (int h = 0; h < HP; h++) p[h] = 0.0f;
#pragma unroll
    for (int h = 0; h < HG; h++) {
        float m = visible ? score[h] : -__int_as_float(0x7f800000);
#pragma unroll
        for (int n = 16; n > 0; n >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, n));
        p[h] = contract_exp(__fsub_rn(score[h], m));
        if (!visible) p[h] = 0.0f;
        top[h] = m;
        // Offset j is in lane j % 8 of the sum, added in increasing order; position j is with thread 2 j, from 16 on 2 j - 31.
        const u32 l = lane & 7;
        float total = __shfl_sync(FULL, p[h], 2 * l);
        total = __fadd_rn(total, __shfl_sync(FULL, p[h], 2 * l + 16));
        total = __fadd_rn(total, __shfl_sync(FULL, p[h], 2 * l + 1));
        total = __fadd_rn(total, __shfl_sync(FULL, p[h], 2 * l + 17));
        sum[h] = tree8(total);
    }
#pragma unroll
    for (int h = 0; h < HP; h += 4) *(float4*)(weights + at * HP + h) = make_float4(p[h], p[h + 1], p[h + 2], p[h + 3]);
    __syncwarp();
}

// What positions `from` .. `to` add up to: the lane's elements of HG heads.
template <int DIM, int HG>
__device__ __forceinline__ void weigh_chunk(const u8* values, const float* weights, u32 from, u32 to,
                                            float out[HG][Staged<DIM>::OWN]) {
    const int HP = (HG + 3) / 4 * 4, OWN = Staged<DIM>::OWN;
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int i = 0; i < OWN; i++) out[h][i] = 0.0f;
    auto add = [&](u32 j) {
        const u8* at = values + j * Staged<DIM>::VALUE_ROW + lane * (OWN * 2);
        float v[OWN], p[HP];
        if (OWN == 4) {
            const uint2 x = *(const uint2*)at;
            const float2 a = half_pair(x.x), b = half_pair(x.y);
            v[0] = a.x; v[1] = a.y; v[OWN - 2] = b.x; v[OWN - 1] = b.y;
        } else {
            const float2 a = half_pair(*(const u32*)at);
            v[0] = a.x; v[1] = a.y;
        }
#pragma unroll
        for (int h = 0; h < HP; h += 4) {
            const float4 x = *(const float4*)(weights + j * HP + h);
            p[h] = x.x; p[h + 1] = x.y; p[h + 2] = x.z; p[h + 3] = x.w;
        }
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int i = 0; i < OWN; i++) out[h][i] = __fmaf_rn(p[h], v[i], out[h][i]);
    };
    if (from == 0 && to == 31) {
#pragma unroll 4
        for (u32 j = 0; j < 32; j++) add(j);
    } else {
        for (u32 j = from; j <= to; j++) add(j);
    }
    __syncwarp();
}

#endif
