// Before the main kernel: delta_i = rowsum(dO * O) - dlse_i, lse in base 2, dq sums to zero, tickets and turns to zero.
#pragma once
#include "cuda/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

inline constexpr int kPreThreads = 256;
inline constexpr int kPreLanesPerRow = 8;

// Products of two chunks of 16 bytes, summed.
template <class T>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (sizeof(T) == 4) {
      sum += __uint_as_float(x[n]) * __uint_as_float(y[n]);
    } else {
      const float2 u = ptx::unpack<T>(x[n]), w = ptx::unpack<T>(y[n]);
      sum += u.x * w.x + u.y * w.y;
    }
  }
  return sum;
}

// Sum over this lane's columns of dO * O.
template <class T>
__device__ __forceinline__ float partial_delta(const BackwardParams& p, const T* dout, int64_t o_offset, int lane) {
  float sum = 0.f;
  if (p.aligned && p.o_aligned) {
    const T* o = static_cast<const T*>(p.o.data) + o_offset;
    constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));
    for (int col = lane * kPerChunk; col < p.head_dim_v; col += kPreLanesPerRow * kPerChunk)
      sum += dot<T>(*reinterpret_cast<const uint4*>(dout + col), *reinterpret_cast<const uint4*>(o + col));
    return sum;
  }
  for (int col = lane; col < p.head_dim_v; col += kPreLanesPerRow) {
    const float o = p.o_is_float ? static_cast<const float*>(p.o.data)[o_offset + col]
                                 : ptx::to_float(static_cast<const T*>(p.o.data)[o_offset + col]);
    sum += ptx::to_float(dout[col]) * o;
  }
  return sum;
}

// 16 bytes each of this lane's columns of a row of 64 kChunks.
template <int kChunks, class T>
__device__ __forceinline__ void load_row(uint4 (&x)[kChunks], const T* row, bool used, int lane) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    x[c] = make_uint4(0, 0, 0, 0);
    if (used) x[c] = __ldcs(reinterpret_cast<const uint4*>(row) + lane + c * kPreLanesPerRow);
  }
}

// x as the sum of three bfloat16, and zeros.
__device__ __forceinline__ uint4 bfloat16_parts(float x) {
  const float high = __bfloat162float(__float2bfloat16_rn(x)), rest = x - high;
  const float middle = __bfloat162float(__float2bfloat16_rn(rest));
  return make_uint4(ptx::pack<ptx::bfloat16>(high, middle), ptx::pack<ptx::bfloat16>(rest - middle, 0.f), 0, 0);
}

// Sums over the eight lanes of a row, of kRows rows; lane n gets row n % kRows's. While there are several rows, a lane gives half of them to
// the one beside it.
template <int kRows>
__device__ __forceinline__ float sum_rows(float (&x)[kRows], int lane) {
#pragma unroll
  for (int mask = 1, left = kRows; mask < kPreLanesPerRow; mask *= 2) {
    if (left == 1) {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], mask);
      continue;
    }
    left /= 2;
#pragma unroll
    for (int n = 0; n < left; ++n) {
      const bool odd = lane & mask;
      const float kept = odd ? x[2 * n + 1] : x[2 * n], given = odd ? x[2 * n] : x[2 * n + 1];
      x[n] = kept + __shfl_xor_sync(0xffffffffu, given, mask);
    }
  }
  return x[0];
}

// The largest finite |x| that this warp's lanes hold goes into *largest.
__device__ __forceinline__ void keep_largest(uint32_t* largest, float x) {
  uint32_t bits = __float_as_uint(fabsf(x));
  if (bits >= 0x7f800000u) bits = 0;
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0 && bits > 0) atomicMax(largest, bits);
}

template <class T>
__device__ __forceinline__ float largest_finite(const T* row, int columns, int lane, int lanes) {
  float largest = 0.f;
  for (int col = lane; col < columns; col += lanes) {
    const float x = fabsf(ptx::to_float(row[col]));
    if (x < -kMinusInf) largest = fmaxf(largest, x);
  }
  return largest;
}

// Terms of dbias are multiples of 2^-(the result).
__device__ __forceinline__ int dbias_exponent(const DbiasSum& p, int head_dim_v) {
  const float dout = __uint_as_float(p.largest[0]), delta = __uint_as_float(p.largest[1]), v = __uint_as_float(p.largest[2]);
  const double bound = static_cast<double>(dout) * v * head_dim_v * p.dropout_scale + delta;
  int exponent = 0;
  frexp(bound * 1.01, &exponent);  // bound < 2^exponent; P may round to a little over 1
  return min(max(61 - exponent - p.log2_terms, -126), 126);
}

// Grid: (row block of kRowPadding keys) x key head x batch. Only if dbias is asked for.
template <class T>
__global__ void __launch_bounds__(kPreThreads) largest_value_kernel(const __grid_constant__ BackwardParams p) {
  const int blocks = (p.sequence.seqlen_k + kRowPadding - 1) / kRowPadding;
  unsigned index = blockIdx.x;
  const int block = static_cast<int>(index % blocks);
  index /= blocks;
  const int h = static_cast<int>(index % p.sequence.num_heads_k), b = static_cast<int>(index / p.sequence.num_heads_k);
  const DeviceSequence s = resolve(p.sequence, b);
  const T* v = key_rows<const T>(p.v, p.sequence, s, h);
  float largest = 0.f;
  for (int r = threadIdx.x / 32; r < kRowPadding; r += kPreThreads / 32) {
    const int j = block * kRowPadding + r;
    if (j < s.seqlen_k) largest = fmaxf(largest, largest_finite(v + j * p.v.row, p.head_dim_v, threadIdx.x % 32, 32));
  }
  keep_largest(p.dbias.largest + 2, largest);
}

// Task `index`: (row block of kRowPadding) x head x batch. Rows of 64 kChunks columns that can be read by 16 bytes; 0: any.
// A few rows at a time: all that they need is asked for before the first store, and blocks are small enough for four on a
// multiprocessor, so that one loads while another sums up.
template <class T, int kChunks>
__device__ __forceinline__ void backward_pre_rows(const BackwardParams& p, unsigned index, int row_blocks) {
  const int block = static_cast<int>(index % row_blocks);
  index /= row_blocks;
  const int h = static_cast<int>(index % p.sequence.num_heads_q);
  const int b = static_cast<int>(index / p.sequence.num_heads_q);
  const DeviceSequence s = resolve(p.sequence, b);
  const int first = block * kRowPadding;
  if (first >= s.capacity_q) return;
  const int64_t padded = h * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + first;
  const T* const dout = query_rows<const T>(p.dout, p.sequence, s, b, h);
  const int64_t o_base = (p.sequence.packed_q ? s.q_begin * p.o.row : b * p.o.batch) + h * p.o.head;
  const float* const lses = row_scalars(p.lse, p.sequence, s, b, h);
  const int lane = threadIdx.x % kPreLanesPerRow, zeros = p.dq_sum && !p.first_stores ? kRowPadding * p.head_dim_rounded / 4 : 0;
  auto* const sums = reinterpret_cast<float4*>(p.dq_sum + padded * p.head_dim_rounded);

  constexpr int kRowStep = kPreThreads / kPreLanesPerRow, kRows = kChunks == 0 ? 1 : 4 / kChunks;  // at a time
#pragma unroll 1
  for (int first_row = threadIdx.x / kPreLanesPerRow, turn = 0; first_row < kRowPadding; first_row += kRows * kRowStep, ++turn) {
    // Lane n of the first ones writes what belongs to row n.
    const int own = first_row + lane % kRows * kRowStep;
    const bool writes = lane < kRows, own_used = writes && first + own < s.seqlen_q;
    const float lse = own_used ? lses[(first + own) * p.lse.row] : kMinusInf;
    const float dlse = own_used && p.dlse ? row_scalars(p.dlse, p.sequence, s, b, h)[(first + own) * p.dlse.row] : 0.f;
    float delta[kRows];
    uint4 x[kRows][kChunks == 0 ? 1 : kChunks], y[kRows][kChunks == 0 ? 1 : kChunks];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int i = first + first_row + n * kRowStep;
      const bool used = i < s.seqlen_q;
      delta[n] = 0.f;
      if constexpr (kChunks == 0) {
        if (used) delta[n] = partial_delta<T>(p, dout + i * p.dout.row, o_base + i * p.o.row, lane);
      } else {
        load_row<kChunks>(x[n], dout + i * p.dout.row, used, lane);
        load_row<kChunks>(y[n], static_cast<const T*>(p.o.data) + o_base + i * p.o.row, used, lane);
      }
    }
    constexpr int kTurns = kRowPadding / (kRows * kRowStep);
    for (int n = threadIdx.x + turn * (zeros / kTurns); n < (turn + 1) * (zeros / kTurns); n += kPreThreads)
      sums[n] = make_float4(0, 0, 0, 0);
    if constexpr (kChunks != 0) {
#pragma unroll
      for (int n = 0; n < kRows; ++n)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) delta[n] += dot<T>(x[n][c], y[n][c]);
    }
    const float sum = sum_rows(delta, lane) - dlse;
    if (p.dbias.sum) {
      for (int n = 0; n < kRows; ++n) {
        const int i = first + first_row + n * kRowStep;
        keep_largest(p.dbias.largest, i < s.seqlen_q ? largest_finite(dout + i * p.dout.row, p.head_dim_v, lane, kPreLanesPerRow) : 0.f);
      }
      keep_largest(p.dbias.largest + 1, writes ? sum : 0.f);
    }
    if (!writes) continue;
    // A row that has nothing but the least float of a bias, whose lse has no room for log(n) beside it, is as one that sees no key: no gradients.
    const bool empty = lse * kLog2E == kMinusInf;
    p.lse_log2[padded + own] = empty ? -kMinusInf : lse * kLog2E;
    p.delta[padded + own] = empty ? 0.f : sum * p.delta_scale;
    if (p.columns_are_lse) {
      reinterpret_cast<float*>(p.row_columns)[padded + own] = empty ? -kMinusInf : lse;
    } else if (p.row_columns) {
      auto* const columns = reinterpret_cast<uint4*>(p.row_columns + (padded + own) / 8 * 256) + own % 8;
      // 2^100 makes 2^(scale (q k - 2^100)) zero, and stays finite where it meets the zeros of the other operand.
      columns[0] = bfloat16_parts(empty ? copysignf(0x1p100f, p.inverse_scale) : lse * p.inverse_scale);
      columns[8] = bfloat16_parts(empty ? 0.f : sum);
    }
  }
  if (p.turn) {
    const int tiles = kRowPadding / p.block_m, count = tiles * p.turns_per_block;
    int32_t* turn = p.turn + ((static_cast<int64_t>(h) * p.sequence.batch + b) * p.num_query_blocks + block * tiles) * p.turns_per_block;
    const int exist = min(count, (p.num_query_blocks - block * tiles) * p.turns_per_block);
    for (int n = threadIdx.x; n < exist; n += kPreThreads) turn[n] = 0;
  }
}

// Grid: tasks. The last come first: the sums that are cleared last lie in the second-level cache, and the main kernel wants the
// first.
template <class T, int kChunks>
__global__ void __launch_bounds__(kPreThreads, kChunks == 0 ? 2 : 4) backward_pre_kernel(const __grid_constant__ BackwardParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  if (blockIdx.x == 0 && threadIdx.x < 2 && p.ticket) p.ticket[threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.again) *p.again = {};
  if (blockIdx.x == 0 && p.done)
    for (int n = threadIdx.x; n < p.sequence.num_heads_k * p.sequence.batch; n += kPreThreads) p.done[n] = 0;
  const int row_blocks = (p.sequence.seqlen_q + kRowPadding - 1) / kRowPadding;
  backward_pre_rows<T, kChunks>(p, gridDim.x - 1 - blockIdx.x, row_blocks);
}

struct DsinkParams {
  BackwardParams backward;
  float* dsink;
  int64_t stride;
};

// dsink_h = - sum over all rows of exp(sink_h - lse_i) delta_i. One block per head, in a fixed order.
template <int kThreads = kPreThreads>
__global__ void __launch_bounds__(kThreads) dsink_kernel(const __grid_constant__ DsinkParams params) {
  const BackwardParams& p = params.backward;
  ptx::wait_for_previous_kernels();
  const int h = blockIdx.x;
  const float sink = p.score.sink[h * p.score.sink_head] * kLog2E;
  float sum = 0.f;
  for (int b = 0; b < p.sequence.batch; ++b) {
    const DeviceSequence s = resolve(p.sequence, b);
    const int64_t padded = h * p.padded_rows + padded_row(p.sequence, s.q_begin, b);
    for (int i = threadIdx.x; i < s.seqlen_q; i += kThreads) {
      const float lse = p.lse_log2[padded + i];
      if (lse != -kMinusInf) sum -= ptx::exp2_approx(sink - lse) * p.delta[padded + i];
    }
  }
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) params.dsink[h * params.stride] = parts[0] / p.delta_scale;
}

}  // namespace tilewise::cuda
