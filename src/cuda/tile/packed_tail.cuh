// Rows of packed outputs that no sequence owns.
#pragma once
#include "cuda/params.h"
#include "cuda/tile/element.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

// Rows of head h behind the last sequence: zeros, lse -inf. Block `block` of p.num_blocks takes its share.
template <class T>
__device__ void zero_packed_tail(const ForwardParams& p, int h, int block, int rows_per_block) {
  const int64_t end = p.sequence.total_q;
  int64_t row = p.sequence.cu_seqlens_q.at(p.sequence.batch) + static_cast<int64_t>(block) * rows_per_block;
  const int64_t stride = static_cast<int64_t>(p.num_blocks) * rows_per_block;
  for (; row < end; row += stride)
    for (int r = threadIdx.x / 32; r < rows_per_block && row + r < end; r += blockDim.x / 32) {
      const int64_t at = (row + r) * p.o.row + h * p.o.head;
      for (int c = threadIdx.x % 32; c < p.head_dim_v; c += 32) {
        store_columns<T>(p.o.data, at + c, p.o_is_float, false, false, 0.f, 0.f);
      }
      if (p.lse && threadIdx.x % 32 == 0) p.lse.data[h * p.lse.head + (row + r) * p.lse.row] = kMinusInf;
    }
}

}  // namespace tilewise::cuda
