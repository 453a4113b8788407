// A norm at inference, folded into weight and bias of the convolution before it:
//
//     factor = weight of the norm / sqrt(var + eps)      folded[c, :] = weight[c, :] * factor[c]
//     shift = (bias - mean) * factor + bias of the norm  folded_bias[c] = shift[c]
//
// A block has one channel of the result. What it folded last is described in `applied`: factor, shift, and a hash of
// the channel's weights. Where these are the same nothing is to be done; nobody has to know who wrote to the tensors,
// and not every writer tells (a norm in training counts no version of its statistics, nor does an optimizer's
// kernel of a weight's). Several streams may do this at once: they write the same, and `applied` last.
//
// The prologue defines weight_t, folded_t and, for bias, running_mean, running_var, bn_weight, bn_bias, `..._t` and
// `has_...`; LAST, whether the weight lies in memory as channels_last, as `folded` does; MANY; and Layer:
// the pointers; row, pixels, inner: elements of a channel's weights, taps, channels of x; eps.
// Params are a Layer, or of MANY: layers, and blocks, which say each block's layer and channel.

using uint64_t = unsigned long long;

// Of MurmurHash3 (Appleby): another number for each k, that has nothing to do with its neighbours'.
__device__ __forceinline__ unsigned scattered(unsigned k) {
    k = (k ^ (k >> 16)) * 0x85ebca6bu;
    k = (k ^ (k >> 13)) * 0xc2b2ae35u;
    return k ^ (k >> 16);
}

// Sum of the elements' bits, each times a number of its own.
__device__ __forceinline__ uint64_t hash_of(const weight_t* weights, int row) {
    __shared__ uint64_t shared[BLOCK];
    uint64_t sum = 1;
#pragma unroll 8
    for (int k = threadIdx.x; k < row; k += BLOCK) {
        const auto pack = load_pack<1>(weights + k);
        uint64_t bits = 0;
        memcpy(&bits, &pack, sizeof(pack));
        sum += (bits + 1) * scattered(k + 1);
    }
    shared[threadIdx.x] = sum;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    return shared[0];
}

__device__ __forceinline__ void fold(const Layer& p, int channel) {
    const weight_t* weights = p.weight + static_cast<long long>(channel) * p.row;
    acc_t factor = rsqrt(to_acc(p.running_var[channel]) + p.eps), shift = -to_acc(p.running_mean[channel]);
    if constexpr (has_bias) shift += to_acc(p.bias[channel]);
    if constexpr (has_bn_weight) factor *= to_acc(p.bn_weight[channel]);
    shift *= factor;
    if constexpr (has_bn_bias) shift += to_acc(p.bn_bias[channel]);

    const uint64_t numbers = static_cast<uint64_t>(__float_as_uint(factor)) << 32 | __float_as_uint(shift);
    const uint64_t hash = hash_of(weights, p.row);
    volatile uint64_t* applied = p.applied + 2 * channel;
    if (applied[0] == numbers && applied[1] == hash) return;

    for (int k = threadIdx.x; k < p.row; k += BLOCK) {
        const int pixel = k / p.inner, from = LAST ? k : (k - pixel * p.inner) * p.pixels + pixel;
        p.folded[static_cast<long long>(channel) * p.row + k] = from_acc<folded_t>(to_acc(weights[from]) * factor);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        p.folded_bias[channel] = from_acc<folded_t>(shift);
        __threadfence();
        applied[0] = numbers, applied[1] = hash;
    }
}

template <class P>
__device__ __forceinline__ void fold_of_block(const P& p) {
    if constexpr (MANY) {
        const int2 at = p.blocks[blockIdx.x];
        fold(p.layers[at.x], at.y);
    } else {
        fold(p, blockIdx.x);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) fold_norm(const __grid_constant__ Params p) {
    fold_of_block(p);
}
