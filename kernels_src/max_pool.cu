// The largest of each window of images whose channels lie side by side:
//
//     out[n, i, j, c] = max over k, l of x[n, i * STRIDE_H - PAD_H + k * DILATION_H, ..., c]
//
// A thread has PACK channels of a pixel of the result. NaN is passed on, as torch does.
//
// The prologue defines value_t; PACK, elements of a 16-byte vector; KERNEL, STRIDE, PAD, DILATION, each with _H and _W;
// and Params: x, out; vectors, of the result, fewer than 2^31 elements; packs, vectors of a pixel; height, width of
// x; out_height, out_width.

extern "C" __global__ void __launch_bounds__(BLOCK) max_pool(const __grid_constant__ Params p) {
    const unsigned vector = blockIdx.x * BLOCK + threadIdx.x;
    if (vector >= p.vectors) return;
    const unsigned pixel = vector / p.packs, pack = vector - pixel * p.packs;
    const unsigned line = pixel / p.out_width, image = line / p.out_height;
    const int left = static_cast<int>(pixel - line * p.out_width) * STRIDE_W - PAD_W;
    const int top = static_cast<int>(line - image * p.out_height) * STRIDE_H - PAD_H;
    const value_t* x = p.x + (static_cast<long long>(image) * p.height * p.width * p.packs + pack) * PACK;

    acc_t most[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) most[v] = __int_as_float(0xff800000);  // -inf
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
            for (int v = 0; v < PACK; ++v) most[v] = maximum(most[v], at(values, v));
        }
    }
    store_pack(p.out + static_cast<long long>(vector) * PACK, most);
}
