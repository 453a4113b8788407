// Hopper: memory barriers that count bytes, clusters of blocks, the copy engine. On what came before it
// these names exist, so that code which is never chosen there compiles.

namespace fusionrt {

#if __CUDA_ARCH__ >= 900
using Barrier = unsigned long long;

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void make_barrier(Barrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive_in_cluster() {
    barriers_are_made();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(Barrier* barrier, unsigned parity) {
    unsigned done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// A value into the same place of another block, whose barrier counts it. A cluster-wide fence or barrier
// in the place of this waits for all outstanding stores and forgets the L1: kernels ran at a third.
__device__ __forceinline__ void send(const acc_t* local, Barrier* barrier, unsigned rank, acc_t x) {
    unsigned to, counted;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(local)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(rank));
    if constexpr (sizeof(acc_t) == 8)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                     :: "r"(to), "l"(__double_as_longlong(x)), "r"(counted) : "memory");
    else
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(to), "r"(__float_as_uint(static_cast<float>(x))), "r"(counted) : "memory");
}
// A multiple of 16 bytes, 16-byte aligned on both sides.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// The same into the L2: where there is no room for it yet.
__device__ __forceinline__ void prefetch_bulk(const void* global, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(global), "r"(bytes) : "memory");
}
#else
using Barrier = unsigned long long;
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void make_barrier(Barrier*, unsigned) {}
__device__ __forceinline__ void barriers_are_made() {}
__device__ __forceinline__ void arrive_in_cluster() {}
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ void expect(Barrier*, unsigned) {}
__device__ __forceinline__ void await(Barrier*, unsigned) {}
__device__ __forceinline__ void send(const acc_t*, Barrier*, unsigned, acc_t) {}
__device__ __forceinline__ void copy_bulk(void*, const void*, unsigned, Barrier*) {}
__device__ __forceinline__ void prefetch_bulk(const void*, unsigned) {}
#endif

}  // namespace fusionrt
