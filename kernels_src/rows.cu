// An expression over rows: norms, softmax, losses, and their gradients.
//
// THREADS threads share a row, or CLUSTER times as many in as many blocks. Several passes go over the row:
// each ends in a reduction among the row's threads, or in a store. Between them a row waits, as it was
// stored,
//   REGISTERS  in the registers of the threads that loaded it;
//   STAGED     in shared memory, where the copy engine put it while the block worked on the row before;
//   STREAMED   nowhere: every pass reads it anew.
//
// Gradients of weights are sums over the rows: blocks are then PERSISTENT, walk over many rows, keep the sums
// of their columns in registers, and leave one row of partial sums each, which `sum_partials` adds up.
// No atomics: two runs give the same bits.
//
// The prologue defines the constants above, KIND being one of the three, and
//   ROWS, BLOCK, VEC, PACKS       rows a block works on at a time; THREADS * ROWS; elements of a pack, packs
//                                 a thread has of a row
//   STAGES, STAGE_BYTES           rows in shared memory, bytes of one
//   PASSES, VALUES, SUMS          passes over the row, uniform values that they find, sums over rows
//   Row, load_row(p, r)           what belongs to one row: where it begins, its uniform operands
//   Tile<W>, load_tile<W>(...)    the row's operands at W columns; staged_tile<W>(...) from shared memory
//   fetch(p, row, ...)            have the copy engine bring a row
//   Known<PASS>, know(...)        uniform expressions of a pass
//   element<PASS, W>(...)         compute W columns: what this pass reduces into found[k], its outputs, sums
//   Values<PASS>::FIRST, COUNT    which of the values this pass finds
//   identity<PASS>, collect<PASS, W>, combine<PASS>    its reductions: start, take in `found`, join two
//   store_row(p, row, values)     outputs with one value a row

// ---------------------------------------------------------------------------------------------
// Among the threads of a row

constexpr int WARPS = (THREADS + 31) / 32, MOST_VALUES = VALUES ? VALUES : 1;

// Two of each, used in turn: who is slow reads one while who is fast writes the other.
struct Exchange {
    acc_t warps[2][ROWS][WARPS][MOST_VALUES];
    acc_t blocks[2][CLUSTER][MOST_VALUES];
    unsigned long long arrived[2];  // mbarriers: a block has the values of all others
};

// No block writes to another before that one has begun and made its barriers.
__device__ __forceinline__ void open(Exchange& exchange) {
    if (threadIdx.x < 2) make_barrier(&exchange.arrived[threadIdx.x], 1);
    cluster_sync();
}

template <int PASS>
__device__ __forceinline__ void reduce(acc_t (&values)[MOST_VALUES], Exchange& exchange, int& turn, int team, int lane) {
    constexpr int FIRST = Values<PASS>::FIRST, COUNT = Values<PASS>::COUNT;
#pragma unroll
    for (int offset = (THREADS < 32 ? THREADS : 32) / 2; offset > 0; offset /= 2) {
        acc_t other[MOST_VALUES];
#pragma unroll
        for (int k = FIRST; k < FIRST + COUNT; ++k) other[k] = __shfl_xor_sync(0xffffffffu, values[k], offset);
        combine<PASS>(values, other);
    }
    if constexpr (WARPS > 1) {
        acc_t(&shared)[WARPS][MOST_VALUES] = exchange.warps[turn & 1][team];
        if (lane % 32 == 0)
#pragma unroll
            for (int k = FIRST; k < FIRST + COUNT; ++k) shared[lane / 32][k] = values[k];
        __syncthreads();
#pragma unroll
        for (int k = FIRST; k < FIRST + COUNT; ++k) values[k] = shared[0][k];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) combine<PASS>(values, shared[w]);
    }
    if constexpr (CLUSTER > 1) {
        const int use = turn & 1;
        if (threadIdx.x == 0) expect(&exchange.arrived[use], CLUSTER * COUNT * sizeof(acc_t));
        if (threadIdx.x < CLUSTER)
#pragma unroll
            for (int k = FIRST; k < FIRST + COUNT; ++k)
                send(&exchange.blocks[use][cluster_rank()][k], &exchange.arrived[use], threadIdx.x, values[k]);
        await(&exchange.arrived[use], turn >> 1 & 1);
#pragma unroll
        for (int k = FIRST; k < FIRST + COUNT; ++k) values[k] = exchange.blocks[use][0][k];
#pragma unroll
        for (int r = 1; r < CLUSTER; ++r) combine<PASS>(values, exchange.blocks[use][r]);
    }
    ++turn;
}

// ---------------------------------------------------------------------------------------------
// Over a row

constexpr column_t STEP = THREADS * VEC;
constexpr int MOST_SUMS = SUMS ? SUMS : 1, HELD = KIND == REGISTERS ? PACKS : 1, SUMMED = SUMS ? PACKS : 1;
using SumsOfColumns = acc_t[SUMMED][MOST_SUMS][VEC];

struct Work {
    Row row;
    bool valid;
    column_t first, end;   // of the block's part of the row
    int team, lane;
    const char* stage;
};

template <int PASS, int W>
__device__ __forceinline__ void one(const Params& p, const Work& work, const Known<PASS>& known,
                                    acc_t (&values)[MOST_VALUES], column_t column, const Tile<W>& tile,
                                    acc_t (&sums)[MOST_SUMS][W]) {
    acc_t found[MOST_VALUES][W];
    element<PASS, W>(p, work.row, known, column, tile, found, sums);
    collect<PASS, W>(values, found);
}

template <int PASS>
__device__ __forceinline__ void look(const Params& p, const Work& work, Tile<VEC> (&tiles)[HELD],
                                     acc_t (&values)[MOST_VALUES], SumsOfColumns& sums) {
    Known<PASS> known;
    know(p, work.row, values, known);
    if constexpr (KIND == STREAMED) {
        for (column_t column = work.first; column < work.end; column += PACKS * STEP) {
            Tile<VEC> ahead[PACKS];
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
                if (column + k * STEP < work.end) ahead[k] = load_tile<VEC>(p, work.row, column + k * STEP);
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
                if (column + k * STEP < work.end)
                    one<PASS, VEC>(p, work, known, values, column + k * STEP, ahead[k], sums[0]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const column_t column = work.first + k * STEP;
            if (column >= work.end) continue;
            if constexpr (KIND == STAGED) {
                const column_t within = (k * THREADS + work.lane) * VEC;
                one<PASS, VEC>(p, work, known, values, column, staged_tile<VEC>(work.stage, within),
                               sums[SUMS ? k : 0]);
            } else {
                one<PASS, VEC>(p, work, known, values, column, tiles[k], sums[SUMS ? k : 0]);
            }
        }
    }
}

template <int PASS>
__device__ __forceinline__ void passes(const Params& p, const Work& work, Tile<VEC> (&tiles)[HELD],
                                       acc_t (&values)[MOST_VALUES], SumsOfColumns& sums, Exchange& exchange, int& turn) {
    identity<PASS>(values);
    if (work.valid) look<PASS>(p, work, tiles, values, sums);
    if constexpr (Values<PASS>::COUNT > 0) reduce<PASS>(values, exchange, turn, work.team, work.lane);
    if constexpr (PASS + 1 < PASSES) {
        // What the compiler computed of a pack it would otherwise keep for the next pass, in full width.
        if constexpr (KIND == REGISTERS)
#pragma unroll
            for (int k = 0; k < PACKS; ++k) hide(tiles[k]);
        passes<PASS + 1>(p, work, tiles, values, sums, exchange, turn);
    }
}

__device__ __forceinline__ void load_tiles(const Params& p, const Work& work, Tile<VEC> (&tiles)[HELD]) {
    if constexpr (KIND == REGISTERS)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            if (work.first + k * STEP < work.end) tiles[k] = load_tile<VEC>(p, work.row, work.first + k * STEP);
}

template <typename P>  // whose members exist only where there are sums
__device__ __forceinline__ void store_sums(const P& p, const Work& work, SumsOfColumns& sums, unsigned block) {
    __shared__ acc_t shared[ROWS > 1 ? ROWS : 1][ROWS > 1 ? THREADS * VEC : 1];
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
#pragma unroll
        for (int k = 0; k < SUMMED; ++k) {
            const column_t column = work.first + k * STEP;
            if constexpr (ROWS > 1) {
                __syncthreads();
#pragma unroll
                for (int v = 0; v < VEC; ++v) shared[work.team][work.lane * VEC + v] = sums[k][s][v];
                __syncthreads();
                for (int other = 1; other < ROWS && work.team == 0; ++other)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) sums[k][s][v] += shared[other][work.lane * VEC + v];
            }
            if (work.team == 0 && column < work.end) {
                const unsigned long long at = static_cast<unsigned long long>(s) * p.chunks + block;
                store_pack<acc_t, VEC>(p.partials + at * p.columns + column, sums[k][s]);
            }
        }
}

// The work on row r, or none beyond the last one.
__device__ __forceinline__ Work begin(const Params& p, unsigned r, unsigned rank) {
    Work work;
    work.valid = r < p.rows;
    work.row = load_row(p, work.valid ? r : p.rows - 1);
    work.team = threadIdx.x / THREADS, work.lane = threadIdx.x % THREADS;
    work.first = rank * p.span + work.lane * VEC;
    work.end = min(p.columns, (rank + 1) * p.span);
    return work;
}

__device__ __forceinline__ void finish(const Params& p, const Work& work, unsigned rank, Tile<VEC> (&tiles)[HELD],
                                       SumsOfColumns& sums, Exchange& exchange, int& turn) {
    acc_t values[MOST_VALUES];
    passes<0>(p, work, tiles, values, sums, exchange, turn);
    if (work.valid && work.lane == 0 && rank == 0) store_row(p, work.row, values);
}

// Rows base + team, and so on every `step` rows.
__device__ __forceinline__ void walk(const Params& p, unsigned base, unsigned step, unsigned rank,
                                     SumsOfColumns& sums, Exchange& exchange) {
    int turn = 0;
    Tile<VEC> tiles[HELD];
    Work work = begin(p, base + threadIdx.x / THREADS, rank);
    load_tiles(p, work, tiles);
    for (;;) {
        base += step;
        const bool more = PERSISTENT && base < p.rows;
        Work next = work;
        Tile<VEC> ahead[HELD];
        if (more) {
            next = begin(p, base + work.team, rank);
            if (next.valid) load_tiles(p, next, ahead);
        }
        finish(p, work, rank, tiles, sums, exchange, turn);
        if (!more) break;
        work = next;
#pragma unroll
        for (int k = 0; k < HELD; ++k) tiles[k] = ahead[k];
    }
}

// The same with the copy engine STAGES - 1 rows ahead, which one thread of each team asks for them. (With a
// barrier of its own for "everyone has left this place", instead of __syncthreads, it was slower.)
__device__ __forceinline__ void walk_staged(const Params& p, unsigned base, unsigned step, unsigned rank,
                                            SumsOfColumns& sums, Exchange& exchange) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Barrier full[ROWS][STAGES];
    const int team = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    char* const mine = memory + team * STAGES * STAGE_BYTES;
    if (threadIdx.x < ROWS * STAGES) make_barrier(&full[threadIdx.x / STAGES][threadIdx.x % STAGES], 1);
    barriers_are_made();
    __syncthreads();
    if (lane == 0)
        for (unsigned s = 0; s < STAGES; ++s)
            if (base + s * step + team < p.rows)
                fetch(p, base + s * step + team, rank, mine + s * STAGE_BYTES, &full[team][s]);

    int turn = 0;
    unsigned place = 0, round = 0;
    Tile<VEC> tiles[HELD];
    Work work = begin(p, base + team, rank);
    for (; base < p.rows; base += step) {
        const Work next = begin(p, base + step + team, rank);  // its uniform operands are on their way
        work.stage = mine + place * STAGE_BYTES;
        if (work.valid) await(&full[team][place], round & 1);
        finish(p, work, rank, tiles, sums, exchange, turn);
        // Who is here has read the row for the last time.
        if constexpr (WARPS > 1) __syncthreads();
        else __syncwarp();
        const unsigned later = base + STAGES * step + team;
        if (lane == 0 && later < p.rows)
            fetch(p, later, rank, mine + place * STAGE_BYTES, &full[team][place]);
        if (++place == STAGES) place = 0, ++round;
        work = next;
    }
}

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK, MIN_BLOCKS) rows(const __grid_constant__ Params p) {
    __shared__ Exchange exchange;
    const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0, block = blockIdx.x / CLUSTER, blocks = gridDim.x / CLUSTER;
    if constexpr (CLUSTER > 1) open(exchange);
    SumsOfColumns sums = {};
    if constexpr (KIND == STAGED) walk_staged(p, block * ROWS, blocks * ROWS, rank, sums, exchange);
    else walk(p, block * ROWS, blocks * ROWS, rank, sums, exchange);
    if constexpr (SUMS > 0) store_sums(p, begin(p, 0, rank), sums, block);
}
