// A pointwise expression with operands that repeat from row to row, such as the weights of a norm's channels:
// more of them than of what changes. A thread owns VEC columns, reads those once, and walks down some rows.
//
// The prologue defines, beside what pointwise.cu needs,
//   UNROLL                        rows that a thread reads before it computes
//   load_fixed<W>(p, i)           the operands that repeat; load<W>(p, i, fixed) reads the others
//   p.columns, p.vectors          of a row: elements, vectors (a divisor)
//   p.rows, p.each                rows in all, and of a thread

#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_walk(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const index_t n = static_cast<index_t>(blockIdx.x) * BLOCK + threadIdx.x, team = p.vectors.divide(n);
    const index_t column = (n - team * p.vectors.value) * VEC, first = team * p.each;
    if (first >= p.rows) return;
    const index_t end = first + p.each < p.rows ? first + p.each : p.rows;

    const Tile<VEC> fixed = load_fixed<VEC>(p, column);
    index_t row = first;
    for (; row + UNROLL <= end; row += UNROLL) {
        Tile<VEC> tiles[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) tiles[u] = load<VEC>(p, (row + u) * p.columns + column, fixed);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const index_t i = (row + u) * p.columns + column;
            finish<VEC>(p, i, tiles[u], draws<VEC>(p, i));
        }
    }
    for (; row < end; ++row) {
        const index_t i = row * p.columns + column;
        finish<VEC>(p, i, load<VEC>(p, i, fixed), draws<VEC>(p, i));
    }
}
