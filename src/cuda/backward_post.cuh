// After the main kernel: dq from its float32 sums; dbias and dalibi from theirs.
#pragma once
#include "cuda/backward_pre.cuh"
#include "cuda/params.h"
#include "cuda/ptx/reduce.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

inline constexpr int kPostWarps = 8;

// Has anybody added to 16 rows of dq? Then there is a sum.
__device__ __forceinline__ bool has_sum(const BackwardParams& p, int h, int b, int first) {
  if (!p.first_stores || (p.again && p.again->wanted != 0)) return true;
  const int64_t tile = (static_cast<int64_t>(h) * p.sequence.batch + b) * p.num_query_blocks + first / p.block_m;
  return ptx::load_relaxed(p.turn + tile * p.turns_per_block) != 0;
}

// Task `index`: (block of kRowPadding rows) x head x batch (one more when rows are packed: the rows of no sequence). A warp
// turns 16 rows at a time from fragments to rows.
template <class T>
__device__ __forceinline__ void backward_post_rows(const BackwardParams& p, unsigned index, int row_blocks) {
  const int block = static_cast<int>(index % row_blocks);
  index /= row_blocks;
  const int h = static_cast<int>(index % p.sequence.num_heads_q);
  const int b = static_cast<int>(index / p.sequence.num_heads_q);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto store = [&](int64_t row, int col, float x, float y, bool pairs) {
    if (col < p.head_dim) store_columns<T>(p.dq.data, row + col, p.dq_is_float, pairs, col + 1 < p.head_dim, x, y);
  };
  const bool pairs = reinterpret_cast<uintptr_t>(p.dq.data) % 4 == 0 && ((p.dq.row | p.dq.batch | p.dq.head) & 1) == 0;
  if (b >= p.sequence.batch) {
    const int64_t stride = static_cast<int64_t>(row_blocks) * kPostWarps;
    for (int64_t row = p.sequence.cu_seqlens_q.at(p.sequence.batch) + static_cast<int64_t>(block) * kPostWarps + warp;
         row < p.sequence.total_q; row += stride)
      for (int col = 2 * lane; col < p.head_dim; col += 64) store(row * p.dq.row + h * p.dq.head, col, 0.f, 0.f, pairs);
    return;
  }
  const DeviceSequence s = resolve(p.sequence, b);
  const int64_t base = (p.sequence.packed_q ? s.q_begin * p.dq.row : b * p.dq.batch) + h * p.dq.head;
  const int first = (block * kPostWarps + warp) * 16;
  static_assert(kPostWarps * 16 == kRowPadding);
  if (first >= s.capacity_q) return;
  const int64_t padded = h * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + first;
  const auto* sums = reinterpret_cast<const float4*>(p.dq_sum + padded * p.head_dim_rounded) + lane;
  const float factor = p.gradient_scale;
  const int used_rows = has_sum(p, h, b, first) ? s.seqlen_q : 0;  // the others are zeros
  if constexpr (sizeof(T) == 2) {
    if (p.dq_aligned) {  // 32 columns at a time: quads exchange their pairs, so that a lane stores 16 bytes of a row
      const int quad = lane & 3;
#pragma unroll 2
      for (int n = 0; n < p.head_dim_rounded / 8; n += 4) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 x = __ldcs(sums + (n + i) * 32);
          upper[i] = ptx::pack<T>(x.x * factor, x.y * factor);
          lower[i] = ptx::pack<T>(x.z * factor, x.w * factor);
        }
        transpose_quad(upper, quad);
        transpose_quad(lower, quad);
        const int i = first + (lane >> 2), column = (n + quad) * 8;
        if (column >= p.head_dim) continue;
        T* const out = static_cast<T*>(p.dq.data) + base + column;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        if (i < s.capacity_q)
          *reinterpret_cast<uint4*>(out + i * p.dq.row) =
              i < used_rows ? make_uint4(upper[0], upper[1], upper[2], upper[3]) : zero;
        if (i + 8 < s.capacity_q)
          *reinterpret_cast<uint4*>(out + (i + 8) * p.dq.row) =
              i + 8 < used_rows ? make_uint4(lower[0], lower[1], lower[2], lower[3]) : zero;
      }
      return;
    }
  }
  for (int n = 0; n * 8 < p.head_dim; ++n) {
    const float4 x = sums[n * 32];
    for (int half = 0; half < 2; ++half) {
      const int i = first + (lane >> 2) + 8 * half;
      if (i >= s.capacity_q) continue;
      const bool used = i < used_rows;
      store(base + i * p.dq.row, n * 8 + 2 * (lane & 3), used ? (half ? x.z : x.x) * factor : 0.f,
            used ? (half ? x.w : x.y) * factor : 0.f, pairs);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kPostWarps * 32) backward_post_kernel(const __grid_constant__ BackwardParams p) {
  ptx::let_next_kernel_start();
  const int row_blocks = max(1, (p.sequence.seqlen_q + kRowPadding - 1) / kRowPadding);
  const unsigned tasks = static_cast<unsigned>(row_blocks) * p.sequence.num_heads_q * (p.sequence.batch + p.sequence.packed_q);
  if (p.done != nullptr) {
    // Few multiprocessors are left to this kernel while the main one runs; its blocks go from head to head behind it.
    const unsigned head = blockIdx.x / row_blocks / (p.sequence.num_heads_q / p.sequence.num_heads_k);
    if (threadIdx.x == 0 && head < static_cast<unsigned>(p.sequence.num_heads_k * p.sequence.batch))
      while (ptx::load_acquire(p.done + head) < p.num_key_blocks) __nanosleep(500);
    __syncthreads();
    backward_post_rows<T>(p, blockIdx.x, row_blocks);
    if (blockIdx.x == gridDim.x - 1) ptx::wait_for_previous_kernels();  // whoever waits for this kernel waits for that one, too
    return;
  }
  ptx::wait_for_previous_kernels();
  if (p.only_again && p.again->wanted == 0) return;
  // The last come first: their sums are still in the second-level cache.
  for (unsigned n = blockIdx.x; n < tasks; n += gridDim.x) backward_post_rows<T>(p, tasks - 1 - n, row_blocks);
}

struct DbiasParams {
  BackwardParams backward;
  void* dbias;
  int32_t dtype;
  bool only_again;  // only if all has been computed again: else it is there already
  int64_t shape[4], stride[4];
};

// From the integer sums to dbias, of any float type and strides.
template <int kThreads = 256>
__global__ void __launch_bounds__(kThreads) dbias_kernel(const __grid_constant__ DbiasParams p) {
  if (p.only_again && p.backward.again->wanted == 0) return;
  const DbiasSum& from = p.backward.dbias;
  const int exponent = dbias_exponent(from, p.backward.head_dim_v);
  const int64_t total = p.shape[0] * p.shape[1] * p.shape[2] * p.shape[3];
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < total;
       n += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t rest = n, at = 0;
    for (int dim = 3; dim >= 0; --dim) at += rest % p.shape[dim] * p.stride[dim], rest /= p.shape[dim];
    const bool finite = (from.not_finite[n / 32] >> n % 32 & 1) == 0;
    const float x = finite ? static_cast<float>(ldexp(static_cast<double>(from.sum[n]), -exponent)) : __int_as_float(0x7fffffff);
    switch (p.dtype) {
      case TW_FLOAT32: static_cast<float*>(p.dbias)[at] = x; break;
      case TW_FLOAT16: static_cast<ptx::float16*>(p.dbias)[at] = ptx::from_float<ptx::float16>(x); break;
      default: static_cast<ptx::bfloat16*>(p.dbias)[at] = ptx::from_float<ptx::bfloat16>(x); break;
    }
  }
}

struct DalibiParams {
  const float* parts;  // [batch, head, key block]
  int64_t batch, heads, blocks;
  float* dalibi;
  int64_t stride_batch, stride_head;
  bool sum_batch;
};

// One thread per slope, in a fixed order.
template <int kThreads = 128>
__global__ void __launch_bounds__(kThreads) dalibi_kernel(const __grid_constant__ DalibiParams p) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= (p.sum_batch ? p.heads : p.batch * p.heads)) return;
  const int64_t h = n % p.heads, first = p.sum_batch ? 0 : n / p.heads, last = p.sum_batch ? p.batch : first + 1;
  float sum = 0.f;
  for (int64_t b = first; b < last; ++b)
    for (int64_t block = 0; block < p.blocks; ++block) sum += p.parts[(b * p.heads + h) * p.blocks + block];
  p.dalibi[(p.sum_batch ? 0 : first * p.stride_batch) + h * p.stride_head] = sum;
}

}  // namespace tilewise::cuda
