// What a kernel over rows reduces: sums, maxima, first maxima, softmax terms, moments. For each, how a thread takes
// in neighbouring values and how two partial results are joined.
//
// A softmax is a maximum and, relative to it, a sum of exponentials: joined online, as in
// Milakov & Gimelshein 2018. While a maximum is -inf its sum is 0.

namespace fusionrt {

// One after the other, so that a product becomes part of the addition.
template <int W> __device__ __forceinline__ acc_t total(const acc_t (&x)[W]) {
    acc_t y = x[0];
#pragma unroll
    for (int v = 1; v < W; ++v) y += x[v];
    return y;
}
template <int W> __device__ __forceinline__ acc_t most(const acc_t (&x)[W]) {
    acc_t y = x[0];
#pragma unroll
    for (int v = 1; v < W; ++v) y = maximum(y, x[v]);
    return y;
}
__device__ __forceinline__ acc_t finite_top(acc_t top) { return top == -acc_t(inf) ? acc_t(0) : top; }
// e^a as a term of a sum that is at least 1, a <= 0: what is below 2^-126 need not be told from 0, and the
// product's rounding, |a| / 2 ulp of the term, is no ulp of the sum, as |a| e^a < 0.37. Two instructions
// of seven an element; the accurate function's nine made the sum wait for arithmetic instead of memory.
__device__ __forceinline__ acc_t term(acc_t a) {
    if constexpr (sizeof(acc_t) == 4) return ex2(LOG2_E * a);
    else return exp(a);
}

template <int W> __device__ __forceinline__ void collect_sum(acc_t& sum, const acc_t (&x)[W]) { sum += total(x); }
template <int W> __device__ __forceinline__ void collect_max(acc_t& top, const acc_t (&x)[W]) {
    top = maximum(top, most(x));
}
template <int W>
__device__ __forceinline__ void collect_softmax(acc_t& top, acc_t& sum, const acc_t (&x)[W]) {
    const acc_t next = maximum(top, most(x)), at = finite_top(next);
    acc_t e[W];
#pragma unroll
    for (int v = 0; v < W; ++v) e[v] = term(x[v] - at);
    sum = sum * term(top - at) + total(e);
    top = next;
}
// The first of the largest elements, and where it stands; a NaN is larger than all. Its position, an integer, lies in
// an acc_t bit by bit. A row of -inf alone: position 0, with which everyone begins.
struct Index { int64_t value; };
__device__ __forceinline__ acc_t held(unsigned long long position) {
    if constexpr (sizeof(acc_t) == 4) return __uint_as_float(static_cast<unsigned>(position));
    else return static_cast<acc_t>(__longlong_as_double(static_cast<long long>(position)));
}
__device__ __forceinline__ unsigned long long position_of(acc_t held) {
    if constexpr (sizeof(acc_t) == 4) return __float_as_uint(held);
    else return static_cast<unsigned long long>(__double_as_longlong(held));
}
__device__ __forceinline__ Index index_of(acc_t held) { return {static_cast<int64_t>(position_of(held))}; }
__device__ __forceinline__ Index cast_int64(Index index) { return index; }
template <typename T> __device__ __forceinline__ T from_acc(Index index) { return static_cast<T>(index.value); }

// Packs of VEC elements, STEP apart, the first at `column`.
template <int VEC, int STEP, int W, typename I>
__device__ __forceinline__ void collect_first(acc_t& top, acc_t& at, const acc_t (&x)[W], I column) {
    const acc_t here = most(x);
    if (here <= top || top != top) return;
    int nth = 0;
#pragma unroll
    for (int v = W - 1; v >= 0; --v)
        if (x[v] == here || x[v] != x[v]) nth = v / VEC * STEP + v % VEC;
    top = here, at = held(column + nth);
}
__device__ __forceinline__ void combine_first(acc_t& top, acc_t& at, acc_t other_top, acc_t other_at) {
    const bool nan_here = top != top, nan_there = other_top != other_top;
    const bool alike = nan_here ? nan_there : other_top == top;
    const bool wins = alike ? position_of(other_at) < position_of(at) : !nan_here && !(other_top <= top);
    top = wins ? other_top : top, at = wins ? other_at : at;
}
__device__ __forceinline__ void combine_sum(acc_t& sum, acc_t other) { sum += other; }
__device__ __forceinline__ void combine_max(acc_t& top, acc_t other) { top = maximum(top, other); }
__device__ __forceinline__ void combine_softmax(acc_t& top, acc_t& sum, acc_t other_top, acc_t other_sum) {
    const acc_t next = maximum(top, other_top), at = finite_top(next);
    sum = sum * term(top - at) + other_sum * term(other_top - at);
    top = next;
}
// How many; what the mean lost to rounding; their mean; the sum of the squares of their distances from it:
// Chan, Golub & LeVeque 1983. Far from 0 the means' rounding would be most of what is between two of them.
__device__ __forceinline__ void combine_moments(acc_t& count, acc_t& lost, acc_t& mean, acc_t& squares,
                                                acc_t other_count, acc_t other_lost, acc_t other_mean,
                                                acc_t other_squares) {
    const bool any = count > acc_t(0);
    const acc_t apart = (other_mean - mean) + (other_lost - lost);
    const acc_t share = any ? other_count * near_reciprocal(count + other_count) : acc_t(1), weight = count * share;
    squares += other_squares + (weight > acc_t(0) ? apart * apart * weight : acc_t(0));  // never inf * 0
    const acc_t step = apart * share, next = mean + step, taken = next - mean;  // Knuth's exact sum
    lost = any ? lost + ((mean - (next - taken)) + (step - taken)) : other_lost;
    mean = any ? next : other_mean;
    count += other_count;
}

// Join the values of N neighbouring lanes, a power of two, in all of them. (A softmax's maximum first: one
// exponential a lane instead of two a step.)
template <int N> __device__ __forceinline__ void join_lanes_sum(acc_t& sum) {
#pragma unroll
    for (int offset = N / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
}
template <int N> __device__ __forceinline__ void join_lanes_max(acc_t& top) {
#pragma unroll
    for (int offset = N / 2; offset > 0; offset /= 2) top = maximum(top, __shfl_xor_sync(0xffffffffu, top, offset));
}
template <int N> __device__ __forceinline__ void join_lanes_first(acc_t& top, acc_t& at) {
    const acc_t mine = top;
    join_lanes_max<N>(top);
    unsigned long long least = mine == top || mine != mine ? position_of(at) : ~0ull;
    if constexpr (sizeof(acc_t) == 4) {
        unsigned word = static_cast<unsigned>(least);
#pragma unroll
        for (int offset = N / 2; offset > 0; offset /= 2) word = min(word, __shfl_xor_sync(0xffffffffu, word, offset));
        least = word;
    } else {
#pragma unroll
        for (int offset = N / 2; offset > 0; offset /= 2) least = min(least, __shfl_xor_sync(0xffffffffu, least, offset));
    }
    at = held(least);
}
template <int N> __device__ __forceinline__ void join_lanes_softmax(acc_t& top, acc_t& sum) {
    const acc_t mine = top;
    join_lanes_max<N>(top);
    sum *= term(mine - finite_top(top));
    join_lanes_sum<N>(sum);
}
// About the mean of the lanes' means, of which the differences to the true mean are then taken off: a third of the
// instructions of joining two by two, which is left for rows that not every lane has a part of.
template <int N>
__device__ __forceinline__ void join_lanes_moments(acc_t& count, acc_t& lost, acc_t& mean, acc_t& squares) {
    if (__all_sync(0xffffffffu, count > acc_t(0))) {
        acc_t centre = mean;
#pragma unroll
        for (int offset = N / 2; offset > 0; offset /= 2)  // of equal means it is that mean
            centre = acc_t(0.5) * centre + acc_t(0.5) * __shfl_xor_sync(0xffffffffu, centre, offset);
        const acc_t apart = (mean - centre) + lost;
        acc_t total = count * apart;
        squares += total * apart;
        join_lanes_sum<N>(count);
        join_lanes_sum<N>(total);
        join_lanes_sum<N>(squares);
        mean = centre, lost = total * near_reciprocal(count);
        squares = maximum(squares - total * lost, acc_t(0));
    } else {
#pragma unroll
        for (int offset = N / 2; offset > 0; offset /= 2)
            combine_moments(count, lost, mean, squares, __shfl_xor_sync(0xffffffffu, count, offset),
                            __shfl_xor_sync(0xffffffffu, lost, offset), __shfl_xor_sync(0xffffffffu, mean, offset),
                            __shfl_xor_sync(0xffffffffu, squares, offset));
    }
}
// In pairs, so that the mean of equal values is that value, and their variance 0.
template <int W> __device__ __forceinline__ acc_t paired_total(const acc_t (&x)[W]) {
    if constexpr (W == 1) {
        return x[0];
    } else {
        acc_t half[W / 2];
#pragma unroll
        for (int v = 0; v < W / 2; ++v) half[v] = x[v] + x[v + W / 2];
        return paired_total<W / 2>(half);
    }
}
// A thread has few packs: what its own mean loses is little.
template <int W>
__device__ __forceinline__ void collect_moments(acc_t& count, acc_t&, acc_t& mean, acc_t& squares,
                                                const acc_t (&x)[W]) {
    const acc_t here = paired_total(x) * acc_t(1.0 / W), apart = here - mean, both = count + acc_t(W);
    acc_t d[W];
#pragma unroll
    for (int v = 0; v < W; ++v) d[v] = (x[v] - here) * (x[v] - here);
    const bool any = count > acc_t(0);
    const acc_t share = acc_t(W) * near_reciprocal(both);
    squares += total(d) + (any ? apart * apart * (count * share) : acc_t(0));
    mean = any ? mean + apart * share : here;
    count = both;
}

// N elements of a column, one after the other: how many there were before, where in the row the first one stands,
// and how far the next ones are apart. Moments: Welford 1962; the reciprocals serve all columns of a thread.
struct Order { acc_t before; unsigned long long at, apart; };
template <int N> __device__ __forceinline__ void take_sum(acc_t& sum, const acc_t (&x)[N], const Order&) {
#pragma unroll
    for (int n = 0; n < N; ++n) sum += x[n];
}
template <int N> __device__ __forceinline__ void take_max(acc_t& top, const acc_t (&x)[N], const Order&) {
#pragma unroll
    for (int n = 0; n < N; ++n) top = maximum(top, x[n]);
}
// Equal elements have equal bits, as -0 + 0 is 0, and all NaN become one.
template <int N> __device__ __forceinline__ void take_first(acc_t& top, acc_t& at, const acc_t (&x)[N], const Order& order) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const acc_t next = maximum(top, x[n] + acc_t(0));
        at = position_of(next) == position_of(top) ? at : held(order.at + n * order.apart);
        top = next;
    }
}
template <int N> __device__ __forceinline__ void take_softmax(acc_t& top, acc_t& sum, const acc_t (&x)[N], const Order&) {
    collect_softmax(top, sum, x);
}
template <int N>
__device__ __forceinline__ void take_moments(acc_t& count, acc_t&, acc_t& mean, acc_t& squares, const acc_t (&x)[N],
                                             const Order& order) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        count = order.before + acc_t(n + 1);
        const acc_t distance = x[n] - mean;
        mean += distance * near_reciprocal(count);  // of the first: x
        squares += distance * (x[n] - mean);
    }
}

}  // namespace fusionrt
