// Squeeze and excitation of images whose channels lie side by side, with m the mean over an image's pixels:
//
//     out = x * gate      gate = outer(w2 hidden + b2)      hidden = inner(w1 m + b1)
//
// The blocks of a cluster have an image: each some of its channels, and of its pixels, if channels are few. A block
// multiplies its sums of its pixels with its columns of w1, which gives a part of every hidden value. These parts all
// blocks get, the one time that they meet; then each computes the gates of its channels, by rows of w2 that no block
// but those with the same channels reads. With FEW images nothing but latency counts: pixels and weights are all
// under way from the beginning, in registers.
//
// The prologue defines value_t; CLUSTER, blocks of a cluster; FEW; PACK, elements of a 16-byte vector; HIDDEN_PACK,
// what divides it and the hidden values; inner and outer, functions of acc_t; and Params: x, w1 [hidden, channels],
// b1, w2 [channels, hidden], b2, out; pixels and channels of an image; hidden; part_bits: there are 2^part_bits parts of
// the channels, and as many neighbours of a cluster have one each; pixels_each of a block; packs of a part and of a row
// of w2, neither more than BLOCK. Shared memory, numbers: SCRATCH, 2 PACK packs, 2 hidden rounded up to 4,
// CLUSTER hidden.

#include "prelude.cuh"
#include "hopper.cuh"

constexpr int WARPS = BLOCK / 32;
// Packs of a thread that are under way at a time, as many as registers allow: of pixels, which of FEW images stay there
// until they are scaled, and of either matrix.
constexpr int KEPT = FEW ? 2560 / BLOCK : 0, HELD = FEW ? (1 << 14) / (PACK * BLOCK) : 4;
constexpr int TOGETHER = 8;  // numbers of a sum

// Before anything is stored: without the fence of a release.
__device__ __forceinline__ void begin_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Rows of packs among the threads of a block: a thread has one pack of every `lanes`th row.
struct Share {
    int packs, lanes, lane, pack;
    __device__ __forceinline__ explicit Share(const Divisor& by)
        : packs(by.value), lanes(by.divide(BLOCK)), lane(by.divide(threadIdx.x)), pack(threadIdx.x - lane * packs) {}
    __device__ __forceinline__ bool works() const { return lane < lanes; }
};

// The thread's pack of `rows` rows, N of them at a time; `pitch` elements lie between rows.
template <int W, int N> struct Rows {
    const value_t* from;
    int pitch, lane, lanes, rows;
    Pack<value_t, W> packs[N > 0 ? N : 1];

    __device__ __forceinline__ Rows(const value_t* first, int pitch, int rows, const Share& share, bool works)
        : from(first + share.pack * W), pitch(pitch), lane(share.lane), lanes(share.lanes), rows(works ? rows : 0) {
        if (FEW) asm("" : "+l"(from));  // which is otherwise computed anew for each row, as registers are few
    }
    // use(pack, offset) for the N rows from `first` on that there are.
    template <typename Use> __device__ __forceinline__ void each(int first, const Use& use) {
        int row = first + lane, offset = row * pitch;
#pragma unroll
        for (int n = 0; n < N; ++n, row += lanes, offset += lanes * pitch)
            if (row < rows) use(packs[n], offset);
    }
    __device__ __forceinline__ void load(int first) {
        each(first, [&](Pack<value_t, W>& pack, int offset) { pack = load_pack<W>(from + offset); });
    }
    // The rows behind the first N.
    template <typename Use> __device__ __forceinline__ void each_left(const Use& use) const {
        int row = N * lanes + lane, offset = row * pitch;
#pragma unroll 4
        for (; row < rows; row += lanes, offset += lanes * pitch) use(load_pack<W>(from + offset), offset);
    }
};

// Of `count` sums of `terms` numbers each; use(k, sum) by one thread. As many threads share a sum as there are.
template <typename Use>
__device__ __forceinline__ void sum_up(const acc_t* numbers, int count, int step, int terms, int term_step,
                                       const Use& use) {
    if (count <= 0) return;
    const int shift = min(5, max(0, __clz(count - 1) - __clz(BLOCK - 1))), threads = 1 << shift;
    const int part = threadIdx.x & (threads - 1);
#pragma unroll 1
    for (int first = 0; first < count; first += BLOCK >> shift) {  // the same for all threads
        const int k = first + (threadIdx.x >> shift);
        const acc_t* at = numbers + (k * step + part * term_step);
        acc_t sum = 0;
#pragma unroll 1
        for (int left = k < count ? terms - part : 0; left > 0;) {
            acc_t found[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n, left -= threads, at += threads * term_step)
                found[n] = left > 0 ? *at : acc_t(0);
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) sum += found[n];
        }
#pragma unroll 1
        for (int other = threads / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (k < count && part == 0) use(k, sum);
    }
}

// All rows of a matrix, of which the first ones may be there, times `vector`. Of each row's packs `terms` count.
template <int W, typename Use>
__device__ __forceinline__ void multiply(Rows<W, HELD>& matrix, const Share& share, bool there, int rows, int terms,
                                         const acc_t* vector, acc_t* scratch, const Use& use) {
    const auto factors = shared_pack<W>(vector + share.pack * W);
    const int pitch = share.packs | 1;  // not a multiple of the banks
    const int turn = HELD * share.lanes;
#pragma unroll 1
    for (int first = 0; first < rows; first += turn) {
        if (first > 0 || !there) matrix.load(first);
        if (share.works()) {  // products of rows that there are not nobody adds
            acc_t* to = scratch + share.lane * pitch + share.pack;
#pragma unroll
            for (int n = 0; n < HELD; ++n, to += share.lanes * pitch) {
                acc_t sum = 0;
#pragma unroll
                for (int v = 0; v < W; ++v) sum += at(matrix.packs[n], v) * factors.data[v];
                *to = sum;
            }
        }
        __syncthreads();
        sum_up(scratch, min(turn, rows - first), pitch, terms, 1, [&](int k, acc_t sum) { use(first + k, sum); });
        __syncthreads();
    }
}

// Numbers that are under way until they are put into shared memory.
struct Bias {
    const value_t* from;
    int count;
    Pack<value_t, 1> first;
    __device__ __forceinline__ Bias(const value_t* from, int count) : from(from), count(count) {
        if (static_cast<int>(threadIdx.x) < count) first = load_pack<1>(from + threadIdx.x);
    }
    __device__ __forceinline__ void put(acc_t* to) const {
        if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = at(first, 0);
#pragma unroll 1
        for (int k = threadIdx.x + BLOCK; k < count; k += BLOCK) to[k] = to_acc(from[k]);
    }
};

__device__ __forceinline__ void add(const Pack<value_t, PACK>& pixel, acc_t (&own)[PACK]) {
#pragma unroll
    for (int v = 0; v < PACK; ++v) own[v] += at(pixel, v);
}

// Before weights are under way, which take registers: of a small image nothing is left.
__device__ __forceinline__ void add_what_is_not_kept(const Rows<PACK, KEPT>& x, acc_t (&own)[PACK]) {
    x.each_left([&](const Pack<value_t, PACK>& pixel, int) { add(pixel, own); });
}

// What the pixels of all threads add up to, for every channel of the block.
__device__ __forceinline__ void sum_pixels(Rows<PACK, KEPT>& x, acc_t (&own)[PACK], const Share& share, acc_t* sums,
                                           acc_t* scratch) {
    x.each(0, [&](const Pack<value_t, PACK>& pixel, int) { add(pixel, own); });
    const int channels = share.packs * PACK, pitch = channels | 4;
    if (share.works())
#pragma unroll
        for (int v = 0; v < PACK; ++v) scratch[share.lane * pitch + share.pack * PACK + v] = own[v];
    __syncthreads();
    sum_up(scratch, channels, 1, share.lanes, pitch, [&](int c, acc_t sum) { sums[c] = sum; });
    __syncthreads();
}

__device__ __forceinline__ void scale_pixels(Rows<PACK, KEPT>& x, const Share& share, const acc_t* gates,
                                             value_t* out) {
    const auto gate = shared_pack<PACK>(gates + share.pack * PACK);
    value_t* to = out + share.pack * PACK;
    const auto scale = [&](const Pack<value_t, PACK>& pixel, int offset) {
        acc_t found[PACK];
#pragma unroll
        for (int v = 0; v < PACK; ++v) found[v] = at(pixel, v) * gate.data[v];
        store_pack(to + offset, found);
    };
    x.each(0, scale);
    x.each_left(scale);
}

// A part of the hidden values into place `rank` of every block: consecutive values by consecutive threads.
__device__ __forceinline__ void send_to_all(const acc_t* values, const acc_t* parts, int count, int rank,
                                            Barrier* barrier) {
    constexpr int SENDERS = WARPS > CLUSTER ? WARPS / CLUSTER : 1;  // warps for each block
    const int warp = threadIdx.x / 32;
    for (int to = warp % CLUSTER; to < CLUSTER; to += WARPS)
        for (int k = warp / CLUSTER * 32 + threadIdx.x % 32; k < count; k += SENDERS * 32)
            send(parts + rank * count + k, barrier, to, values[k]);
}

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK, FEW ? 1 : 2)
    squeeze_excite(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    extern __shared__ float4 memory[];
    __shared__ Barrier barrier;
    const Share share(p.packs), across(p.hidden_packs);
    const int block_channels = share.packs * PACK, rounded = (p.hidden + 3) / 4 * 4;
    acc_t* scratch = reinterpret_cast<acc_t*>(memory);
    acc_t *sums = scratch + SCRATCH, *gates = sums + block_channels, *hidden = gates + block_channels;
    acc_t *mine = hidden + rounded, *parts = mine + rounded;

    if (threadIdx.x == 0) make_barrier(&barrier, 1), barriers_are_made();
    begin_in_cluster();
    const int rank = cluster_rank(), slice = rank >> p.part_bits;
    const int channel = (rank - (slice << p.part_bits)) * block_channels;
    const int channels = max(0, min(block_channels, p.channels - channel));
    const int first = slice * p.pixels_each, pixels = max(0, min(p.pixels_each, p.pixels - first));
    const long long begin = (static_cast<long long>(blockIdx.x / CLUSTER) * p.pixels + first) * p.channels + channel;
    const bool has_pack = share.works() && share.pack * PACK < channels;

    Rows<PACK, KEPT> x(p.x + begin, p.channels, pixels, share, has_pack);
    Rows<PACK, HELD> w1(p.w1 + channel, p.channels, p.hidden, share, has_pack);
    Rows<HIDDEN_PACK, HELD> w2(p.w2 + static_cast<long long>(channel) * p.hidden, p.hidden, channels, across,
                               across.works());
    x.load(0);
    const Bias b1(p.b1, p.hidden), b2(p.b2 + channel, channels);
    acc_t own[PACK] = {};
    add_what_is_not_kept(x, own);
    if (FEW) w1.load(0), w2.load(0);

    sum_pixels(x, own, share, sums, scratch);
    b1.put(hidden), b2.put(gates);
    multiply(w1, share, FEW, p.hidden, channels / PACK, sums, scratch,
             [&](int r, acc_t sum) { mine[r] = sum; });
    wait_for_cluster();  // only who runs can be sent anything
    if (threadIdx.x == 0) expect(&barrier, CLUSTER * p.hidden * sizeof(acc_t));
    send_to_all(mine, parts, p.hidden, rank, &barrier);
    await(&barrier, 0);

    for (int r = threadIdx.x; r < p.hidden; r += BLOCK) {
        acc_t sum = 0;
#pragma unroll
        for (int k = 0; k < CLUSTER; ++k) sum += parts[k * p.hidden + r];
        hidden[r] = inner(sum / p.pixels + hidden[r]);
    }
    __syncthreads();
    multiply(w2, across, FEW, channels, across.packs, hidden, scratch,
             [&](int c, acc_t sum) { gates[c] = outer(sum + gates[c]); });
    scale_pixels(x, share, gates, p.out + begin);
}
