// How fast device memory can be read: the ceiling that every other kernel's speed is compared with.
//
// Launch: block 256, any grid. Reads `count` pieces of 16 bytes once each; the sum goes to `sink` so that nothing is left out.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) read_all(const __grid_constant__ ProbeArgs a) {
    const u64 stride = (u64)gridDim.x * 256;
    u32 sum = 0;
#pragma unroll 8
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < a.count; i += stride) {
        const uint4 v = __ldcs(a.source + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) *a.sink = sum;
}
