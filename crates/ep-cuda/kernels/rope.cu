// Norms over heads where the model has them, rotary embedding of queries and keys, keys and values into their pages.
//
// Launch: block 128, grid (ceil((heads + 2 kv_heads) / 4), token rows): a warp a head. Queries are rewritten in place;
// keys and values are only stored, rounded to the pages' type.
#include "head.cuh"

extern "C" __global__ void __launch_bounds__(128) rope_append(const __grid_constant__ RopeArgs a) {
    allow_next();
    wait_for_previous();
    const u32 r = blockIdx.y;
    if (r >= a.step.header->rows) return;
    const u32 h = blockIdx.x * 4 + (threadIdx.x >> 5), all = a.heads + 2 * a.kv_heads;
    if (h >= all) return;
    const StepRow row = a.step.rows[r];
    float* x = a.qkv + ((size_t)r * all + h) * a.head_dim;
    const bool query = h < a.heads, value = h >= a.heads + a.kv_heads;
    u8* page = nullptr;
    if (!query) {
        const u32 head = h - a.heads - (value ? a.kv_heads : 0);
        page = kv_at(a.step, a.kv, value ? a.kv.value_offset : a.kv.key_offset, row.table, row.position, head);
    }
    rotate_head(a, x, h, row.position, [&](u32 i, float v) {
        if (query) x[i] = v;
        else if (a.kv.half) ((u16*)page)[i] = float_to_f16(v);
        else ((float*)page)[i] = v;
    });
}
