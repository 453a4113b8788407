// A norm at inference, folded into weight and bias of the convolution before it:
//
//     factor = weight of the norm / sqrt(var + eps)      folded[c, :] = weight[c, :] * factor[c]
//     shift = (bias - mean) * factor + bias of the norm  folded_bias[c] = shift[c]
//
// A team of threads has one channel of the result: as many warps as find a pack of weights for each lane, or of many
// layers, which fill the device in any case, one. What it folded last is described in `applied`: factor, shift, and a
// hash of the channel's weights. Where these are the same nothing is to be done; nobody has to know who wrote to the
// tensors, and not every writer tells (a norm in training counts no version of its statistics, nor does an
// optimizer's kernel of a weight's). Several streams may do this at once: they write the same, and `applied` last.
//
// The prologue defines weight_t, folded_t and, for bias, running_mean, running_var, bn_weight, bn_bias, `..._t` and
// `has_...`; LAST, whether the weight lies in memory as channels_last, as `folded` does; MANY; and Layer:
// the pointers; row, pixels, inner: elements of a channel's weights, taps, channels of x; channels; threads of a
// team; eps. Params are a Layer, or of MANY: layers; which team has which layer and channel; how many have one.

#include "prelude.cuh"

using uint64_t = unsigned long long;

struct Team {
    int threads, first, lane;  // first: of the team in its block

    __device__ explicit Team(int size) : threads(size), first(threadIdx.x / size * size), lane(threadIdx.x - first) {}

    // A barrier of the team's own (0 is the block's), after which its threads agree.
    __device__ bool all(bool holds) const {
        unsigned found;
        asm volatile(
            "{ .reg .pred mine, every; setp.ne.u32 mine, %1, 0; bar.red.and.pred every, %2, %3, mine;"
            " selp.u32 %0, 1, 0, every; }"
            : "=r"(found) : "r"(unsigned(holds)), "r"(first / 32 + 1), "r"(threads) : "memory");
        return found;
    }

    __device__ uint64_t sum(uint64_t x) const {
        __shared__ uint64_t of_warps[BLOCK / 32];
        for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
        if (threads == 32) return x;
        of_warps[threadIdx.x / 32] = x;
        all(true);
        uint64_t found = 0;
        for (int k = 0; k < threads / 32; ++k) found += of_warps[first / 32 + k];
        return found;
    }
};

// Of MurmurHash3 (Appleby): another number for each k, that has nothing to do with its neighbours'.
__device__ __forceinline__ unsigned scattered(unsigned k) {
    k = (k ^ (k >> 16)) * 0x85ebca6bu;
    k = (k ^ (k >> 13)) * 0xc2b2ae35u;
    return k ^ (k >> 16);
}

// Sum of all words, or where they end or are not aligned of all elements, each times a number of its own.
__device__ __forceinline__ uint64_t hash_of(const weight_t* weights, int row, const Team& team) {
    constexpr int PACK = 16 / sizeof(weight_t);
    const int packs = reinterpret_cast<uint64_t>(weights) % 16 ? 0 : row / PACK;
    uint64_t sum = 0;
#pragma unroll 4
    for (int k = team.lane; k < packs; k += team.threads) {
        unsigned words[4];
        load_bytes<16>(weights + k * PACK, words);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += (uint64_t(words[j]) + 1) * scattered(4 * k + j + 1);
    }
    for (int k = packs * PACK + team.lane; k < row; k += team.threads) {
        const auto pack = load_pack<1>(weights + k);
        uint64_t bits = 0;
        memcpy(&bits, &pack, sizeof(pack));
        sum += (bits + 1) * scattered(~k);
    }
    return team.sum(sum);
}

__device__ __forceinline__ void fold(const Layer& p, int channel, const Team& team) {
    const weight_t* weights = p.weight + static_cast<long long>(channel) * p.row;
    acc_t factor = rsqrt(to_acc(p.running_var[channel]) + p.eps), shift = -to_acc(p.running_mean[channel]);
    if constexpr (has_bias) shift += to_acc(p.bias[channel]);
    if constexpr (has_bn_weight) factor *= to_acc(p.bn_weight[channel]);
    shift *= factor;
    if constexpr (has_bn_bias) shift += to_acc(p.bn_bias[channel]);

    const uint64_t numbers = static_cast<uint64_t>(__float_as_uint(factor)) << 32 | __float_as_uint(shift);
    volatile uint64_t* applied = p.applied + 2 * channel;
    const uint64_t last[] = {applied[0], applied[1]}, hash = hash_of(weights, p.row, team);
    if (team.all(last[0] == numbers && last[1] == hash)) return;

    for (int k = team.lane; k < p.row; k += team.threads) {
        const int pixel = k / p.inner, from = LAST ? k : (k - pixel * p.inner) * p.pixels + pixel;
        p.folded[static_cast<long long>(channel) * p.row + k] = from_acc<folded_t>(to_acc(weights[from]) * factor);
    }
    __threadfence();
    team.all(true);
    if (team.lane == 0) {
        p.folded_bias[channel] = from_acc<folded_t>(shift);
        __threadfence();
        applied[0] = numbers, applied[1] = hash;
    }
}

template <class P>
__device__ __forceinline__ void fold_of_team(const P& p) {
    if constexpr (MANY) {
        const Team team(32);
        const int k = (blockIdx.x * BLOCK + threadIdx.x) / 32;
        if (k >= p.count) return;
        const int2 at = p.channels[k];
        fold(p.layers[at.x], at.y, team);
    } else {
        const Team team(p.team);
        const int channel = (blockIdx.x * BLOCK + threadIdx.x) / p.team;
        if (channel < p.channels) fold(p, channel, team);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) fold_norm(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    fold_of_team(p);
}
