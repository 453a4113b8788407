// A reduction over rows and the elements that follow from it, in one launch: the statistics of a batch norm and its
// result, the sums of its gradient and the gradient.
//
// All blocks are on the device at a time (a cooperative launch). Each finds partial values of its rows, all meet,
// each joins those of some columns, all meet again, and each goes over its rows a second time, backwards: what it
// kept in shared memory is not read again, and of the rest the last of what was read is still in the L2.
//
// The prologue defines
//   finding::                     what pointwise_reduce.cu needs where columns are kept, in one group; store(p, n, values)
//   elements::                    what pointwise_walk.cu needs
//   MIN_BLOCKS, AT_ONCE           blocks on a multiprocessor, packs that the second pass takes at a time
//   KEPT_BYTES                    of the operands that both passes read, for a pack
//   keep(to, tile), recall(from, p, i, fixed)    those operands in shared memory, threads side by side; the others
//   p.finding, p.elements
//   p.kept, p.side                packs of a thread in shared memory; 2^side columns that a block joins at a time
//   p.arrived                     where blocks meet: 0, and 0 again at the end

#include "prelude.cuh"
#include "reductions.cuh"
#include "arrivals.cuh"

using finding::BLOCK, finding::DEPTH, finding::LANES, finding::UNROLL, finding::VALUES, finding::VEC, finding::WIDTH;
using finding::index_t;

// Those of all chunks, a column after the other.
__device__ __forceinline__ void join_chunks(const Params& p) {
    const finding::Params& found = p.finding;
    __shared__ acc_t shared[BLOCK][VALUES];
    const int columns = 1 << p.side, depth = threadIdx.x >> p.side;
    for (index_t first = blockIdx.x << p.side; first < found.columns; first += gridDim.x << p.side) {
        const index_t n = first + (threadIdx.x & (columns - 1));
        acc_t none[VALUES][1], values[VALUES];
        finding::start<1>(none);
#pragma unroll
        for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
        const index_t chunks = n < found.columns ? found.chunks : 0;
#pragma unroll 2
        for (index_t c = depth; c < chunks; c += BLOCK >> p.side) {
            acc_t other[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; ++k)
                other[k] = fresh_pack<1>(found.partials + (k * found.chunks + c) * found.columns + n).data[0];
            finding::join_all(values, other);
        }
#pragma unroll
        for (int k = 0; k < VALUES; ++k) shared[threadIdx.x][k] = values[k];
        for (int half = BLOCK / 2; half >= columns; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) {
                finding::join_all(values, shared[threadIdx.x + half]);
#pragma unroll
                for (int k = 0; k < VALUES; ++k) shared[threadIdx.x][k] = values[k];
            }
        }
        if (depth == 0 && n < found.columns) finding::store(found, n, values);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_resident(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    extern __shared__ __align__(16) unsigned char own[];
    constexpr int STEP = BLOCK * KEPT_BYTES;
    const finding::Params& found = p.finding;
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const index_t tiles = (found.columns + WIDTH - 1) / WIDTH, tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles;
    const index_t column = tile * WIDTH + lane * VEC;
    // Blocks take turns, so that all are in one neighbourhood of memory, the last of which is in the L2 still when
    // they turn back.
    const index_t step = found.chunks * DEPTH, first = chunk * DEPTH + depth;
    const index_t end = column < found.columns ? found.rows : 0;
    int packs = 0;  // that lie behind

    finding::Walk<VEC> walk(found);
    if (first < end) {
        const finding::Tile<VEC> fixed = finding::load_fixed<VEC>(found, column);
        index_t row = first;
        for (; row + (UNROLL - 1) * step < end; row += UNROLL * step, packs += UNROLL) {
            index_t i[UNROLL];
            finding::Tile<VEC> read[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                i[u] = (row + u * step) * found.columns + column;
                read[u] = finding::load<VEC>(found, i[u], fixed);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (packs + u < p.kept) keep(own + (packs + u) * STEP, read[u]);
            walk.take_in(found, i, read, row, step);
        }
        for (; row < end; row += step, ++packs) {
            const index_t i[1] = {row * found.columns + column};
            const finding::Tile<VEC> one[1] = {finding::load<VEC>(found, i[0], fixed)};
            if (packs < p.kept) keep(own + packs * STEP, one[0]);
            walk.take_in(found, i, one, row, step);
        }
    }
    {
        __shared__ acc_t shared[finding::MOST][DEPTH][WIDTH];
        acc_t joined[finding::OWN][VALUES];
        finding::join_columns(walk.values, joined, shared);
        const index_t first = tile * WIDTH + threadIdx.x % WIDTH;
        if (threadIdx.x / WIDTH == 0)
#pragma unroll
            for (int n = 0; n < finding::OWN; ++n)
                if (first + n * BLOCK < found.columns)
#pragma unroll
                    for (int k = 0; k < VALUES; ++k)
                        found.partials[(k * found.chunks + chunk) * found.columns + first + n * BLOCK] = joined[n][k];
    }
    meet(p.arrived);
    join_chunks(p);
    meet(p.arrived);
    if (packs == 0) return;

    const elements::Tile<VEC> fixed = elements::load_fixed<VEC>(p.elements, column);
    while (packs % AT_ONCE) {
        --packs;
        const index_t i = (first + packs * step) * found.columns + column;
        elements::finish<VEC>(p.elements, i, packs < p.kept ? recall(own + packs * STEP, p.elements, i, fixed)
                                                            : elements::load<VEC>(p.elements, i, fixed), {});
    }
    while (packs) {
        packs -= AT_ONCE;
        const index_t row = first + packs * step;
        elements::Tile<VEC> read[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const index_t i = (row + u * step) * found.columns + column;
            if (packs + u < p.kept) read[u] = recall(own + (packs + u) * STEP, p.elements, i, fixed);
            else read[u] = elements::load<VEC>(p.elements, i, fixed);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u)
            elements::finish<VEC>(p.elements, (row + u * step) * found.columns + column, read[u], {});
    }
}
