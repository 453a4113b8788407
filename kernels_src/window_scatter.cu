// The gradient of a rolling extreme: grad of every result to the element that it is.
//
// Places never decrease along a row, so the results that are one element are neighbours: a run. A thread sums
// the runs that begin among its ITEMS results, the last one to its end: no atomics, one order of additions.
//
// grad and index are (outer, results, inner), out is (outer, n, inner) and zero. Place -1: no element.
// Before this file: scalar_t, ITEMS.

#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) window_scatter(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
    const int64_t column = thread % p.inner, part = thread / p.inner % p.parts, outer = thread / p.inner / p.parts;
    if (outer >= p.outer) return;
    const scalar_t* grad = p.grad + outer * p.results * p.inner + column;
    const int* index = p.index + outer * p.results * p.inner + column;
    scalar_t* out = p.out + outer * p.n * p.inner + column;
    int64_t i = part * ITEMS;
    const int64_t stop = min(i + ITEMS, p.results);
    int place = i ? index[(i - 1) * p.inner] : -1;
    for (; i < stop && index[i * p.inner] == place; ++i) {}
    while (i < stop) {
        place = index[i * p.inner];
        acc_t sum = 0;
        for (; i < p.results && index[i * p.inner] == place; ++i) sum += to_acc(grad[i * p.inner]);
        if (place >= 0) out[place * p.inner] = from_acc<scalar_t>(sum);
    }
}
