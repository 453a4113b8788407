// Both gradients of a depthwise convolution without a stride, of the input and of the weights, in one pass over the
// gradient and x, whose rows come by way of shared memory (depthwise_copies.cuh), STAGES turns ahead:
//
//     grad_x[n, r, c] = sum over i, j of grad[n, r + P - i D, c + P - j D] weight[i, j]
//     grad_weight[i, j] = sum over n, r, c of x[n, r, c] grad[n, r + P - i D, c + P - j D]
//
// The first is a convolution of the gradient with the kernel FLIPPED, and a thread goes about it as depthwise.cu does.
// A pixel of the gradient that counts for a held result by some tap counts, times the same pixel of x, for that tap's
// weight: beside the HELD rows of results stand as many of x, a row of which is read when its result begins.
//
// The prologue defines what it does for depthwise_tiles.cu, `source` being grad_output, FLIPPED true, STEPS a multiple
// of HELD; and
//   OTHER_LOADS    units of a row of x that a thread copies

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "depthwise_turns.cuh"
#include "depthwise_partials.cuh"
#include "depthwise_copies.cuh"
#include "depthwise_blocks.cuh"

static_assert(STEPS % HELD == 0, "a turn begins where the ring of rows of x does");

// A row of the gradient with the rows of x whose results it counts for; `newest` is the place of the last one.
__device__ __forceinline__ void weigh_row(const acc_t (&grad)[WINDOW][VEC], const Held& x, int newest, Sums& sums) {
#pragma unroll
    for (int h = 0; h < HELD; ++h)
#pragma unroll
        for (int j = 0; j < KW; ++j)
#pragma unroll
            for (int q = 0; q < COLUMNS; ++q)
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    sums[TAPS - 1 - tap_row(0, h) * KW - j][v] += grad[q + j][v] * x[(newest + 1 + h) % HELD][q][v];
}

extern "C" __global__ void __launch_bounds__(BLOCK) depthwise_tiles_gradients(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 ring[];
    alignas(16) __shared__ acc_t shared[TAPS * PITCH];
    const Task task(p);
    const Bands bands = {p.band, p.pixels}, x_bands = {p.other_band, p.other_pixels};
    Copied copied[LOADS], x_copied[OTHER_LOADS];
    begin_copies(p, p.grad, {p.grad_batch, p.grad_row, p.grad_column, p.source_columns}, bands, task.first,
                 task.source_column(p), [&](int band) { return source_rows(p, task, band); }, copied);
    begin_copies(p, p.x, {p.x_batch, p.x_row, p.x_column, p.result_columns}, x_bands, task.first,
                 task.result_column(p, 0), [&](int band) { return other_rows(p, task, band); }, x_copied);
    const int end = task.turns(p);
    const int grad_stage = STEPS * p.pixels * PIXEL, stage = grad_stage + STEPS * p.other_pixels * PIXEL;
    const unsigned stages = shared_address(ring);
    const auto copy_turn = [&](unsigned to) {
        copy_rows<STEPS>(p, copied, bands, p.grad_step, to);
        copy_rows<STEPS>(p, x_copied, x_bands, p.x_step, to + grad_stage);
    };
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (k < end) copy_turn(stages + k * stage);
        commit_copies();
    }

    Taken taken(p, task.first, min(CHANNELS, p.channels - task.first));
    const Strip strip(p, task);
    const int column = task.result_column(p, strip.beside);
    const Result result = {strip.lines.image * p.out_batch + column * p.out_column + strip.channel,
                           columns_of<COLUMNS>(column, p.dilation_w, p.result_columns), strip.lines.result_row};
    taken.share(shared);
    const Weights weights(shared + threadIdx.x % LANES * VEC);
    const Channels channels = know(p, 0);
    const char* grad_from = reinterpret_cast<const char*>(ring) + strip.at(p.band.value, p.pitch);
    const char* x_from = reinterpret_cast<const char*>(ring) + grad_stage + strip.at(p.other_band.value, COLUMNS);

    Held held = {}, x = {};
    Sums sums = {};
    int read = 0, fill = (STAGES - 1) * stage;
#pragma unroll 1
    for (int turn = 0; turn < end; ++turn) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (turn + STAGES - 1 < end) copy_turn(stages + fill);
        commit_copies();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int newest = step % HELD;
            acc_t grad[WINDOW][VEC];
            read_window(x_from + read + step * p.other_pixels * PIXEL, x[newest]);
            read_window(grad_from + read + step * p.pixels * PIXEL, grad);
            move_on(held);
            take_row<0>(weights, grad, held);
            weigh_row(grad, x, newest, sums);
            if (turn * STEPS + step < strip.steps) store_finished(p, result, channels, turn * STEPS + step, held);
        }
        fill = read;
        read = read + stage == STAGES * stage ? 0 : read + stage;
    }
    __syncthreads();
    const long long row = static_cast<long long>(task.group) * p.channels + task.first;
    write_partials(sums, BLOCK / LANES, LANES, min(CHANNELS, p.channels - task.first), p.partials + row * TAPS);
#endif
}
