// A chain of tasks of one token row in one launch: linear layers, their norms, attention, SwiGLU. The whole step of a
// model whose weights are all resident is one chain.
//
// As many blocks as multiprocessors stay for the whole chain and meet at a barrier after each task. Weights don't wait for
// barriers: each warp has a ring in shared memory that asynchronous copies fill D - 1 steps ahead of its arithmetic,
// across the borders of rows, matrices and tasks, so the memory works while blocks meet, attend and quantise.
//
// Units of 8 weight rows are interleaved over the blocks, and a block's units over its warps, counted through all matrices
// of the chain: neighbours in time are in different rings. Lane l of a warp has rows 4 * r + l % 4 of its unit, and of
// them the blocks l / 4, l / 4 + 8, ...: the contract's lanes. Planar 4-bit codes in blocks of 32 without zero points,
// columns a multiple of 256.
//
// Launch: cooperative, block any number of warps up to 16, grid the multiprocessors. Dynamic shared memory: `area`
// bytes for the activation or attention, then warps * (D * 1024 + (D / 2 + 2) * 128 * scale bytes). `barrier` holds two
// zeros, and does so again at the end. Compute capability 8.0 and up. Compiled for each format class (FORMAT) with PIPE.
#include "chain.cuh"
#include "dot.cuh"

#if defined(PIPE) && __CUDA_ARCH__ >= 800

#define RPT 2  // weight rows of a lane
#define ROWS (4 * RPT)

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// The activation in shared memory: pieces of 16 codes [piece][block] in PAIR order, then {d, -8 * sum} [block].
template <bool W16> struct Staged {
    static const u32 PIECES = W16 ? 4 : 2;
    int4* pieces;
    int2* steps;
    __device__ Staged(u8* area, u32 kb) : pieces((int4*)area), steps((int2*)(area + (size_t)kb * PIECES * 16)) {}
};

// Brings an activation that is in memory.
template <bool W16> __device__ __forceinline__ void stage_codes(const Activation& x, const Staged<W16>& to) {
    const u32 PIECES = Staged<W16>::PIECES, kb = x.cols / 32;
    const int4* codes = (const int4*)x.codes;
    const size_t block = (size_t)x.ld * PIECES;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < kb * PIECES; i += blockDim.x)
        to.pieces[i % PIECES * kb + i / PIECES] = pair_order(__ldcg(codes + i / PIECES * block + i % PIECES));
    for (u32 k = threadIdx.x; k < kb; k += blockDim.x) {
        int2 s = __ldcg(x.steps + (size_t)k * x.ld);
        s.y *= -8;
        to.steps[k] = s;
    }
}

// Makes the activation from the norm of a row, in every block for itself. `xs` holds the row.
template <bool W16>
__device__ __forceinline__ void stage_norm(const ChainLinear& l, const Staged<W16>& to, float* xs, u32* barrier, u32 count) {
    __shared__ float lanes[128];
    const u32 n = l.x.cols, kb = n / 32, t = threadIdx.x, lane = t & 31, warp = t >> 5, warps = blockDim.x >> 5;
    const u32 EARLY = 12;  // norm weights that are there before the row is
    const float* weight = (const float*)l.weight;
    float early[EARLY];
#pragma unroll
    for (u32 q = 0; q < EARLY; q++) {
        const u32 k = warp + q * warps;
        early[q] = k < kb ? __ldg(weight + k * 32 + lane) : 0.0f;
    }
    grid_wait(barrier, count);
#pragma unroll 4
    for (u32 i = t * 4; i < n; i += blockDim.x * 4) *(float4*)(xs + i) = __ldcg((const float4*)(l.src + i));
    __syncthreads();
    float sum = 0.0f;
    if (t < 256)
#pragma unroll 4
        for (u32 i = t; i < n; i += 256) sum = __fmaf_rn(xs[i], xs[i], sum);
    // The tree over 256 lanes.
    if (t >= 128 && t < 256) lanes[t - 128] = sum;
    __syncthreads();
    if (t < 128) lanes[t] = sum = __fadd_rn(sum, lanes[t]);
    __syncthreads();
    if (t < 64) sum = __fadd_rn(sum, lanes[t + 64]);
    __syncthreads();
    if (t < 64) lanes[t] = sum;
    __syncthreads();
    if (t < 32) {
        sum = warp_tree(__fadd_rn(sum, lanes[t + 32]));
        if (t == 0) lanes[0] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), l.eps)));
    }
    __syncthreads();
    const float inv = lanes[0];
    // Where this lane's code goes in its block: even and odd elements of eight apart.
    const u32 at = ((lane >> 3) * 2 + (lane & 1)) * 4 + ((lane & 7) >> 1), piece = at / 16;
    auto block = [&](u32 k, float w) {
        const Quantised q = quantise32<W16>(__fmul_rn(__fmul_rn(xs[k * 32 + lane], inv), w));
        u8* bytes = (u8*)to.pieces + at % 16;
        bytes[(size_t)(piece * kb + k) * 16] = (u8)(W16 ? high_byte(q.code) : q.code);
        if (W16) bytes[(size_t)((2 + piece) * kb + k) * 16] = (u8)low_byte(q.code);
        if (lane == 0) to.steps[k] = make_int2(__float_as_int(q.d), -8 * q.sum);
    };
#pragma unroll
    for (u32 q = 0; q < EARLY; q++)
        if (warp + q * warps < kb) block(warp + q * warps, early[q]);
    for (u32 k = warp + EARLY * warps; k < kb; k += warps) block(k, __ldg(weight + k * 32 + lane));
}

// Finds the segment of a unit, which becomes the unit in the segment.
__device__ __forceinline__ ChainSegment find_segment(const ChainLinear& l, u32& unit) {
    u32 s = 0;
    while (s + 1 < l.segments && l.segment[s + 1].before <= unit) s++;
    const ChainSegment found = l.segment[s];
    unit -= found.before;
    return found;
}

template <bool HALF, bool W16, int D> __device__ __forceinline__ void chain(const ChainArgs& a) {
    extern __shared__ __align__(128) u8 area[];
    const u32 PIECES = Staged<W16>::PIECES, SCALE = HALF ? 2 : 4, PER_ROW = SCALE;  // 16-byte pieces of 16 scales
    const u32 SLOT = RPT * 512, PAIR = RPT * 64 * SCALE, PAIRS = D / 2 + 2;
    const u32 lane = threadIdx.x & 31, klane = lane >> 2, group = lane & 3, warp = threadIdx.x >> 5;
    const u32 warps = blockDim.x >> 5;
    u8* ring = area + a.area + warp * (D * SLOT + PAIRS * PAIR);
    const u32 ring_at = (u32)__cvta_generic_to_shared(ring);

    // The first of a block's units of a matrix that this warp has; the next ones follow `warps` apart.
    auto first_unit = [&](u32 base) { return (warp + warps - base % warps) % warps; };

    // What is copied next: step `from_step` of the block's unit `from_unit` of matrix `from`.
    u32 from = 0, from_unit = first_unit(a.linear[0].base), from_step = 0, steps_of_from = 0, from_pair = 0;
    const u32 copy_row = lane >> 3, copy_k = lane & 7, to_code = (copy_row * 8 + (copy_k ^ copy_row * 2)) * 16;
    const u32 scale_row = lane / PER_ROW, scale_late = lane % PER_ROW / (PER_ROW / 2);
    const u8 *code[RPT], *scale = nullptr;
    auto aim = [&]() {  // at the next unit that exists
        for (; from < a.linears; from++, from_unit = from < a.linears ? first_unit(a.linear[from].base) : 0) {
            const ChainLinear& l = a.linear[from];
            u32 u = from_unit * gridDim.x + blockIdx.x;
            if (u >= l.units) continue;
            const ChainSegment s = find_segment(l, u);
            const u32 kb = l.x.cols / 32;
            steps_of_from = kb / 8;
#pragma unroll
            for (int r = 0; r < RPT; r++)
                code[r] = s.codes + ((size_t)min(u * ROWS + r * 4 + copy_row, s.rows - 1) * kb + copy_k) * 16;
            scale = s.scales + (size_t)min(u * ROWS + scale_row, s.rows - 1) * kb * SCALE + lane % PER_ROW * 16;
            return;
        }
    };
    auto issue = [&](u32 slot) {
        if (from < a.linears) {
            const u32 to = ring_at + slot * SLOT + to_code;
#pragma unroll
            for (int r = 0; r < RPT; r++) copy16(to + r * 512, code[r] + from_step * 128);
            if ((from_step & 1) == 0) {
                if (scale_row < ROWS && from_step + scale_late < steps_of_from)
                    copy16(ring_at + D * SLOT + from_pair * PAIR + lane * 16, scale + from_step * (8 * SCALE));
                from_pair = from_pair + 1 == PAIRS ? 0 : from_pair + 1;
            }
            if (++from_step == steps_of_from) {
                from_step = 0;
                from_unit += warps;
                aim();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    aim();
#pragma unroll 1
    for (u32 i = 0; i < D - 1; i++) issue(i);

    u32 slot = 0, pair = 0;
    const u32 from_code = (group * 8 + (klane ^ group * 2)) * 16;
    auto multiply = [&](const ChainLinear& l) {
        const u32 kb = l.x.cols / 32, steps_of_row = kb / 8;
        const Staged<W16> x(area, kb);
        for (u32 i = first_unit(l.base); i * gridDim.x + blockIdx.x < l.units; i += warps) {
            float acc[RPT];
#pragma unroll
            for (int r = 0; r < RPT; r++) acc[r] = 0.0f;
            const int4* px = x.pieces + klane;
            const int2* ps = x.steps + klane;
#pragma unroll 2
            for (u32 step = 0; step < steps_of_row; step++, px += 8, ps += 8) {
                asm volatile("cp.async.wait_group %0;" ::"n"(D - 2) : "memory");
                __syncwarp();  // the others' copies are there, and they have left the slot that is filled now
                issue(slot == 0 ? D - 1 : slot - 1);
                const u8* at = ring + slot * SLOT + from_code;
                const u8* scales = ring + D * SLOT + pair * PAIR + ((step & 1) * 8 + klane) * SCALE;
                if ((step & 1) || step + 1 == steps_of_row) pair = pair + 1 == PAIRS ? 0 : pair + 1;
                slot = slot + 1 == D ? 0 : slot + 1;
                int v[PIECES * 4];
#pragma unroll
                for (u32 j = 0; j < PIECES; j++) {
                    const int4 p = px[j * kb];
                    v[4 * j] = p.x;
                    v[4 * j + 1] = p.y;
                    v[4 * j + 2] = p.z;
                    v[4 * j + 3] = p.w;
                }
                const int2 ds = *ps;
#pragma unroll
                for (int r = 0; r < RPT; r++) {
                    const uint4 c = *(const uint4*)(at + r * 512);
                    const u8* sc = scales + (r * 4 + group) * (16 * SCALE);
                    const float s = HALF ? f16_to_float(*(const u16*)sc) : *(const float*)sc;
                    acc[r] = add_planar<W16>(acc[r], c, l.flip, v, ds, s);
                }
            }
            u32 u = i * gridDim.x + blockIdx.x;
            const ChainSegment s = find_segment(l, u);
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                float v = acc[r];
                v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 16));
                v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 8));
                v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 4));
                const u32 row = u * ROWS + r * 4 + group;
                if (klane == 0 && row < s.rows) {
                    float* out = l.out + s.column + row;
                    if (s.bias) v = __fadd_rn(v, __ldg((const float*)s.bias + row));
                    if (s.accumulate) v = __fadd_rn(v, __ldcg(out));
                    *out = v;
                }
            }
        }
    };

#pragma unroll 1
    for (u32 t = 0; t < a.tasks; t++) {
        const ChainTask task = a.task[t];
        const u32 count = t * gridDim.x;  // arrivals before this task
        switch (task.kind) {
        case CHAIN_LINEAR: {
            const ChainLinear l = a.linear[task.index];
            const Staged<W16> to(area, l.x.cols / 32);
            if (l.kv) ask_for_pages(a.attention[l.kv - 1], a.step.rows[0]);
            if (l.src) {
                const u32 codes = (l.x.cols / 32 * (PIECES * 16 + 8) + 15) / 16 * 16;
                stage_norm<W16>(l, to, (float*)(area + codes), a.barrier, count);
            } else {
                grid_wait(a.barrier, count);
                stage_codes<W16>(l.x, to);
            }
            __syncthreads();
            multiply(l);
            break;
        }
        case CHAIN_ATTEND:
            grid_wait(a.barrier, count);
            attend(a.attention[task.index], a.rope[task.index], area, a.slots);
            break;
        case CHAIN_COMBINE:
            grid_wait(a.barrier, count);
            combine<W16>(a.attention[task.index], a.activation[task.index].out);
            break;
        default:
            grid_wait(a.barrier, count);
            swiglu_blocks<W16>(a.activation[task.index]);
        }
        if (t + 1 < a.tasks) grid_arrive(a.barrier);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    grid_leave(a.barrier);
}

#define KERNEL(D)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1) chain_w16_d##D(const __grid_constant__ ChainArgs a) {        \
        chain<(PIPE == 2), true, D>(a);                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 1) chain_w8_d##D(const __grid_constant__ ChainArgs a) {         \
        chain<(PIPE == 2), false, D>(a);                                                                              \
    }
KERNEL(6)
KERNEL(8)
KERNEL(10)

#endif
