// Images of any sizes, cropped, resized, flipped, colour-jittered, normalised and laid out for a network.
//
// One warp computes 32 neighbouring pixels of one row of a result, and warps are independent of each
// other. The warp sums source rows, each weighted by the vertical filter, into a row of shared memory, as
// wide as its 32 pixels need or CHUNK elements at a time; then each lane sums the columns of its pixel.
// Weights are computed where they are used: the vertical ones serve 16 elements a lane, the horizontal ones
// all channels. So nothing depends on how strongly an image shrinks, and there are no tables.
//
// The runtime puts before this file: pixel_t, output_t, CHANNELS, PLANAR and OUT_PLANAR (channels first),
// RESIZES (any image), CUBIC, ANTIALIAS, ADJUSTS, STAGE, Sample, Params. Contrast needs the mean of the whole
// image as it is by then: FIRST leaves images in `between`, adjusted up to there, and sums of their grey values
// in `sums`; SECOND does the rest from those. WHOLE is both, without contrast.

#include "prelude.cuh"

constexpr int WHOLE = 0, FIRST = 1, SECOND = 2;
constexpr int LANES = 32, WARPS = BLOCK / LANES, QUARTER = 4 * LANES, CHUNK = 4 * QUARTER;
constexpr bool BYTES = sizeof(pixel_t) == 1;
constexpr int PLANES = PLANAR ? CHANNELS : 1, INTERLEAVED = PLANAR ? 1 : CHANNELS;
constexpr int PIXELS = (CHUNK - 3) / INTERLEAVED;  // a chunk may begin 3 bytes early, on a word
constexpr float SUPPORT = CUBIC ? 2.0f : 1.0f;
constexpr int BRIGHTNESS = 0, CONTRAST = 1, SATURATION = 2, HUE = 3, ADJUSTMENTS = 4;

__device__ __forceinline__ float saturated(float x) { return ::fminf(::fmaxf(x, 0.0f), 1.0f); }

// ---------------------------------------------------------------------------------------------
// Resampling: the formulas of torch.nn.functional.interpolate, which normalises weights where it is
// antialiased and otherwise repeats border pixels.

__device__ __forceinline__ float filter(float x) {
    x = ::fabsf(x);
    if constexpr (CUBIC) {  // Keys, with the parameter that torch takes
        constexpr float A = ANTIALIAS ? -0.5f : -0.75f;
        const float inner = ::fmaf(::fmaf(A + 2.0f, x, -(A + 3.0f)) * x, x, 1.0f);
        const float outer = ::fmaf(::fmaf(x - 5.0f, x, 8.0f), x, -4.0f) * A;
        return x < 1.0f ? inner : (x < 2.0f ? outer : 0.0f);
    } else {
        return ::fmaxf(1.0f - x, 0.0f);
    }
}

// The source positions that one result position reads, relative to the box.
struct Taps {
    int first, count;
    float start, step;  // of the first one from the centre, and between two, in units of the filter

    __device__ __forceinline__ float weight(int t) const { return filter(::fmaf(float(t), step, start)); }
};

// The centre of `position` is (position + 1/2) box / resized: its whole part and fraction from integers,
// as 24 bits for both would leave few for the fraction.
__device__ __forceinline__ Taps taps(int position, int resized, int box) {
    const unsigned long long numerator = (2ull * position + 1) * box;
    const unsigned denominator = 2u * resized;
    const float inverse = refined_rcp(static_cast<float>(denominator));
    int whole = static_cast<int>(static_cast<float>(numerator) * inverse);
    long long rest = static_cast<long long>(numerator) - static_cast<long long>(whole) * denominator;
    if (rest < 0) --whole, rest += denominator;
    if (rest >= denominator) ++whole, rest -= denominator;
    const float fraction = static_cast<float>(rest) * inverse;
    const float stretch = ANTIALIAS ? ::fmaxf(2.0f * static_cast<float>(box) * inverse, 1.0f) : 1.0f;
    // Where this image is not resized, all weights but one are 0.
    const float reach = resized == box ? 0.5f : SUPPORT * stretch, step = refined_rcp(stretch);
    int low = whole + static_cast<int>(::floorf(fraction + 0.5f - reach));
    int high = whole + static_cast<int>(::floorf(fraction + 0.5f + reach));
    if constexpr (ANTIALIAS) low = max(low, 0), high = min(high, box);
    else high = low + static_cast<int>(2.0f * reach);
    return {low, high - low, (static_cast<float>(low - whole) + 0.5f - fraction) * step, step};
}

__device__ __forceinline__ int inside(int position, int box) { return min(max(position, 0), box - 1); }

// What one byte of a word counts as a float32: its bits alone are that number times 2^-149. The weights
// are so much larger, and no conversion is needed, of which a multiprocessor makes 16 a cycle.
constexpr float BYTE_WEIGHT = 8.507059173023462e37f;  // 2^126
constexpr float BYTE_UNIT = 8388608.0f;               // 2^(149 - 126)

__device__ __forceinline__ float byte_of(unsigned word, int k) {
    return __uint_as_float(__byte_perm(word, 0, 0x4440 + k));
}

__device__ __forceinline__ float element(unsigned char byte) { return __uint_as_float(byte); }
template <typename T> __device__ __forceinline__ float element(T x) { return to_acc(x); }

// Element k of the four that a lane has of the QUARTER number j of a chunk: bytes lie in a word.
__device__ __forceinline__ int place(int j, int k, int lane) {
    return j * QUARTER + (BYTES ? 4 * lane + k : k * LANES + lane);
}

// How a row is read. Bytes are read by words, which either begin where rows do or are shifted into place; the end
// of an image may lie within a word, of which the rest is not ours to read.
constexpr int WORDS = 0, SHIFTED = 1, SINGLY = 2;

// A lane's elements of one source row, from J quarters, of which the last one is not full: there it reads
// some other element, which nobody asks for, rather than branch. Loads of several rows shall be under way
// together. `first` is the lane's first one, `count` that of the row's elements.
template <int J, int READ> struct Row {
    float elements[4 * J];

    __device__ __forceinline__ Row(const pixel_t* first, int count, int lane) {
        if constexpr (READ == SINGLY) {
            const int last = count - 1 - place(0, 0, lane);
#pragma unroll
            for (int v = 0; v < 4 * J; ++v) elements[v] = element(first[up_to(last, place(v / 4, v % 4, 0), v / 4)]);
        } else {
            const unsigned long long address = reinterpret_cast<unsigned long long>(first);
            const int early = READ == WORDS ? 0 : static_cast<int>(address & 3);
            const char* from = reinterpret_cast<const char*>(address - early);
            const int last = ((early + count - 1) & ~3) - place(0, 0, lane);
            unsigned words[J];
#pragma unroll
            for (int j = 0; j < J; ++j) words[j] = word(from, up_to(last, j * QUARTER, j));
            if constexpr (READ == SHIFTED) {
#pragma unroll
                for (int j = 0; j < J; ++j) {
                    const unsigned next = word(from, min(j * QUARTER + 4, last));
                    words[j] = __funnelshift_r(words[j], next, 8 * early);
                }
            }
#pragma unroll
            for (int v = 0; v < 4 * J; ++v) elements[v] = byte_of(words[v / 4], v % 4);
        }
    }

    __device__ __forceinline__ static int up_to(int last, int offset, int j) {
        return j < J - 1 ? offset : min(offset, last);
    }

    __device__ __forceinline__ static unsigned word(const char* from, int offset) {
        return __ldg(reinterpret_cast<const unsigned*>(from + offset));
    }
};

// The vertical filter: `count` elements from the column at `top`, which is of the box's first row.
template <int J, int READ>
__device__ __forceinline__ void sum_rows(float (&sums)[4 * J], const pixel_t* top, int stride, int box,
                                         const Taps& rows, int count, int lane) {
    constexpr int TOGETHER = READ == SINGLY ? 1 : (J > 2 ? 2 : 4);
    const pixel_t* origin = top + place(0, 0, lane);
    const pixel_t* first = origin + static_cast<long long>(rows.first) * stride;
    float total = 0.0f;
#pragma unroll TOGETHER
    for (int t = 0; t < rows.count; ++t) {
        if constexpr (!ANTIALIAS) first = origin + inside(rows.first + t, box) * static_cast<long long>(stride);
        const Row<J, READ> row(first, count, lane);
        if constexpr (ANTIALIAS) first += stride;
        const float weight = rows.weight(t), scaled = BYTES ? weight * BYTE_WEIGHT : weight;
#pragma unroll
        for (int v = 0; v < 4 * J; ++v) sums[v] = ::fmaf(scaled, row.elements[v], sums[v]);
        total += weight;
    }
    const float scale = (BYTES ? BYTE_UNIT : 1.0f) * refined_rcp(total);
#pragma unroll
    for (int v = 0; v < 4 * J; ++v) sums[v] *= scale;
}

// The same into shared memory. `singly`: as the image ends there, within a word.
template <int J>
__device__ __forceinline__ void fill_chunk(float* chunk, const pixel_t* top, int stride, int box,
                                           const Taps& rows, int count, int lane, bool singly) {
    if constexpr (J > 1) {
        if (count <= (J - 1) * QUARTER) {
            return fill_chunk<J - 1>(chunk, top, stride, box, rows, count, lane, singly);
        }
    }
    float sums[4 * J] = {};
    if (!BYTES || singly) sum_rows<J, SINGLY>(sums, top, stride, box, rows, count, lane);
    else if constexpr (BYTES) {
        if (stride % 4 == 0) sum_rows<J, WORDS>(sums, top, stride, box, rows, count, lane);
        else sum_rows<J, SHIFTED>(sums, top, stride, box, rows, count, lane);
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
        if constexpr (BYTES) {
            Pack<float, 4> four;
#pragma unroll
            for (int k = 0; k < 4; ++k) four.data[k] = sums[4 * j + k];
            *reinterpret_cast<Pack<float, 4>*>(chunk + place(j, 0, lane)) = four;
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) chunk[place(j, k, lane)] = sums[4 * j + k];
        }
    }
}

// The horizontal filter, as far as the pixels [begin, end) reach that the chunk holds from `skew` on. Lanes
// begin at different taps: in step with each other, many would read one bank where sizes are powers of 2.
template <int N>
__device__ __forceinline__ void sum_columns(float (&sums)[N], float& total, const float* chunk,
                                            const Taps& columns, int begin, int end, int box, int lane) {
    const int low = ANTIALIAS ? max(begin - columns.first, 0) : 0;
    const int high = ANTIALIAS ? min(end - columns.first, columns.count) : columns.count;
    int t = low + ((lane * max(high - low, 0)) >> 5);
    for (int k = low; k < high; ++k) {
        const int column = ANTIALIAS ? columns.first + t : inside(columns.first + t, box);
        if (ANTIALIAS || (begin <= column && column < end)) {
            const float weight = columns.weight(t);
            const float* from = chunk + (column - begin) * N;
#pragma unroll
            for (int c = 0; c < N; ++c) sums[c] = ::fmaf(weight, from[c], sums[c]);
            total += weight;
        }
        if (++t == high) t = low;
    }
}

// One pixel of the resized image for each lane, in [0, 1] if the source is.
__device__ __forceinline__ void resample(float (&pixel)[CHANNELS], float* chunk, const Sample& s,
                                         const Taps& rows, const Taps& columns, int lane) {
    const int last = columns.first + columns.count;
    int begin = __shfl_sync(0xffffffffu, columns.first, 0), end = __shfl_sync(0xffffffffu, last, LANES - 1);
    if constexpr (!ANTIALIAS) begin = inside(begin, s.box_width), end = inside(end - 1, s.box_width) + 1;
    const pixel_t* image = reinterpret_cast<const pixel_t*>(s.data);
    const int stride = s.width * INTERLEAVED;
    const bool at_end = s.top + min(rows.first + rows.count, static_cast<int>(s.box_height)) == s.height
                        && (static_cast<unsigned>(s.data) + PLANES * s.height * static_cast<unsigned>(stride)) % 4;
#pragma unroll 1
    for (int plane = 0; plane < PLANES; ++plane) {
        const pixel_t* corner = image + static_cast<long long>(plane * s.height + s.top) * stride
                                + s.left * INTERLEAVED;
        float sums[INTERLEAVED] = {}, total = 0.0f;
        for (int at = begin; at < end; at += PIXELS) {
            const int stop = min(at + PIXELS, end);
            const pixel_t* top = corner + at * INTERLEAVED;
            const int skew = BYTES ? static_cast<int>(reinterpret_cast<unsigned long long>(top) & 3) : 0;
            const int count = (stop - at) * INTERLEAVED + skew;
            fill_chunk<4>(chunk, top - skew, stride, s.box_height, rows, count, lane, at_end);
            __syncwarp();
            sum_columns(sums, total, chunk + skew, columns, at, stop, s.box_width, lane);
            __syncwarp();
        }
        const float scale = (BYTES ? 1.0f / 255.0f : 1.0f) * refined_rcp(total);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {  // registers have no index
            const float value = sums[PLANAR ? 0 : c] * scale;
            // Bytes cannot hold what a cubic overshoots.
            if (!PLANAR || c == plane) pixel[c] = BYTES && CUBIC ? saturated(value) : value;
        }
    }
}

__device__ __forceinline__ float in_unit(unsigned char byte) { return static_cast<float>(byte) * (1.0f / 255.0f); }
template <typename T> __device__ __forceinline__ float in_unit(T x) { return to_acc(x); }

// The same where no image is resized: one source pixel, which each lane reads for itself.
__device__ __forceinline__ void fetch(float (&pixel)[CHANNELS], const Sample& s, int y, int x) {
    const pixel_t* image = reinterpret_cast<const pixel_t*>(s.data);
    const long long area = static_cast<long long>(s.height) * s.width;
    const long long at = static_cast<long long>(s.top + y) * s.width + s.left + x;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) pixel[c] = in_unit(image[PLANAR ? c * area + at : at * CHANNELS + c]);
}

// ---------------------------------------------------------------------------------------------
// Colour: the formulas of torchvision, for images in [0, 1]

__device__ __forceinline__ float grey(const float (&pixel)[CHANNELS]) {
    if constexpr (CHANNELS == 3) return 0.2989f * pixel[0] + 0.587f * pixel[1] + 0.114f * pixel[2];
    else return pixel[0];
}

__device__ __forceinline__ void blend(float (&pixel)[CHANNELS], float with, float factor) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) pixel[c] = saturated(factor * pixel[c] + (1.0f - factor) * with);
}

// By way of hue, saturation and value.
__device__ __forceinline__ void turn_hue(float (&pixel)[CHANNELS], float turn) {
    const float r = pixel[0], g = pixel[1], b = pixel[2];
    const float most = ::fmaxf(r, ::fmaxf(g, b)), range = most - ::fminf(r, ::fminf(g, b));
    const bool is_grey = !(range > 1e-30f);  // as good as
    const float inverse = is_grey ? 0.0f : refined_rcp(range);
    const float sector = most == r ? (g - b) * inverse
                                   : (most == g ? 2.0f + (b - r) * inverse : 4.0f + (r - g) * inverse);
    float h = sector * (1.0f / 6.0f) + 1.0f + turn;
    h = (h - ::floorf(h)) * 6.0f;
    const float whole = ::floorf(h), s = is_grey ? 0.0f : range * refined_rcp(most), f = s * (h - whole);
    const float p = saturated((1.0f - s) * most), q = saturated((1.0f - f) * most);
    const float t = saturated((1.0f - s + f) * most);
    const int i = static_cast<int>(whole) % 6;  // 6 where h was rounded up to it
    pixel[0] = i == 0 || i == 5 ? most : (i == 1 ? q : (i == 4 ? t : p));
    pixel[1] = i == 1 || i == 2 ? most : (i == 0 ? t : (i == 3 ? q : p));
    pixel[2] = i == 3 || i == 4 ? most : (i == 2 ? t : (i == 5 ? q : p));
}

// The adjustments of a sample in its order: those before its contrast, or from there on.
__device__ __forceinline__ void adjust(float (&pixel)[CHANNELS], const Sample& s, float mean) {
    if constexpr (ADJUSTS) {
        bool on = STAGE != SECOND;
#pragma unroll 1
        for (int k = 0; k < ADJUSTMENTS; ++k) {
            const int which = (s.order >> (2 * k)) & 3;
            if (STAGE == FIRST && which == CONTRAST) return;
            on = on || which == CONTRAST;
            if (!on || !(s.order >> (8 + which) & 1)) continue;
            if (which == BRIGHTNESS) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) pixel[c] = saturated(pixel[c] * s.brightness);
            }
            if (STAGE == SECOND && which == CONTRAST) blend(pixel, mean, s.contrast);
            if constexpr (CHANNELS == 3) {  // nothing to do for grey
                if (which == SATURATION) blend(pixel, grey(pixel), s.saturation);
                if (which == HUE) turn_hue(pixel, s.hue);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Results

__device__ __forceinline__ void store(const Params& p, const float (&pixel)[CHANNELS], long long at) {
    const long long sample = blockIdx.y, area = static_cast<long long>(p.height) * p.width;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const long long to = OUT_PLANAR ? (sample * CHANNELS + c) * area + at
                                        : (sample * area + at) * CHANNELS + c;
        p.out[to] = from_acc<output_t>(::fmaf(pixel[c], p.scale[c], p.shift[c]));
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Leaves a pixel for the second stage, and the grey of 32 of them.
__device__ __forceinline__ void leave(const Params& p, const float (&pixel)[CHANNELS], int tile, int row,
                                      int x, bool exists, int lane) {
    const long long sample = blockIdx.y, area = static_cast<long long>(p.height) * p.width;
    const float sum = warp_sum(exists ? grey(pixel) : 0.0f);
    if (lane == 0) p.sums[(sample * p.height + row) * p.tiles + tile] = sum;
    if (!exists) return;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        p.between[(sample * CHANNELS + c) * area + static_cast<long long>(row) * p.width + x] = pixel[c];
}

__device__ __forceinline__ void from_source(const Params& p) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int tile = blockIdx.x % p.tiles, row = blockIdx.x / p.tiles * WARPS + warp;
    if (row >= p.height) return;  // the whole warp
    const Sample& s = p.samples[blockIdx.y];
    const int x = tile * LANES + lane, y_resized = s.offset_y + row, x_resized = s.offset_x + min(x, p.width - 1);
    float pixel[CHANNELS];
    if constexpr (RESIZES) {
        __shared__ alignas(16) float chunks[WARPS][CHUNK];
        const Taps rows = taps(y_resized, s.resized_height, s.box_height);
        const Taps columns = taps(x_resized, s.resized_width, s.box_width);
        resample(pixel, chunks[warp], s, rows, columns, lane);
    } else {
        fetch(pixel, s, y_resized, x_resized);
    }
    adjust(pixel, s, 0.0f);
    const int flipped = s.flip ? p.width - 1 - x : x;
    if constexpr (STAGE == FIRST) leave(p, pixel, tile, row, flipped, x < p.width, lane);
    else if (x < p.width) store(p, pixel, static_cast<long long>(row) * p.width + flipped);
}

// The mean of an image's grey values, by each block anew: some 1,500 partial sums at 224 x 224.
__device__ __forceinline__ float mean_grey(const Params& p) {
    __shared__ float of_warps[WARPS];
    const int count = p.height * p.tiles, lane = threadIdx.x % LANES;
    const float* sums = p.sums + static_cast<long long>(blockIdx.y) * count;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += BLOCK) sum += sums[i];
    sum = warp_sum(sum);
    if (lane == 0) of_warps[threadIdx.x / LANES] = sum;
    __syncthreads();
    sum = warp_sum(lane < WARPS ? of_warps[lane] : 0.0f);
    return sum * refined_rcp(static_cast<float>(p.height) * static_cast<float>(p.width));
}

__device__ __forceinline__ void from_between(const Params& p) {
    const float mean = mean_grey(p);
    const Sample& s = p.samples[blockIdx.y];
    const long long area = static_cast<long long>(p.height) * p.width, sample = blockIdx.y;
#pragma unroll 1
    for (int k = 0; k < PER_THREAD; ++k) {
        const long long at = (static_cast<long long>(blockIdx.x) * PER_THREAD + k) * BLOCK + threadIdx.x;
        if (at >= area) return;
        float pixel[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) pixel[c] = p.between[(sample * CHANNELS + c) * area + at];
        adjust(pixel, s, mean);
        store(p, pixel, at);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3) image(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if constexpr (STAGE == SECOND) from_between(p);
    else from_source(p);
}
