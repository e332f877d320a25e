// Where forward_sm90 keeps what in shared memory.
#pragma once
#include "cuda/config_sm90.h"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/work_sm90.cuh"

namespace tilewise::cuda {

// What a consumer tells its store warp.
struct StagedTile {
  int32_t tile;  // whose O it has staged: number of its Work; -1: none
  int32_t last;  // there is no more
};

// Addresses in shared memory.
template <ForwardSm90Config C>
struct SharedSm90 {
  uint32_t base;
  __device__ __forceinline__ uint32_t q(int slot) const { return base + slot * C.q_bytes(); }            // [q_rows, d]
  __device__ __forceinline__ uint32_t o(int consumer) const { return base + C.o_offset() + consumer * C.o_bytes(); }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + C.k_offset() + stage * C.k_bytes(); }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + C.v_offset() + stage * C.v_stage_bytes(); }
  __device__ __forceinline__ uint32_t ones(int stage) const {  // [block_n, 64]
    return C.panels() > 1 ? v(stage) + C.k_bytes() : base + C.ones_offset();
  }
  __device__ __forceinline__ uint32_t barrier(int n) const { return base + C.barrier_offset() + 8 * n; }
  __device__ __forceinline__ uint32_t q_full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t q_empty(int slot) const { return barrier(C.q_slots + slot); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 * C.q_slots + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(2 * C.q_slots + C.stages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(2 * C.q_slots + 2 * C.stages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(2 * C.q_slots + 3 * C.stages + stage); }
  __device__ __forceinline__ uint32_t o_full(int consumer) const {
    return barrier(2 * C.q_slots + 4 * C.stages + consumer);
  }
  __device__ __forceinline__ uint32_t o_empty(int consumer) const {
    return barrier(2 * C.q_slots + 4 * C.stages + C.consumers + consumer);
  }
  __device__ __forceinline__ uint32_t work_full(int tile) const {
    return barrier(2 * C.q_slots + 4 * C.stages + 2 * C.consumers + tile % C.kWorkSlots);
  }
  __device__ __forceinline__ uint32_t take_next() const {
    return barrier(2 * C.q_slots + 4 * C.stages + 2 * C.consumers + C.kWorkSlots);
  }
  __device__ __forceinline__ uint32_t bias(int consumer, int stage) const {
    return base + C.bias_offset() + (consumer * C.kBiasStages + stage) * C.kBiasBytes;
  }
  __device__ __forceinline__ uint32_t bias_full(int consumer, int stage) const {
    return barrier(C.other_barriers() + consumer * C.kBiasStages + stage);
  }
  __device__ __forceinline__ uint32_t bias_empty(int consumer, int stage) const {
    return barrier(C.other_barriers() + C.bias_rings() + consumer * C.kBiasStages + stage);
  }
  // Arrivals that complete a phase of barrier n, in the order above. Consumers arrive once per warp: wgmma_wait is a wait of
  // the warp.
  static __device__ __forceinline__ constexpr uint32_t arrivals(int n) {
    if (n >= C.other_barriers()) return n < C.other_barriers() + C.bias_rings() ? 1 : 4;
    if ((n -= 2 * C.q_slots) < 0) return n < -C.q_slots ? 1 : 4 * C.consumers / C.slots_per_tile();
    if ((n -= 4 * C.stages) < 0) return ((n + 4 * C.stages) / C.stages & 1) == 0 ? 1 : 4 * C.consumers;
    return n < C.consumers ? 4 : 1;
  }
  __device__ __forceinline__ Work* work(unsigned char* shared, int tile) const {
    return reinterpret_cast<Work*>(shared + C.work_offset()) + tile % C.kWorkSlots;
  }
  __device__ __forceinline__ StagedTile* staged(unsigned char* shared, int consumer) const {
    return reinterpret_cast<StagedTile*>(shared + C.staged_offset()) + consumer;
  }
  // First of a warp's list of rows to be computed again, -1: none. Only that warp touches it.
  __device__ __forceinline__ int* again(unsigned char* shared, int consumer, int warp) const {
    return reinterpret_cast<int*>(shared + C.again_offset()) + consumer * 4 + warp;
  }
};

}  // namespace tilewise::cuda
