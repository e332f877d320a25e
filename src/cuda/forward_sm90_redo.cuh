// After forward_sm90: rows whose softmax overflowed, or whose O has a NaN, are computed again by the sm_80 kernel, which
// takes the row maximum before every exponential and lets no NaN of a masked value through. Nearly always there are none,
// and a block reads its share of the marks and ends. It also writes the zeros of packed rows that no sequence owns.
#pragma once
#include "cuda/config_sm90.h"
#include "cuda/forward_sm80.cuh"
#include "cuda/params_sm90.h"
#include "cuda/ptx/sm90.cuh"

namespace tilewise::cuda {

// The general kernel takes every softmax_scale, zero and negative included.
TW_HOST_DEVICE constexpr ForwardConfig redo_config(Element element, int head_dim) {
  return forward_config(element, ForwardKind::kGeneral, head_dim, false);
}

template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(redo_config(kElement, kHeadDim).num_threads())
    forward_sm90_redo_kernel(const __grid_constant__ ForwardSm90Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr ForwardConfig C = redo_config(kElement, kHeadDim);
  using Kernel = ForwardKernel<C>;
  static_assert(C.block_m == 128);
  constexpr int kMarks = 8;  // bytes per row block
  const ForwardParams& f = p.forward;
  const int heads = f.sequence.num_heads_q * f.sequence.batch;
  const int chunks = static_cast<int>((static_cast<int64_t>(heads) * p.redo_stride + 15) / 16);
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  // A thread looks at the 16 marks of two row blocks. Nearly always that is all, so it stands alone: the code behind it is
  // long, prepares much, and is not in the caches. Marks of rows that do not exist may hold anything; the exact test comes
  // later. Neighbouring chunks go to different blocks: marked rows come in groups.
  bool any = f.sequence.packed_q;
  for (int mine = threadIdx.x * gridDim.x + blockIdx.x; mine < chunks; mine += gridDim.x * C.num_threads()) {
    const uint4 marks = reinterpret_cast<const uint4*>(p.redo)[mine];
    any |= (marks.x | marks.y | marks.z | marks.w) != 0;
  }
  if (!__syncthreads_or(any)) return;

  for (int begin = 0; begin < chunks; begin += gridDim.x * C.num_threads()) {
    const int mine = begin + threadIdx.x * gridDim.x + blockIdx.x;
    uint4 marks = {0, 0, 0, 0};
    if (mine < chunks) marks = reinterpret_cast<const uint4*>(p.redo)[mine];
    const bool marked = (marks.x | marks.y | marks.z | marks.w) != 0;
    if (__syncthreads_or(marked)) {
#pragma unroll 1
      for (int n = 0; n < 2 * C.num_threads(); ++n) {
        if (!__syncthreads_or(marked && static_cast<int>(threadIdx.x) == n / 2)) continue;
        const int64_t at = 2 * (begin + static_cast<int64_t>(n / 2) * gridDim.x + blockIdx.x) + n % 2;  // row block
        const int head = static_cast<int>(at / (p.redo_stride / kMarks));
        const int block = static_cast<int>(at - static_cast<int64_t>(head) * (p.redo_stride / kMarks));
        if (head >= heads) break;
        Kernel kernel{f};
        kernel.b = head / f.sequence.num_heads_q;
        kernel.s = resolve(f.sequence, kernel.b);
        kernel.first_row = block * C.block_m;
        const int groups = min(kMarks, (kernel.s.capacity_q - kernel.first_row + 15) / 16);  // that exist
        if (groups <= 0) continue;
        const uint64_t marks_of_block = reinterpret_cast<const uint64_t*>(p.redo)[at];
        if ((marks_of_block & (~uint64_t{0} >> (64 - 8 * groups))) == 0) continue;
        kernel.first_head = head % f.sequence.num_heads_q;
        kernel.head_k = kernel.first_head / (f.sequence.num_heads_q / f.sequence.num_heads_k);
        kernel.split = 0;
        kernel.warp = threadIdx.x / 32;
        kernel.lane = threadIdx.x % 32;
        kernel.natural = !(f.score.scale > 1e-30f);
        kernel.run(ptx::shared_address(shared),
                   reinterpret_cast<uint32_t*>(shared + (C.block_m + 2 * C.block_n) * C.head_dim * 2));
      }
    }
  }
  if (f.sequence.packed_q)
    for (int n = blockIdx.x; n < f.num_blocks * f.sequence.num_heads_q; n += gridDim.x)
      zero_packed_tail<typename Kernel::T>(f, n / f.num_blocks, n % f.num_blocks, C.block_m);
}

}  // namespace tilewise::cuda
