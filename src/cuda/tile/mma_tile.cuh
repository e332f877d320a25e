// Products of tiles: one warp, kM row groups of 16, operands in shared memory or registers.
#pragma once
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/layout.cuh"

namespace tilewise::cuda {

// c[kM][kN] += A B for one step of 16 k, with A fragments given and B rows of n: kN / 2 ldmatrix, 2 kM mma each.
template <class T, int kM, int kN, int kCols>
__device__ __forceinline__ void mma_step_b(float (&c)[kM][kN][4], const uint32_t (&a)[kM][4],
                                           const LaneAddress<kCols>& b, int step) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t fragment[4];
    ptx::ldmatrix_x4(fragment, b.at(n / 2, step));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<T>(c[m][n], a[m], fragment[0], fragment[1]);
      ptx::mma_m16n8k16<T>(c[m][n + 1], a[m], fragment[2], fragment[3]);
    }
  }
}

// The same with B rows of k, through ldmatrix.trans: rows 16 step .., columns 16 (first + n / 2) ..
template <class T, int kM, int kN, int kCols>
__device__ __forceinline__ void mma_step_bt(float (&c)[kM][kN][4], const uint32_t (&a)[kM][4],
                                            const LaneAddress<kCols>& b, int step) {
#ifdef TW_LOAD_FIRST
  uint32_t all[kN / 2][4];
#pragma unroll
  for (int n = 0; n < kN; n += 2) ptx::ldmatrix_x4(all[n / 2], b.at(n / 2, step));
#pragma unroll
  for (int n = 0; n < kN; n += 2)
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<T>(c[m][n], a[m], all[n / 2][0], all[n / 2][1]);
      ptx::mma_m16n8k16<T>(c[m][n + 1], a[m], all[n / 2][2], all[n / 2][3]);
    }
  return;
#endif
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t fragment[4];
    ptx::ldmatrix_x4_trans(fragment, b.at(step, n / 2));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<T>(c[m][n], a[m], fragment[0], fragment[1]);
      ptx::mma_m16n8k16<T>(c[m][n + 1], a[m], fragment[2], fragment[3]);
    }
  }
}

}  // namespace tilewise::cuda
