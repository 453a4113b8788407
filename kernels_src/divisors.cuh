// Division by what is the same for all threads.

namespace fusionrt {

// By an invariant below 2^31: multiply-high, add, shift (Granlund & Montgomery 1994).
struct Divisor {
    unsigned value, multiplier, shift;
    __device__ __forceinline__ unsigned divide(unsigned n) const {
        return (__umulhi(n, multiplier) + n) >> shift;
    }
};
struct WideDivisor {
    unsigned long long value;
    __device__ __forceinline__ unsigned long long divide(unsigned long long n) const { return n / value; }
};

}  // namespace fusionrt
