// Indices from users: one that is out of range is reported, in a place that the host looks at later.

namespace fusionrt {

// Of several the same one is told every time: the largest in absolute value. `argument`, of 1 to 3, says which of a
// call's index tensors it stands in; fusionrt/indices.py reads it.
__device__ __forceinline__ void report_index(unsigned long long* fault, unsigned argument, int64_t index) {
    const int64_t most = 1ll << 59, told = index < -most ? -most : index > most ? most : index;
    const unsigned long long folded = static_cast<unsigned long long>(told) << 1 ^ (told < 0 ? ~0ull : 0ull);
    atomicMax(fault, folded << 2 | argument);
}

}  // namespace fusionrt
