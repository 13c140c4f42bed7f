// Where a position's keys and values are.
#pragma once
#include "common.cuh"

// Address of element 0 of KV head `head` at `position`, keys or values by `offset`, of a sequence whose page table
// starts at `table`.
__device__ __forceinline__ u8* kv_at(const StepRef& s, const KvRef& kv, u64 offset, u32 table, u32 position, u32 head) {
    const u32 page = s.pages[table + position / kv.page_tokens], token = position % kv.page_tokens;
    const size_t element = (size_t)head * kv.head_stride + (size_t)token * kv.token_stride;
    return kv.base + page * kv.page_bytes + offset + element * (kv.half ? 2 : 4);
}
