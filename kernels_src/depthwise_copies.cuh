// How blocks of depthwise convolutions bring rows of an image into shared memory: together, whole lines of memory at
// a time. A block has LANES x VEC channels; pixels lie one after the other, PIXEL bytes each, as many for each of the
// block's bands, which are chunks of rows, or images, of their own.

constexpr int UNIT = 16, PIXEL = LANES * VEC * static_cast<int>(sizeof(scalar_t)), UNITS = PIXEL / UNIT;  // bytes
constexpr int CHANNELS = LANES * VEC, UNIT_CHANNELS = UNIT / static_cast<int>(sizeof(scalar_t));
static_assert(PIXEL % UNIT == 0, "a pixel is whole units");

// The bands of an image: pixels of each, of all.
struct Bands {
    Divisor pixels;
    int all;
};

// Of a band: its image, the first row, and the one that is not to be read any more.
struct Rows {
    unsigned image;
    int first, end;
};

// A unit of a pixel that a thread copies of every row: zeros, where there is no such row.
struct Copied {
    const scalar_t* next;
    int row, end;
};

// Steps from an image, a row, a column to the next; columns in all.
struct Steps {
    long long batch, row, column;
    int columns;
};

template <int LOADS, typename Of>
__device__ __forceinline__ void begin_copies(const Params& p, const scalar_t* from, const Steps& steps,
                                             const Bands& bands, int channel, int column, const Of& rows_of,
                                             Copied (&copied)[LOADS]) {
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
        const int index = threadIdx.x + k * BLOCK, pixel = index / UNITS, band = bands.pixels.divide(pixel);
        const int at = column + (pixel - band * bands.pixels.value) * p.dilation_w;
        const int c = channel + index % UNITS * UNIT_CHANNELS;
        const Rows rows = rows_of(band);
        const bool any = pixel < bands.all && static_cast<unsigned>(at) < static_cast<unsigned>(steps.columns)
                         && c < p.channels;
        copied[k] = {from + (rows.image * steps.batch + rows.first * steps.row + at * steps.column + c), rows.first,
                     any ? rows.end : 0};
    }
}

// The next rows, `apart` elements each; by way of the L1, as pixels lie differently here than in lines of memory.
template <int ROWS, int LOADS>
__device__ __forceinline__ void copy_rows(const Params& p, Copied (&copied)[LOADS], const Bands& bands, long long apart,
                                          unsigned to) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s, to += bands.all * PIXEL)
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            const int index = threadIdx.x + k * BLOCK;
            if (index < bands.all * UNITS)
                copy_or_clear<true>(to + index * UNIT, copied[k].next,
                                    static_cast<unsigned>(copied[k].row) < static_cast<unsigned>(copied[k].end));
            copied[k].next += apart;
            copied[k].row += p.dilation_h;
        }
}

// Pixels of a strip, from shared memory.
template <int PIXELS> __device__ __forceinline__ void read_window(const char* row, acc_t (&x)[PIXELS][VEC]) {
    Window<scalar_t, VEC, PIXELS> window;
#pragma unroll
    for (int j = 0; j < PIXELS; ++j)
        window.pixels[j] = *reinterpret_cast<const Pixel<scalar_t, VEC>*>(row + j * PIXEL);
    convert(window, x);
}
