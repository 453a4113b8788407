// The gradient of depthwise weights as depthwise_backward.cu describes it, where rows of both images come by way of
// shared memory (depthwise_copies.cuh), STAGES turns ahead.
//
// The prologue defines what it does for depthwise_backward.cu, LANES being exact; and
//   STEPS, STAGES         rows of the gradient in a turn; turns whose rows there is memory for
//   LOADS, OTHER_LOADS    units of a row of x and of the gradient that a thread copies

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "depthwise_partials.cuh"
#include "depthwise_sums.cuh"
#include "depthwise_copies.cuh"
#include "depthwise_blocks.cuh"

constexpr int ROWS = STEPS * STRIDE_H;  // of x in a turn
static_assert(STEPS % PHASES == 0, "a turn begins where the ring of rows held does");

template <int S = 0>
__device__ __forceinline__ void take_rows(const Params& p, const char* row, const Held& held, int newest, Sums& sums) {
    acc_t x[WINDOW][VEC];
    read_window(row, x);
    take_row<S>(x, held, newest, sums);
    if constexpr (S + 1 < STRIDE_H) take_rows<S + 1>(p, row + p.pixels * PIXEL, held, newest, sums);
}

extern "C" __global__ void __launch_bounds__(BLOCK) depthwise_tiles_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 ring[];
    const Task task(p);
    const Bands bands = {p.band, p.pixels}, grad_bands = {p.other_band, p.other_pixels};
    Copied copied[LOADS], grad_copied[OTHER_LOADS];
    begin_copies(p, p.x, {p.x_batch, p.x_row, p.x_column, p.source_columns}, bands, task.first, task.source_column(p),
                 [&](int band) { return source_rows(p, task, band); }, copied);
    begin_copies(p, p.grad, {p.grad_batch, p.grad_row, p.grad_column, p.result_columns}, grad_bands, task.first,
                 task.result_column(p, 0), [&](int band) { return other_rows(p, task, band); }, grad_copied);
    const int end = task.turns(p);
    const int x_stage = ROWS * p.pixels * PIXEL, stage = x_stage + STEPS * p.other_pixels * PIXEL;
    const unsigned stages = shared_address(ring);
    const auto copy_turn = [&](unsigned to) {
        copy_rows<ROWS>(p, copied, bands, p.x_step, to);
        copy_rows<STEPS>(p, grad_copied, grad_bands, p.grad_step, to + x_stage);
    };
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (k < end) copy_turn(stages + k * stage);
        commit_copies();
    }

    const Strip strip(p, task);
    const char* x_from = reinterpret_cast<const char*>(ring) + strip.at(p.band.value, p.pitch);
    const char* grad_from = reinterpret_cast<const char*>(ring) + x_stage + strip.at(p.other_band.value, COLUMNS);

    Sums sums = {};
    Held held = {};
    int read = 0, fill = (STAGES - 1) * stage;
#pragma unroll 1
    for (int turn = 0; turn < end; ++turn) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (turn + STAGES - 1 < end) copy_turn(stages + fill);
        commit_copies();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int newest = PHASES > 1 ? step % PHASES : 0;
            if constexpr (PHASES == 1) make_room(held);
            read_window(grad_from + read + step * p.other_pixels * PIXEL, held[newest]);
            take_rows(p, x_from + read + step * STRIDE_H * p.pixels * PIXEL, held, newest, sums);
        }
        fill = read;
        read = read + stage == STAGES * stage ? 0 : read + stage;
    }
    __syncthreads();
    const long long row = static_cast<long long>(task.group) * p.channels + task.first;
    write_partials(sums, BLOCK / LANES, LANES, min(CHANNELS, p.channels - task.first), p.partials + row * TAPS);
#endif
}
