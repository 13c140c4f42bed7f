// A chain of tasks of one token row in one launch: linear layers, their norms, attention, SwiGLU. The whole step of a
// model whose weights are all resident is one chain.
//
// As many blocks as multiprocessors stay for the whole chain and meet at a barrier after each task. Weights don't wait for
// barriers: each warp has a ring in shared memory that asynchronous copies fill D - 1 slots ahead of its arithmetic, across
// the borders of rows, matrices and tasks, so the memory works while blocks meet, attend and quantise. The last warp of a
// block has no ring: it speaks for the block at barriers, where a warp with copies under way would wait for them.
//
// Units of 4 weight rows are interleaved over the blocks, and a block's units over its warps, counted through all matrices of
// the chain: neighbours in time are in different rings. Lane l of a warp has row l % 4 of its unit, and of it the blocks
// l / 4, l / 4 + 8, ...: the contract's lanes. Planar 4-bit codes in blocks of 32 without zero points, columns a multiple of
// 256.
//
// Launch: cooperative, 8 or 16 warps a block, grid the multiprocessors. Dynamic shared memory: `area` bytes for the
// activation or attention, then a ring of D slots for each warp but the last, then `table_bytes`. `barrier` holds two zeros,
// and does so again at the end. Compute capability 8.0 and up. Compiled for each format class (FORMAT) with PIPE.
#include "chain.cuh"
#include "copies.cuh"
#include "dot.cuh"

#if defined(PIPE) && __CUDA_ARCH__ >= 800

// Rows of a unit.
#define ROWS 4
// A slot of a ring: the codes of that many steps of 8 blocks, then their scales.
#define STEPS 4
#define CELL (ROWS * 8 * 16)

// The activation in shared memory: pieces of 16 codes [piece][block] in PAIR order, then {d, staged_sum} [block].
template <bool W16> struct Staged {
    static const u32 PIECES = W16 ? 4 : 2;
    int4* pieces;
    int2* steps;
    __device__ Staged(u8* area, u32 kb) : pieces((int4*)area), steps((int2*)(area + (size_t)kb * PIECES * 16)) {}
};

// Brings an activation that is in memory.
template <class S, bool W16> __device__ __forceinline__ void stage_codes(const Activation& x, Staged<W16> to) {
    const u32 PIECES = Staged<W16>::PIECES, kb = x.cols / 32;
    const int4* codes = (const int4*)x.codes;
    const size_t block = (size_t)x.ld * PIECES;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < kb * PIECES; i += blockDim.x)
        to.pieces[i % PIECES * kb + i / PIECES] = pair_order(__ldcg(codes + i / PIECES * block + i % PIECES));
    for (u32 k = threadIdx.x; k < kb; k += blockDim.x) {
        int2 s = __ldcg(x.steps + (size_t)k * x.ld);
        s.y = staged_sum<S>(s.y);
        to.steps[k] = s;
    }
}

// Makes the activation from the norm of a row, in every block for itself. `xs` holds the row.
template <class S, bool W16>
__device__ __forceinline__ void stage_norm(const ChainLinear& l, Staged<W16> to, float* xs, u32* barrier, u32 count) {
    __shared__ float lanes[256];
    const u32 n = l.x.cols, kb = n / 32, t = threadIdx.x, lane = t & 31, warp = t >> 5, warps = blockDim.x >> 5;
    const u32 EARLY = 10;  // norm weights that are there before the row is
    const float* weight = (const float*)l.weight;
    float early[EARLY];
#pragma unroll
    for (u32 q = 0; q < EARLY; q++) early[q] = __ldcg(weight + min(warp + q * warps, kb - 1) * 32 + lane);
    grid_wait(barrier, count);
#pragma unroll 4
    for (u32 i = t * 4; i < n; i += blockDim.x * 4) *(float4*)(xs + i) = __ldcg((const float4*)(l.src + i));
    __syncthreads();
    float sum = 0.0f;
    if (t < 256) {
#pragma unroll 4
        for (u32 i = t; i < n; i += 256) sum = __fmaf_rn(xs[i], xs[i], sum);
        lanes[t] = sum;
    }
    __syncthreads();
    // The tree over 256 lanes, in every warp.
    float v[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) v[j] = lanes[j * 32 + lane];
    sum = tree8(v);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
    const float inv = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), l.eps)));
    // Where this lane's code goes in its block: even and odd elements of eight apart.
    const u32 at = ((lane >> 3) * 2 + (lane & 1)) * 4 + ((lane & 7) >> 1), piece = at / 16;
    auto put = [&](u32 k, int code) {
        u8* bytes = (u8*)to.pieces + at % 16;
        bytes[(size_t)(piece * kb + k) * 16] = (u8)(W16 ? high_byte(code) : code);
        if (W16) bytes[(size_t)((2 + piece) * kb + k) * 16] = (u8)low_byte(code);
    };
    // Largest magnitudes first, lane q keeping that of the warp's block q: one division serves all blocks. Five blocks
    // at a time without a branch between them, so that they overlap; those beyond the last repeat it.
    u32 largest = 0;
#pragma unroll
    for (u32 half = 0; half < EARLY; half += 5) {
        if (half > 0 && half * warps >= kb) break;
#pragma unroll
        for (u32 q = half; q < half + 5; q++) {
            early[q] = __fmul_rn(__fmul_rn(xs[min(warp + q * warps, kb - 1) * 32 + lane], inv), early[q]);
            const u32 most = __reduce_max_sync(FULL, __float_as_uint(early[q]) & 0x7fffffffu);
            if (lane == q) largest = most;
        }
    }
    const QuantiseStep step = quantise_step<W16>(largest);
    int total = 0;
#pragma unroll
    for (u32 half = 0; half < EARLY; half += 5) {
        if (half > 0 && half * warps >= kb) break;
#pragma unroll
        for (u32 q = half; q < half + 5; q++) {
            const u32 k = warp + q * warps;
            const int code = __float2int_rn(__fmul_rn(early[q], __shfl_sync(FULL, step.factor, q)));
            const int sum = __reduce_add_sync(FULL, code);
            if (lane == q) total = sum;
            if (k < kb) put(k, code);
        }
    }
    if (lane < EARLY && warp + lane * warps < kb)
        to.steps[warp + lane * warps] = make_int2(__float_as_int(step.d), staged_sum<S>(total));
    for (u32 k = warp + EARLY * warps; k < kb; k += warps) {
        const Quantised q = quantise32<W16>(__fmul_rn(__fmul_rn(xs[k * 32 + lane], inv), __ldcg(weight + k * 32 + lane)));
        put(k, q.code);
        if (lane == 0) to.steps[k] = make_int2(__float_as_int(q.d), staged_sum<S>(q.sum));
    }
}

// What a warp copies next: from block `step` on of unit `unit` of a block's share of matrix `from`. In shared memory between
// matrices: registers are for the other tasks then.
struct Aim { u32 from, unit, step; };

template <class S, bool W16, int D> __device__ __forceinline__ void chain(const ChainArgs& a) {
    extern __shared__ __align__(128) u8 area[];
    __shared__ Aim aims[16];
    const u32 PIECES = Staged<W16>::PIECES, SCALE = S::BYTES, PER_ROW = SCALE;  // 16-byte pieces of 16 scales
    const u32 SLOT = STEPS * (CELL + ROWS * 8 * SCALE);
    const u32 lane = threadIdx.x & 31, klane = lane >> 2, group = lane & 3, warp = threadIdx.x >> 5;
    const u32 warps = (blockDim.x >> 5) - 1;  // of those that multiply
    u8* ring = area + a.area + warp * (D * SLOT);
    const u32 ring_at = shared_at(ring);

    // Where everything is, in shared memory: reads of it from device memory would queue behind the copies.
    uint4* table = (uint4*)(area + a.area + warps * (D * SLOT));
    for (u32 i = threadIdx.x; i < a.table_bytes / 16; i += blockDim.x) table[i] = __ldg(a.table + i);
    const ChainMatrix* matrices = (const ChainMatrix*)table;
    const ChainSegment* segments = (const ChainSegment*)(matrices + a.linears);
    const ChainTask* tasks = (const ChainTask*)(segments + a.segments);
    __syncthreads();

    // Finds the segment of a unit, which becomes the unit in the segment.
    auto find_segment = [&](const ChainMatrix& m, u32& unit) -> const ChainSegment& {
        const ChainSegment* s = segments + m.segment;
        for (const ChainSegment* last = s + m.segments - 1; s < last && s[1].before <= unit;) s++;
        unit -= s->before;
        return *s;
    };
    // The first of a block's units of a matrix that this warp has; the next ones follow `warps` apart.
    auto first_unit = [&](const ChainMatrix& m) { return warp >= m.first ? warp - m.first : warp + warps - m.first; };

    // The copies: where this lane's next piece of codes is, where its scales, and how many blocks of the unit are left.
    const u32 copy_row = lane >> 3, copy_k = lane & 7, to_code = (copy_row * 8 + (copy_k ^ copy_row * 2)) * 16;
    const u32 scale_row = lane / PER_ROW % ROWS, scale_k = lane / (PER_ROW * ROWS) * 16 + lane % PER_ROW * (16 / SCALE);
    const bool scale_lane = lane < 2 * ROWS * PER_ROW;
    const u8 *codes, *scales;
    u32 from, unit, left;
    auto aim = [&](u32 step) {  // at the next unit that exists
        for (left = 0; from < a.linears;) {
            const ChainMatrix& m = matrices[from];
            u32 u = unit * gridDim.x + blockIdx.x;
            if (u < m.units) {
                const ChainSegment& s = find_segment(m, u);
                const u32 row = u * ROWS, last = s.rows - 1;
                codes = s.codes + ((size_t)min(row + copy_row, last) * m.blocks + step + copy_k) * 16;
                scales = s.scales + ((size_t)min(row + scale_row, last) * m.blocks + step + scale_k) * SCALE;
                left = m.blocks - step;
                break;
            }
            if (++from < a.linears) unit = first_unit(matrices[from]);
        }
    };
    auto issue = [&](u32 slot) {
        if (left > 0) {
            const u32 to = ring_at + slot * SLOT;
#pragma unroll
            for (u32 c = 0; c < STEPS; c++)
                if (left > c * 8) copy16(to + c * CELL + to_code, codes + c * 128);
            if (scale_lane && left > scale_k) copy16(to + STEPS * CELL + lane * 16, scales);
            codes += STEPS * 128;
            scales += STEPS * 8 * SCALE;
            if (left > STEPS * 8) {
                left -= STEPS * 8;
            } else {
                unit += warps;
                aim(0);
            }
        }
        commit_copies();
    };
    auto keep_aim = [&] {
        if (lane == 0) aims[warp] = {from, unit, from < a.linears ? matrices[from].blocks - left : 0};
    };
    if (warp < warps) {
        from = 0;
        unit = first_unit(matrices[0]);
        aim(0);
#pragma unroll 1
        for (u32 i = 0; i < D - 1; i++) issue(i);
        keep_aim();
    }

    u32 slot = 0;
    const u32 from_code = (group * 8 + (klane ^ group * 2)) * 16;
    auto multiply = [&](const ChainMatrix& m) {
        const u32 kb = m.blocks, units = m.units, flip = m.flip;
        const Staged<W16> x(area, kb);
        __syncwarp();
        from = aims[warp].from;
        unit = aims[warp].unit;
        aim(aims[warp].step);
        __syncwarp();
        for (u32 i = first_unit(m); i * gridDim.x + blockIdx.x < units; i += warps) {
            u32 u = i * gridDim.x + blockIdx.x;
            const ChainSegment& s = find_segment(m, u);
            const u32 row = u * ROWS + group;
            const bool mine = klane == 0 && row < s.rows, biased = s.bias, accumulate = s.accumulate;
            float* out = m.out + s.column + row;
            const float bias = mine && biased ? __ldcg((const float*)s.bias + row) : 0.0f;
            const float before = mine && accumulate ? __ldcg(out) : 0.0f;
            float acc = 0.0f;
            const int4* px = x.pieces + klane;
            const int2* ps = x.steps + klane;
            auto step = [&](const u8* codes, const u8* scale) {
                int v[PIECES * 4];
#pragma unroll
                for (u32 j = 0; j < PIECES; j++) {
                    const int4 p = px[j * kb];
                    v[4 * j] = p.x;
                    v[4 * j + 1] = p.y;
                    v[4 * j + 2] = p.z;
                    v[4 * j + 3] = p.w;
                }
                acc = add_planar<S, W16>(acc, *(const uint4*)codes, flip, v, *ps, S::read(scale, klane));
                px += 8;
                ps += 8;
            };
            // Scales of two steps lie side by side; the next two follow those of all rows.
            auto scale_at = [&](u32 q) { return q % 2 * 8 * SCALE + q / 2 * (ROWS * 16 * SCALE); };
#pragma unroll 1
            for (u32 done = 0; done < kb; done += 8 * STEPS) {
                await_copies<D - 2>();
                __syncwarp();  // the others' copies are there, and they have left the slot that is filled now
                issue(slot == 0 ? D - 1 : slot - 1);
                const u8* in = ring + slot * SLOT + from_code;
                const u8* scale = ring + slot * SLOT + STEPS * CELL + group * (16 * SCALE);
                slot = slot + 1 == D ? 0 : slot + 1;
                if (done + 8 * STEPS <= kb) {
#pragma unroll(S::MIN && W16 && D == 2 ? 2 : STEPS)  // more does not fit the registers
                    for (u32 q = 0; q < STEPS; q++) step(in + q * CELL, scale + scale_at(q));
                } else {
#pragma unroll 1
                    for (u32 q = 0; done + q * 8 < kb; q++) step(in + q * CELL, scale + scale_at(q));
                }
            }
            acc = __fadd_rn(acc, __shfl_xor_sync(FULL, acc, 16));
            acc = __fadd_rn(acc, __shfl_xor_sync(FULL, acc, 8));
            acc = __fadd_rn(acc, __shfl_xor_sync(FULL, acc, 4));
            if (mine) {
                if (biased) acc = __fadd_rn(acc, bias);
                if (accumulate) acc = __fadd_rn(acc, before);
                *out = acc;
            }
        }
        keep_aim();
    };

#pragma unroll 1
    for (u32 t = 0; t < a.tasks; t++) {
        const ChainTask task = tasks[t];
        const u32 count = t * gridDim.x;  // arrivals before this task
        switch (task.kind) {
        case CHAIN_LINEAR: {
            const ChainLinear& l = a.linear[task.index];
            const ChainMatrix& m = matrices[task.index];
            const Staged<W16> to(area, m.blocks);
            if (l.src) {
                const u32 codes = (m.blocks * (PIECES * 16 + 8) + 15) / 16 * 16;
                stage_norm<S, W16>(l, to, (float*)(area + codes), a.barrier, count);
            } else {
                grid_wait(a.barrier, count);
                stage_codes<S, W16>(l.x, to);
            }
            __syncthreads();
            if (warp < warps)
                multiply(m);
            else if (l.kv)
                ask_for_pages(a.attention[l.kv - 1], a.step.rows[0]);
            break;
        }
        case CHAIN_ATTEND:
            attend(a.attention[task.index], a.rope[task.index], a.slots, a.barrier, count);
            break;
        case CHAIN_COMBINE:
            combine<W16>(a.attention[task.index], a.activation[task.index].out, a.barrier, count);
            break;
        default:
            swiglu_blocks<W16>(a.activation[task.index], a.barrier, count);
        }
        if (t + 1 < a.tasks) grid_arrive(a.barrier);
    }
    await_all_copies();
    grid_leave(a.barrier);
}

#define KERNEL(D)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1) chain_w16_d##D(const __grid_constant__ ChainArgs a) {        \
        chain<SCALES, true, D>(a);                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 1) chain_w8_d##D(const __grid_constant__ ChainArgs a) {         \
        chain<SCALES, false, D>(a);                                                                              \
    }
KERNEL(2)
KERNEL(3)
KERNEL(4)

#endif
