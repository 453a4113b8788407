// Sums over segments of a row, as gradients of channels' weights are, in shared memory until the row ends: a part of
// rows.cu, of whose `Work` it knows.

// Each warp has a place for each of the row's segments, where it alone adds.
__device__ __forceinline__ acc_t* sums_of_segments(unsigned segments, int which, int warp) {
    return reinterpret_cast<acc_t*>(memory + SEGMENTS_AT) + (which * (BLOCK / 32) + warp) * segments;
}
template <typename P>  // whose members exist only where there are segments
__device__ __forceinline__ void clear_segments(const P& p, const Work& work) {
    const int warp = threadIdx.x / 32;
    for (unsigned s = work.lane % 32; s < p.segments; s += 32)
        for (int which = 0; which < SEGMENT_SUMS; ++which) sums_of_segments(p.segments, which, warp)[s] = 0;
    __syncwarp();
}
// Of the segment that a lane is at. The packs of a warp's lanes are neighbours, so few segments have part in them.
struct Running { unsigned segment; OfSegments sums; };

__device__ __forceinline__ unsigned within(const Work& work, column_t column) { return min(column, work.end - 1); }

template <typename P>
__device__ __forceinline__ Running at_first_segment(const P& p, const Work& work) {
    return {segment_of(p, within(work, work.first)), {}};
}
template <typename P>
__device__ __forceinline__ void flush(const P& p, const Running& running) {
    const unsigned last = __shfl_sync(0xffffffffu, running.segment, 31);
    for (unsigned segment = __shfl_sync(0xffffffffu, running.segment, 0); segment <= last; ++segment)
#pragma unroll
        for (int which = 0; which < SEGMENT_SUMS; ++which) {
            acc_t sum = running.segment == segment ? running.sums[which] : acc_t(0);
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (threadIdx.x % 32 == 0) sums_of_segments(p.segments, which, threadIdx.x / 32)[segment] += sum;
        }
}
template <typename P>
__device__ __forceinline__ void add_to_segments(const P& p, const Work& work, column_t column, const OfSegments& sums,
                                                Running& running) {
    const unsigned mine = segment_of(p, within(work, column));
    if (__any_sync(0xffffffffu, mine != running.segment)) {
        flush(p, running);
        running = {mine, {}};
    }
#pragma unroll
    for (int which = 0; which < SEGMENT_SUMS; ++which) running.sums[which] += sums[which];
}
// What the row's warps have, in their order.
template <typename P>
__device__ __forceinline__ void store_segments(const P& p, const Work& work, unsigned rank) {
    meet();
    for (unsigned i = work.lane; i < SEGMENT_SUMS * p.segments && work.valid; i += THREADS) {
        const unsigned which = i / p.segments, segment = i - which * p.segments;
        acc_t sum = 0;
        for (int warp = 0; warp < WARPS; ++warp)
            sum += sums_of_segments(p.segments, which, work.team * WARPS + warp)[segment];
        const unsigned long long row = static_cast<unsigned long long>(which * CLUSTER + rank) * p.rows + work.r;
        p.partials[row * p.segments + segment] = sum;
    }
}
