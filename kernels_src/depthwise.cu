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
// TRANSPOSED is the gradient of the input of a convolution with a stride: a turn takes one row and finishes
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

#include "prelude.cuh"
#include "depthwise.cuh"
#include "depthwise_turns.cuh"

// Rows of the source, where all of them are under way together: some of the last turn's may not count.
constexpr int ROWS_TOGETHER = TRANSPOSED ? TURNS : (TURNS - BEFORE - 1) * STRIDE_H + KH;
// A thread's share: where it reads and writes, in the first row of either image.
struct Strip {
    const scalar_t* from;
    Columns source;
    Result result;
    int row, turns;  // the first row, which may be outside of the image
};

__device__ __forceinline__ Strip strip_of(const Params& p, unsigned task, int channel) {
    const int strip = digit(task, p.strips), residue_w = digit(task, p.residues_w);
    const int chunk = digit(task, p.chunks), residue_h = digit(task, p.residues_h);
    const int unit = chunk * p.chunk, left = min(p.chunk, p.units - unit);
    const int column = strip * (TRANSPOSED ? COLUMNS / STRIDE_W : COLUMNS * STRIDE_W);
    Strip s;
    s.source = columns_of<WINDOW>(column * p.dilation_w + p.source_left + residue_w, p.dilation_w, p.source_columns);
    s.result.columns = columns_of<COLUMNS>(strip * COLUMNS * p.dilation_w + p.result_left + residue_w, p.dilation_w,
                                   p.result_columns);
    s.row = unit * ROWS_IN * p.dilation_h + p.source_top + residue_h;
    s.result.row = (unit - BEFORE) * ROWS_OUT * p.dilation_h + p.result_top + residue_h;
    s.turns = left + BEFORE;
    s.from = p.x + (task * p.x_batch + s.source.first * p.x_column + channel);
    s.result.to = task * p.out_batch + s.result.columns.first * p.out_column + channel;
    return s;
}

// A row of a turn in which some row is in the image.
__device__ __forceinline__ void load_row(const Params& p, const Strip& strip, int row, Source& source) {
    if (ROWS_IN == 1 || in_image(row, p.source_rows))
        load_window(strip.from + row * p.x_row, p.source_step, strip.source, source);
    else
        clear(source);
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
        store_finished(p, strip.result, channels, turn, held);
    }
#pragma unroll 1
    for (int turn = end; turn < strip.turns; ++turn) {  // below the image
        move_on(held);
        store_finished(p, strip.result, channels, turn, held);
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
        store_finished(p, strip.result, channels, turn, held);
    }
}

// ----------------------------------------------------------------------------------------------------

// Said to be one, or the compiler spills for the sake of more blocks on a multiprocessor.
extern "C" __global__ void __launch_bounds__(BLOCK, 1) depthwise(const __grid_constant__ Params p) {
    wait_for_kernel_before();
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
