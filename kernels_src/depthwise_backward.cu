// The gradient of the weights of a depthwise convolution (depthwise.cu), images with neighbouring channels again:
//
//     grad_weight[c, i, j] = sum over n, o, p of grad[n, o, p, c] x[n, o S - P + i D, p S - P + j D, c]
//
// A thread has VEC channels and all their taps. It goes down the rows of both images, COLUMNS pixels of the gradient
// at a time: the HELD last rows of the gradient stay in registers, and each row of x, a window of WINDOW pixels, is read
// once and counts for all of these. A block's threads then add up what they have for the same channels, and
// each block writes a row of partial sums, which `sum_partials` adds: two runs give the same bits.
//
// The prologue defines scalar_t, KH, KW, STRIDE_H, STRIDE_W, VEC, COLUMNS, LANES as for depthwise.cu.

#include "prelude.cuh"
#include "depthwise.cuh"
#include "depthwise_partials.cuh"
#include "depthwise_sums.cuh"

using Source = Window<scalar_t, VEC, WINDOW>;
using Gradient = Window<scalar_t, VEC, COLUMNS>;

struct Strip {
    const scalar_t *x, *grad;  // first pixels of row 0
    Columns source, result;
    int row, grad_row, rows;   // first rows; how many of the gradient's
};

__device__ __forceinline__ Strip strip_of(const Params& p, unsigned task, int channel) {
    const int strip = digit(task, p.strips), residue_w = digit(task, p.residues_w);
    const int chunk = digit(task, p.chunks), residue_h = digit(task, p.residues_h);
    const int unit = chunk * p.chunk;
    Strip s;
    s.source = columns_of<WINDOW>(strip * COLUMNS * STRIDE_W * p.dilation_w + p.source_left + residue_w, p.dilation_w,
                                  p.source_columns);
    s.result = columns_of<COLUMNS>(strip * COLUMNS * p.dilation_w + residue_w, p.dilation_w, p.result_columns);
    s.row = unit * STRIDE_H * p.dilation_h + p.source_top + residue_h;
    s.grad_row = unit * p.dilation_h + residue_h;
    s.rows = min(p.chunk, p.units - unit);
    s.x = p.x + (task * p.x_batch + s.source.first * p.x_column + channel);
    s.grad = p.grad + (task * p.grad_batch + s.result.first * p.grad_column + channel);
    return s;
}

// As `in_image`, which takes three registers more here.
__device__ __forceinline__ bool has_row(int row, int rows) { return row >= 0 && row < rows; }

__device__ __forceinline__ void load_row(const Params& p, const Strip& strip, int row, Source& source) {
    if (has_row(row, p.source_rows)) load_window(strip.x + row * p.x_row, p.source_step, strip.source, source);
}

__device__ __forceinline__ void load_grad(const Params& p, const Strip& strip, int turn, Gradient& grad) {
    const int row = strip.grad_row + turn * p.dilation_h;
    if (turn < strip.rows && row < p.result_rows)
        load_window(strip.grad + row * p.grad_row, p.result_step, strip.result, grad);
    else
        clear(grad);
}

__device__ __forceinline__ void go_down(const Params& p, const Strip& strip, Sums& sums) {
    const int turns = strip.rows + HELD - 1, step = STRIDE_H * p.dilation_h;
    Source next[STRIDE_H];
    Gradient next_grad;
    int row = strip.row;
#pragma unroll
    for (int s = 0; s < STRIDE_H; ++s) load_row(p, strip, row + s * p.dilation_h, next[s]);
    load_grad(p, strip, 0, next_grad);

    Held held = {};
#pragma unroll 1
    for (int first = 0; first < turns; first += PHASES) {
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase, row += step) {
            const int turn = first + phase, newest = PHASES > 1 ? phase : 0;
            if (turn >= turns) break;
            if constexpr (PHASES == 1) make_room(held);
            acc_t x[WINDOW][VEC];
            convert(next_grad, held[newest]);
            convert(next[0], x);
            load_grad(p, strip, turn + 1, next_grad);
            load_row(p, strip, row + step, next[0]);
            if (has_row(row, p.source_rows)) take_row<0>(x, held, newest, sums);
            if constexpr (STRIDE_H == 2) {
                convert(next[STRIDE_H - 1], x);
                load_row(p, strip, row + step + p.dilation_h, next[STRIDE_H - 1]);
                if (has_row(row + p.dilation_h, p.source_rows)) take_row<1>(x, held, newest, sums);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) depthwise_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    unsigned group = blockIdx.x;
    const int first = digit(group, p.slices) * p.lanes * VEC;
    const int lane = threadIdx.x % p.lanes, slot = threadIdx.x / p.lanes, slots = BLOCK / p.lanes;
    const int channel = first + lane * VEC;

    Sums sums = {};
    if (slot < slots && channel < p.channels)
        for (unsigned task = group * slots + slot; task < p.tasks; task += p.groups * slots)
            go_down(p, strip_of(p, task, channel), sums);
    const long long row = static_cast<long long>(group) * p.channels + first;
    write_partials(sums, slots, p.lanes, min(p.lanes * VEC, p.channels - first), p.partials + row * TAPS);
}
