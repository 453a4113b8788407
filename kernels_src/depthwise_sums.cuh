// What a thread of the gradient of depthwise weights (depthwise_backward.cu) does with the rows of both images, however
// they come to it: products of a row of x with the HELD last rows of the gradient, sums of all taps.

constexpr int BEFORE = (KH - 1) / STRIDE_H, HELD = BEFORE + 1, ROWS_IN = STRIDE_H, ROWS_OUT = 1;
constexpr int WINDOW = (COLUMNS - 1) * STRIDE_W + KW;
// A ring of so many rows costs moves, a turn that is written out so often costs instructions to fetch.
constexpr int PHASES = HELD <= 3 ? HELD : 1;

using Held = acc_t[HELD][COLUMNS][VEC];

// Where the row of the gradient is held that is `age` turns old.
__device__ constexpr int place_of(int newest, int age) { return PHASES > 1 ? (newest + HELD - age) % HELD : age; }

// Row s of a turn of x with the rows of the gradient that it counts for.
template <int S>
__device__ __forceinline__ void take_row(const acc_t (&x)[WINDOW][VEC], const Held& held, int newest, Sums& sums) {
#pragma unroll
    for (int m = 0; m < HELD; ++m) {
        if (S + STRIDE_H * m >= KH) continue;
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q)
#pragma unroll
            for (int j = 0; j < KW; ++j)
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    sums[(S + STRIDE_H * m) * KW + j][v] +=
                        held[place_of(newest, m)][q][v] * x[q * STRIDE_W + j][v];
    }
}

// For a new row, where the ring is not one by phases.
__device__ __forceinline__ void make_room(Held& held) {
#pragma unroll
    for (int h = HELD - 1; h > 0; --h)
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q)
#pragma unroll
            for (int v = 0; v < VEC; ++v) held[h][q][v] = held[h - 1][q][v];
}
