// Token ids to what a language model takes: padded inputs, attention mask, positions, labels; one block a row.
//
// A row of `width` results holds a sequence of `count` tokens, at most `limit`, with BOS and EOS around them, at its
// beginning or (LEFT) its end. Of a RAGGED batch the sequences lie one behind the other and all of their tokens are
// real; of a padded one those are real that are not p.pad, and the sequence begins (LEFT) with the first of these. Element
// i of the result has a Philox counter of its own: which tokens a masked language model has to guess does not depend on
// how the work is cut.
//
// Before this file: source_t (of ids; uint8_t: bytes, to which p.shift is added), index_t, RAGGED, LEFT, BOS, EOS,
// SHIFTED (inputs are the labels one place later), MASKED (labels are of chosen tokens), CHECKED.

#include "prelude.cuh"
#include "indices.cuh"

__device__ __forceinline__ bool is_special(const Params& p, int64_t id) {
    for (int k = 0; k < p.n_special; ++k)
        if (p.special[k] == id) return true;
    return false;
}

// Of a row of a padded batch: how many p.pad it begins with.
__device__ __forceinline__ int64_t padding_before(const Params& p, int64_t begin) {
    __shared__ int first;
    for (int64_t base = 0; base < p.size; base += BLOCK) {
        __syncthreads();
        if (threadIdx.x == 0) first = BLOCK;
        __syncthreads();
        const int64_t at = base + threadIdx.x;
        if (at < p.size && p.ids[begin + at] != p.pad) atomicMin(&first, static_cast<int>(threadIdx.x));
        __syncthreads();
        if (first < BLOCK) return base + first;
    }
    return p.size;
}

struct Row {
    const source_t* ids;
    int64_t first, count;  // of the sequence in the row of results
    __device__ __forceinline__ explicit Row(const Params& p) {
        const int64_t row = blockIdx.x;
        int64_t begin = row * p.size, end = begin + p.size;
        if (RAGGED) {
            begin = p.offsets[row], end = p.offsets[row + 1];
            const bool fits = 0 <= begin && begin <= end && end <= p.total;
            if (!fits) {
                if (threadIdx.x == 0) report_index(p.fault, 2, begin < 0 || begin > p.total ? begin : end);
                begin = end = 0;
            }
        } else if (LEFT) {
            begin += padding_before(p, begin);
        }
        const int64_t tokens = end - begin + (BOS ? 1 : 0) + (EOS ? 1 : 0);
        ids = p.ids + begin;
        count = min(tokens, p.limit);
        first = LEFT ? p.width - count : 0;
    }
    __device__ __forceinline__ bool has(int64_t at) const { return at >= first && at < first + count; }
    __device__ __forceinline__ int64_t token(const Params& p, int64_t at) const {
        if (!has(at)) return p.pad;
        const int64_t k = at - first;
        if (EOS && k == count - 1) return p.eos;
        if (BOS && k == 0) return p.bos;
        const int64_t id = ids[k - (BOS ? 1 : 0)];
        return sizeof(source_t) == 1 ? id + p.shift : id;
    }
    __device__ __forceinline__ bool real(const Params& p, int64_t at, int64_t id) const {
        return has(at) && (RAGGED || sizeof(source_t) == 1 || id != p.pad);
    }
};

// How many of the block's earlier threads say yes; `all`: how many of all.
__device__ __forceinline__ int earlier(bool yes, int (&totals)[BLOCK / 32], int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned votes = __ballot_sync(0xffffffffu, yes);
    __syncthreads();  // the last totals have been read
    if (lane == 0) totals[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1));
    all = 0;
#pragma unroll
    for (int w = 0; w < BLOCK / 32; ++w) {
        if (w < warp) before += totals[w];
        all += totals[w];
    }
    return before;
}

extern "C" __global__ void __launch_bounds__(BLOCK) tokens(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    __shared__ int totals[BLOCK / 32];
    const Row row(p);
    const RandomState state = MASKED && p.state != nullptr ? RandomState{p.state[0], p.state[1] + p.offset}
                                                           : RandomState{p.seed, p.offset};
    int64_t positions = 0;
    for (int64_t base = 0; base < p.width; base += BLOCK) {
        const int64_t at = base + threadIdx.x, out = blockIdx.x * p.width + at;
        const bool inside = at < p.width;
        const int64_t id = inside ? row.token(p, at) : p.pad;
        const bool real = inside && row.real(p, at, id);
        int all;
        const int64_t position = positions + earlier(real, totals, all);
        positions += all;
        if (!inside) continue;
        if (CHECKED && real && (id < 0 || id >= p.vocab_size)) report_index(p.fault, 1, id);
        int64_t input = id, label = real ? id : p.ignore;
        if (SHIFTED) input = at == row.first ? p.first_input : row.token(p, at - 1);
        if (MASKED) {
            unsigned w[4];
            philox(state, static_cast<unsigned long long>(out), w);
            const bool chosen = real && w[0] < p.chosen_below && !is_special(p, id);
            if (!chosen) label = p.ignore;
            else if (w[1] < p.masked_below) input = p.mask;
            else if (w[1] < p.random_below)
                input = static_cast<int64_t>(static_cast<unsigned long long>(w[2]) * p.vocab_size >> 32);
        }
        p.input_ids[out] = static_cast<index_t>(input);
        p.attention_mask[out] = real;
        p.position_ids[out] = static_cast<index_t>(real ? position : 1);
        p.labels[out] = static_cast<index_t>(label);
    }
}
