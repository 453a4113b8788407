// What a thread of a depthwise convolution (depthwise.cu) does with the windows of a row, however they come to it:
// products with its weights, rows of results held until they are finished, the epilogue.

constexpr int ROWS_IN = TRANSPOSED ? 1 : STRIDE_H, ROWS_OUT = TRANSPOSED ? STRIDE_H : 1;  // of a turn
constexpr int BEFORE = (KH - 1) / STRIDE_H;  // turns until the first row is finished
constexpr int HELD = TRANSPOSED ? (KH > STRIDE_H ? KH : STRIDE_H) : BEFORE + 1;
constexpr int LEFT = TRANSPOSED ? (KW - 1) / STRIDE_W : 0;
constexpr int WINDOW = TRANSPOSED ? (COLUMNS - 1) / STRIDE_W + LEFT + 1 : (COLUMNS - 1) * STRIDE_W + KW;
constexpr int PITCH = (LANES + 1) * VEC;  // of a tap's weights: not a multiple of the banks
constexpr bool WEIGHTS_IN_REGISTERS = TAPS * VEC * sizeof(acc_t) <= 80;

using Source = Window<scalar_t, VEC, WINDOW>;
using Held = acc_t[HELD][COLUMNS][VEC];

// The row of taps by which a turn's row `s` counts for a held row: KH or more, if by none.
__device__ constexpr int tap_row(int s, int held) { return TRANSPOSED ? held : s + STRIDE_H * (BEFORE - held); }

// The pixel of the window that result q takes by tap column j: negative, if none.
__device__ constexpr int pixel_of(int q, int j) {
    return !TRANSPOSED ? q * STRIDE_W + j
           : (q + (LEFT + 1) * STRIDE_W - j) % STRIDE_W ? -1 : (q + LEFT * STRIDE_W - j) / STRIDE_W;
}

// Weights of the thread's channels: in registers where these suffice.
struct Weights {
    const acc_t* shared;
    acc_t own[WEIGHTS_IN_REGISTERS ? TAPS : 1][VEC];

    __device__ __forceinline__ explicit Weights(const acc_t* shared) : shared(shared) {
        if constexpr (WEIGHTS_IN_REGISTERS)
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) read(tap, own[tap]);
    }
    __device__ __forceinline__ void read(int tap, acc_t (&w)[VEC]) const {
        const auto pack = shared_pack<VEC>(shared + tap * PITCH);
#pragma unroll
        for (int v = 0; v < VEC; ++v) w[v] = pack.data[v];
    }
    __device__ __forceinline__ void get(int tap, acc_t (&w)[VEC]) const {
        if constexpr (WEIGHTS_IN_REGISTERS)
#pragma unroll
            for (int v = 0; v < VEC; ++v) w[v] = own[tap][v];
        else read(tap, w);
    }
};

// What a thread takes of its block's weights for all threads.
struct Taken {
    static constexpr int EACH = (LANES * VEC * TAPS + BLOCK - 1) / BLOCK;
    scalar_t weights[EACH];
    int count;

    __device__ __forceinline__ Taken(const Params& p, int first, int channels) : count(channels * TAPS) {
        each([&](scalar_t& weight, int k) { weight = p.weight[first * TAPS + k]; });
    }
    __device__ __forceinline__ void share(acc_t* shared) {
        each([&](scalar_t& weight, int k) {
            const int c = k / TAPS, tap = k - c * TAPS;
            shared[(FLIPPED ? TAPS - 1 - tap : tap) * PITCH + c] = to_acc(weight);
        });
        __syncthreads();
    }
    template <typename Use> __device__ __forceinline__ void each(const Use& use) {
#pragma unroll
        for (int n = 0; n < EACH; ++n)
            if (const int k = threadIdx.x + n * BLOCK; k < count) use(weights[n], k);
    }
};

// The finished rows go, new ones come.
__device__ __forceinline__ void move_on(Held& held) {
#pragma unroll
    for (int h = 0; h < HELD; ++h)
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                held[h][q][v] = h + ROWS_OUT < HELD ? held[h + ROWS_OUT < HELD ? h + ROWS_OUT : 0][q][v] : acc_t(0);
}

template <int S>
__device__ __forceinline__ void take_row(const Weights& weights, const acc_t (&x)[WINDOW][VEC], Held& held) {
#pragma unroll
    for (int j = 0; j < KW; ++j)
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            if (tap_row(S, h) >= KH) continue;
            acc_t w[VEC];
            weights.get(tap_row(S, h) * KW + j, w);
#pragma unroll
            for (int q = 0; q < COLUMNS; ++q) {
                if (pixel_of(q, j) < 0) continue;
#pragma unroll
                for (int v = 0; v < VEC; ++v) held[h][q][v] += x[pixel_of(q, j)][v] * w[v];
            }
        }
}

// Where results of a thread go: `to` in row 0, the first row, which may be outside of the image.
struct Result {
    long long to;
    Columns columns;
    int row;
};

__device__ __forceinline__ void store_row(const Params& p, const Result& result, const Channels& channels, int row,
                                          const acc_t (&values)[COLUMNS][VEC]) {
    const long long at = result.to + row * p.out_row;
    char* to = reinterpret_cast<char*>(p.out + at);
    const int bytes = p.result_step * static_cast<int>(sizeof(scalar_t));
    Window<scalar_t, VEC, COLUMNS> residual;
    if (RESIDUAL) load_window(p.residual + at, p.result_step, result.columns, residual);
    else clear(residual);
    Pack<scalar_t, VEC> out[COLUMNS];
#pragma unroll
    for (int q = 0; q < COLUMNS; ++q) {
        acc_t added[VEC];
        unpack(residual.pixels[q], added);
#pragma unroll
        for (int v = 0; v < VEC; ++v) out[q].data[v] = from_acc<scalar_t>(finish(channels, v, values[q][v], added[v]));
    }
    if (result.columns.inside) {
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q)
            store_bytes<Pixel<scalar_t, VEC>::BYTES>(to + static_cast<long long>(q) * bytes, &out[q]);
    } else {
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q) {
            const int column = result.columns.first + q * result.columns.step;
            if (column >= 0 && column < result.columns.count)
                store_bytes<Pixel<scalar_t, VEC>::BYTES>(to + static_cast<long long>(q) * bytes, &out[q]);
        }
    }
}

__device__ __forceinline__ void store_finished(const Params& p, const Result& result, const Channels& channels, int turn,
                                               const Held& held) {
    if (turn < BEFORE) return;
    int row = result.row + turn * ROWS_OUT * p.dilation_h;
#pragma unroll
    for (int r = 0; r < ROWS_OUT; ++r, row += p.dilation_h)
        if (in_image(row, p.result_rows)) store_row(p, result, channels, row, held[r]);
}
