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
// As the first factor of another product.
template <typename T, int N> __device__ __forceinline__ void pack(const float (&values)[N], unsigned (&pairs)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = pair_of(T{}, values[2 * i], values[2 * i + 1]);
}

__device__ __forceinline__ void release(Barrier* empty, unsigned lane) {
    if (lane == 0) arrive(empty);
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
