// The copy engine: boxes of a tensor of five dimensions between global and shared memory (sm_90).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace tilewise::ptx {

struct BoxOrigin {  // innermost dimension first
  int32_t at[5];
};

__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Elements outside of the tensor arrive as zeros, and count in the barrier's bytes.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, uint32_t barrier, BoxOrigin box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4])
      : "memory");
}

// `bytes` consecutive bytes, a multiple of 16, both ends aligned to 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t shared, BoxOrigin box) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(shared), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4])
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Shared memory of all but the latest kPending groups has been read and may be written again.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace tilewise::ptx
