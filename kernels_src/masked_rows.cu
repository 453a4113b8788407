// Queries whose mask lets no key pass: zeros in the place of whatever an attention computed for them, and
// infinity for the logarithm of their sum. A backward pass then finds the weights exp(x - inf) = 0 again, and
// has no other gradients of them than zeros.
//
// Of a query one number is read, the first key that its mask lets pass; only queries without any are written.
//
// The prologue defines scalar_t, CAUSAL (query i attends to no key after i), LOGARITHMS (there are any), and
// Params.

#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) masked_rows(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const unsigned r = blockIdx.x * BLOCK + threadIdx.x, lane = threadIdx.x % 32;
    bool empty = false;
    scalar_t* out = p.out;
    if (r < p.count) {
        const unsigned row = r % p.rows, head = r / p.rows % p.heads, batch = r / p.rows / p.heads;
        const float first = p.first[batch * p.first_batch + head * p.first_head + row * p.first_row];
        empty = first > static_cast<float>(CAUSAL && row < p.last_key ? row : p.last_key);
        out += batch * p.out_batch + head * p.out_head + row * p.out_row;
        if (LOGARITHMS && empty) p.logarithms[batch * p.log_batch + head * p.log_head + row * p.log_row] = inf;
    }
    // A warp writes one row after the other.
    for (unsigned left = __ballot_sync(0xffffffffu, empty); left; left &= left - 1) {
        scalar_t* to = reinterpret_cast<scalar_t*>(__shfl_sync(
            0xffffffffu, reinterpret_cast<unsigned long long>(out), __ffs(left) - 1));
        for (unsigned c = lane; c < p.columns; c += 32) to[c] = from_acc<scalar_t>(0);
    }
}
