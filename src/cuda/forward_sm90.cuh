// Forward attention with the copy engine and the asynchronous tensor cores (sm_90a).
//
// A block stays on its multiprocessor and takes tile after tile: 64 query rows for each of its consumer warpgroups.
// Threads of the producer warpgroup hand out the tiles, load Q, K and V ahead of their use, and store O after it (up to head dim 128). The
// pipeline does not drain between tiles. Step j of a consumer, inside a tile and across tiles alike:
//
//   S(j) = Q K(j)^T             issued, then
//   O += P(j-1) V(j-1)          issued behind it, while
//   P(j) = 2^(S(j) c - m)       is computed as soon as S(j) is there
//
// and in the first step of a tile, the previous tile's O is finished and goes out. The consumers take turns at issuing
// (ping-pong), so that one computes exponentials while the tensor cores work for the other. docs/kernels/forward_sm90.md
// has the timeline, tile/softmax_sm90.cuh the softmax, tile/exact_rows.cuh what happens to rows that it cannot do.
#pragma once
#include "cuda/forward_sm90_consumer.cuh"
#include "cuda/forward_sm90_producer.cuh"

namespace tilewise::cuda {

template <Element kElement, Sm90Shape kShape, RowSum kRowSum, ScoreKind kScore>
__global__ void __launch_bounds__(forward_sm90_config(kElement, kShape, kRowSum, kScore).num_threads(), 1)
    forward_sm90_kernel(const __grid_constant__ ForwardSm90Params p) {
  constexpr ForwardSm90Config C = forward_sm90_config(kElement, kShape, kRowSum, kScore);
  static_assert(C.valid());
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedSm90<C> shared{ptx::shared_address(memory)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler knows

  ptx::let_next_kernel_start();
  if (threadIdx.x == 64) {  // without, the first copy waits for the description too: 1 % at 512 keys
    ptx::tma_prefetch(p.q);
    ptx::tma_prefetch(p.k);
    ptx::tma_prefetch(p.v);
    ptx::tma_prefetch(p.o);
    if constexpr (C.biased()) ptx::tma_prefetch(p.bias.map);
  }
  // The warps that load need the barriers alone, not the ones, and go ahead.
  constexpr int kLoaders = 15;  // a named barrier that consumers do not use
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 1) {
    if (lane == 0) {
      // Unrolled, addresses are one register and a number, an instruction each; a loop takes fifteen and a fence a barrier, 1 us.
#pragma unroll
      for (int n = 0; n < C.num_barriers(); ++n) ptx::mbarrier_init(shared.barrier(n), shared.arrivals(n));
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    ptx::barrier_arrive(kLoaders, 64);
    ptx::barrier_arrive(0, C.num_threads() - 32);
  } else if (warp == 0) {
    ptx::barrier_sync(kLoaders, 64);
  } else {
    if constexpr (C.ones())
      if (warpgroup > 0) {
        const uint32_t one = ptx::pack<typename ElementType<kElement>::Type>(1.f, 1.f);
        for (int stage = 0; stage < (C.panels() > 1 ? C.stages : 1); ++stage)
          for (int n = threadIdx.x - 128; n < C.ones_bytes() / 16; n += C.num_threads() - 128)
            ptx::store_shared(shared.ones(stage) + 16 * n, make_uint4(one, one, one, one));
        ptx::fence_async_shared();
      }
    ptx::barrier_sync(0, C.num_threads() - 32);
  }

  if (warpgroup == 0) {
    ptx::give_registers<C.producer_registers()>();
    if (warp == 0 && (C.general() || lane == 0)) {
      ptx::wait_for_previous_kernels();
      load_keys_and_values<C>(p, shared, memory, C.general() ? lane : 0);
    } else if (lane == 0) {
      if (warp == 1) {
        ptx::wait_for_previous_kernels();
        hand_out_tiles<C>(p, shared, memory);
      } else if (C.biased()) {
        if (warp == 2) {
          ptx::wait_for_previous_kernels();
          load_bias_tiles<C>(p, shared, memory);
        }
      } else if (C.store_warps()) {
        store_output<C>(p, shared, memory, warp - 2);
      }
    }
  } else {
    ptx::take_registers<C.consumer_registers()>();
    ConsumerSm90<C> consumer{{p, shared, memory, warpgroup - 1, warp % 4, lane}};
    consumer.run();
  }
}

}  // namespace tilewise::cuda
