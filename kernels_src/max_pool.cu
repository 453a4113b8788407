// The largest of each window of images whose channels lie side by side:
//
//     out[n, i, j, c] = max over k, l of x[n, i * STRIDE_H - PAD_H + k * DILATION_H, ..., c]
//
// and, if PLACES, where it was: k * KERNEL_W + l, of equal values the first, of NaN the last, as torch has it. A
// thread has PACK channels of a pixel of the result. NaN is passed on.
//
// The prologue defines value_t; PACK, elements of a 16-byte vector; KERNEL, STRIDE, PAD, DILATION, each with _H and _W;
// and Params: x, out, places; vectors, of the result, fewer than 2^31 elements; packs, vectors of a pixel; height,
// width of x; out_height, out_width.

#include "prelude.cuh"

// The first step of a window that lies inside of the images.
__device__ __forceinline__ int first_inside(int begin, int dilation) {
    return begin < 0 ? (-begin + dilation - 1) / dilation : 0;
}

extern "C" __global__ void __launch_bounds__(BLOCK) max_pool(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const unsigned vector = blockIdx.x * BLOCK + threadIdx.x;
    if (vector >= p.vectors) return;
    const unsigned pixel = vector / p.packs, pack = vector - pixel * p.packs;
    const unsigned line = pixel / p.out_width, image = line / p.out_height;
    const int left = static_cast<int>(pixel - line * p.out_width) * STRIDE_W - PAD_W;
    const int top = static_cast<int>(line - image * p.out_height) * STRIDE_H - PAD_H;
    const value_t* x = p.x + (static_cast<long long>(image) * p.height * p.width * p.packs + pack) * PACK;

    acc_t most[PACK];
    int place[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) {
        most[v] = __int_as_float(0xff800000);  // -inf
        place[v] = first_inside(top, DILATION_H) * KERNEL_W + first_inside(left, DILATION_W);
    }
#pragma unroll
    for (int k = 0; k < KERNEL_H; ++k) {
        const int row = top + k * DILATION_H;
        if (row < 0 || row >= p.height) continue;
#pragma unroll
        for (int l = 0; l < KERNEL_W; ++l) {
            const int column = left + l * DILATION_W;
            if (column < 0 || column >= p.width) continue;
            const auto values = load_pack<PACK>(x + (static_cast<long long>(row) * p.width + column) * p.packs * PACK);
#pragma unroll
            for (int v = 0; v < PACK; ++v) {
                const acc_t value = at(values, v);
                if (PLACES && (value > most[v] || value != value)) place[v] = k * KERNEL_W + l;
                most[v] = maximum(most[v], value);
            }
        }
    }
    store_pack(p.out + static_cast<long long>(vector) * PACK, most);
    if (PLACES) {
        Pack<unsigned char, PACK> places;
#pragma unroll
        for (int v = 0; v < PACK; ++v) places.data[v] = place[v];
        *reinterpret_cast<Pack<unsigned char, PACK>*>(p.places + static_cast<long long>(vector) * PACK) = places;
    }
}
