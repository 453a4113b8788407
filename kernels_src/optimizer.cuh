// What the kernels of fusionrt.optim share: the table of the tensors that a launch serves.
//
// Gradients move from step to step (zero_grad frees them), everything else stays. So the addresses of the
// gradients are parameters of each launch, 0 for one that is absent, and the rest is a table in memory.

struct Tensor {  // columns of fusionrt/optim/table.py
    void* param;
    float* step;       // how often it was updated
    int64_t numel;
    int64_t position;  // among all parameters of the optimizer: whose random numbers it gets
    void* state[3];
    float* scale[3];   // of 8-bit states: the largest magnitude of each block
    float* master;     // the parameter in float32
};
struct Chunk { int tensor, index; };  // which CHUNK elements of which tensor

// What a step of one tensor depends on beside its elements; optimizer_prepare.cu computes it.
struct alignas(16) Scalars {
    acc_t factor;      // of the gradient: sign, unscaling, clipping
    acc_t decay;       // the parameter is multiplied by it (decoupled) or has it as its gradient's share
    acc_t size;        // of the step
    acc_t correction;  // of the second moment's square root; for SGD whether a momentum buffer is new
    int skip;
};

// One after the other in a fixed order: the same sum every time. Of the whole block, for thread 0.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double warps[BLOCK / 32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_down_sync(0xffffffffu, x, lane);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    if (threadIdx.x == 0) for (int w = 0; w < BLOCK / 32; ++w) x += warps[w];
    return x;
}
