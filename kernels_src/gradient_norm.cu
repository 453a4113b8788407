// Sums of the squares of gradients: block b adds up chunks b, b + grid, ... into squares[b].
// Sixteen elements at most are added in acc_t before a double takes them: 1e8 small squares stay exact enough.

#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) gradient_norm(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    constexpr int W = 16 / sizeof(grad_t), TILE = BLOCK * W;
    double sum = 0;
    for (unsigned c = blockIdx.x; c < p.n_chunks; c += gridDim.x) {
        const Chunk chunk = p.chunks[c];
        const grad_t* grad = static_cast<const grad_t*>(p.grads[chunk.tensor]);
        if (!grad) continue;
        const int64_t first = static_cast<int64_t>(chunk.index) * CHUNK;
        const int count = static_cast<int>(min(static_cast<int64_t>(CHUNK), p.tensors[chunk.tensor].numel - first));
        grad += first;
        const bool wide = reinterpret_cast<unsigned long long>(grad) % 16 == 0;
        if (wide && count == CHUNK) {
            Pack<grad_t, W> packs[CHUNK / TILE];
#pragma unroll
            for (int k = 0; k < CHUNK / TILE; ++k) packs[k] = load_pack<W>(grad + k * TILE + threadIdx.x * W);
#pragma unroll
            for (int k = 0; k < CHUNK / TILE; ++k) {
                acc_t squares = 0;
#pragma unroll
                for (int v = 0; v < W; ++v) squares += at(packs[k], v) * at(packs[k], v);
                sum += squares;
            }
        } else {
            for (int i = threadIdx.x; i < count; i += BLOCK) {
                const acc_t g = to_acc(grad[i]);
                sum += static_cast<double>(g) * g;
            }
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) p.squares[blockIdx.x] = sum;
}
