// The gradient of a table: rows of an incoming gradient, summed by their index. In a fixed order, without atomics.
//
// The indices come sorted, with where they stood before. They are cut into chunks of p.chunk, whatever their
// values: one value may have them all.
//   STAGE 0   A team of LANES threads goes through a chunk. The sum of an index that has no rows elsewhere is
//             written; that of one which goes on from the chunk before is the chunk's partial sum `before`, that
//             of one which only goes on in the next chunk its partial sum `after`.
//   STAGE 1   Where an index goes on beyond the chunk that it begins in, a block adds up: `after` of that chunk and
//             `before` of those that follow.
//
// The prologue defines scalar_t, index_t, VEC (elements of a pack), LANES and STAGE.

constexpr int TEAMS = BLOCK / LANES, AHEAD = 4;  // rows whose loads are under way at a time

__device__ __forceinline__ acc_t* before(const Params& p, int64_t chunk) { return p.partials + 2 * chunk * p.columns; }
__device__ __forceinline__ acc_t* after(const Params& p, int64_t chunk) { return before(p, chunk) + p.columns; }

__device__ __forceinline__ void write(const Params& p, int64_t index, unsigned column, acc_t (&sum)[VEC]) {
    if (index < 0 || index >= p.rows || index == p.padding) return;
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] *= static_cast<acc_t>(p.scale);
    store_pack<scalar_t, VEC>(p.out + index * p.columns + column, sum);
}

struct Chunk {
    int64_t begin, end;
    bool goes_on_before, goes_on_after;   // the first index, the last one
};

__device__ __forceinline__ Chunk chunk_at(const Params& p, int64_t c) {
    Chunk chunk = {c * p.chunk, min((c + 1) * p.chunk, p.count), false, false};
    chunk.goes_on_before = c > 0 && p.indices[chunk.begin - 1] == p.indices[chunk.begin];
    chunk.goes_on_after = chunk.end < p.count && p.indices[chunk.end - 1] == p.indices[chunk.end];
    return chunk;
}

__device__ __forceinline__ void sum_chunk(const Params& p, int64_t c, unsigned column) {
    const Chunk chunk = chunk_at(p, c);
    bool goes_on_before = chunk.goes_on_before;
    int64_t index = p.indices[chunk.begin];
    acc_t sum[VEC] = {};
    for (int64_t i = chunk.begin; i < chunk.end; i += AHEAD) {
        int64_t next[AHEAD];
        Pack<scalar_t, VEC> rows[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (i + a < chunk.end) {
                next[a] = p.indices[i + a];
                rows[a] = load_pack<VEC>(p.grad + p.order[i + a] * p.columns + column);
            }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (i + a >= chunk.end) continue;
            if (next[a] != index) {
                if (goes_on_before) store_pack<acc_t, VEC>(before(p, c) + column, sum);
                else write(p, index, column, sum);
                index = next[a], goes_on_before = false;
#pragma unroll
                for (int v = 0; v < VEC; ++v) sum[v] = 0;
            }
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += at(rows[a], v);
        }
    }
    if (goes_on_before) store_pack<acc_t, VEC>(before(p, c) + column, sum);
    else if (chunk.goes_on_after) store_pack<acc_t, VEC>(after(p, c) + column, sum);
    else write(p, index, column, sum);
}

// The last chunk that an index has rows in, which goes on from the one before `from`.
__device__ __forceinline__ int64_t last_chunk(const Params& p, int64_t from, int64_t index) {
    int64_t low = from * p.chunk, high = p.count;  // rows at low or before have the index, those at high do not
    while (low + 1 < high) {
        const int64_t middle = low + (high - low) / 2;
        if (p.indices[middle] == index) low = middle;
        else high = middle;
    }
    return low / p.chunk;
}

// Each team adds up neighbouring chunks, the first team the sums of all of them.
__device__ __forceinline__ void join(const Params& p, int64_t c, unsigned column, int team, int lane) {
    __shared__ acc_t shared[TEAMS][LANES * VEC];
    const Chunk chunk = chunk_at(p, c);
    const int64_t index = p.indices[chunk.end - 1];
    if (!chunk.goes_on_after || (chunk.goes_on_before && p.indices[chunk.begin] == index)) return;
    const bool exists = column < p.columns;
    const int64_t last = last_chunk(p, c + 1, index), share = (last - c + TEAMS - 1) / TEAMS;
    acc_t sum[VEC] = {};
    if (exists)
        for (int64_t k = c + 1 + team * share; k <= min(last, c + (team + 1) * share); ++k) {
            const auto part = load_pack<VEC>(static_cast<const acc_t*>(before(p, k)) + column);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += part.data[v];
        }
#pragma unroll
    for (int v = 0; v < VEC; ++v) shared[team][lane * VEC + v] = sum[v];
    __syncthreads();
    if (team > 0 || !exists) return;
    const auto first = load_pack<VEC>(static_cast<const acc_t*>(after(p, c)) + column);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        sum[v] = first.data[v];
        for (int other = 0; other < TEAMS; ++other) sum[v] += shared[other][lane * VEC + v];
    }
    write(p, index, column, sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK) embedding_backward(const __grid_constant__ Params p) {
    const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned column = (blockIdx.y * LANES + lane) * VEC;
    if constexpr (STAGE == 0) {
        const int64_t c = static_cast<int64_t>(blockIdx.x) * TEAMS + team;
        if (c * p.chunk < p.count && column < p.columns) sum_chunk(p, c, column);
    } else {
        join(p, blockIdx.x, column, team, lane);
    }
}
