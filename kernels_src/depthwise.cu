// Depthwise convolution of images whose channels are neighbours in memory (channels_last): a kernel for each channel.
//
//     out[n, o, p, c] = epilogue(sum over i, j of x[n, o S - P + i D, p S - P + j D, c] weight[c, i, j])
//
// A thread has VEC channels of COLUMNS neighbouring results and goes down the rows of an image. It reads and converts
// a row of the source once, a window of WINDOW pixels, for all the results that the row counts for: these are HELD in
// registers, and each turn finishes the oldest. The next turn's windows are under way meanwhile. Neighbouring
// threads have neighbouring channels, then neighbouring columns, so what windows share comes from the L1.
//
// Turns one by one are a chain: each waits for the memory. Of a small problem, whose blocks run all at once, nothing
// else takes time, and a thread has so few TURNS that all of their windows are under way together, with the weights.
//
// With a dilation D the rows of one residue modulo D are an image of their own, and so are the columns.
// TRANSPOSED is the gradient of the source of a convolution with a stride: a turn takes one row and finishes
// STRIDE_H; without a stride it is a convolution with the kernel FLIPPED.
//
// A result's additions have the order of the rows, then of the columns, however the work is cut.
//
// The prologue defines scalar_t and
//   KH, KW, STRIDE_H, STRIDE_W, TRANSPOSED, FLIPPED
//   VEC, COLUMNS                  see above
//   LANES                         threads side by side along the channels, at most
//   TURNS                         of each thread, if these are to be under way together; otherwise 0
//   Channels, know(p, c)          what the epilogue needs of VEC channels, once a thread
//   RESIDUAL, finish(channels, v, value, residual)      whether there is one, and the epilogue

constexpr int TAPS = KH * KW;
constexpr int ROWS_IN = TRANSPOSED ? 1 : STRIDE_H, ROWS_OUT = TRANSPOSED ? STRIDE_H : 1;  // of a turn
constexpr int BEFORE = (KH - 1) / STRIDE_H;  // turns until the first row is finished
constexpr int HELD = TRANSPOSED ? (KH > STRIDE_H ? KH : STRIDE_H) : BEFORE + 1;
constexpr int LEFT = TRANSPOSED ? (KW - 1) / STRIDE_W : 0;
constexpr int WINDOW = TRANSPOSED ? (COLUMNS - 1) / STRIDE_W + LEFT + 1 : (COLUMNS - 1) * STRIDE_W + KW;
// Rows of the source, where all of them are under way together: some of the last turn's may not count.
constexpr int ROWS_TOGETHER = TRANSPOSED ? TURNS : (TURNS - BEFORE - 1) * STRIDE_H + KH;
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

// A thread's share: where it reads and writes, in the first row of either image.
struct Strip {
    const scalar_t* from;
    long long to;
    Columns source, result;
    int row, result_row, turns;  // first rows, which may be outside of the image
};

__device__ __forceinline__ Strip strip_of(const Params& p, unsigned task, int channel) {
    const int strip = digit(task, p.strips), residue_w = digit(task, p.residues_w);
    const int chunk = digit(task, p.chunks), residue_h = digit(task, p.residues_h);
    const int unit = chunk * p.chunk, left = min(p.chunk, p.units - unit);
    const int column = strip * (TRANSPOSED ? COLUMNS / STRIDE_W : COLUMNS * STRIDE_W);
    Strip s;
    s.source = columns_of<WINDOW>(column * p.dilation_w + p.source_left + residue_w, p.dilation_w, p.source_columns);
    s.result = columns_of<COLUMNS>(strip * COLUMNS * p.dilation_w + p.result_left + residue_w, p.dilation_w,
                                   p.result_columns);
    s.row = unit * ROWS_IN * p.dilation_h + p.source_top + residue_h;
    s.result_row = (unit - BEFORE) * ROWS_OUT * p.dilation_h + p.result_top + residue_h;
    s.turns = left + BEFORE;
    s.from = p.x + (task * p.x_batch + s.source.first * p.x_column + channel);
    s.to = task * p.out_batch + s.result.first * p.out_column + channel;
    return s;
}

__device__ __forceinline__ bool in_image(int row, int rows) {
    return static_cast<unsigned>(row) < static_cast<unsigned>(rows);
}

// A row of a turn in which some row is in the image.
__device__ __forceinline__ void load_row(const Params& p, const Strip& strip, int row, Source& source) {
    if (ROWS_IN == 1 || in_image(row, p.source_rows))
        load_window(strip.from + row * p.x_row, p.source_step, strip.source, source);
    else
        clear(source);
}

__device__ __forceinline__ void store_row(const Params& p, const Strip& strip, const Channels& channels, int row,
                                          const acc_t (&values)[COLUMNS][VEC]) {
    using Result = Pixel<scalar_t, VEC>;
    const long long at = strip.to + row * p.out_row;
    char* to = reinterpret_cast<char*>(p.out + at);
    const int bytes = p.result_step * static_cast<int>(sizeof(scalar_t));
    Window<scalar_t, VEC, COLUMNS> residual;
    if (RESIDUAL) load_window(p.residual + at, p.result_step, strip.result, residual);
    else clear(residual);
    Pack<scalar_t, VEC> out[COLUMNS];
#pragma unroll
    for (int q = 0; q < COLUMNS; ++q) {
        acc_t added[VEC];
        unpack(residual.pixels[q], added);
#pragma unroll
        for (int v = 0; v < VEC; ++v) out[q].data[v] = from_acc<scalar_t>(finish(channels, v, values[q][v], added[v]));
    }
    if (strip.result.inside) {
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q) store_bytes<Result::BYTES>(to + static_cast<long long>(q) * bytes, &out[q]);
    } else {
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q) {
            const int column = strip.result.first + q * strip.result.step;
            if (column >= 0 && column < strip.result.count)
                store_bytes<Result::BYTES>(to + static_cast<long long>(q) * bytes, &out[q]);
        }
    }
}

__device__ __forceinline__ void store_finished(const Params& p, const Strip& strip, const Channels& channels, int turn,
                                               const Held& held) {
    if (turn < BEFORE) return;
    int row = strip.result_row + turn * ROWS_OUT * p.dilation_h;
#pragma unroll
    for (int r = 0; r < ROWS_OUT; ++r, row += p.dilation_h)
        if (in_image(row, p.result_rows)) store_row(p, strip, channels, row, held[r]);
}

__device__ __forceinline__ void go_down(const Params& p, const Strip& strip, const Channels& channels,
                                        const Weights& weights) {
    // Turns of which some row is in the image. Before them all that is held is zero; nothing is finished, as no
    // kernel lies above the image as a whole.
    const int step = ROWS_IN * p.dilation_h, above = -strip.row - (ROWS_IN - 1) * p.dilation_h;
    const int begin = above > 0 ? (above + step - 1) / step : 0;
    const int end = min(strip.turns, (p.source_rows - strip.row + step - 1) / step);

    Source next[ROWS_IN];
    if (begin < end)
#pragma unroll
        for (int s = 0; s < ROWS_IN; ++s)
            load_row(p, strip, strip.row + begin * step + s * p.dilation_h, next[s]);
    Held held = {};
#pragma unroll 1
    for (int turn = begin; turn < end; ++turn) {
        const int row = strip.row + (turn + 1) * step;
        move_on(held);  // costs nothing: a product is added on the way
        acc_t x[WINDOW][VEC];
        convert(next[0], x);
        if (turn + 1 < end) load_row(p, strip, row, next[0]);
        take_row<0>(weights, x, held);
        if constexpr (ROWS_IN == 2) {
            convert(next[ROWS_IN - 1], x);
            if (turn + 1 < end) load_row(p, strip, row + p.dilation_h, next[ROWS_IN - 1]);
            take_row<1>(weights, x, held);
        }
        store_finished(p, strip, channels, turn, held);
    }
#pragma unroll 1
    for (int turn = end; turn < strip.turns; ++turn) {  // below the image
        move_on(held);
        store_finished(p, strip, channels, turn, held);
    }
}

// -- all turns together ------------------------------------------------------------------------------

using Rows = Source[ROWS_TOGETHER > 0 ? ROWS_TOGETHER : 1];

// Without branches, between which loads would not be in flight together.
__device__ __forceinline__ void load_rows(const Params& p, const Strip& strip, Rows& rows) {
    const unsigned bytes = p.source_step * static_cast<unsigned>(sizeof(scalar_t));
#pragma unroll
    for (int r = 0; r < ROWS_TOGETHER; ++r) {
        const int row = strip.row + r * p.dilation_h;
        const char* from = reinterpret_cast<const char*>(strip.from + row * p.x_row);
        const bool row_inside = in_image(row, p.source_rows);
        clear(rows[r]);
#pragma unroll
        for (int j = 0; j < WINDOW; ++j) {
            const int column = strip.source.first + j * strip.source.step;
            if (row_inside & in_image(column, strip.source.count))
                load_bytes<Pixel<scalar_t, VEC>::BYTES>(from + j * bytes, rows[r].pixels[j].words);
        }
    }
}

template <int S>
__device__ __forceinline__ void take_together(const Weights& weights, const Rows& rows, int turn, Held& held) {
    if (turn * ROWS_IN + S >= ROWS_TOGETHER) return;
    acc_t x[WINDOW][VEC];
    convert(rows[turn * ROWS_IN + S], x);
    take_row<S>(weights, x, held);
}

__device__ __forceinline__ void go_together(const Params& p, unsigned task, int channel, bool works, Taken& taken,
                                            acc_t* shared, const acc_t* own) {
    Strip strip;
    Rows rows;
    Channels channels;
    if (works) {
        strip = strip_of(p, task, channel);
        load_rows(p, strip, rows);
        channels = know(p, channel);
    }
    taken.share(shared);
    if (!works) return;
    const Weights weights(own);
    Held held = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        move_on(held);
        take_together<0>(weights, rows, turn, held);
        if constexpr (ROWS_IN == 2) take_together<1>(weights, rows, turn, held);
        store_finished(p, strip, channels, turn, held);
    }
}

// ----------------------------------------------------------------------------------------------------

// Said to be one, or the compiler spills for the sake of more blocks on a multiprocessor.
extern "C" __global__ void __launch_bounds__(BLOCK, 1) depthwise(const __grid_constant__ Params p) {
    alignas(16) __shared__ acc_t shared[TAPS * PITCH];
    unsigned group = blockIdx.x;
    const int first = digit(group, p.slices) * p.lanes * VEC;
    Taken taken(p, first, min(p.lanes * VEC, p.channels - first));

    const int lane = threadIdx.x % p.lanes, slot = threadIdx.x / p.lanes, slots = BLOCK / p.lanes;
    const unsigned task = group * slots + slot;
    const int channel = first + lane * VEC;
    const bool works = slot < slots && task < p.tasks && channel < p.channels;
    if constexpr (TURNS > 0) {
        go_together(p, task, channel, works, taken, shared, shared + lane * VEC);
    } else {
        taken.share(shared);
        if (works) go_down(p, strip_of(p, task, channel), know(p, channel), Weights(shared + lane * VEC));
    }
}
