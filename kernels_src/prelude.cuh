// What every template may use.
//
// No CUDA header is included: a bare translation unit compiles in 25 ms, cuda_fp16.h + cuda_bf16.h
// cost 45 ms more and are the most frequent NVRTC installation fault.
//
// The runtime puts the specialisation's constants before it:
//   using acc_t = float;                    // arithmetic type: float, or double for double tensors
//   constexpr int SIGNIFICANT_BITS = 8;     // of results: 8 bfloat16, 11 float16, 24, 53
//   constexpr bool READS_FIRST = false;     // loads stand before stores in the text

#include "types.cuh"
#include "dependent_launch.cuh"
#include "packs.cuh"
#include "divisors.cuh"
#include "mathematics.cuh"
#include "philox.cuh"
