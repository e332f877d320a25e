// The shape of backward_sm90's pass for dQ: a reason per number, and the sums of registers and shared memory that they cost.
#pragma once
#include "core/host_device.h"
#include "cuda/config_sm80.h"

namespace tilewise::cuda {

struct BackwardQuerySm90Config {
  Element element;
  int head_dim;  // of q, k and v, rounded up

  static constexpr int kConsumers = 2;  // warpgroups of 64 queries
  static constexpr int block_n = 64;    // keys a tile
  TW_HOST_DEVICE constexpr int block_m() const { return 64 * kConsumers; }
  TW_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  TW_HOST_DEVICE constexpr int num_threads() const { return 128 * (kConsumers + 1); }

  // setmaxnreg: 3 x 168 = 24 + 2 x 240. A consumer holds 128 of dQ, 32 of S and then P, 32 of dP, 16 of dS as an operand: 208.
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

  // Shared memory, in bytes: Q and dO of both consumers, two tiles of K, one of V, 32 KiB each. A tile of K is needed from its S to its
  // dQ, a third of a step longer than a step; one of V for a third of a step, and the next arrives in the other two.
  TW_HOST_DEVICE constexpr int tile_bytes() const { return 64 * head_dim * 2; }
  TW_HOST_DEVICE constexpr int dout_offset() const { return kConsumers * tile_bytes(); }
  TW_HOST_DEVICE constexpr int k_offset() const { return 2 * kConsumers * tile_bytes(); }
  TW_HOST_DEVICE constexpr int v_offset() const { return k_offset() + 2 * tile_bytes(); }
  TW_HOST_DEVICE constexpr int barrier_offset() const { return v_offset() + tile_bytes(); }
  static constexpr int kBarriers = 18;
  static constexpr int kBlockBytes = 128;  // of a QueryBlock; there are the present one and the next
  TW_HOST_DEVICE constexpr int block_offset() const { return barrier_offset() + kBarriers * 8; }
  TW_HOST_DEVICE constexpr int shared_bytes() const { return block_offset() + 2 * kBlockBytes; }

  TW_HOST_DEVICE constexpr bool valid() const { return head_dim == 256 && shared_bytes() <= 227 * 1024; }
};

}  // namespace tilewise::cuda
