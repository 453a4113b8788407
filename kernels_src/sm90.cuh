// Hopper's matrix units and tensor copies, for architecture sm_90a.
//
// A tile in shared memory has rows of 128 bytes whose 16-byte units are exchanged by the copy engine (unit ^
// row % 8), so that neither it nor the matrix units meet bank conflicts; it begins at a multiple of 1024.

namespace fusionrt {

// A matrix in global memory and the box of it that one copy moves, as cuTensorMapEncodeTiled writes them.
struct alignas(64) TensorMap { unsigned long long words[16]; };

template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
// The box at (column, row) into shared memory; what lies outside of the matrix is 0, and counted as well.
__device__ __forceinline__ void load_box(void* shared, const TensorMap* map, int column, int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}
// Into the same place of every block of the cluster whose bit is set, each of whose barriers counts it.
__device__ __forceinline__ void load_box_for(unsigned short blocks, void* shared, const TensorMap* map, int column,
                                             int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)),
                    "h"(blocks) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap* map, int column, int row, const void* shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(map), "r"(column), "r"(row), "r"(shared_address(shared)) : "memory");
}
// Until all but the last COUNT boxes that this thread stores have left shared memory.
template <int COUNT> __device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(COUNT) : "memory");
}
// Before the copy engine or the matrix units read what this thread wrote into shared memory.
__device__ __forceinline__ void show_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// At a barrier of any block of the cluster. With a release that is said to be the cluster's, every arrival would
// wait for all outstanding stores; what is released here has only been read.
__device__ __forceinline__ void arrive_at(Barrier* barrier, unsigned rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 :: "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Where a tile lies, for the matrix units: address and the distance of groups of eight rows in units of 16
// bytes, and the exchange of units.
__device__ __forceinline__ unsigned long long describe(const void* shared) {
    return (static_cast<unsigned long long>(1) << 62) | (static_cast<unsigned long long>(1024 >> 4) << 32)
           | (static_cast<unsigned long long>(1) << 16) | ((shared_address(shared) & 0x3ffff) >> 4);
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last COUNT groups of products are done.
template <int COUNT> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(COUNT) : "memory");
}

// Two values as neighbours of 16 bits.
__device__ __forceinline__ unsigned pair_of(float16_t, float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned pair_of(bfloat16_t, float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 of_pair(float16_t, unsigned pair) {
    return {to_acc(float16_t{static_cast<unsigned short>(pair)}), to_acc(float16_t{static_cast<unsigned short>(pair >> 16)})};
}
__device__ __forceinline__ float2 of_pair(bfloat16_t, unsigned pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
// Four matrices of 8 × 8: lane l says where row l % 8 of matrix l / 8 lies, and holds two neighbours of each.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned address, unsigned (&pairs)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(address) : "memory");
}

// Two warpgroups in turns. A copy's barrier tells a phase from its neighbours only: a warpgroup may wait for it once
// the one before has waited for all that comes before.
__device__ __forceinline__ void await_turn(unsigned group) {
    asm volatile("bar.sync %0, 256;" :: "r"(1 + group) : "memory");
}
__device__ __forceinline__ void give_turn(unsigned group) {
    asm volatile("bar.arrive %0, 256;" :: "r"(1 + group) : "memory");
}

}  // namespace fusionrt
