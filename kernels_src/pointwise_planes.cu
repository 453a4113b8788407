// A reduction over the channels of contiguous images and the elements that follow from it, in one launch: the
// statistics of a batch norm and its result, the sums of its gradient and the gradient.
//
// A cluster of blocks has a channel, or TOGETHER of them where one plane is no whole packs. Its blocks find partial
// values of what they read, and keep that in shared memory; tell them to each other; and go over it again. So all is
// read once, and blocks of several clusters on a multiprocessor read, wait and write at different times.
//
// The prologue defines
//   finding::                     what columns.cuh needs; store(p, n, values)
//   elements::                    what pointwise_walk.cu needs
//   MIN_BLOCKS, AHEAD             blocks on a multiprocessor, packs of a thread on their way
//   AT_ONCE                       of them in the second pass
//   TOGETHER, PLANE, LANES        channels of a cluster; pixels of a plane; packs of the channels' planes of an image
//   CLUSTER                       blocks
//   KEPT_BYTES                    of the operands that both passes read, for a pack
//   bring(to, p, i), brought(from, fixed)    those operands into shared memory, threads side by side, and from there
//   recall(from, p, i, fixed)     the second pass's: these, and others
//   p.finding, p.elements
//   p.images, p.image             how many, and elements of one

#include "prelude.cuh"
#include "reductions.cuh"
#include "arrivals.cuh"
#include "copies.cuh"
#include "hopper.cuh"

using finding::BLOCK, finding::VALUES, finding::VEC;
using finding::index_t;

constexpr int STEP = BLOCK * KEPT_BYTES, WARPS = BLOCK / 32;
constexpr int PARTS = TOGETHER > 1 ? 2 : 1;  // channels in which a pack may lie
static_assert(TOGETHER == 1 || BLOCK % LANES == 0, "a thread has one place in planes that share packs");

// What the threads have found, then of a channel what the blocks have.
struct Exchange {
    acc_t threads[PARTS][VALUES][TOGETHER > 1 ? BLOCK : WARPS];
    acc_t blocks[TOGETHER][VALUES][CLUSTER];
    Barrier arrived;
};

template <int N> __device__ __forceinline__ void join_lanes(acc_t (&values)[VALUES]) {
#pragma unroll
    for (int offset = N / 2; offset > 0; offset /= 2) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = __shfl_xor_sync(0xffffffffu, values[k], offset);
        finding::join_all(values, other);
    }
}
__device__ __forceinline__ void begin(acc_t (&values)[VALUES]) {
    acc_t none[VALUES][1];
    finding::start<1>(none);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
}

// Of its columns, the elements of a pack, what lies in one channel and in the next.
__device__ __forceinline__ void leave(const finding::Values<VEC>& columns, int place, Exchange& exchange) {
    const int border = PLANE - place % PLANE;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        acc_t each[VEC][VALUES];
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            begin(each[v]);
            if (PARTS == 1 || (v < border) == (part == 0))
#pragma unroll
                for (int k = 0; k < VALUES; ++k) each[v][k] = columns[k][v];
        }
#pragma unroll
        for (int half = VEC / 2; half > 0; half /= 2)
#pragma unroll
            for (int v = 0; v < half; ++v) finding::join_all(each[v], each[v + half]);
        acc_t (&mine)[VALUES] = each[0];
        if constexpr (TOGETHER == 1) join_lanes<32>(mine);
        if (TOGETHER > 1 || threadIdx.x % 32 == 0)
#pragma unroll
            for (int k = 0; k < VALUES; ++k)
                exchange.threads[part][k][TOGETHER > 1 ? threadIdx.x : threadIdx.x / 32] = mine[k];
    }
}

// What a warp's lanes find of channel c in what the threads left, joined in all of them.
__device__ __forceinline__ void join_threads(acc_t (&values)[VALUES], int c, const Exchange& exchange) {
    const int first = TOGETHER > 1 ? c * PLANE / VEC : 0, last = ((c + 1) * PLANE - 1) / VEC;
    const int lanes = last - first + 1, count = TOGETHER > 1 ? lanes * (BLOCK / LANES) : WARPS;
    begin(values);
    for (int n = threadIdx.x % 32; n < count; n += 32) {
        const int lane = first + n % lanes, at = TOGETHER > 1 ? n / lanes * LANES + lane : n;
        const int part = TOGETHER > 1 && lane * VEC < c * PLANE;
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = exchange.threads[part][k][at];
        finding::join_all(values, other);
    }
    join_lanes<32>(values);
}

// To every block the first lane's: those of others were joined in another order, which moments' last bits show.
__device__ __forceinline__ void tell(const acc_t (&values)[VALUES], int c, unsigned rank, Exchange& exchange) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const acc_t value = __shfl_sync(0xffffffffu, values[k], 0);
        if (lane < CLUSTER) send(&exchange.blocks[c][k][rank], &exchange.arrived, lane, value);
    }
}
__device__ __forceinline__ void join_blocks(acc_t (&values)[VALUES], int c, const Exchange& exchange) {
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = exchange.blocks[c][k][threadIdx.x % CLUSTER];
    join_lanes<CLUSTER>(values);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, MIN_BLOCKS)
pointwise_planes(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char own[];
    __shared__ Exchange exchange;
    const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0, group = blockIdx.x / CLUSTER;
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) make_barrier(&exchange.arrived, 1);
        arrive_in_cluster();
    }
    wait_for_kernel_before();
    const index_t base = group * (LANES * VEC), total = p.images * LANES, step = CLUSTER * BLOCK;
    const index_t first = rank * BLOCK + threadIdx.x, place = threadIdx.x % LANES * VEC;
    const int packs = first < total ? (total - first + step - 1) / step : 0;
    const auto at = [&](int k) {
        const index_t n = first + k * step, image = n / LANES;
        return image * p.image + base + (n - image * LANES) * VEC;
    };

#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
        if (k < packs) bring(own + k * STEP, p.finding, at(k));
        commit_copies();
    }
    finding::Walk<VEC> walk(p.finding);
    {
        const finding::Tile<VEC> fixed = finding::load_fixed<VEC>(p.finding, base + place);
        for (int k = 0; k < packs; ++k) {
            wait_for_copies<AHEAD - 1>();
            const index_t i[1] = {0};
            const finding::Tile<VEC> one[1] = {brought(own + k * STEP, fixed)};
            walk.take_in(p.finding, i, one, 0, 1);
            if (k + AHEAD < packs) bring(own + (k + AHEAD) * STEP, p.finding, at(k + AHEAD));
            commit_copies();
        }
    }
    leave(walk.values, place, exchange);
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        wait_for_cluster();
        if (threadIdx.x == 0) expect(&exchange.arrived, TOGETHER * VALUES * CLUSTER * sizeof(acc_t));
    }
    const int warp = threadIdx.x / 32;
    acc_t values[VALUES];
    for (int c = warp; c < TOGETHER && warp < WARPS; c += WARPS) {
        join_threads(values, c, exchange);
        if constexpr (CLUSTER > 1) tell(values, c, rank, exchange);
        else if (threadIdx.x % 32 == 0) finding::store(p.finding, group * TOGETHER + c, values);
    }
    if constexpr (CLUSTER > 1) {
        await(&exchange.arrived, 0);
        // Every block stores the same bits, and so need not wait for those of another.
        for (int c = warp; c < TOGETHER && warp < WARPS; c += WARPS) {
            join_blocks(values, c, exchange);
            if (threadIdx.x % 32 == 0) finding::store(p.finding, group * TOGETHER + c, values);
        }
    }
    __syncthreads();

    const elements::Tile<VEC> fixed = elements::load_fixed<VEC>(p.elements, base + place);
    int k = 0;
    for (; k + AT_ONCE <= packs; k += AT_ONCE) {
        elements::Tile<VEC> tiles[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) tiles[u] = recall(own + (k + u) * STEP, p.elements, at(k + u), fixed);
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) elements::finish<VEC>(p.elements, at(k + u), tiles[u], {});
    }
    for (; k < packs; ++k) {
        const index_t i = at(k);
        elements::finish<VEC>(p.elements, i, recall(own + k * STEP, p.elements, i, fixed), {});
    }
}
