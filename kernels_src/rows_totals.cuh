// Sums over all rows of what has one value a row: the block that ends last adds up what all have left, always in the same
// order, and writes what follows from that. For few blocks: each ends only when it has counted itself.
//
// The prologue defines
//   TOTALS                        how many sums
//   add_row(p, r, sums)           those of row r: of what the kernel stored, and of operands with one value a row
//   store_totals(p, sums)         what follows from them
//   p.arrived                     where blocks are counted: see arrivals.cuh

constexpr unsigned AT_ONCE = BLOCK < 1024 ? 1024 / BLOCK : 1;  // rows of which a thread asks for the values at a time

template <typename P>  // whose members exist only where there are totals
__device__ __noinline__ void add_up_rows(const P& p) {  // inline it made a kernel of full registers spill
    if (!is_last(p.arrived)) return;
    acc_t sums[TOTALS] = {};
    for (unsigned first = threadIdx.x; first < p.rows; first += AT_ONCE * BLOCK) {
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) {
            const unsigned r = first + i * BLOCK;
            acc_t of_row[TOTALS] = {};
            add_row(p, min(r, p.rows - 1), of_row);  // not under a condition, which the next ones would wait for
#pragma unroll
            for (int k = 0; k < TOTALS; ++k) sums[k] += r < p.rows ? of_row[k] : acc_t(0);
        }
    }
    static_assert(BLOCK % 32 == 0, "warps are whole");
    __shared__ acc_t of_warps[TOTALS][BLOCK / 32];
#pragma unroll
    for (int k = 0; k < TOTALS; ++k) {
        join_lanes_sum<32>(sums[k]);
        if (threadIdx.x % 32 == 0) of_warps[k][threadIdx.x / 32] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int k = 0; k < TOTALS; ++k) {
        sums[k] = threadIdx.x < BLOCK / 32 ? of_warps[k][threadIdx.x] : acc_t(0);
        join_lanes_sum<32>(sums[k]);
    }
    if (threadIdx.x == 0) store_totals(p, sums);
}
