// Indices sorted, with where they stood: a stable radix sort, BITS bits at a pass, from the lowest.
//
// The indices are cut into tiles of 2^p.tile, each a block's. COUNT: how many of a tile have which digit, of the
// first pass. SCATTER: a block knows from the counts of all tiles where each digit of its own begins, its warps go
// through their parts in order, and while it puts a key in its place, it counts it for the next pass. Counts are
// integers, of which it is no matter in which order they come.
//
// What is no index of a table of p.rows rows, or p.padding, has the key p.rows and comes last.
//
// The prologue defines index_t, BITS and
//   SCATTER, FIRST, LAST   which pass this is

#include "prelude.cuh"

constexpr int BINS = 1 << BITS, WARPS = BLOCK / 32;

__device__ __forceinline__ unsigned key_at(const Params& p, unsigned i) {
    if constexpr (!FIRST) return p.keys[i];
    const int64_t index = p.indices[i];
    return index >= 0 && index < p.rows && index != p.padding ? static_cast<unsigned>(index)
                                                              : static_cast<unsigned>(p.rows);
}
__device__ __forceinline__ unsigned digit_of(const Params& p, unsigned key) { return key >> p.shift & (BINS - 1); }

__device__ __forceinline__ unsigned end_of(const Params& p, unsigned long long end) {
    return static_cast<unsigned>(end < p.count ? end : p.count);
}

// The counts of this pass; zeros where later passes and the caller count.
__device__ __forceinline__ void count_tile(const Params& p) {
    __shared__ unsigned found[BINS];
    for (unsigned k = blockIdx.x * BLOCK + threadIdx.x; k < p.zeros; k += gridDim.x * BLOCK) p.zeroed[k] = 0;
    for (unsigned b = threadIdx.x; b < BINS; b += BLOCK) found[b] = 0;
    __syncthreads();
    const unsigned long long begin = static_cast<unsigned long long>(blockIdx.x) << p.tile;
    const unsigned end = end_of(p, begin + (1ull << p.tile));
    for (unsigned long long i = begin + threadIdx.x; i < end; i += BLOCK)
        atomicAdd(&found[digit_of(p, key_at(p, static_cast<unsigned>(i)))], 1u);
    __syncthreads();
    for (unsigned b = threadIdx.x; b < BINS; b += BLOCK) p.counts[blockIdx.x * BINS + b] = found[b];
}

// The sum of all threads' before this one.
__device__ __forceinline__ unsigned sum_before(unsigned x) {
    __shared__ unsigned sums[WARPS];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    unsigned before = sum - x;
    for (unsigned w = 0; w < warp; ++w) before += sums[w];
    return before;
}

// From how often each of the block's warps has a digit to where its first one goes.
__device__ __forceinline__ void find_places(const Params& p, unsigned (&places)[WARPS][BINS]) {
    const unsigned bin = threadIdx.x;
    unsigned all = 0, place = 0;
    if (bin < BINS) {
#pragma unroll 16
        for (unsigned t = 0; t < gridDim.x; ++t) {
            const unsigned n = p.counts[t * BINS + bin];
            all += n;
            if (t < blockIdx.x) place += n;
        }
    }
    place += sum_before(all);
    if (bin < BINS)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const unsigned n = places[w][bin];
            places[w][bin] = place;
            place += n;
        }
}

__device__ __forceinline__ void scatter_tile(const Params& p) {
    __shared__ unsigned places[WARPS][BINS];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (1u << p.tile) / WARPS;
    const unsigned long long begin = (static_cast<unsigned long long>(blockIdx.x) << p.tile) + warp * part;
    const unsigned end = end_of(p, begin + part);
    for (unsigned k = threadIdx.x; k < WARPS * BINS; k += BLOCK) places[k / BINS][k % BINS] = 0;
    __syncthreads();
    for (unsigned long long i = begin + lane; i < end; i += 32)
        atomicAdd(&places[warp][digit_of(p, key_at(p, static_cast<unsigned>(i)))], 1u);
    __syncthreads();
    find_places(p, places);
    __syncthreads();
    for (unsigned long long base = begin; base < end; base += 32) {
        const unsigned i = static_cast<unsigned>(base) + lane;
        const bool exists = base + lane < end;
        const unsigned key = exists ? key_at(p, i) : 0, digit = exists ? digit_of(p, key) : BINS;
        const unsigned alike = __match_any_sync(0xffffffffu, digit), rank = __popc(alike & ((1u << lane) - 1));
        const unsigned place = exists ? places[warp][digit] + rank : 0;
        __syncwarp();
        if (exists && rank == 0) places[warp][digit] += __popc(alike);
        __syncwarp();
        if (!exists) continue;
        p.keys_out[place] = key;
        p.order_out[place] = FIRST ? i : p.order[i];
        if constexpr (!LAST) atomicAdd(&p.next_counts[(place >> p.tile) * BINS + (key >> (p.shift + BITS) & (BINS - 1))], 1u);
        else if (key < p.rows) p.present[key] = 1;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_indices(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if constexpr (SCATTER) scatter_tile(p);
    else count_tile(p);
}
