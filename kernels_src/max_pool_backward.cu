// The gradient of max_pool.cu, given the places of the largest values:
//
//     out[n, y, x, c] = sum of grad[n, i, j, c] over the windows whose largest value was there
//
// A thread has PACK channels of a pixel and looks at the windows that it lies in, so that the sums have one order.
//
// The prologue defines what it does there, with Params: grad, places, out; vectors, of out, fewer than 2^31 elements;
// packs, vectors of a pixel; height, width of out; out_height, out_width, of grad.

#include "prelude.cuh"

// The window of which this is step k, or -1.
__device__ __forceinline__ int window(int at, int k, int stride, int padding, int dilation, int windows) {
    const int begin = at + padding - k * dilation, n = begin / stride;
    return begin >= 0 && n * stride == begin && n < windows ? n : -1;
}

extern "C" __global__ void __launch_bounds__(BLOCK) max_pool_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const unsigned vector = blockIdx.x * BLOCK + threadIdx.x;
    if (vector >= p.vectors) return;
    const unsigned pixel = vector / p.packs, pack = vector - pixel * p.packs;
    const unsigned line = pixel / p.width, image = line / p.height;
    const int column = static_cast<int>(pixel - line * p.width), row = static_cast<int>(line - image * p.height);
    const long long first = (static_cast<long long>(image) * p.out_height * p.out_width * p.packs + pack) * PACK;

    acc_t sum[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) sum[v] = 0;
#pragma unroll
    for (int k = 0; k < KERNEL_H; ++k) {
        const int i = window(row, k, STRIDE_H, PAD_H, DILATION_H, p.out_height);
        if (i < 0) continue;
#pragma unroll
        for (int l = 0; l < KERNEL_W; ++l) {
            const int j = window(column, l, STRIDE_W, PAD_W, DILATION_W, p.out_width);
            if (j < 0) continue;
            const long long at_window = first + (static_cast<long long>(i) * p.out_width + j) * p.packs * PACK;
            const auto grads = load_pack<PACK>(p.grad + at_window);
            const auto places = *reinterpret_cast<const Pack<unsigned char, PACK>*>(p.places + at_window);
#pragma unroll
            for (int v = 0; v < PACK; ++v)
                if (places.data[v] == k * KERNEL_W + l) sum[v] += at(grads, v);
        }
    }
    store_pack(p.out + static_cast<long long>(vector) * PACK, sum);
}
