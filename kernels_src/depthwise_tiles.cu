// Depthwise convolution as depthwise.cu describes it, where rows of the source come by way of shared memory
// (depthwise_copies.cuh), STAGES turns ahead.
//
// A block has STRIPS strips of COLUMNS neighbouring results, side by side in bands. A turn takes STEPS steps of
// depthwise.cu's, of rows that a ring in shared memory holds.
//
// The prologue defines what it does for depthwise.cu, LANES being exact, but for TURNS; and
//   STEPS      of a turn
//   STAGES     turns whose rows there is memory for
//   LOADS      units of a row that a thread copies

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "depthwise_turns.cuh"
#include "depthwise_copies.cuh"
#include "depthwise_blocks.cuh"

constexpr int ROWS = STEPS * ROWS_IN;  // of a turn

template <int S = 0>
__device__ __forceinline__ void take_rows(const Params& p, const char* row, const Weights& weights, Held& held) {
    acc_t x[WINDOW][VEC];
    read_window(row, x);
    take_row<S>(weights, x, held);
    if constexpr (S + 1 < ROWS_IN) take_rows<S + 1>(p, row + p.pixels * PIXEL, weights, held);
}

extern "C" __global__ void __launch_bounds__(BLOCK) depthwise_tiles(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 ring[];
    alignas(16) __shared__ acc_t shared[TAPS * PITCH];
    const Task task(p);
    const Bands bands = {p.band, p.pixels};
    Copied copied[LOADS];
    begin_copies(p, p.x, {p.x_batch, p.x_row, p.x_column, p.source_columns}, bands, task.first, task.source_column(p),
                 [&](int band) { return source_rows(p, task, band); }, copied);
    const int end = task.turns(p), stage = ROWS * p.pixels * PIXEL;
    const unsigned stages = shared_address(ring);
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (k < end) copy_rows<ROWS>(p, copied, bands, p.x_step, stages + k * stage);
        commit_copies();
    }

    Taken taken(p, task.first, min(CHANNELS, p.channels - task.first));
    const Strip strip(p, task);
    const int column = task.result_column(p, strip.beside);
    const Result result = {strip.lines.image * p.out_batch + column * p.out_column + strip.channel,
                           columns_of<COLUMNS>(column, p.dilation_w, p.result_columns), strip.lines.result_row};
    taken.share(shared);
    const Weights weights(shared + threadIdx.x % LANES * VEC);
    const Channels channels = know(p, strip.steps ? strip.channel : 0);
    const char* from = reinterpret_cast<const char*>(ring) + strip.at(p.band.value, p.pitch);

    Held held = {};
    int read = 0, fill = (STAGES - 1) * stage;
#pragma unroll 1
    for (int turn = 0; turn < end; ++turn) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (turn + STAGES - 1 < end) copy_rows<ROWS>(p, copied, bands, p.x_step, stages + fill);
        commit_copies();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            move_on(held);
            take_rows(p, from + read + step * ROWS_IN * p.pixels * PIXEL, weights, held);
            if (turn * STEPS + step < strip.steps) store_finished(p, result, channels, turn * STEPS + step, held);
        }
        fill = read;
        read = read + stage == STAGES * stage ? 0 : read + stage;
    }
#endif
}
