// What the kernels of depthwise convolutions share whose blocks have neighbouring rows of small images in shared memory:
// CHANNELS neighbouring channels, a thread VEC of them. All columns are known when this is compiled, so what lies
// beside an image takes neither memory nor multiplications.
//
// ROWS neighbouring rows of the result are a unit, an image has `units` of them, and so on with the next image: a block
// has neighbouring units, whatever images these are of, and asks for all that they depend on at once.
//
// The prologue defines scalar_t, KH, KW, STRIDE_H, STRIDE_W, TRANSPOSED, FLIPPED, VEC as for depthwise.cu, and
//   WIDTH, COLUMNS     columns of the source and of the result
//   TOP, LEFT          the padding
//   ROWS               as above: a multiple of STRIDE_H, if TRANSPOSED

constexpr int CHANNELS = 32 * VEC, WARPS = BLOCK / 32;
constexpr int COPIED = 16, COPIED_CHANNELS = COPIED / static_cast<int>(sizeof(scalar_t));  // at a time

// Rows of the source that a unit depends on: how many, and how far the first is from where the unit would begin.
constexpr int ABOVE = TRANSPOSED ? (KH - 1 - TOP) / STRIDE_H : TOP;
constexpr int DEPTH = TRANSPOSED ? (ROWS - 1 + TOP) / STRIDE_H + ABOVE + 1 : (ROWS - 1) * STRIDE_H + KH;

// The tap by which a row, or column, of the source counts for one of the result; there is none beyond the kernel's.
__device__ constexpr int tap_row(int source, int result) {
    return TRANSPOSED ? result + TOP - (source - ABOVE) * STRIDE_H : source - result * STRIDE_H;
}
__device__ constexpr int tap_column(int source, int result) {
    return TRANSPOSED ? result + LEFT - source * STRIDE_W : source - result * STRIDE_W + LEFT;
}

// Where a unit is: its image, its first rows of the result and of the source, which may be above the image.
struct Unit {
    int image, row, source;

    __device__ __forceinline__ Unit(const Params& p, int unit) : image(p.units.divide(unit)) {
        row = (unit - image * static_cast<int>(p.units.value)) * ROWS;
        source = (TRANSPOSED ? row / STRIDE_H : row * STRIDE_H) - ABOVE;
    }
};

// All products of the N-th row of the source that a unit depends on: use(row of the unit, tap, column of the source, of
// the result).
template <int N, typename Use> __device__ __forceinline__ void each_product(const Use& use) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = tap_row(N, r);
        if (i < 0 || i >= KH) continue;
#pragma unroll
        for (int s = 0; s < WIDTH; ++s)
#pragma unroll
            for (int q = 0; q < COLUMNS; ++q)
                if (const int j = tap_column(s, q); j >= 0 && j < KW) use(r, i * KW + j, s, q);
    }
}

// Rows, those of all images one after the other.
struct Lines {
    int begin, end;
};

__device__ __forceinline__ Lines source_lines(const Params& p, int begin, int end) {
    const Unit first(p, begin), last(p, end - 1);
    return {first.image * p.source_rows + max(0, first.source),
            last.image * p.source_rows + min(p.source_rows, last.source + DEPTH)};
}

// Rows of COUNT pixels, which are `apart` elements from each other.
template <int COUNT>
__device__ __forceinline__ void copy_lines(const scalar_t* from, const Lines& lines, int apart, int channels, void* to) {
    constexpr int PIECES = CHANNELS / COPIED_CHANNELS, STEP = BLOCK / PIECES;
    const int channel = threadIdx.x % PIECES * COPIED_CHANNELS, first = threadIdx.x / PIECES;
    const int pixels = (lines.end - lines.begin) * COUNT;
    const bool copies = channel < channels;
    const scalar_t* next = from + ((static_cast<long long>(lines.begin) * COUNT + first) * apart + (copies ? channel : 0));
    unsigned shared = shared_address(to) + threadIdx.x * COPIED;
#pragma unroll 4
    for (int pixel = first; pixel < pixels; pixel += STEP, shared += BLOCK * COPIED, next += STEP * apart)
        copy_or_clear<true>(shared, next, copies);
}

// A row of a thread's channels, which `row` begins with.
template <int COUNT> __device__ __forceinline__ void read_row(const scalar_t* row, acc_t (&x)[COUNT][VEC]) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
        const auto pixel = shared_pack<VEC>(row + s * CHANNELS);
#pragma unroll
        for (int v = 0; v < VEC; ++v) x[s][v] = at(pixel, v);
    }
}

// products.take<N>(x) for the rows x of the source from `row` on that a unit depends on, those that are in the image. No
// loop, which compilers may leave one, with sums in memory.
template <int N = 0, typename Products>
__device__ __forceinline__ void take_rows(const scalar_t* from, int row, int rows, const Products& products) {
    if (in_image(row + N, rows)) {
        acc_t x[WIDTH][VEC];
        read_row(from + N * (WIDTH * CHANNELS), x);
        products.template take<N>(x);
    }
    if constexpr (N + 1 < DEPTH) take_rows<N + 1>(from, row, rows, products);
}
