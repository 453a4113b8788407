// out = finish(x w^T + bias, residual) for few rows: x [m, k], w [n, k], out [m, n], 16-bit.
//
// What takes time is to read w once, and before that to begin: for a small one most of the time goes by until the
// first numbers arrive. So nothing stands before the loads, no ring and no barrier: the warps of a block share k, in
// steps of 32, and all that a thread reads of a thousand columns is under way at once. A block has 16 rows of w, which
// are columns of the result; its warps add up what they have in a fixed order.
//
// Of a step a lane has eight neighbours along k of each of its rows, 16 bytes. It gives them to the matrix units as if
// they were others: the same ones of w and of x, so that the sum over k is the same.
//
// The prologue defines
//   value_t                       float16_t or bfloat16_t
//   GROUPS                        of 8 rows of x
//   AT_ONCE                       steps of a warp that are under way
//   BIAS, RESIDUAL, KEEP          whether there is one; whether x w^T + bias is written as well
//   Params                        x, w, out, kept, residual, bias; x_row, w_row, residual_row: steps to the next; m, n, k
//   finish(product, residual)

#include "prelude.cuh"
#include "copies.cuh"
#include "mma.cuh"

constexpr int WARPS = BLOCK / 32, STEP = 32, COLUMNS = 16, ROWS = 8 * GROUPS;
constexpr int PITCH = COLUMNS + 4;  // threads of a warp in different banks

struct Operands { unsigned w[2][4], x[GROUPS][4]; };

__device__ __forceinline__ void load(const value_t* row, bool inside, unsigned (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = 0;
    if (inside) load_bytes<16>(row, words);
}

// From column k on; the lane's first rows are `n` and `m`.
__device__ __forceinline__ void load_step(const Params& p, int n, int m, int k, Operands& found) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load(p.w + (n + 8 * i) * p.w_row + k, n + 8 * i < p.n && k < p.k, found.w[i]);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
        load(p.x + (m + 8 * i) * p.x_row + k, m + 8 * i < p.m && k < p.k, found.x[i]);
}

__device__ __forceinline__ void take_step(const Operands& found, float (&sums)[GROUPS][4]) {
    const auto& w = found.w;
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        const unsigned a[4] = {w[0][half], w[1][half], w[0][half + 1], w[1][half + 1]};
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const unsigned b[2] = {found.x[i][half], found.x[i][half + 1]};
            multiply<16>(value_t{}, sums[i][0], sums[i][1], sums[i][2], sums[i][3], a, b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 2) gemv(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * COLUMNS;
    float sums[GROUPS][4] = {};
#pragma unroll 1
    for (int k = warp * STEP; k < p.k; k += AT_ONCE * WARPS * STEP) {
        Operands found[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s)
            load_step(p, first + lane / 4, lane / 4, k + s * WARPS * STEP + lane % 4 * 8, found[s]);
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) take_step(found[s], sums);
    }

    __shared__ float shared[WARPS][ROWS][PITCH];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            shared[warp][i * 8 + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = sums[i][e];
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * COLUMNS; at += BLOCK) {
        const int m = at / COLUMNS, column = at % COLUMNS, n = first + column;
        if (m >= p.m || n >= p.n) continue;
        float product = BIAS ? to_acc(p.bias[n]) : 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) product += shared[w][m][column];
        const long long to = static_cast<long long>(m) * p.n + n;
        if constexpr (KEEP) p.kept[to] = from_acc<value_t>(product);
        const acc_t residual = RESIDUAL ? to_acc(p.residual[m * p.residual_row + n]) : 0;
        p.out[to] = from_acc<value_t>(finish(product, residual));
    }
}
