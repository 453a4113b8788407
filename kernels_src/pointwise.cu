// Any pointwise expression: every operand is read once, every output written once.
//
// The floor is bytes / bandwidth; what is left to tune is bytes in flight and instructions per
// element. One 16-byte vector a thread and a grid that covers the tensor once measured best: with
// 2048 resident threads an SM keeps 32 KB in flight per operand without any unrolling.
//
// The prologue defines
//   BLOCK, UNROLL, VEC            threads, vectors a thread, elements a vector
//   index_t                       unsigned below 2^31 elements, else unsigned long long
//   Params                        pointers, sizes, strides, scalars; `count` elements in all
//   Tile<W>                       the operands' values at W neighbouring elements
//   load<W>(p, i), finish<W>(p, i, tile)   read a tile; compute and store the outputs

extern "C" __global__ void __launch_bounds__(BLOCK) pointwise(const __grid_constant__ Params p) {
    const index_t base = static_cast<index_t>(blockIdx.x) * (BLOCK * UNROLL * VEC)
                         + static_cast<index_t>(threadIdx.x) * VEC;
    constexpr index_t STEP = BLOCK * VEC;

    if (base + (UNROLL - 1) * STEP + VEC <= p.count) {
        Tile<VEC> tiles[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) tiles[u] = load<VEC>(p, base + u * STEP);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) finish<VEC>(p, base + u * STEP, tiles[u]);
        return;
    }
    // The ragged end: whole vectors while they last, then single elements.
    for (int u = 0; u < UNROLL; ++u) {
        const index_t i = base + u * STEP;
        if (UNROLL > 1 && i + VEC <= p.count) {
            finish<VEC>(p, i, load<VEC>(p, i));
        } else if (VEC > 1) {
#pragma unroll 1
            for (index_t j = i; j < p.count && j < i + VEC; ++j) finish<1>(p, j, load<1>(p, j));
        }
    }
}
