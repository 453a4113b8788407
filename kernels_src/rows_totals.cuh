// Sums over all rows of what has one value a row: the block that ends last adds up what all have left, always in the same
// order, and writes what follows from that. For few blocks: they count themselves one after the other, in 2 ns each.
//
// The prologue defines
//   TOTALS                        how many sums
//   add_row(p, r, sums)           those of row r: of what the kernel stored, and of operands with one value a row
//   store_totals(p, sums)         what follows from them
//   p.arrived                     where blocks are counted: see arrivals.cuh

template <typename P>  // whose members exist only where there are totals
__device__ __noinline__ void add_up_rows(const P& p) {  // inline it made a kernel of full registers spill
    if (!is_last(p.arrived)) return;
    acc_t sums[TOTALS] = {};
    for (unsigned r = threadIdx.x; r < p.rows; r += BLOCK) add_row(p, r, sums);
    static_assert(BLOCK % 32 == 0, "warps are whole");
    __shared__ acc_t of_warps[TOTALS][BLOCK / 32];
#pragma unroll
    for (int k = 0; k < TOTALS; ++k) {
        join_lanes_sum<32>(sums[k]);
        if (threadIdx.x % 32 == 0) of_warps[k][threadIdx.x / 32] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int k = 0; k < TOTALS; ++k)
        for (int warp = 1; warp < BLOCK / 32; ++warp) sums[k] += of_warps[k][warp];
    store_totals(p, sums);
}
