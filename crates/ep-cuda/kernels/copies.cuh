// Asynchronous copies to shared memory and what waits for them: groups of a thread's copies, and barriers in shared memory.
//
// `to` and `bar` are addresses in shared memory. A thread that has awaited its copies sees what they brought; others see it after a
// barrier that the thread has come to since. Compute capability 8.0 and up; what needs 9.0 says so.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 800

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes, past the first-level cache.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
// `n` of 16 bytes; the rest becomes zero.
__device__ __forceinline__ void copy16(void* to, const void* from, u32 n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(__cvta_generic_to_global(from)), "r"(n)
                 : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last N groups are under way.
template <int N> __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void await_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// `count` arrivals end a phase; phases are awaited by parity.
__device__ __forceinline__ void phase_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void phase_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void phase_await(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN%=;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Arrives, and lets the phase end no sooner than `bytes` bytes of bulk copies are there.
__device__ __forceinline__ void phase_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar)
                 : "memory");
}
// Orders this thread's ordinary accesses to shared memory before those of tensor cores and bulk copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

#endif
