// The gradient of the weights of a depthwise convolution (depthwise_backward.cu), of 16-bit images on matrix units.
//
// For each channel a product adds over 8 pixels of a strip of the gradient. Its 16 rows are ROWS rows of x by
// SHIFTS columns by which x is shifted against the gradient; its 8 columns are rows of the gradient.
// An element is thus a tap (row of x - row of the gradient, shift); each tap is ROWS of them, added at the end.
//
// A block goes down the rows of 8 strips as depthwise_mma.cu does, ROWS of x a turn; what comes of the gradient
// stays in a ring of GRADS rows as long as it counts. A warp has the 8 channels of a unit and some of the strips.
// Each block writes a row of partial sums, which `sum_partials` adds: two runs give the same bits.
//
// The prologue defines scalar_t, KH, KW, STRIDE_H, STRIDE_W, and
//   ROWS, SHIFTS     16 in all; SHIFTS is at least KW
//   STAGES, GRADS    turns whose rows of x there is memory for; rows of the gradient
//   BLOCKS           that share a multiprocessor

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "mma.cuh"

constexpr int STRIPS = 8, PIXELS = 8, UNIT = 16, CHANNEL = 8;   // of a block; of a strip; bytes; channels of a unit
constexpr int UNITS = BLOCK / (STRIPS * PIXELS), WARPS = BLOCK / 32, SHARES = WARPS / UNITS;
constexpr int PIXEL = UNITS * UNIT;                             // bytes
constexpr int LOADS = 2, APART = UNITS / LOADS;                 // units of a pixel of x that a thread fetches
constexpr int NEW = ROWS / STRIDE_H;                            // rows of the gradient that a turn begins with
constexpr int GRAD_ROW = (STRIPS * PIXELS + 1) * PIXEL;         // bytes: neighbouring rows in different banks
constexpr int OWN = STRIPS / SHARES;                            // strips of a warp
constexpr int COUNTED = (KH - 1 + ROWS) / STRIDE_H;             // rows of the gradient that count in a turn
static_assert(COUNTED <= 8 && GRADS >= NEW * (STAGES - 1) + COUNTED, "and are not those that are on their way");
static_assert(GRADS % NEW == 0, "a turn's rows lie together");

using Sums = acc_t[CHANNEL][4];

__device__ __forceinline__ int place(unsigned pixel, unsigned unit) {
    return pixel * PIXEL + ((unit ^ (pixel * UNITS / 8)) & (UNITS - 1)) * UNIT;
}

// Rows of an image: the first ones of x and of the gradient, how many of this, turns.
struct Lines {
    int row, grad_row, grads, turns;
    unsigned image;
};

__device__ __forceinline__ Lines lines_of(const Params& p, unsigned lines) {
    const bool any = lines < p.lines;
    const int unit = digit(lines, p.chunks) * p.chunk, residue = digit(lines, p.residues_h);
    const int grads = any ? min(p.chunk, p.units - unit) : 0;
    return {unit * STRIDE_H * p.dilation_h + p.source_top + residue, unit * p.dilation_h + residue, grads,
            any ? ((grads - 1) * STRIDE_H + KH + ROWS - 1) / ROWS : 0, lines};
}

struct Task {
    int first, source_column, result_column;
    unsigned lines, group;
};

__device__ __forceinline__ Task task_of(const Params& p) {
    unsigned rest = blockIdx.x;
    Task task;
    task.first = digit(rest, p.slices) * UNITS * CHANNEL;
    task.group = rest;
    const int strip = digit(rest, p.tiles) << p.strips, residue = digit(rest, p.residues_w);
    task.source_column = strip * p.pitch * p.dilation_w + p.source_left + residue;
    task.result_column = strip * p.columns * p.dilation_w + residue;
    task.lines = rest << (3 - p.strips);
    return task;
}

// A pixel of which a thread fetches `units` of every row, of x or of the gradient; rows from `rows` on are zero.
struct Source {
    const scalar_t* next;
    int row, rows, units;
};

__device__ __forceinline__ int units_of(const Params& p, int channel, int apart) {
    return (p.channels - channel + apart * CHANNEL - 1) / (apart * CHANNEL);
}

__device__ __forceinline__ Source source_of(const Params& p, const Task& task) {
    const int pixel = threadIdx.x / APART, band = p.band.divide(pixel);
    const int channel = task.first + threadIdx.x % APART * CHANNEL;
    const int column = task.source_column + (pixel - band * p.band.value) * p.dilation_w;
    const Lines lines = lines_of(p, task.lines + band);
    return {p.x + (lines.image * p.x_batch + lines.row * p.x_row + column * p.x_column + channel), lines.row,
            in_image(column, p.source_columns) && lines.turns > 0 ? p.source_rows : 0,
            pixel < p.pixels ? units_of(p, channel, APART) : 0};
}

__device__ __forceinline__ Source grad_of(const Params& p, const Task& task) {
    const int slot = threadIdx.x / UNITS, strip = slot / PIXELS, pixel = slot % PIXELS;
    const int beside = strip & ((1 << p.strips) - 1), channel = task.first + threadIdx.x % UNITS * CHANNEL;
    const int column = task.result_column + (beside * p.columns + pixel) * p.dilation_w;
    const Lines lines = lines_of(p, task.lines + (strip >> p.strips));
    const bool inside = pixel < p.columns && in_image(column, p.result_columns);
    return {p.grad + (lines.image * p.grad_batch + lines.grad_row * p.grad_row + column * p.grad_column + channel),
            lines.grad_row, inside ? min(p.result_rows, lines.grad_row + lines.grads * p.dilation_h) : 0,
            channel < p.channels};
}

// Of a turn. Where a thread's units of a row lie: `to`, and `grad_to` of the gradient.
__device__ __forceinline__ void fetch(const Params& p, Source& x, Source& grad, const int (&to)[LOADS], int grad_to,
                                      unsigned stage, unsigned grads) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s, stage += p.row_bytes) {
        const bool copies = in_image(x.row, x.rows);
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            if (k < x.units) copy_or_clear(stage + to[k], x.next + k * APART * CHANNEL, copies);
        x.next += p.x_step;
        x.row += p.dilation_h;
    }
#pragma unroll
    for (int s = 0; s < NEW; ++s) {
        if (grad.units)
            copy_or_clear(grads + s * GRAD_ROW + grad_to, grad.next, in_image(grad.row, grad.rows));
        grad.next += p.grad_step;
        grad.row += p.dilation_h;
    }
}

__device__ __forceinline__ void clear(char* from, int bytes) {
    for (int k = threadIdx.x * UNIT; k < bytes; k += BLOCK * UNIT) *reinterpret_cast<uint4*>(from + k) = uint4{0, 0, 0, 0};
}

// The operand of a product that pixels `low` and `high` are, for all channels.
__device__ __forceinline__ void pair(const char* row, int low, int high, unsigned (&to)[CHANNEL]) {
    const auto a = shared_pack<4>(reinterpret_cast<const unsigned*>(row + low));
    const auto b = shared_pack<4>(reinterpret_cast<const unsigned*>(row + high));
#pragma unroll
    for (int c = 0; c < CHANNEL; ++c) to[c] = __byte_perm(a.data[c / 2], b.data[c / 2], c % 2 ? 0x7632 : 0x5410);
}

// Of lane 4 g + t: shift and row of x (the first of two) that it supplies, pixels of a strip.
__device__ __forceinline__ int group() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int pixel_of(int e) {
    return STRIDE_W == 1 ? threadIdx.x % 4 * 2 + e : threadIdx.x % 4 + 4 * e;  // in different banks
}

__device__ __forceinline__ void take_rows(const Params& p, const char* stage, const char* grad, const int (&at)[OWN][2],
                                          const int (&grad_at)[2], Sums& sums) {
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        unsigned b[CHANNEL], a[2][CHANNEL];
        pair(grad + k * PIXELS * PIXEL, grad_at[0], grad_at[1], b);
#pragma unroll
        for (int r = 0; r < 2; ++r) pair(stage + r * (ROWS / 2) * p.row_bytes, at[k][0], at[k][1], a[r]);
#pragma unroll
        for (int c = 0; c < CHANNEL; ++c) {
            const unsigned left[2] = {a[0][c], a[1][c]}, right[1] = {b[c]};
            multiply<8>(scalar_t{}, sums[c][0], sums[c][1], sums[c][2], sums[c][3], left, right);
        }
    }
}

// What a block's warps have for the same taps, added in their order.
__device__ __forceinline__ void write_partials(const Params& p, const Task& task, const Sums& sums, float* shared) {
    constexpr int WARP = CHANNEL * 128 + 4;  // 16 x 8 sums a channel
    float* mine = shared + threadIdx.x / 32 * WARP;
#pragma unroll
    for (int c = 0; c < CHANNEL; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            mine[c * 128 + (group() + k / 2 * 8) * 8 + threadIdx.x % 4 * 2 + k % 2] = sums[c][k];
    __syncthreads();
    const int count = min(UNITS * CHANNEL, p.channels - task.first) * TAPS;
    acc_t* to = p.partials + (static_cast<long long>(task.group) * p.channels + task.first) * TAPS;
    for (int k = threadIdx.x; k < count; k += BLOCK) {
        const int c = k / TAPS, i = k % TAPS / KW, j = k % KW;
        acc_t total = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int distance = i - r + ROWS - STRIDE_H, n = distance / STRIDE_H;  // rows of the gradient back
            if (distance % STRIDE_H) continue;
#pragma unroll
            for (int share = 0; share < SHARES; ++share)
                total += shared[(c / CHANNEL * SHARES + share) * WARP + c % CHANNEL * 128 + (r * SHIFTS + j) * 8 + n];
        }
        to[k] = total;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) depthwise_mma_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 shared[];
    char* grads = reinterpret_cast<char*>(shared);
    char* stages = grads + GRADS * GRAD_ROW;
    clear(grads, p.shared_bytes);
    __syncthreads();

    const Task task = task_of(p);
    int end = 0;
    for (int band = 0; band < STRIPS >> p.strips; ++band) end = max(end, lines_of(p, task.lines + band).turns);
    Source source = source_of(p, task), grad = grad_of(p, task);
    const int stage = ROWS * p.row_bytes;
    unsigned ring = shared_address(stages), grad_ring = shared_address(grads);
    keep(ring), keep(grad_ring);
    int to[LOADS], grad_to = place(threadIdx.x / UNITS, threadIdx.x % UNITS);
    keep(grad_to);
#pragma unroll
    for (int k = 0; k < LOADS; ++k) keep(to[k] = place(threadIdx.x / APART, threadIdx.x % APART + k * APART));
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (k < end) fetch(p, source, grad, to, grad_to, ring + k * stage, grad_ring + k * NEW * GRAD_ROW);
        commit_copies();
    }

    const int warp = threadIdx.x / 32, unit = warp / SHARES, first = warp % SHARES * OWN;
    const int shift = group() % SHIFTS, row = group() / SHIFTS * p.row_bytes;
    int at[OWN][2], grad_at[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        keep(grad_at[e] = place(first * PIXELS + pixel_of(e), unit));
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int strip = first + k, beside = strip & ((1 << p.strips) - 1), band = strip >> p.strips;
            keep(at[k][e] = place(band * p.band.value + beside * p.pitch + pixel_of(e) * STRIDE_W + shift, unit) + row);
        }
    }

    Sums sums = {};
    int read = 0, fill = (STAGES - 1) * stage, grad_fill = (STAGES - 1) * NEW * GRAD_ROW;
    // The row of the gradient of this lane; what comes of rows that do not count is left out at the end.
    int counted = (NEW - 1 - min(group(), COUNTED - 1) + 8 * GRADS) % GRADS * GRAD_ROW;
#pragma unroll 1
    for (int turn = 0; turn < end; ++turn) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (turn + STAGES - 1 < end) fetch(p, source, grad, to, grad_to, ring + fill, grad_ring + grad_fill);
        commit_copies();
        take_rows(p, stages + read, grads + counted, at, grad_at, sums);
        fill = read;
        read = read + stage == STAGES * stage ? 0 : read + stage;
        grad_fill = grad_fill + NEW * GRAD_ROW == GRADS * GRAD_ROW ? 0 : grad_fill + NEW * GRAD_ROW;
        counted += counted >= (GRADS - NEW) * GRAD_ROW ? (NEW - GRADS) * GRAD_ROW : NEW * GRAD_ROW;
    }
    __syncthreads();
    write_partials(p, task, sums, reinterpret_cast<float*>(shared));
#endif
}
