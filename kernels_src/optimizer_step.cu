// One step of an optimizer for all parameters of a kind: a block takes CHUNK elements of one tensor.
//
// The runtime gives RULE and its flags, the dtypes param_t, grad_t and state_t, STATES (0 to 3 an element),
// MASTER (float32 copies of 16-bit parameters), STOCHASTIC (rounding of 16-bit states), CHUNK and W.
// Bound by memory: AdamW in float32 moves 28 bytes an element. 16 bytes of each of its four inputs a thread, and
// six blocks of 256 threads: 96 KB of loads in flight on each multiprocessor.

#include "prelude.cuh"

constexpr bool QUANTISED = sizeof(state_t) == 1;
constexpr int KEPT = STATES ? STATES : 1;  // an array of none cannot be declared
// Blocks on a multiprocessor. Left to itself the compiler gives AdamW 62 registers, and a third fewer loads are in
// flight; more than these and something spills.
constexpr bool HEAVY = QUANTISED || STOCHASTIC || sizeof(acc_t) == 8;
constexpr int RESIDENT = HEAVY ? 2 : sizeof(param_t) < 4 || STATES > 2 || __CUDA_ARCH__ < 800 ? 4 : 6;

// As good as exact, without the exact ones' branches, whose calls make registers spill: the approximate ones'
// residual, once; where that is no number (0, infinity) they are right by themselves.
__device__ __forceinline__ float near_sqrt(float x) {
    float root, inverse;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    const float refined = ::fmaf(::fmaf(-root, root, x), 0.5f * inverse, root);
    return ::fabsf(refined) < float(inf) ? refined : root;
}
__device__ __forceinline__ float near_quotient(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    const float refined = ::fmaf(::fmaf(-quotient, b, a), rcp(b), quotient);
    return ::fabsf(refined) < float(inf) ? refined : quotient;
}
__device__ __forceinline__ double near_sqrt(double x) { return ::sqrt(x); }
__device__ __forceinline__ double near_quotient(double a, double b) { return a / b; }

// ---------------------------------------------------------------------------------------------
// The rules: x is the parameter, g its gradient, s its state. What torch computes in a kernel of its own is rounded
// here as well: a factor near 1 rounds the same way for hundreds of steps.

// An infinite x without decay is no NaN.
__device__ __forceinline__ acc_t decayed(acc_t g, acc_t x, const Scalars& k) {
    return k.decay != acc_t(0) ? g + k.decay * x : g;
}

// beta x + weight g, as torch's lerp: of small betas x may be much larger than what is left of it.
__device__ __forceinline__ acc_t lerp(acc_t x, acc_t g, acc_t weight, acc_t beta) {
    return weight < acc_t(0.5) ? x + weight * (g - x) : g - beta * (g - x);
}

__device__ __forceinline__ void update(acc_t& x, acc_t g, acc_t (&s)[KEPT], const Scalars& k, const Params& p) {
    if constexpr (RULE != AVERAGE) g *= k.factor;
    if constexpr (RULE == ADAM) {
        if constexpr (DECOUPLED) x = mul_rn(x, k.decay);
        else g = decayed(g, x, k);
        s[0] = lerp(s[0], g, p.weight1, p.beta1);
        s[1] = mul_rn(p.beta2, s[1]) + p.weight2 * g * g;
        acc_t second = s[1];
        if constexpr (STATES == 3) second = s[2] = maximum(s[2], s[1]);  // amsgrad
        x -= k.size * near_quotient(s[0], near_sqrt(second) * k.correction + p.eps);
    } else if constexpr (RULE == SGD) {
        g = decayed(g, x, k);
        if constexpr (STATES == 1) {  // momentum
            s[0] = k.correction != acc_t(0) ? g : p.beta1 * s[0] + p.weight1 * g;
            g = NESTEROV ? g + p.beta1 * s[0] : s[0];
        }
        x -= k.size * g;
    } else if constexpr (RULE == LION) {
        const acc_t c = lerp(s[0], g, p.weight1, p.beta1);
        x = mul_rn(x, k.decay) - (c > acc_t(0) ? k.size : c < acc_t(0) ? -k.size : c * k.size);  // 0 and NaN stay
        s[0] = lerp(s[0], g, p.weight2, p.beta2);
    } else if constexpr (RULE == AVERAGE) {
        x = lerp(x, g, p.weight1, p.beta1);
    } else {  // SCALE: the parameter is the gradient
        x = g;
    }
}

// ---------------------------------------------------------------------------------------------
// Random bits: philox of (element / 4), 32 bits an element, the low half for the first state, the high one
// for the second. The same on a CPU.

template <int W_> __device__ __forceinline__ void random_bits(const Params& p, const Tensor& t, int64_t i,
                                                              unsigned (&bits)[W_]) {
    const RandomState random{p.seed, static_cast<unsigned long long>(*t.step)};
    const unsigned long long counter = static_cast<unsigned long long>(t.position) << 40 | i >> 2;
    unsigned w[4];
    if constexpr (W_ % 4 == 0) {
#pragma unroll
        for (int v = 0; v < W_; ++v) {
            if (v % 4 == 0) philox(random, counter + v / 4, w);
            bits[v] = w[v % 4];
        }
    } else {
#pragma unroll
        for (int v = 0; v < W_; ++v) {
            philox(random, static_cast<unsigned long long>(t.position) << 40 | (i + v) >> 2, w);
            const int k = static_cast<int>((i + v) & 3);
            bits[v] = k == 0 ? w[0] : k == 1 ? w[1] : k == 2 ? w[2] : w[3];
        }
    }
}

// bfloat16 above or below x with the odds that make x the mean.
__device__ __forceinline__ bfloat16_t rounded_by_chance(acc_t x, unsigned bits16) {
    const unsigned word = __float_as_uint(static_cast<float>(x));
    if ((word & 0x7f800000u) == 0x7f800000u) return from_acc<bfloat16_t>(x);
    return {static_cast<unsigned short>((word + bits16) >> 16)};
}

// ---------------------------------------------------------------------------------------------
// W_ neighbours, or a single element

template <int W_, typename T> __device__ __forceinline__ void fetch(const T* from, acc_t (&to)[W_]) {
    // Not the read-only path of load_pack: this very kernel writes there. Of an address read from memory the
    // compiler does not know where it points.
    __builtin_assume(__isGlobal(from));
    const Pack<T, W_> pack = *reinterpret_cast<const Pack<T, W_>*>(from);
#pragma unroll
    for (int v = 0; v < W_; ++v) to[v] = at(pack, v);
}

template <int W_, bool WIDE_GRAD>
__device__ __forceinline__ void fetch_gradient(const grad_t* from, acc_t (&to)[W_]) {
    if constexpr (WIDE_GRAD) {
        fetch<W_>(from, to);
    } else {
#pragma unroll
        for (int v = 0; v < W_; ++v) to[v] = to_acc(from[v]);
    }
}

template <int W_>
__device__ __forceinline__ void put_state(state_t* to, const acc_t (&x)[W_], const unsigned (&bits)[W_], int n) {
    if constexpr (STOCHASTIC) {
        Pack<state_t, W_> pack;
#pragma unroll
        for (int v = 0; v < W_; ++v)
            pack.data[v] = n == 2 ? from_acc<state_t>(x[v])
                                  : rounded_by_chance(x[v], n ? bits[v] >> 16 : bits[v] & 0xffffu);
        store_bytes<Pack<state_t, W_>::BYTES>(to, &pack);
    } else {
        store_pack(to, x);
    }
}

template <int W_, bool WIDE_GRAD>
__device__ __forceinline__ void step_pack(const Params& p, const Tensor& t, const grad_t* grad, int64_t i,
                                          const Scalars& k) {
    acc_t x[W_], g[W_], s[KEPT][W_];
    param_t* param = static_cast<param_t*>(t.param) + i;
    if constexpr (MASTER) fetch<W_>(t.master + i, x);
    else if constexpr (RULE != SCALE) fetch<W_>(param, x);
    fetch_gradient<W_, WIDE_GRAD>(grad + i, g);
#pragma unroll
    for (int n = 0; n < STATES; ++n) fetch<W_>(static_cast<const state_t*>(t.state[n]) + i, s[n]);
#pragma unroll
    for (int v = 0; v < W_; ++v) {
        acc_t own[KEPT];
#pragma unroll
        for (int n = 0; n < STATES; ++n) own[n] = s[n][v];
        update(x[v], g[v], own, k, p);
#pragma unroll
        for (int n = 0; n < STATES; ++n) s[n][v] = own[n];
    }
    if constexpr (MASTER) store_pack(t.master + i, x);
    store_pack(param, x);
    unsigned bits[W_];
    if constexpr (STOCHASTIC) random_bits(p, t, i, bits);
#pragma unroll
    for (int n = 0; n < STATES; ++n) put_state(static_cast<state_t*>(t.state[n]) + i, s[n], bits, n);
}

// ---------------------------------------------------------------------------------------------
// 8-bit states: a code is a level on a logarithmic scale, eight to an octave, below the largest magnitude of
// its block of 256; 0 is zero. A warp has one block, a lane eight neighbours. The first moment has a sign and
// 127 levels and is rounded to the nearest; the second has 255 and is rounded by chance, or else its steps of
// a thousandth would be lost in levels 9 % apart; its maximum (amsgrad) must not drift upwards: nearest.
// fusionrt/optim/quantised.py says why.

constexpr int OCTAVE = 8, PER_LANE = 8, QUANTUM = 32 * PER_LANE;

__device__ __forceinline__ float decoded(unsigned code, float scale, int n) {
    const int top = n ? 255 : 127, level = n ? code : code & 127;
    const float magnitude = level ? scale * ex2(static_cast<float>(level - top) / OCTAVE) : scale * 0.0f;
    return n || code < 128 ? magnitude : -magnitude;
}

__device__ __forceinline__ unsigned encoded(float x, float scale, int n, unsigned bits16) {
    const int top = n ? 255 : 127;
    const float magnitude = ::fabsf(x);
    if (!(magnitude > 0)) return 0;
    const float place = lg2(near_quotient(magnitude, scale)) * OCTAVE + top;
    int level;
    if (n == 1) {
        level = static_cast<int>(::floorf(place));
        const float odds = (ex2((place - level) / OCTAVE) - 1.0f) * 11.048456f;  // 1 / (2^(1/8) - 1)
        level += odds * 65536.0f > bits16 + 0.5f;
    } else {
        level = static_cast<int>(::rintf(place));
    }
    level = clamped(level, n ? 1 : 0, top);  // a second moment of zero would make the step infinite
    return n || x > 0 || !level ? level : level | 128;
}

// NaN counts as the largest: as integers, the bits of magnitudes have their order.
__device__ __forceinline__ float warp_top(const acc_t (&x)[PER_LANE]) {
    int top = 0;
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) top = max(top, __float_as_int(::fabsf(static_cast<float>(x[v]))));
#pragma unroll
    for (int lane = 16; lane; lane /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, lane));
    return __int_as_float(top);
}

template <bool WIDE>
__device__ __forceinline__ void step_quantised(const Params& p, const Tensor& t, const grad_t* grad, int64_t i,
                                               int count, const Scalars& k) {
    acc_t x[PER_LANE], g[PER_LANE], s[KEPT][PER_LANE];
    param_t* param = static_cast<param_t*>(t.param) + i;
    Pack<uint8_t, PER_LANE> codes[KEPT];
    if constexpr (WIDE) {
        if constexpr (MASTER) fetch<PER_LANE>(t.master + i, x);
        else fetch<PER_LANE>(param, x);
        fetch<PER_LANE>(grad + i, g);
#pragma unroll
        for (int n = 0; n < STATES; ++n)
            codes[n] = *reinterpret_cast<const Pack<uint8_t, PER_LANE>*>(static_cast<uint8_t*>(t.state[n]) + i);
    } else {
#pragma unroll
        for (int v = 0; v < PER_LANE; ++v) {
            const bool inside = v < count;
            x[v] = !inside ? acc_t(0) : MASTER ? t.master[i + v] : to_acc(param[v]);
            g[v] = inside ? to_acc(grad[i + v]) : acc_t(0);
#pragma unroll
            for (int n = 0; n < STATES; ++n)
                codes[n].data[v] = inside ? static_cast<const uint8_t*>(t.state[n])[i + v] : 0;
        }
    }
    const int64_t block = i / QUANTUM;
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
        const float scale = t.scale[n][block];
#pragma unroll
        for (int v = 0; v < PER_LANE; ++v) s[n][v] = decoded(codes[n].data[v], scale, n);
    }
#pragma unroll
    for (int v = 0; v < PER_LANE; ++v) {
        acc_t own[KEPT];
#pragma unroll
        for (int n = 0; n < STATES; ++n) own[n] = s[n][v];
        update(x[v], g[v], own, k, p);
#pragma unroll
        for (int n = 0; n < STATES; ++n) s[n][v] = v < count ? own[n] : acc_t(0);
    }
    unsigned bits[PER_LANE];
    if constexpr (STATES > 1) random_bits(p, t, i, bits);
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
        const float scale = warp_top(s[n]);
        if (threadIdx.x % 32 == 0) t.scale[n][block] = scale;
#pragma unroll
        for (int v = 0; v < PER_LANE; ++v)
            codes[n].data[v] = encoded(s[n][v], scale, n, n == 1 ? bits[v] >> 16 : 0);
    }
    if constexpr (WIDE) {
        if constexpr (MASTER) store_pack(t.master + i, x);
        store_pack(param, x);
#pragma unroll
        for (int n = 0; n < STATES; ++n) store_bytes<PER_LANE>(static_cast<uint8_t*>(t.state[n]) + i, &codes[n]);
    } else {
#pragma unroll
        for (int v = 0; v < PER_LANE; ++v) {
            if (v >= count) break;
            if constexpr (MASTER) t.master[i + v] = x[v];
            param[v] = from_acc<param_t>(x[v]);
#pragma unroll
            for (int n = 0; n < STATES; ++n) static_cast<uint8_t*>(t.state[n])[i + v] = codes[n].data[v];
        }
    }
}

// ---------------------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned(const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) optimizer_step(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const Chunk chunk = p.chunks[blockIdx.x];
    const grad_t* grad = static_cast<const grad_t*>(p.grads[chunk.tensor]);
    Tensor t = p.tensors[chunk.tensor];
    Scalars k;
    bool idle = !grad;
    if constexpr (RULE != AVERAGE) {
        k = p.scalars[chunk.tensor];
        idle = idle || k.skip;
    }
    if constexpr (RULE == SCALE) {
        t.param = const_cast<grad_t*>(grad);
        idle = idle || k.factor == acc_t(1);  // nothing to clip
    }
    const int64_t first = static_cast<int64_t>(chunk.index) * CHUNK;
    // No early return: all that was read above is under way together.
    const int count = idle ? 0 : static_cast<int>(min(static_cast<int64_t>(CHUNK), t.numel - first));
    bool wide = aligned(t.param) && (!MASTER || aligned(t.master));
#pragma unroll
    for (int n = 0; n < STATES; ++n) wide = wide && aligned(t.state[n]);
    if constexpr (QUANTISED) {
        wide = wide && aligned(grad);
        for (int base = threadIdx.x / 32 * QUANTUM; base < count; base += BLOCK * PER_LANE) {  // a warp together
            const int i = base + threadIdx.x % 32 * PER_LANE;
            if (wide && base + QUANTUM <= count) step_quantised<true>(p, t, grad, first + i, PER_LANE, k);
            else step_quantised<false>(p, t, grad, first + i, count - i, k);
        }
    } else {
        const int packed = wide ? count / W * W : 0;
        if (aligned(grad)) {
#pragma unroll 1
            for (int i = threadIdx.x * W; i < packed; i += BLOCK * W) step_pack<W, true>(p, t, grad, first + i, k);
        } else {
#pragma unroll 1
            for (int i = threadIdx.x * W; i < packed; i += BLOCK * W) step_pack<W, false>(p, t, grad, first + i, k);
        }
#pragma unroll 1
        for (int i = packed + threadIdx.x; i < count; i += BLOCK) step_pack<1, false>(p, t, grad, first + i, k);
    }
}
