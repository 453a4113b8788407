// Reads memory and keeps nothing: what a reduction can reach at best. 16 bytes a load, four on their way.
//
// Before this file: BLOCK. The grid strides over `vectors` words of 16 bytes.

#include "prelude.cuh"

constexpr int AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(BLOCK) read(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const long long step = static_cast<long long>(gridDim.x) * BLOCK * AT_ONCE;
    unsigned seen = 0;
    for (long long first = static_cast<long long>(blockIdx.x) * BLOCK * AT_ONCE + threadIdx.x; first < p.vectors;
         first += step) {
        unsigned words[AT_ONCE][4] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (first + k * BLOCK < p.vectors) load_bytes<16>(p.x + 4 * (first + k * BLOCK), words[k]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) seen ^= words[k][0] ^ words[k][1] ^ words[k][2] ^ words[k][3];
    }
    if (seen == p.never) *p.out = seen;  // hardly ever, which the compiler cannot know
}
