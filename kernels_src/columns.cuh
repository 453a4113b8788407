// What the threads of a block find of the columns that they own, walking down rows: for pointwise_reduce and
// pointwise_resident, whose prologues say what is here used and not defined.

constexpr int DEPTH = BLOCK / LANES;
template <int W> using Values = acc_t[VALUES][W];

// What a thread has seen of its columns.
template <int W> struct Walk {
    Values<W> values;
    unsigned seen = 0;
    RandomState random;
    __device__ __forceinline__ explicit Walk(const Params& p) : random(random_state(p)) { start<W>(values); }
    // N tiles, the elements before which are `apart`; the first one's stand at position `at` of their row.
    template <int N>
    __device__ __forceinline__ void take_in(const Params& p, const index_t (&i)[N], const Tile<W> (&tiles)[N],
                                            index_t at, index_t apart) {
        acc_t found[N][GROUPS][W];
#pragma unroll
        for (int n = 0; n < N; ++n) finish<W>(p, i[n], tiles[n], draws<W>(random, i[n]), found[n]);
        take<N, W>(values, found, Order{static_cast<acc_t>(seen), at, apart});
        seen += N;
    }
};

template <int G = 0>
__device__ __forceinline__ void join_all(acc_t (&mine)[VALUES], const acc_t (&other)[VALUES]) {
    join<G>(mine, other);
    if constexpr (G + 1 < GROUPS) join_all<G + 1>(mine, other);
}

// The threads of a block that own the same columns leave what they found in shared memory, where every thread
// joins its share of one column (or of some); the shares are joined as a tree.
constexpr int WIDTH = LANES * VEC, OWN = WIDTH > BLOCK ? WIDTH / BLOCK : 1, SHARES = WIDTH < BLOCK ? BLOCK / WIDTH : 1;
template <int G = 0>
__device__ __forceinline__ void join_columns(const Values<VEC>& values, acc_t (&joined)[OWN][VALUES],
                                             acc_t (&shared)[MOST][DEPTH][WIDTH]) {
    constexpr int FIRST = Group<G>::FIRST, COUNT = Group<G>::COUNT;
    const int first = threadIdx.x % LANES * VEC, depth = threadIdx.x / LANES;
    const int column = threadIdx.x % WIDTH, share = threadIdx.x / WIDTH;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared[k][depth][first + v] = values[FIRST + k][v];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) joined[n][FIRST + k] = shared[k][share][column + n * BLOCK];
#pragma unroll
        for (int d = SHARES; d < DEPTH; d += SHARES) {
            acc_t other[VALUES];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) other[FIRST + k] = shared[k][share + d][column + n * BLOCK];
            join<G>(joined[n], other);
        }
    }
#pragma unroll
    for (int half = SHARES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (share >= half)
#pragma unroll
            for (int k = 0; k < COUNT; ++k) shared[k][share][column] = joined[0][FIRST + k];
        __syncthreads();
        if (share < half) {
            acc_t other[VALUES];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) other[FIRST + k] = shared[k][share + half][column];
            join<G>(joined[0], other);
        }
    }
    if constexpr (G + 1 < GROUPS) join_columns<G + 1>(values, joined, shared);
}

