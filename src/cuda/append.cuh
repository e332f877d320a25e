// Before attention over a KV cache: new keys and values are written into it (dense or paged), and rotary embedding turns
// the new keys and the queries, in float32, rounded to their type. Pair n of the first rotary_dim elements turns by the
// angle of (position, n): (x, y) -> (x cos - y sin, x sin + y cos).
#pragma once
#include "cuda/params.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"

namespace tilewise::cuda {

inline constexpr int kAppendWarps = 8;

template <class T>
struct Rotation {
  const AppendParams& p;
  int64_t position;

  __device__ __forceinline__ float table(const void* data, int64_t stride_position, int64_t stride_pair, int n) const {
    const int64_t at = position * stride_position + n * stride_pair;
    return p.table_is_float ? static_cast<const float*>(data)[at] : ptx::to_float(static_cast<const T*>(data)[at]);
  }

  // One warp: `from` and `to` are rows of head_dim elements.
  __device__ __forceinline__ void row(const T* from, T* to, int lane) const {
    const int half = p.rotary_dim / 2;
    for (int n = lane; n < half; n += 32) {
      const int first = p.interleaved ? 2 * n : n, second = p.interleaved ? 2 * n + 1 : n + half;
      const float x = ptx::to_float(from[first]), y = ptx::to_float(from[second]);
      const float cosine = table(p.cosines, p.cos_position, p.cos_pair, n), sine = table(p.sines, p.sin_position, p.sin_pair, n);
      // Each product rounded by itself, as on the CPU: a fused one lands on the other side of a tie now and then, and the
      // caches would differ by one ulp (1 element of 115,200 seen).
      to[first] = ptx::from_float<T>(__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)));
      to[second] = ptx::from_float<T>(__fadd_rn(__fmul_rn(x, sine), __fmul_rn(y, cosine)));
    }
    for (int c = 2 * half + lane; c < p.head_dim; c += 32) to[c] = from[c];
  }
};

// One warp per row: first the new keys, then the new values, then the queries to rotate.
template <class T>
__global__ void __launch_bounds__(kAppendWarps * 32) append_kernel(const __grid_constant__ AppendParams p) {
  const SequenceParams& q = p.sequence;
  const int lane = threadIdx.x % 32;
  const int64_t new_rows = static_cast<int64_t>(q.batch) * q.seqlen_new * q.num_heads_k;
  const int64_t query_rows = p.rotary_dim > 0 ? static_cast<int64_t>(q.batch) * q.seqlen_q * q.num_heads_q : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAppendWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kAppendWarps + threadIdx.x / 32; item < 2 * new_rows + query_rows;
       item += step) {
    const bool is_query = item >= 2 * new_rows, is_value = !is_query && item >= new_rows;
    int64_t rest = item - (is_query ? 2 * new_rows : is_value ? new_rows : 0);
    const int heads = is_query ? q.num_heads_q : q.num_heads_k, rows = is_query ? q.seqlen_q : q.seqlen_new;
    const int h = static_cast<int>(rest % heads);
    rest /= heads;
    const int n = static_cast<int>(rest % rows), b = static_cast<int>(rest / rows);
    const DeviceSequence s = resolve(q, b);
    const int append_begin = q.seqused_k ? q.seqused_k.at(b) : s.capacity_k;
    const int64_t base = p.rotary_seqlens ? p.rotary_seqlens.at(b) : append_begin;
    if (is_query) {
      if (n >= s.seqlen_q) continue;
      const T* from = static_cast<const T*>(p.q.data) + (q.packed_q ? s.q_begin * p.q.row : b * p.q.batch) + n * p.q.row + h * p.q.head;
      T* to = static_cast<T*>(p.q_rotated.data) + (q.packed_q ? s.q_begin * p.q_rotated.row : b * p.q_rotated.batch) +
              n * p.q_rotated.row + h * p.q_rotated.head;
      Rotation<T>{p, base + (p.queries_advance ? n : 0)}.row(from, to, lane);
      continue;
    }
    const int position = append_begin + n;
    if (position >= q.seqlen_k) continue;  // no room: never outside the cache
    const RowTensor& cache = is_value ? p.v : p.k;
    const RowTensor& source = is_value ? p.v_new : p.k_new;
    int64_t at;
    if (q.page_size > 0) {
      DeviceSequence unpadded = s;
      unpadded.leftpad = 0;  // positions count from the start of the cache row
      at = paged_row(cache, q, unpadded, b, position);
    } else {
      at = s.cache_row * cache.batch + position * cache.row;
    }
    T* to = static_cast<T*>(cache.data) + at + h * cache.head;
    const T* from = static_cast<const T*>(source.data) + b * source.batch + n * source.row + h * source.head;
    if (!is_value && p.rotary_dim > 0) {
      Rotation<T>{p, base + n}.row(from, to, lane);
    } else {
      for (int c = lane; c < (is_value ? p.head_dim_v : p.head_dim); c += 32) to[c] = from[c];
    }
  }
}

}  // namespace tilewise::cuda
