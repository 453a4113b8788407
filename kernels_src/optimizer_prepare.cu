// Before a step: count it, and compute once for each tensor what all of its elements need.
//
// Nothing here is known to the host: whether GradScaler found an infinity, the norm of the gradients, and a
// learning rate that is a tensor lie on the device, so the host never waits and a CUDA graph may hold the step.
// RULE, BLOCK and N (gradients) come from the runtime.

#include "prelude.cuh"

__device__ __forceinline__ bool is_finite(double x) { return ::fabs(x) <= 1.7976931348623157e308; }

// Of the gradients that are clipped, unscaled, and whether all gradients are finite; for the whole block.
__device__ __forceinline__ double gradient_norm(const Params& p, double unscale, bool& finite) {
    double sum = 0;
    bool mine = true;
    for (unsigned k = threadIdx.x; k < p.n_squares; k += BLOCK) {
        mine = mine && is_finite(p.squares[k]);
        if (k < p.n_clipped) sum += p.squares[k];
    }
    sum = block_sum(sum);
    __shared__ double norm;
    if (threadIdx.x == 0) {
        norm = ::sqrt(sum) * ::fabs(unscale);
        if (p.norm && blockIdx.x == 0) *p.norm = static_cast<acc_t>(norm);
    }
    finite = __syncthreads_and(mine) && is_finite(norm);
    return norm;
}

extern "C" __global__ void __launch_bounds__(BLOCK) optimizer_prepare(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const double unscale = p.grad_scale ? 1.0 / *p.grad_scale : 1.0;
    bool finite = true;
    const double norm = p.squares ? gradient_norm(p, unscale, finite) : 0.0;
    // As torch.nn.utils.clip_grad_norm_: at most 1; NaN if the norm is.
    const double ratio = p.max_norm / (norm + 1e-6), factor = (ratio > 1.0 ? 1.0 : ratio) * unscale;
    const unsigned t = blockIdx.x * BLOCK + threadIdx.x;
    if (t >= p.n_tensors || !p.grads[t]) return;
    const double lr = p.lr_tensor ? static_cast<double>(*p.lr_tensor) : p.lr;
    Scalars& s = p.scalars[t];  // written as it comes: kept, it would be spilled around the powers
    const int skip = (p.found_inf && *p.found_inf != 0) || (p.skip_nonfinite && !finite);
    s.skip = skip;
    s.factor = static_cast<acc_t>(MAXIMIZE ? -factor : factor);
    s.decay = static_cast<acc_t>(DECOUPLED ? 1.0 - lr * p.weight_decay : p.weight_decay);
    acc_t size = static_cast<acc_t>(lr), correction = 0;
    float* counter = p.tensors[t].step;
    if (counter && !skip) {
        const double step = static_cast<double>(*counter) + 1.0;
        *counter = static_cast<float>(step);
        if (RULE == ADAM) {
            size = static_cast<acc_t>(lr / (1.0 - ::pow(p.beta1, step)));
            correction = static_cast<acc_t>(1.0 / ::sqrt(1.0 - ::pow(p.beta2, step)));
        } else if (RULE == SGD) {
            correction = step == 1.0;
        }
    }
    s.size = size;
    s.correction = correction;
}
