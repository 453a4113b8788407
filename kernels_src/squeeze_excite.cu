// Squeeze and excitation of images whose channels lie side by side, with m the mean over an image's pixels:
//
//     out = x * gate      gate = outer(w2 hidden + b2)      hidden = inner(w1 m + b1)
//
// The blocks of a cluster have an image, of which each sums a part of the pixels. There are two ways from there. Of
// many images each block computes a part of the hidden values and of the gates, which all of them get, and looks at
// its pixels once more, which the L2 still has. Of FEW, where nothing but latency counts, each multiplies its sums with
// all of w1, which is what they exchange, and computes all gates itself, if they are not many; the first pixels stay in
// registers.
//
// The prologue defines value_t; CLUSTER, blocks of a cluster; FEW; PACK, elements of a 16-byte vector; inner and
// outer, functions of acc_t; and Params: x, w1 [hidden, channels], b1, w2 [channels, hidden], b2, out; pixels and
// channels of an image (no more packs than BLOCK); hidden. Shared memory: 2 channels + (1 + CLUSTER) hidden +
// BLOCK * PACK numbers.

constexpr int WARPS = BLOCK / 32;
constexpr int PARTS = 8;            // threads that share a gate
constexpr int KEPT = 6;             // pixels of a thread in registers
constexpr int MANY = 1 << 14;       // products for gates, from which on they are shared out

// The same place in another block of the cluster.
__device__ __forceinline__ acc_t* in_block(acc_t* here, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    unsigned long long there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return reinterpret_cast<acc_t*>(there);
#else
    return here;
#endif
}

__device__ __forceinline__ void meet() { arrive_in_cluster(), wait_for_cluster(); }

// The sums of the threads that have the same pack, in those of lane 0.
__device__ __forceinline__ void sum_of_lanes(acc_t (&sums)[PACK], acc_t* scratch, int packs, int lane, int lanes) {
    for (int n = lanes; n > 1;) {
        const int half = (n + 1) / 2;
        if (lane >= half && lane < n)
            for (int v = 0; v < PACK; ++v) scratch[v * BLOCK + threadIdx.x] = sums[v];
        __syncthreads();
        if (lane < n - half)
            for (int v = 0; v < PACK; ++v) sums[v] += scratch[v * BLOCK + threadIdx.x + half * packs];
        n = half;
    }
}

__device__ __forceinline__ void add_pixels(const Params& p, const value_t* x, int pixel, int end, int lanes,
                                           acc_t (&own)[PACK]) {
#pragma unroll 4
    for (; pixel < end; pixel += lanes) {
        const auto values = load_pack<PACK>(x + static_cast<long long>(pixel) * p.channels);
#pragma unroll
        for (int v = 0; v < PACK; ++v) own[v] += at(values, v);
    }
}

__device__ __forceinline__ void scale(const Pack<value_t, PACK>& values, const acc_t (&gate)[PACK], value_t* out) {
    acc_t found[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) found[v] = at(values, v) * gate[v];
    store_pack(out, found);
}

__device__ __forceinline__ void scale_pixels(const Params& p, const value_t* x, int pixel, int end, int lanes,
                                             const acc_t (&gate)[PACK], value_t* out) {
#pragma unroll 4
    for (; pixel < end; pixel += lanes) {
        const long long here = static_cast<long long>(pixel) * p.channels;
        scale(load_pack<PACK>(x + here), gate, out + here);
    }
}

// Row r of w1 times what `value` says of element v of pack k, by a warp.
template <typename Value>
__device__ __forceinline__ acc_t multiply_row(const Params& p, int r, int lane, int packs, const Value& value) {
    acc_t sum = 0;
#pragma unroll 4
    for (int k = lane; k < packs; k += 32) {
        const auto weights = load_pack<PACK>(p.w1 + static_cast<long long>(r) * p.channels + k * PACK);
#pragma unroll
        for (int v = 0; v < PACK; ++v) sum += at(weights, v) * value(k, v);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

// Row c of w2, if there is one, times the hidden values, by PARTS threads beside each other.
__device__ __forceinline__ acc_t multiply_channel(const Params& p, int c, int part, const acc_t* hidden) {
    acc_t sum = 0;
    if (c < p.channels)
#pragma unroll 4
        for (int r = part; r < p.hidden; r += PARTS)
            sum += to_acc(p.w2[static_cast<long long>(c) * p.hidden + r]) * hidden[r];
#pragma unroll
    for (int step = PARTS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

// -- of many images --------------------------------------------------------------------------------

__device__ __forceinline__ void of_many(const Params& p, acc_t* shared) {
    acc_t *sums = shared, *gates = sums + p.channels, *hidden = gates + p.channels, *scratch = hidden + p.hidden;
    acc_t* mean = scratch;  // afterwards

    const unsigned rank = cluster_rank();
    const int packs = p.channels / PACK, lanes = BLOCK / packs;
    const int lane = threadIdx.x / packs, pack = threadIdx.x % packs;
    const long long image = static_cast<long long>(blockIdx.x / CLUSTER) * p.pixels;
    const int begin = static_cast<long long>(p.pixels) * rank / CLUSTER;
    const int end = lane < lanes ? static_cast<long long>(p.pixels) * (rank + 1) / CLUSTER : 0;
    const value_t* x = p.x + image * p.channels + pack * PACK;

    acc_t own[PACK] = {};
    add_pixels(p, x, begin + lane, end, lanes, own);
    sum_of_lanes(own, scratch, packs, lane, lanes);
    if (lane == 0)
        for (int v = 0; v < PACK; ++v) sums[pack * PACK + v] = own[v];
    meet();

    for (int c = threadIdx.x; c < p.channels; c += BLOCK) {
        acc_t sum = 0;
#pragma unroll
        for (int k = 0; k < CLUSTER; ++k) sum += in_block(sums, k)[c];
        mean[c] = sum / p.pixels;
    }
    __syncthreads();

    for (int r = rank + CLUSTER * (threadIdx.x / 32); r < p.hidden; r += CLUSTER * WARPS) {
        const acc_t sum = multiply_row(p, r, threadIdx.x % 32, packs,
                                       [&](int k, int v) { return mean[k * PACK + v]; });
        if (threadIdx.x % 32 < CLUSTER)
            in_block(hidden, threadIdx.x % 32)[r] = inner(sum + to_acc(p.b1[r]));
    }
    meet();

    const int part = threadIdx.x % PARTS;
    for (int first = 0; first < p.channels; first += CLUSTER * (BLOCK / PARTS)) {  // the same for all threads
        const int c = first + rank + CLUSTER * (threadIdx.x / PARTS);
        const acc_t sum = multiply_channel(p, c, part, hidden);
        if (c < p.channels && part < CLUSTER) in_block(gates, part)[c] = outer(sum + to_acc(p.b2[c]));
    }
    meet();

    acc_t gate[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) gate[v] = gates[pack * PACK + v];
    value_t* out = p.out + image * p.channels + pack * PACK;
    scale_pixels(p, x, begin + lane, end, lanes, gate, out);
}

// -- of few ----------------------------------------------------------------------------------------

// What these sums of pixels give to each hidden value, into place `rank` of every block.
__device__ __forceinline__ void multiply(const Params& p, const acc_t* sums, acc_t* products, int rank) {
    const int packs = p.channels / PACK, lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < p.hidden; r += WARPS) {
        const acc_t sum = multiply_row(p, r, lane, packs, [&](int k, int v) { return sums[v * packs + k]; });
        if (lane < CLUSTER) in_block(products, lane)[rank * p.hidden + r] = sum;
    }
}

// Gates of every `step`th channel from `first` on, into so many blocks, or into this one.
__device__ __forceinline__ void open_gates(const Params& p, const acc_t* hidden, acc_t* gates, int first, int step) {
    const int part = threadIdx.x % PARTS;
#pragma unroll 2
    for (int begin = first; begin < p.channels; begin += step * (BLOCK / PARTS)) {  // alike for all threads
        const int c = begin + step * (threadIdx.x / PARTS);
        const acc_t sum = multiply_channel(p, c, part, hidden);
        if (c >= p.channels) continue;
        const acc_t gate = outer(sum + to_acc(p.b2[c]));
        if (step == 1 && part == 0) gates[c] = gate;
        for (int k = part; step > 1 && k < CLUSTER; k += PARTS) in_block(gates, k)[c] = gate;
    }
}

__device__ __forceinline__ void of_few(const Params& p, acc_t* shared) {
    acc_t *sums = shared, *gates = sums + p.channels, *hidden = gates + p.channels, *products = hidden + p.hidden;
    acc_t* scratch = products + CLUSTER * p.hidden;

    arrive_in_cluster();  // only who runs can be written to
    const int rank = cluster_rank();
    const int packs = p.channels / PACK, lanes = BLOCK / packs;
    const int lane = threadIdx.x / packs, pack = threadIdx.x % packs;
    const long long image = static_cast<long long>(blockIdx.x / CLUSTER) * p.pixels * p.channels;
    const int begin = static_cast<long long>(p.pixels) * rank / CLUSTER + lane;
    const int end = lane < lanes ? static_cast<long long>(p.pixels) * (rank + 1) / CLUSTER : 0;
    const value_t* x = p.x + image + pack * PACK;
    value_t* out = p.out + image + pack * PACK;

    Pack<value_t, PACK> kept[KEPT];
    acc_t own[PACK] = {};
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (begin + i * lanes < end)
            kept[i] = load_pack<PACK>(x + static_cast<long long>(begin + i * lanes) * p.channels);
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (begin + i * lanes < end)
#pragma unroll
            for (int v = 0; v < PACK; ++v) own[v] += at(kept[i], v);
    add_pixels(p, x, begin + KEPT * lanes, end, lanes, own);
    sum_of_lanes(own, scratch, packs, lane, lanes);
    if (lane == 0)
        for (int v = 0; v < PACK; ++v) sums[v * packs + pack] = own[v];
    __syncthreads();
    wait_for_cluster();

    multiply(p, sums, products, rank);
    meet();
    for (int r = threadIdx.x; r < p.hidden; r += BLOCK) {
        acc_t sum = 0;
        for (int k = 0; k < CLUSTER; ++k) sum += products[k * p.hidden + r];
        hidden[r] = inner(sum / p.pixels + to_acc(p.b1[r]));
    }
    __syncthreads();
    if (p.channels * p.hidden < MANY) {
        open_gates(p, hidden, gates, 0, 1);
        __syncthreads();
    } else {
        open_gates(p, hidden, gates, rank, CLUSTER);
        meet();
    }

    acc_t gate[PACK];
#pragma unroll
    for (int v = 0; v < PACK; ++v) gate[v] = gates[pack * PACK + v];
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (begin + i * lanes < end)
            scale(kept[i], gate, out + static_cast<long long>(begin + i * lanes) * p.channels);
    scale_pixels(p, x, begin + KEPT * lanes, end, lanes, gate, out);
}

// --------------------------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK) squeeze_excite(const __grid_constant__ Params p) {
    extern __shared__ acc_t shared[];
    if constexpr (FEW) of_few(p, shared);
    else of_many(p, shared);
}
