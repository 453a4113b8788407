// y[n, column, row] = x[n, row, column]: images of planes with neighbouring channels, and back.
//
// A block has 64 rows of 32 words: it reads and writes whole lines of memory, and turns them in shared memory. A word
// is an element or, of 16 bits, a pair of neighbours; of a pair of rows each thread makes a pair of columns. Words of
// row r begin at bank r / EACH, so that neither rows nor columns meet in one bank.
//
// The prologue defines word_t, as wide as EACH elements; Params: x, y; rows, columns; down, across: blocks of a
// matrix.

#include "prelude.cuh"

constexpr int ROWS = 64, COLUMNS = 32 * EACH, WARPS = BLOCK / 32, TURNS = ROWS / WARPS;
constexpr int HALVES = ROWS / EACH / 32;  // of a column, which a warp writes in turn

__device__ __forceinline__ int place(int row, int word) { return row * 32 + ((word + row / EACH) & 31); }

extern "C" __global__ void __launch_bounds__(BLOCK) transpose(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    __shared__ unsigned part[ROWS * 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int of_matrix = p.down * p.across, n = blockIdx.x / of_matrix, at = blockIdx.x - n * of_matrix;
    const int first_row = at / p.across * ROWS, first_column = at % p.across * COLUMNS;
    const long long matrix = static_cast<long long>(n) * p.rows * p.columns;

    const int column = first_column + lane * EACH;
    word_t words[TURNS] = {};
#pragma unroll
    for (int k = 0; k < TURNS; ++k) {
        const int row = first_row + warp + k * WARPS;
        if (row < p.rows && column < p.columns) {
            load_bytes<sizeof(word_t)>(
                p.x + (matrix + static_cast<long long>(row) * p.columns + column) / EACH, &words[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < TURNS; ++k) part[place(warp + k * WARPS, lane)] = words[k];
    __syncthreads();

#pragma unroll
    for (int k = 0; k < HALVES * 32 / WARPS; ++k) {
        const int of_part = (k % HALVES * 32 + lane) * EACH, word = warp + k / HALVES * WARPS;
        const int row = first_row + of_part;
        if (row >= p.rows) continue;
        unsigned columns[EACH], rows[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) rows[j] = part[place(of_part + j, word)];
        if constexpr (EACH == 2) {
            columns[0] = __byte_perm(rows[0], rows[1], 0x5410);
            columns[1] = __byte_perm(rows[0], rows[1], 0x7632);
        } else {
            columns[0] = rows[0];
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int to = first_column + word * EACH + j;
            if (to < p.columns) {
                p.y[(matrix + static_cast<long long>(to) * p.rows + row) / EACH] = word_t(columns[j]);
            }
        }
    }
}
