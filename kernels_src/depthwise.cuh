// What the kernels of depthwise convolutions share: windows of neighbouring pixels, VEC channels of each.

namespace fusionrt {

// As words: what is taken for pairs of 16-bit numbers is taken apart, wherever it only passes.
template <typename T, int VEC> struct Pixel {
    static constexpr int BYTES = VEC * static_cast<int>(sizeof(T)), WORDS = BYTES / 4 ? BYTES / 4 : 1;
    unsigned words[WORDS];
};
template <typename T, int VEC, int PIXELS> struct Window { Pixel<T, VEC> pixels[PIXELS]; };

// Whether an image of so many rows, or columns, has this one.
__device__ __forceinline__ bool in_image(int n, int count) {
    return static_cast<unsigned>(n) < static_cast<unsigned>(count);
}

// Of the pixels of a window: the first one's column, the distance to the next, how many columns a row has, and
// whether it has all of these.
struct Columns {
    int first, step, count;
    bool inside;
};

template <int PIXELS> __device__ __forceinline__ Columns columns_of(int first, int step, int count) {
    return {first, step, count, first >= 0 && first + (PIXELS - 1) * step < count};
}

template <typename T, int VEC, int PIXELS> __device__ __forceinline__ void clear(Window<T, VEC, PIXELS>& window) {
#pragma unroll
    for (int j = 0; j < PIXELS; ++j)
#pragma unroll
        for (int k = 0; k < Pixel<T, VEC>::WORDS; ++k) window.pixels[j].words[k] = 0;
}

// From `at`, where the first pixel is or would be, pixels `step` elements apart; zeros for what is beside the row.
template <typename T, int VEC, int PIXELS>
__device__ __forceinline__ void load_window(const T* at, int step, const Columns& columns,
                                            Window<T, VEC, PIXELS>& window) {
    constexpr int BYTES = Pixel<T, VEC>::BYTES;
    const char* first = reinterpret_cast<const char*>(at);
    const int bytes = step * static_cast<int>(sizeof(T));
    if (columns.inside) {
#pragma unroll
        for (int j = 0; j < PIXELS; ++j)
            load_bytes<BYTES>(first + static_cast<long long>(j) * bytes, window.pixels[j].words);
    } else {
        clear(window);
#pragma unroll
        for (int j = 0; j < PIXELS; ++j) {
            const int column = columns.first + j * columns.step;
            if (column >= 0 && column < columns.count)
                load_bytes<BYTES>(first + static_cast<long long>(j) * bytes, window.pixels[j].words);
        }
    }
}

template <typename T, int VEC> __device__ __forceinline__ void unpack(const Pixel<T, VEC>& pixel, acc_t (&x)[VEC]) {
    const auto& pack = reinterpret_cast<const Pack<T, VEC>&>(pixel);
#pragma unroll
    for (int v = 0; v < VEC; ++v) x[v] = at(pack, v);
}
__device__ __forceinline__ void unpack(const Pixel<float16_t, 2>& pixel, acc_t (&x)[2]) {
    float low, high;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(low), "=f"(high) : "r"(pixel.words[0]));
    x[0] = low, x[1] = high;
}

template <typename T, int VEC, int PIXELS>
__device__ __forceinline__ void convert(const Window<T, VEC, PIXELS>& window, acc_t (&x)[PIXELS][VEC]) {
#pragma unroll
    for (int j = 0; j < PIXELS; ++j) unpack(window.pixels[j], x[j]);
}

// The digit of `rest` to the base `by`, which is taken off.
__device__ __forceinline__ int digit(unsigned& rest, const Divisor& by) {
    const unsigned quotient = by.divide(rest), remainder = rest - quotient * by.value;
    rest = quotient;
    return static_cast<int>(remainder);
}

}  // namespace fusionrt
