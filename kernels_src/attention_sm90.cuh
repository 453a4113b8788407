// What Hopper's attention kernels share: heads as the copy engine takes them, products, scores.
//
// A tile of a head, rows of D elements, lies in D / 64 panels of 64 columns, one after the other, each as
// sm90.cuh says. Of 8 columns of a product of 64 rows a thread has two neighbours in row lane / 4 of its warp's
// 16 rows, then two in the row 8 below; column 2 (lane % 4) is the first.

namespace fusionrt {

// Boxes of a map whose dimensions are columns, rows, heads, batches.
struct Head { int head, batch; };

__device__ __forceinline__ void load_rows(void* shared, const TensorMap* map, int column, int row, Head at,
                                          Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row), "r"(at.head), "r"(at.batch),
                    "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void store_rows(const TensorMap* map, int column, int row, Head at, const void* shared) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(map), "r"(column), "r"(row), "r"(at.head), "r"(at.batch), "r"(shared_address(shared))
                 : "memory");
}
// ROWS rows of all D columns.
template <int D, int ROWS> __device__ __forceinline__ void load_panels(unsigned char* shared, const TensorMap* map,
                                                                        int row, Head at, Barrier* full) {
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
        load_rows(shared + panel * ROWS * 128, map, panel * 64, row, at, full);
}
template <int D, int ROWS> __device__ __forceinline__ void load_tile(unsigned char* shared, const TensorMap* map,
                                                                      int row, Head at, Barrier* full) {
    expect(full, ROWS * D * 2);
    load_panels<D, ROWS>(shared, map, row, at, full);
}

// A tile as the second factor of a product over its rows instead of its columns.
__device__ __forceinline__ unsigned long long describe_across(const void* shared, unsigned panel_bytes) {
    return (static_cast<unsigned long long>(1) << 62) | (static_cast<unsigned long long>(1024 >> 4) << 32)
           | (static_cast<unsigned long long>(panel_bytes >> 4) << 16) | ((shared_address(shared) & 0x3ffff) >> 4);
}

// 64 × N products of 16 of T, whose instructions name each of their registers: the prologue defines
//   Tiles<T, N>::multiply(sums, a, b, add)    both in shared memory
//   Across<T, N>::multiply(sums, a, b)        a in registers, b across; adds
template <typename T, int N> struct Tiles;
template <typename T, int N> struct Across;

// Orders s = a b^T. a: 64 rows of a tile of ROWS; b: a tile of N rows; D columns.
template <typename T, int D, int ROWS, int N> __device__ __forceinline__ void order_tiles(
    const unsigned char* a, const unsigned char* b, float (&s)[N / 2]) {
    const unsigned long long first = describe(a), second = describe(b);
    begin_products();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        Tiles<T, N>::multiply(s, first + (i / 4 * ROWS * 128 + i % 4 * 32 >> 4),
                              second + (i / 4 * N * 128 + i % 4 * 32 >> 4), i > 0);
    commit_products();
}
// Orders sums += a b. a: 64 × N; b: a tile of N rows of D columns.
template <typename T, int D, int N> __device__ __forceinline__ void order_across(
    const unsigned (&a)[N / 4], const unsigned char* b, float (&sums)[D / 2]) {
    const unsigned long long second = describe_across(b, N * 128);
    begin_products();
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
        const unsigned part[4] = {a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]};
        Across<T, D>::multiply(sums, part, second + (i * 16 * 128 >> 4));
    }
    commit_products();
}
// No use of a register may move up to before a wait that stands in front of this.
template <int N> __device__ __forceinline__ void hold(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i]) :: "memory");
}

// A ring of tiles in shared memory.
template <int STAGES, unsigned BYTES> struct Ring {
    unsigned char* tiles;
    Barrier* barriers;       // that they are full, that they are empty
    unsigned stage, parity;

    __device__ __forceinline__ Ring(unsigned char* tiles, Barrier* barriers)
        : tiles(tiles), barriers(barriers), stage(0), parity(0) {}
    __device__ __forceinline__ unsigned char* tile() const { return tiles + stage * BYTES; }
    __device__ __forceinline__ Barrier* full() const { return barriers + stage; }
    __device__ __forceinline__ Barrier* empty() const { return barriers + STAGES + stage; }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A query at a position attends to the keys from position - left to position + right.
struct Band { int left, right, offset, queries, keys; };  // query i is at the position i + offset
struct Range { int first, last; };

// Tiles of keys that some of ROWS queries from `row` on attend to.
template <int ROWS, int TILE> __device__ __forceinline__ Range tiles_of_keys(const Band& b, int row) {
    const int low = max(row + b.offset - b.left, 0);
    const int high = min(min(row + ROWS, b.queries) + b.offset + b.right, b.keys);
    return {low / TILE, high > low ? (high + TILE - 1) / TILE : low / TILE};
}
// Tiles of queries that attend to some of ROWS keys from `row` on.
template <int ROWS, int TILE> __device__ __forceinline__ Range tiles_of_queries(const Band& b, int row) {
    const int low = max(row - b.offset - b.right, 0);
    const int high = min(min(row + ROWS, b.keys) - b.offset + b.left, b.queries);
    return {low / TILE, high > low ? (high + TILE - 1) / TILE : low / TILE};
}

template <typename Params> __device__ __forceinline__ Band band_of(const Params& p) {
    return {p.left, p.right, p.offset, p.queries, p.keys};
}

// Whether one of 64 queries, the first of which has the position `first`, does not attend to a key of a tile.
template <int TILE, typename Params> __device__ __forceinline__ bool has_edge(const Params& p, int first, int key) {
    return key + TILE > p.keys || key + TILE - 1 > first + p.right || key < first + 63 - p.left;
}

// What a block has: ROWS queries of a head, and the tiles of keys that they attend to.
struct Place { int row; Head query, key; Range tiles; };

// The last queries, which have most keys if only those on their left count, come first.
template <int ROWS, int TILE, typename Params> __device__ __forceinline__ Place place_of(const Params& p) {
    const int number = blockIdx.x / p.tiles, head = number % p.heads, batch = number / p.heads;
    const int row = (p.tiles - 1 - blockIdx.x % p.tiles) * ROWS;
    return {row, {head, batch}, {head / p.group, batch}, tiles_of_keys<ROWS, TILE>(band_of(p), row)};
}

// A score, in units of log2, is scale product or cap tanh(inner product), and then -slope |distance|.
enum Alibi { NONE, LEFT, BOTH };  // keys that are attended to lie on the left of the query; on either side
struct Scoring {
    float scale, inner, cap;      // log2(e) scale; scale / softcap; log2(e) softcap
    float near;                   // 0.75 / inner: products up to that have a cheaper tanh
};
template <bool SOFTCAP> __device__ __forceinline__ float factor(const Scoring& s) { return SOFTCAP ? s.cap : s.scale; }

struct Tanh { float value, derivative; };
template <bool NEAR> __device__ __forceinline__ Tanh tanh_of(const Scoring& s, float product) {
    if constexpr (NEAR) {  // 6e-7 of it off, and nothing of the special-function unit, which exponentials need
        const float x = product * s.inner, square = x * x;
        float by = fmaf(square, 0.0129507279f, -0.0500801901f);
        by = fmaf(square, by, 0.132598308f);
        by = fmaf(square, by, -0.333283482f);
        const float t = x * fmaf(square, by, 0.999999452f);
        return {t, fmaf(-t, t, 1)};
    }
    const float part = rcp(ex2(product * (2 * LOG2_E * s.inner)) + 1), twice = 4 * part;
    return {fmaf(-2, part, 1), fmaf(-twice, part, twice)};
}
// Of a whole warp.
template <int N> __device__ __forceinline__ bool are_near(const Scoring& s, const float (&products)[N]) {
    float most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < N; ++i) most[i % 2] = fmaxf(most[i % 2], fabsf(products[i]));
    return __all_sync(~0u, fmaxf(most[0], most[1]) <= s.near);
}

__device__ __forceinline__ float infinite() { return static_cast<float>(inf); }
// Of row r those whose column, counted from this thread's first one, is outside of [low, high] become `value`.
template <int N> __device__ __forceinline__ void exclude(float (&values)[N], int r, int low, int high, float value) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (8 * i + c < low || 8 * i + c > high) values[4 * i + 2 * r + c] = value;
}
// The same of neighbours of 16 bits; 0 in their place.
template <int N> __device__ __forceinline__ void exclude(unsigned (&pairs)[N], int r, int low, int high) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        if (8 * i < low || 8 * i > high) pairs[2 * i + r] &= 0xffff0000u;
        if (8 * i + 1 < low || 8 * i + 1 > high) pairs[2 * i + r] &= 0xffffu;
    }
}
// Keys, those of a tile from `key` on, that a thread's queries do not attend to: `value` in their place.
template <typename Params, int N> __device__ __forceinline__ void mask(const Params& p, int position, int key,
                                                                       float value, float (&s)[N]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = position + 8 * r;
        exclude(s, r, at - p.left - key, min(at + p.right, p.keys - 1) - key, value);
    }
}
// As the first factor of another product.
template <typename T, int N> __device__ __forceinline__ void pack(const float (&values)[N], unsigned (&pairs)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = pair_of(T{}, values[2 * i], values[2 * i + 1]);
}

__device__ __forceinline__ void release(Barrier* empty, unsigned lane) {
    if (lane == 0) arrive(empty);
}
// One thread of the last warpgroup fills rings, the others compute.
template <int GROUPS, typename Load, typename Compute> __device__ __forceinline__ void divide_block(
    const Load& load, const Compute& compute) {
    const unsigned group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one number for a warp
    if (group == GROUPS) {
        give_registers<24>();
        if (threadIdx.x % 128 == 0) load();
        __syncwarp();
    } else {
        take_registers<GROUPS == 2 ? 240 : 160>();
        compute(group);
    }
}

// The threads of one warpgroup; barriers from 1 on.
__device__ __forceinline__ void sync_group(unsigned barrier) {
    asm volatile("bar.sync %0, 128;" :: "r"(barrier) : "memory");
}
// A warp's 16 rows of a product of 64 × D, times a factor for either of a thread's rows, to global memory by way
// of those rows of a tile of ROWS, which nobody reads any more.
template <typename T, int D, int ROWS> __device__ __forceinline__ void store_product(
    const float (&sums)[D / 2], const float (&factors)[2], unsigned char* tile, unsigned row_of_tile,
    const TensorMap* map, int row, Head at, unsigned lane) {
    const unsigned matrix_row = lane % 16, unit = lane / 16;
#pragma unroll
    for (int i = 0; i < D / 8; i += 2) {
        unsigned pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            pairs[k] = pair_of(T{}, sums[4 * i + 2 * k] * factors[k % 2], sums[4 * i + 2 * k + 1] * factors[k % 2]);
        const unsigned to = shared_address(tile + i / 8 * ROWS * 128 + (row_of_tile + matrix_row) * 128);
        store_matrices(to + ((i % 8 + unit ^ matrix_row % 8) << 4), pairs);
    }
    show_to_engines();
    __syncwarp();
    if (lane == 0)
#pragma unroll
        for (int panel = 0; panel < D / 64; ++panel)
            store_rows(map, panel * 64, row, at, tile + panel * ROWS * 128 + row_of_tile * 128);
}

}  // namespace fusionrt
