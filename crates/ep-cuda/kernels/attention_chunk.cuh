// One chunk of 32 positions for the query heads of one KV head by one warp, binary16 keys and values in shared memory.
//
// Scores: a lane a position, its key as sixteen-byte pieces of one element for each of the contract's eight lanes; queries
// are broadcast. Values: a few elements a lane, positions in order. Rows of keys are KEY_ROW bytes apart, which keeps the banks
// apart; rows of values VALUE_ROW.
#pragma once
#include "kv.cuh"

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
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + ahead * ROW),
                         "l"(__cvta_generic_to_global(from + ahead * stride))
                         : "memory");
    }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread's copies are under way, for the whole warp.
template <int N> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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
    const bool visible = lane >= from && lane <= to;
    const u8* key = keys + lane * Staged<DIM>::KEY_ROW;
    float acc[HG][8];
#pragma unroll
    for (int h = 0; h < HG; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[h][i] = 0.0f;
#pragma unroll 2
    for (int e = 0; e < DIM; e += 8) {
        const uint4 x = *(const uint4*)(key + e * 2);
        const float2 k[4] = {half_pair(x.x), half_pair(x.y), half_pair(x.z), half_pair(x.w)};
#pragma unroll
        for (int h = 0; h < HG; h++) {
            const float4 a = *(const float4*)(query + h * DIM + e), b = *(const float4*)(query + h * DIM + e + 4);
            acc[h][0] = __fmaf_rn(a.x, k[0].x, acc[h][0]);
            acc[h][1] = __fmaf_rn(a.y, k[0].y, acc[h][1]);
            acc[h][2] = __fmaf_rn(a.z, k[1].x, acc[h][2]);
            acc[h][3] = __fmaf_rn(a.w, k[1].y, acc[h][3]);
            acc[h][4] = __fmaf_rn(b.x, k[2].x, acc[h][4]);
            acc[h][5] = __fmaf_rn(b.y, k[2].y, acc[h][5]);
            acc[h][6] = __fmaf_rn(b.z, k[3].x, acc[h][6]);
            acc[h][7] = __fmaf_rn(b.w, k[3].y, acc[h][7]);
        }
    }
    float p[HP];
#pragma unroll
    for (int h = 0; h < HP; h++) p[h] = 0.0f;
#pragma unroll
    for (int h = 0; h < HG; h++) {
        float s = __fmul_rn(tree8(acc[h]), scale);
        if (softcap > 0.0f) s = __fmul_rn(softcap, contract_tanh(__fdiv_rn(s, softcap)));
        float m = visible ? s : -__int_as_float(0x7f800000);
#pragma unroll
        for (int n = 16; n > 0; n >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, n));
        p[h] = visible ? contract_exp(__fsub_rn(s, m)) : 0.0f;
        top[h] = m;
        // Offset j is in lane j % 8 of the sum, added in increasing order.
        const u32 l = lane & 7;
        float total = __shfl_sync(FULL, p[h], l);
#pragma unroll
        for (int n = 8; n < 32; n += 8) total = __fadd_rn(total, __shfl_sync(FULL, p[h], l + n));
        sum[h] = tree8(total);
    }
#pragma unroll
    for (int h = 0; h < HP; h += 4) *(float4*)(weights + lane * HP + h) = make_float4(p[h], p[h + 1], p[h + 2], p[h + 3]);
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
