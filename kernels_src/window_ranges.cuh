// What is known of a range of elements, for windows: how two neighbouring ranges become one.
//
// Nothing is ever subtracted from a sum, so that an infinity or NaN that leaves the window leaves nothing behind,
// and nothing cancels. Squares are summed about a pivot that lies in every window it serves: then their sum is at
// most (window + 1) times that about the mean, which costs the rounding of as many terms.
//
// `join(a, b)`: a lies before b. `none(at)`: of no elements; a range joined to it from the right has to begin at `at`.
// `one(x, pivot, at)`: of x. Before this file: FAMILY, LARGEST, INDEXED.

constexpr int TOTAL = 0, EXTREME = 1, MOMENTS = 2, PLACED = 3;       // FAMILY; the last one is EXTREME, INDEXED

struct Total {
    acc_t sum;
    static __device__ __forceinline__ Total none(int = 0) { return {acc_t(0)}; }
    static __device__ __forceinline__ Total one(acc_t x, acc_t, int) { return {x}; }
};
__device__ __forceinline__ Total join(Total a, Total b) { return {a.sum + b.sum}; }

struct Extreme {
    acc_t value;
    static __device__ __forceinline__ Extreme none(int = 0) { return {acc_t(LARGEST ? -inf : inf)}; }
    static __device__ __forceinline__ Extreme one(acc_t x, acc_t, int) { return {x}; }
};
__device__ __forceinline__ Extreme join(Extreme a, Extreme b) {
    return {LARGEST ? maximum(a.value, b.value) : minimum(a.value, b.value)};
}

// With the first place where it is; NaN is more extreme than any number.
struct Placed {
    acc_t value;
    int index;
    static __device__ __forceinline__ Placed none(int at = 0x7fffffff) { return {acc_t(LARGEST ? -inf : inf), at}; }
    static __device__ __forceinline__ Placed one(acc_t x, acc_t, int at) { return {x, at}; }
};
__device__ __forceinline__ Placed join(Placed a, Placed b) {
    const bool second = a.value == a.value && !(LARGEST ? b.value <= a.value : b.value >= a.value);
    return second ? b : a;
}

struct Shifted {
    acc_t sum, squares;   // of x - pivot
    static __device__ __forceinline__ Shifted none(int = 0) { return {acc_t(0), acc_t(0)}; }
    static __device__ __forceinline__ Shifted one(acc_t x, acc_t pivot, int) {
        return {x - pivot, (x - pivot) * (x - pivot)};
    }
};
__device__ __forceinline__ Shifted join(Shifted a, Shifted b) { return {a.sum + b.sum, a.squares + b.squares}; }

struct Moments {
    acc_t n, mean, squares;   // about the mean
    static __device__ __forceinline__ Moments none(int = 0) { return {acc_t(0), acc_t(0), acc_t(0)}; }
};
__device__ __forceinline__ Moments join(Moments a, Moments b) {      // Chan, Golub & LeVeque 1983
    const acc_t n = a.n + b.n, d = b.mean - a.mean, part = b.n / n;
    const Moments both = {n, a.mean + d * part, a.squares + b.squares + d * d * (a.n * part)};
    return a.n == acc_t(0) ? b : b.n == acc_t(0) ? a : both;
}

// Whatever their order.
template <typename S> __device__ __forceinline__ S join_any(S a, S b) { return join(a, b); }
__device__ __forceinline__ Placed join_any(Placed a, Placed b) { return b.index < a.index ? join(b, a) : join(a, b); }

template <int F> struct Of { using Sum = Total; using State = Total; };
template <> struct Of<EXTREME> { using Sum = Extreme; using State = Extreme; };
template <> struct Of<PLACED> { using Sum = Placed; using State = Placed; };
template <> struct Of<MOMENTS> { using Sum = Shifted; using State = Moments; };
using Sum = Of<INDEXED ? PLACED : FAMILY>::Sum;                      // while elements are added, about a pivot
using Value = Of<INDEXED ? PLACED : FAMILY>::State;                  // what is kept
struct State : Value {};

// From sums about a pivot to what is kept, and back; n elements.
template <typename S> __device__ __forceinline__ S kept(S s, acc_t, acc_t) { return s; }
__device__ __forceinline__ Moments kept(Shifted s, acc_t pivot, acc_t n) {
    const acc_t mean = n > acc_t(0) ? s.sum * (acc_t(1) / n) : acc_t(0);
    return {n, pivot + mean, s.squares - s.sum * mean};
}
template <typename S> __device__ __forceinline__ S about(S s, acc_t, acc_t) { return s; }
__device__ __forceinline__ Shifted about(Moments s, acc_t pivot, acc_t n) {
    const acc_t d = s.mean - pivot, sum = n * d;
    return {sum, s.squares + sum * d};
}
// About a pivot that is `by` lower.
template <typename S> __device__ __forceinline__ S moved(S s, acc_t, acc_t) { return s; }
__device__ __forceinline__ Shifted moved(Shifted s, acc_t by, acc_t n) {
    const acc_t sum = s.sum + n * by;
    return {sum, s.squares + by * (s.sum + sum)};
}
template <typename S> __device__ __forceinline__ acc_t pivot_of(S) { return acc_t(0); }
__device__ __forceinline__ acc_t pivot_of(Moments s) { return s.mean; }

template <typename S> __device__ __forceinline__ acc_t number_of(S) { return acc_t(0); }
__device__ __forceinline__ acc_t number_of(Moments s) { return s.n; }
