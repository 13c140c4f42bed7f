// Causal attention of many rows of one sequence: binary16 keys and values, heads of 64 or 128 elements.
//
// A block takes ROWS neighbouring rows of the step and up to HG query heads of one KV head, and walks the chunks that any of them sees.
// Keys and values become floats in shared memory once for all of them. Sixteen threads have a row:
//   scores  thread (p, half): positions p and p + 8, then p + 16 and p + 24, four of the contract's eight lanes, for every head;
//   values  thread d: a few elements, for every head, positions in order.
// The values of a chunk are under way while its scores are computed, and the keys of the next while values are added up.
//
// A tile whose rows are not all of one sequence, or a single row, is left to attention_rows.cu (AttentionArgs.chunks = 0 there).
// Launch: block 128, grid (ceil(rows / ROWS), head groups), dynamic shared memory tile_bytes (src/launch/attention.rs).
// Compute capability 8.0 and up.
#include "attention.cuh"
#include "copies.cuh"

#if __CUDA_ARCH__ >= 800

// Eight halves as floats, in two stores.
__device__ __forceinline__ void store_floats(float* to, const uint4& x) {
    const u32 w[4] = {x.x, x.y, x.z, x.w};
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = f16_to_float((u16)w[i]);
        v[2 * i + 1] = f16_to_float((u16)(w[i] >> 16));
    }
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

template <int DIM, int HG> struct Tile {
    // Rows of floats, padded to keep the banks apart.
    static const int QUERY = HG * DIM + 8, KEY = DIM + 8, WEIGHT = HG * 32 + 8;
    float query[ROWS][QUERY];
    float keys[32][KEY];
    float values[32][DIM];
    float weights[ROWS][WEIGHT];
    uint4 halves[DIM / 32][128];  // the values of a chunk on their way, by the thread that asked for them
    float top[ROWS][HG], sum[ROWS][HG];  // of the chunks so far
};

template <int DIM, int HG> __device__ __forceinline__ void tile(const AttentionArgs& a) {
    extern __shared__ __align__(16) u8 raw[];
    Tile<DIM, HG>& s = *(Tile<DIM, HG>*)raw;
    const int LOADS = DIM / 32, QUADS = DIM / 64;
    const u32 tid = threadIdx.x, lane = tid & 31, own = tid / 16, p0 = tid / 2 % 8, half = tid & 1, d0 = tid % 16 * 4;
    allow_next();
    const u32 first_row = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest first
    const u32 share = a.heads / a.kv_heads, groups = (share + HG - 1) / HG;
    const u32 kv_head = blockIdx.y / groups, head = kv_head * share + blockIdx.y % groups * HG;
    const u32 heads = min((u32)HG, share - blockIdx.y % groups * HG);
    const u32 rows = a.step.header->rows;
    if (!one_sequence(a.step, first_row)) {
        wait_for_previous();  // who waits for this kernel counts on what came before it
        return;
    }
    const u32 count = min((u32)ROWS, rows - first_row), table = a.step.rows[first_row].table;
    // Chunks that any row sees, and what this thread's row sees. Rows that are not there see nothing.
    u32 c0 = 0xffffffffu, last = 0;
    for (u32 i = 0; i < count; i++) {
        const u32 position = a.step.rows[first_row + i].position;
        const u32 from = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
        c0 = min(c0, from / 32);
        last = max(last, position);
    }
    const u32 c1 = last / 32, position = a.step.rows[first_row + min(own, count - 1)].position;
    const u32 begin = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    wait_for_previous();

    const size_t stride = (size_t)a.kv.token_stride * 2;
    const u32 load_row = tid / (DIM / 8), piece = tid % (DIM / 8);
    auto load = [&](u64 offset, u32 c, uint4 x[LOADS]) {
        const u8* from = kv_at(a.step, a.kv, offset, table, c * 32, kv_head) + piece * 16;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const u32 r = load_row + i * (32 / LOADS);
            x[i] = c * 32 + r <= last ? *(const uint4*)(from + r * stride) : make_uint4(0, 0, 0, 0);
        }
    };
    uint4 raw_keys[LOADS];
    load(a.kv.key_offset, c0, raw_keys);
    for (u32 r = 0; r < ROWS; r++)
        for (u32 e = tid; e < HG * DIM; e += 128)
            s.query[r][e] = r < count && e < heads * DIM
                                ? a.qkv[(size_t)(first_row + r) * a.qkv_ld + (size_t)head * DIM + e]
                                : 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) store_floats(&s.keys[load_row + i * (32 / LOADS)][piece * 8], raw_keys[i]);

    float total[HG][QUADS * 4];
    bool any = false;  // this row has seen a chunk
    for (u32 c = c0; c <= c1; c++) {
        __syncthreads();
        {
            const u8* from = kv_at(a.step, a.kv, a.kv.value_offset, table, c * 32, kv_head) + load_row * stride + piece * 16;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const u32 n = c * 32 + load_row + i * (32 / LOADS) <= last ? 16 : 0;  // the rest becomes zero
                copy16(&s.halves[i][tid], from + (n == 0 ? 0 : i * (32 / LOADS) * stride), n);
            }
        }
        // Positions p0 + 16 u and p0 + 16 u + 8: of the two threads that share the dots, each ends one, `at[u]`.
        const u32 from = max(c * 32, begin) - c * 32, to = position < c * 32 ? 0 : min(position - c * 32, 31u);
        const bool sees = c * 32 <= position && c * 32 + 31 >= begin && own < count;
        float score[HG][2];
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float acc[HG][2][4];
#pragma unroll
            for (int h = 0; h < HG; h++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[h][i][j] = 0.0f;
            const float *key = &s.keys[p0 + 16 * u][half * 4], *query = &s.query[own][half * 4];
#pragma unroll 2
            for (int e = 0; e < DIM; e += 8) {
                float4 k[2];
#pragma unroll
                for (int i = 0; i < 2; i++) k[i] = *(const float4*)(key + i * 8 * Tile<DIM, HG>::KEY + e);
#pragma unroll
                for (int h = 0; h < HG; h++) {
                    const float4 q = *(const float4*)(query + h * DIM + e);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        acc[h][i][0] = __fmaf_rn(q.x, k[i].x, acc[h][i][0]);
                        acc[h][i][1] = __fmaf_rn(q.y, k[i].y, acc[h][i][1]);
                        acc[h][i][2] = __fmaf_rn(q.z, k[i].z, acc[h][i][2]);
                        acc[h][i][3] = __fmaf_rn(q.w, k[i].w, acc[h][i][3]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HG; h++) {
                float t[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float mine = half ? acc[h][1][j] : acc[h][0][j], give = half ? acc[h][0][j] : acc[h][1][j];
                    t[j] = __fadd_rn(mine, __shfl_xor_sync(FULL, give, 1));
                }
                score[h][u] = __fmul_rn(__fadd_rn(__fadd_rn(t[0], t[2]), __fadd_rn(t[1], t[3])), a.scale);
            }
        }
        if (a.softcap > 0.0f) {
#pragma unroll
            for (int h = 0; h < HG; h++)
#pragma unroll
                for (int u = 0; u < 2; u++)
                    score[h][u] = __fmul_rn(a.softcap, contract_tanh(__fdiv_rn(score[h][u], a.softcap)));
        }
        const u32 at[2] = {p0 + 8 * half, p0 + 8 * half + 16};
        const bool visible[2] = {at[0] >= from && at[0] <= to, at[1] >= from && at[1] <= to};
        float chunk_top[HG], chunk_sum[HG];
#pragma unroll
        for (int h = 0; h < HG; h++) {
            float p[2], m = -__int_as_float(0x7f800000);
#pragma unroll
            for (int u = 0; u < 2; u++) m = fmaxf(m, visible[u] ? score[h][u] : -__int_as_float(0x7f800000));
#pragma unroll
            for (int n = 1; n < 16; n <<= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, n));
#pragma unroll
            for (int u = 0; u < 2; u++) {
                p[u] = contract_exp(__fsub_rn(score[h][u], m));
                if (!visible[u]) p[u] = 0.0f;
                s.weights[own][h * 32 + at[u]] = p[u];
            }
            // Offset j is in lane j % 8 of the sum, added in increasing order: the two threads' in turn.
            const float q0 = __shfl_xor_sync(FULL, p[0], 1), q1 = __shfl_xor_sync(FULL, p[1], 1);
            float all = __fadd_rn(p[0], q0);
            all = __fadd_rn(__fadd_rn(all, half ? q1 : p[1]), half ? p[1] : q1);
#pragma unroll
            for (int n = 8; n > 1; n >>= 1) all = __fadd_rn(all, __shfl_xor_sync(FULL, all, n));
            chunk_sum[h] = all;
            chunk_top[h] = m;
        }
        // Factors of what was before and of this chunk: a row's threads compute one of them each.
        float factor = 0.0f, old_top[HG];
#pragma unroll
        for (int h = 0; h < HG; h++) {
            old_top[h] = any ? s.top[own][h] : chunk_top[h];
            const float m = fmaxf(old_top[h], chunk_top[h]);
            if (tid % 16 == 2 * h) factor = __fsub_rn(old_top[h], m);
            if (tid % 16 == 2 * h + 1) factor = __fsub_rn(chunk_top[h], m);
        }
        factor = contract_exp(factor);
        float before[HG], after[HG];
#pragma unroll
        for (int h = 0; h < HG; h++) {
            before[h] = __shfl_sync(FULL, factor, (lane & 16) + 2 * h);
            after[h] = __shfl_sync(FULL, factor, (lane & 16) + 2 * h + 1);
        }
        __syncwarp();  // all have read the old ones
        if (sees && tid % 16 == 0) {
#pragma unroll
            for (int h = 0; h < HG; h++) {
                s.top[own][h] = fmaxf(old_top[h], chunk_top[h]);
                s.sum[own][h] = any ? __fmaf_rn(s.sum[own][h], before[h], __fmul_rn(chunk_sum[h], after[h])) : chunk_sum[h];
            }
        }
        await_all_copies();
#pragma unroll
        for (int i = 0; i < LOADS; i++) store_floats(&s.values[load_row + i * (32 / LOADS)][piece * 8], s.halves[i][tid]);
        __syncthreads();
        if (c < c1) load(a.kv.key_offset, c + 1, raw_keys);

        float out[HG][QUADS * 4];
#pragma unroll
        for (int h = 0; h < HG; h++)
#pragma unroll
            for (int i = 0; i < QUADS * 4; i++) out[h][i] = 0.0f;
        const float* weights = s.weights[own];
        auto add = [&](u32 j, const float p[HG]) {
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const float4 v = *(const float4*)&s.values[j][q * 64 + d0];
#pragma unroll
                for (int h = 0; h < HG; h++) {
                    out[h][q * 4] = __fmaf_rn(p[h], v.x, out[h][q * 4]);
                    out[h][q * 4 + 1] = __fmaf_rn(p[h], v.y, out[h][q * 4 + 1]);
                    out[h][q * 4 + 2] = __fmaf_rn(p[h], v.z, out[h][q * 4 + 2]);
                    out[h][q * 4 + 3] = __fmaf_rn(p[h], v.w, out[h][q * 4 + 3]);
                }
            }
        };
        if (__all_sync(FULL, sees && from == 0 && to == 31)) {
#pragma unroll 2
            for (u32 j = 0; j < 32; j += 2) {
                float2 p[HG];
#pragma unroll
                for (int h = 0; h < HG; h++) p[h] = *(const float2*)(weights + h * 32 + j);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float w[HG];
#pragma unroll
                    for (int h = 0; h < HG; h++) w[h] = i == 0 ? p[h].x : p[h].y;
                    add(j + i, w);
                }
            }
        } else if (sees) {  // nothing is added for what is not visible, not even a zero
#pragma unroll 1
            for (u32 j = from; j <= to; j++) {
                float w[HG];
#pragma unroll
                for (int h = 0; h < HG; h++) w[h] = weights[h * 32 + j];
                add(j, w);
            }
        }
        __syncwarp();
        if (sees) {
#pragma unroll
            for (int h = 0; h < HG; h++)
#pragma unroll
                for (int i = 0; i < QUADS * 4; i++)
                    total[h][i] = any ? __fmaf_rn(total[h][i], before[h], __fmul_rn(out[h][i], after[h])) : out[h][i];
            any = true;
        }
        if (c < c1) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) store_floats(&s.keys[load_row + i * (32 / LOADS)][piece * 8], raw_keys[i]);
        }
    }
    __syncwarp();
    if (own >= count) return;
    float* to = a.out + ((size_t)(first_row + own) * a.heads + head) * DIM + d0;
#pragma unroll
    for (int h = 0; h < HG; h++) {
        if (h >= heads) continue;
        const float sum = s.sum[own][h];
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            *(float4*)(to + h * DIM + q * 64) = make_float4(__fdiv_rn(total[h][q * 4], sum), __fdiv_rn(total[h][q * 4 + 1], sum),
                                                            __fdiv_rn(total[h][q * 4 + 2], sum), __fdiv_rn(total[h][q * 4 + 3], sum));
    }
}

#define ATTENTION(DIM, HG)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 3) tile_d##DIM##_h##HG(                             \
        const __grid_constant__ AttentionArgs a) {                                                                    \
        tile<DIM, HG>(a);                                                                                             \
    }
#define ALL(DIM) ATTENTION(DIM, 1) ATTENTION(DIM, 2) ATTENTION(DIM, 3) ATTENTION(DIM, 4) ATTENTION(DIM, 5)
ALL(64)
ALL(128)

#endif
