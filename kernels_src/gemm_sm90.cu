// out = finish(x w^T + bias, residual): x [m, k], w [n, k], out [m, n], rows contiguous, 16-bit.
//
// One block a multiprocessor walks over tiles of 64 HALVES × BN. One thread of the last warpgroup fills a ring
// of stages in shared memory; the others take turns: while one multiplies its tile, the rest finish those
// before, so that the matrix units hardly ever wait. With three, two are finishing: a single one did not keep
// up with a product over 768. An instruction of theirs still costs the matrix units half a clock to a whole one.
//
// Where no block has more than one tile there is nothing to hide behind: two warpgroups share its rows
// (TOGETHER), and either finishes half.
//
// The blocks of a cluster have tiles below each other, and each loads a part of w for all.
//
// The prologue defines
//   GROUPS, TOGETHER, STAGES      warpgroups that compute; whether they share a tile; depth of the ring
//   HALVES, BN, CLUSTER           64 rows and BN columns of a tile; blocks of a cluster
//   CHUNK, DEPTH                  columns of a part of a tile; parts that a warp has memory for
//   BIAS, RESIDUAL, KEEP          whether there is one; whether x w^T + bias is written as well
//   value_t                       float16_t or bfloat16_t
//   Params                        maps of x, w, out, kept, residual; bias; n; steps: of 64 along k; tiles_m, tiles_n:
//                                 of clusters; x_bytes: of the rows that a tile has of x
//   multiply(sums, a, b)          adds 64 × BN products of 16
//   finish(product, residual)

#include "prelude.cuh"
#include "hopper.cuh"
#include "sm90.cuh"

constexpr int BM = 64 * HALVES, BK = 64, WARPS = 4 * GROUPS;
constexpr int BAND = 8;  // tiles below each other that are walked before the next column
constexpr unsigned X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int OWN_HALVES = TOGETHER ? 1 : HALVES;  // of a tile, that a warpgroup has
static_assert(!TOGETHER || (GROUPS == 2 && HALVES == 2), "each has half of a tile");
using Sums = float[OWN_HALVES][BN / 2];
// A warp finishes it in parts of 16 rows, through memory of its own.
constexpr int PARTS = OWN_HALVES * BN / CHUNK, OUTPUTS = KEEP ? 2 : 1;
constexpr unsigned ROW_BYTES = CHUNK * 2, PART_BYTES = 16 * ROW_BYTES;
using Pair = Pack<value_t, 2>;

// Stages, parts of every warp, barriers.
extern __shared__ __align__(1024) unsigned char memory[];
__device__ __forceinline__ Barrier* barriers() {
    return reinterpret_cast<Barrier*>(memory + STAGES * STAGE_BYTES + WARPS * DEPTH * OUTPUTS * PART_BYTES);
}

struct Ring {
    unsigned stage, parity;

    __device__ __forceinline__ unsigned char* x() const { return memory + stage * STAGE_BYTES; }
    __device__ __forceinline__ unsigned char* w() const { return x() + X_BYTES; }
    __device__ __forceinline__ Barrier* full() const { return barriers() + stage; }
    __device__ __forceinline__ Barrier* empty() const { return barriers() + STAGES + stage; }
    __device__ __forceinline__ Barrier* empty_before() const {
        return barriers() + STAGES + (stage == 0 ? STAGES - 1 : stage - 1);
    }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Place { int row, column; };

// Of the t-th tile: some tiles below each other first, so that those on their way share rows and columns.
__device__ __forceinline__ Place place(const Params& p, unsigned t, unsigned rank) {
    const unsigned in_band = BAND * p.tiles_n, band = t / in_band, within = t - band * in_band;
    const unsigned height = min(p.tiles_m - band * BAND, static_cast<unsigned>(BAND)), column = within / height;
    const unsigned row = band * BAND + within - column * height;
    return {static_cast<int>((row * CLUSTER + rank) * BM), static_cast<int>(column * BN)};
}

// ---------------------------------------------------------------------------------------------
// The thread that loads

__device__ __forceinline__ void load_tiles(const Params& p, unsigned rank) {
    constexpr int W_ROWS = BN / CLUSTER;
    Ring ring = {0, 0};
    for (unsigned t = blockIdx.x / CLUSTER; t < p.tiles_m * p.tiles_n; t += gridDim.x / CLUSTER) {
        const Place tile = place(p, t, rank);
        for (unsigned k = 0; k < p.steps; ++k, ring.next()) {
            await(ring.empty(), ring.parity ^ 1);
            Barrier* full = ring.full();
            expect(full, p.x_bytes + W_BYTES);
            load_box(ring.x(), &p.x, k * BK, tile.row, full);
            if constexpr (CLUSTER == 1)
                load_box(ring.w(), &p.w, k * BK, tile.column, full);
            else
                load_box_for((1 << CLUSTER) - 1, ring.w() + rank * W_ROWS * BK * 2, &p.w, k * BK,
                             tile.column + rank * W_ROWS, full);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The warpgroups that multiply and finish

// A warp has read a stage: every block that writes into it hears of it.
__device__ __forceinline__ void release(Barrier* empty, unsigned lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) arrive(empty);
    } else {
        if (lane < CLUSTER) arrive_at(empty, lane);
    }
}

__device__ __forceinline__ void begin_sums(const Params& p, int column, Sums& sums) {
    Pair bias[BN / 8];
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
        bias[i].data[0] = bias[i].data[1] = {0};
        if (BIAS && column + i * 8 < p.n) bias[i] = load_pack<2>(p.bias + column + i * 8);
    }
#pragma unroll
    for (int half = 0; half < OWN_HALVES; ++half)
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) {
            sums[half][i] = at(bias[i / 4], i % 2);
            asm volatile("" : "+f"(sums[half][i]));  // or the compiler would make them again for each half
        }
}

__device__ __forceinline__ void accumulate(const Params& p, Ring& ring, unsigned group, unsigned lane, Sums& sums) {
    const unsigned own = TOGETHER ? group * 64 * BK * 2 : 0;
    for (unsigned k = 0; k < p.steps; ++k, ring.next()) {
        await(ring.full(), ring.parity);
        const unsigned long long x = describe(ring.x() + own), w = describe(ring.w());
        begin_products();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i)
#pragma unroll
            for (int half = 0; half < OWN_HALVES; ++half)
                multiply(sums[half], x + half * (64 * BK * 2 >> 4) + i * 2, w + i * 2);
        commit_products();
        wait_for_products<1>();
        if (k > 0) release(ring.empty_before(), lane);
    }
}

__device__ __forceinline__ void await_sums(const Ring& ring, unsigned lane, Sums& sums) {
    wait_for_products<0>();
    release(ring.empty_before(), lane);
#pragma unroll
    for (int half = 0; half < OWN_HALVES; ++half)  // no use of a sum may move up to before the wait
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(sums[half][i]) :: "memory");
}

// What a warp finishes its 16 rows of each half with. The copy engine brings residuals and takes results.
struct Finisher {
    const Params& p;
    unsigned warp, lane, parity;    // a bit for each of its DEPTH barriers

    __device__ __forceinline__ unsigned char* memory_of(int part, int output = 0) const {
        return memory + STAGES * STAGE_BYTES + ((warp * DEPTH + part % DEPTH) * OUTPUTS + output) * PART_BYTES;
    }
    __device__ __forceinline__ Barrier* loaded(int part) const {
        return barriers() + 2 * STAGES + warp * DEPTH + part % DEPTH;
    }
    __device__ __forceinline__ static Place place_of(Place rows, int part) {
        return {rows.row + part % OWN_HALVES * 64, rows.column + part / OWN_HALVES * CHUNK};
    }

    __device__ __forceinline__ void fetch(Place rows, int part) const {
        const Place at = place_of(rows, part);
        expect(loaded(part), PART_BYTES);
        load_box(memory_of(part), &p.residual, at.column, at.row, loaded(part));
    }
    __device__ __forceinline__ void begin(Place rows) const {
        if (lane == 0) {
            wait_for_stores<0>();
            if constexpr (RESIDUAL) {
#pragma unroll
                for (int part = 0; part < DEPTH && part < PARTS; ++part) fetch(rows, part);
            }
        }
        __syncwarp();
    }

    // Of each 8 × 8 of the sums a lane has neighbours in row lane / 4, as matrix loads and stores want them.
    __device__ __forceinline__ void compute(int part, const float (&sums)[BN / 2]) {
        const unsigned row = lane % 16, unit = lane / 16, exchange = row * ROW_BYTES / 128 % (ROW_BYTES / 16);
        const unsigned to = shared_address(memory_of(part)) + row * ROW_BYTES;
        if constexpr (RESIDUAL) {
            await(loaded(part), parity >> part % DEPTH & 1);
            parity ^= 1u << part % DEPTH;
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i += 2) {
            const unsigned offset = (unit + i ^ exchange) << 4;
            const float* of_pack = sums + (part / OWN_HALVES * CHUNK / 8 + i) * 4;
            unsigned pairs[4];
            if constexpr (KEEP) {
#pragma unroll
                for (int k = 0; k < 4; ++k) pairs[k] = pair_of(value_t{}, of_pack[k * 2], of_pack[k * 2 + 1]);
                store_matrices(to + PART_BYTES + offset, pairs);
            }
            if constexpr (RESIDUAL) load_matrices(to + offset, pairs);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 residual = RESIDUAL ? of_pair(value_t{}, pairs[k]) : float2{0, 0};
                pairs[k] = pair_of(value_t{}, finish(of_pack[k * 2], residual.x), finish(of_pack[k * 2 + 1], residual.y));
            }
            store_matrices(to + offset, pairs);
        }
    }

    __device__ __forceinline__ void store(Place rows, int part) const {
        const Place at = place_of(rows, part);
        show_to_engines();
        __syncwarp();
        if (lane == 0) {
            store_box(&p.out, at.column, at.row, memory_of(part));
            if constexpr (KEEP) store_box(&p.kept, at.column, at.row, memory_of(part, 1));
            // Until the memory of the next part is free, or that of the part before for a residual.
            wait_for_stores<OUTPUTS * (RESIDUAL ? 1 : DEPTH - 1)>();
            if (RESIDUAL && part > 0 && part - 1 + DEPTH < PARTS) fetch(rows, part - 1 + DEPTH);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run(Place rows, const Sums& sums) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            compute(part, sums[part % OWN_HALVES]);
            store(rows, part);
        }
    }
};

__device__ __forceinline__ void compute_tiles(const Params& p, unsigned group, unsigned rank) {
    const unsigned clusters = gridDim.x / CLUSTER, tiles = p.tiles_m * p.tiles_n, lane = threadIdx.x % 32;
    const unsigned first = TOGETHER ? 0 : group, stride = TOGETHER ? 1 : GROUPS;  // of its tiles
    Finisher finisher = {p, threadIdx.x / 32, lane, 0};
    unsigned step = first * p.steps;
    for (unsigned t = blockIdx.x / CLUSTER + first * clusters; t < tiles;
         t += stride * clusters, step += stride * p.steps) {
        const Place tile = place(p, t, rank);
        const int row = tile.row + (threadIdx.x % 128 / 32 * 16 + (TOGETHER ? group * 64 : 0));
        const Place own = {row, tile.column};
        finisher.begin(own);
        Sums sums;
        begin_sums(p, own.column + lane % 4 * 2, sums);
        Ring ring = {step % STAGES, step / STAGES % 2};
        if (!TOGETHER && step > 0) await_turn(group);
        accumulate(p, ring, group, lane, sums);
        if (!TOGETHER && t + clusters < tiles) give_turn(group + 1 < GROUPS ? group + 1 : 0);
        await_sums(ring, lane, sums);
        finisher.run(own, sums);
    }
    if (lane == 0) wait_for_stores<0>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, 1)
gemm_sm90(const __grid_constant__ Params p) {
    const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES + WARPS * DEPTH; ++i)  // full, empty, loaded
            make_barrier(barriers() + i, i / STAGES == 1 ? 4 * CLUSTER * (TOGETHER ? GROUPS : 1) : 1);
        barriers_are_made();
    }
    if constexpr (CLUSTER > 1) arrive_in_cluster(), wait_for_cluster();
    else __syncthreads();
    wait_for_kernel_before();

    const unsigned group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one number for a warp
    if (group == GROUPS) {
        give_registers<24>();
        if (threadIdx.x % 128 == 0) {
            prefetch_map(&p.x), prefetch_map(&p.w), prefetch_map(&p.out);
            load_tiles(p, rank);
        }
        __syncwarp();
    } else {
        take_registers<GROUPS == 2 ? 240 : 160>();
        compute_tiles(p, group, rank);
    }
    if constexpr (CLUSTER > 1) arrive_in_cluster(), wait_for_cluster();  // others write here until then
}
