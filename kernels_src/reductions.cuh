// What a kernel over rows reduces: sums, maxima, softmax terms, moments. For each, how a thread takes in
// neighbouring values and how two partial results are joined.
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
__device__ __forceinline__ acc_t reference(acc_t top) { return top == -acc_t(inf) ? acc_t(0) : top; }
// A term of a sum that is at least 1: what is below 2^-126 need not be told from 0.
__device__ __forceinline__ acc_t term(acc_t a) {
    if constexpr (HALF) return ex2(LOG2_E * a);
    else return exp(a);
}

template <int W> __device__ __forceinline__ void collect_sum(acc_t& sum, const acc_t (&x)[W]) { sum += total(x); }
template <int W> __device__ __forceinline__ void collect_max(acc_t& top, const acc_t (&x)[W]) {
    top = maximum(top, most(x));
}
template <int W>
__device__ __forceinline__ void collect_softmax(acc_t& top, acc_t& sum, const acc_t (&x)[W]) {
    const acc_t next = maximum(top, most(x)), at = reference(next);
    acc_t e[W];
#pragma unroll
    for (int v = 0; v < W; ++v) e[v] = term(x[v] - at);
    sum = sum * term(top - at) + total(e);
    top = next;
}
__device__ __forceinline__ void combine_sum(acc_t& sum, acc_t other) { sum += other; }
__device__ __forceinline__ void combine_max(acc_t& top, acc_t other) { top = maximum(top, other); }
__device__ __forceinline__ void combine_softmax(acc_t& top, acc_t& sum, acc_t other_top, acc_t other_sum) {
    const acc_t next = maximum(top, other_top), at = reference(next);
    sum = sum * term(top - at) + other_sum * term(other_top - at);
    top = next;
}
// How many, their mean, and the sum of the squares of their distances from it: Chan, Golub & LeVeque 1983.
__device__ __forceinline__ void combine_moments(acc_t& count, acc_t& mean, acc_t& squares, acc_t other_count,
                                                acc_t other_mean, acc_t other_squares) {
    const acc_t both = count + other_count, apart = other_mean - mean;
    const acc_t share = both > acc_t(0) ? other_count * near_reciprocal(both) : acc_t(0);
    squares += other_squares + (count > acc_t(0) ? apart * apart * (count * share) : acc_t(0));  // never inf * 0
    mean += apart * share;
    count = both;
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
template <int W>
__device__ __forceinline__ void collect_moments(acc_t& count, acc_t& mean, acc_t& squares, const acc_t (&x)[W]) {
    const acc_t here = paired_total(x) * acc_t(1.0 / W);
    acc_t d[W];
#pragma unroll
    for (int v = 0; v < W; ++v) d[v] = (x[v] - here) * (x[v] - here);
    combine_moments(count, mean, squares, W, here, total(d));
}

// Element after element. Moments: distances from the first one, which a thread keeps in `count` until it
// has seen all of its n. As that is one of them, what cancels is at most n times as large as the result.
__device__ __forceinline__ void take_sum(acc_t& sum, acc_t x, bool) { sum += x; }
__device__ __forceinline__ void take_max(acc_t& top, acc_t x, bool) { top = maximum(top, x); }
__device__ __forceinline__ void take_softmax(acc_t& top, acc_t& sum, acc_t x, bool) {
    if (!(x <= top)) {  // rarely
        const acc_t next = maximum(top, x);
        sum *= term(top - reference(next));
        top = next;
    }
    sum += term(x - reference(top));
}
__device__ __forceinline__ void take_moments(acc_t& origin, acc_t& sum, acc_t& squares, acc_t x, bool first) {
    if (first) origin = x;
    const acc_t distance = x - origin;
    sum += distance;
    squares += distance * distance;
}
__device__ __forceinline__ void settle_moments(acc_t& count, acc_t& mean, acc_t& squares, unsigned seen) {
    const acc_t n = static_cast<acc_t>(seen), sum = mean, shift = seen ? sum / n : acc_t(0), lost = sum * shift;
    if (squares != acc_t(inf)) squares = squares < lost ? acc_t(0) : squares - lost;
    mean = count + shift;
    count = n;
}

}  // namespace fusionrt
