// Merge of the partial results of split keys: lse = log(sum exp(lse_s)), o = sum exp(lse_s - lse) o_s, then the sink.
#pragma once
#include "cuda/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineFirst = 8;  // splits a warp requests at once, before it knows their weights

// log(sum exp(lse_s)) of one row with its sink, and what every part is multiplied with: exp(lse_s - maximum) * shrink.
struct Merged {
  float lse, maximum, shrink;
};

// By every lane of a warp; writes the splits' weights, -1 for one that saw no key.
__device__ __forceinline__ Merged merge_lse(const ForwardParams& p, int64_t item, int64_t part, int64_t row, int h,
                                            float* weights) {
  const SequenceParams& q = p.sequence;
  const int lane = threadIdx.x % 32;
  float own[kMaxSplits / 32];
  float maximum = kMinusInf;
#pragma unroll
  for (int n = 0; n < kMaxSplits / 32; ++n) {
    const int split = n * 32 + lane;
    own[n] = split < p.num_splits ? p.split_lse[split * part + item] : kMinusInf;
    maximum = fmaxf(maximum, own[n]);
  }
  for (int mask = 16; mask > 0; mask /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kMaxSplits / 32; ++n) {
    // A NaN lse (from a visible NaN) must come through: it is no maximum, so test for it here.
    const float weight = own[n] == kMinusInf ? -1.f : expf(own[n] - maximum);
    if (n * 32 + lane < p.num_splits) weights[n * 32 + lane] = weight;
    sum += own[n] == kMinusInf ? 0.f : weight;
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  Merged merged{sum == 0.f ? kMinusInf : maximum + logf(sum), maximum, sum == 0.f ? 0.f : 1.f / sum};
  if (p.score.sink == nullptr) return merged;
  // A row outside every sequence has lse -inf in every part and takes no sink.
  bool used = true;
  if (q.seqused_q) {
    if (q.packed_q) {  // find the sequence: only holes need it
      int64_t low = 0, high = q.batch;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (q.cu_seqlens_q.at(middle) <= row ? low : high) = middle;
      }
      used = row - q.cu_seqlens_q.at(low) < q.seqused_q.at(low);
    } else {
      used = row % q.seqlen_q < q.seqused_q.at(row / q.seqlen_q);
    }
  }
  if (!used) return merged;
  const float sink = p.score.sink[h * p.score.sink_head];
  if (merged.lse == kMinusInf) {
    merged.lse = sink;
  } else if (sink != kMinusInf) {
    const float larger = fmaxf(merged.lse, sink);
    const float total = larger + logf(expf(merged.lse - larger) + expf(sink - larger));
    merged.shrink *= expf(merged.lse - total);
    merged.lse = total;
  }
  return merged;
}

// In 32 bits where they suffice: a 64-bit division takes a hundred instructions.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// One block per (head, row); its warps share the splits, their lanes take four columns each.
template <class T>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ float weights[kCombineWarps][kMaxSplits];
  __shared__ float4 partial[kCombineWarps][32];
  const SequenceParams& q = p.sequence;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t rows = q.packed_q ? q.total_q : static_cast<int64_t>(q.batch) * q.seqlen_q;
  const int64_t part = rows * q.num_heads_q;
  for (int64_t item = blockIdx.x; item < part; item += gridDim.x) {
    const int h = static_cast<int>(divide(item, rows));
    const int64_t row = item - h * rows, b = q.packed_q ? 0 : divide(row, q.seqlen_q), i = row - b * q.seqlen_q;
    const int64_t o_offset = (q.packed_q ? row * p.o.row : b * p.o.batch + i * p.o.row) + h * p.o.head;
    if (item == blockIdx.x) {  // what comes before is done while they run
      ptx::wait_for_previous_kernels();
      ptx::let_next_kernel_start();  // not before the wait: its blocks should find the multiprocessors empty
    }
    if (q.packed_q && row >= q.cu_seqlens_q.at(q.batch)) continue;  // zeroed by the main kernel
    Merged merged{};
    for (int first = 0; first < p.head_dim_v; first += 128) {
      const int column = first + lane * 4;
      const bool exists = column < p.split_columns;
      const float* from = p.split_o + item * p.split_columns + column;
      const int64_t step = part * p.split_columns;
      // The parts come from L2, half a microsecond away: ask for as many as registers hold, and for lse beside them.
      float4 x[kCombineFirst];
#pragma unroll
      for (int n = 0; n < kCombineFirst; ++n) {
        const int split = n * kCombineWarps + warp;
        x[n] = exists && split < p.num_splits ? *reinterpret_cast<const float4*>(from + split * step) : float4{};
      }
      if (first == 0) {
        merged = merge_lse(p, item, part, row, h, weights[warp]);
        __syncwarp();
      }
      float4 sum{};
      const auto add = [&](const float4& y, float weight) {
        if (weight < 0) return;  // nothing was written
        sum = make_float4(sum.x + weight * y.x, sum.y + weight * y.y, sum.z + weight * y.z, sum.w + weight * y.w);
      };
#pragma unroll
      for (int n = 0; n < kCombineFirst; ++n) {
        const int split = n * kCombineWarps + warp;
        if (split < p.num_splits) add(x[n], weights[warp][split]);
      }
#pragma unroll 4
      for (int split = kCombineFirst * kCombineWarps + warp; split < p.num_splits; split += kCombineWarps)
        if (exists) add(*reinterpret_cast<const float4*>(from + split * step), weights[warp][split]);
      partial[warp][lane] = sum;
      __syncthreads();
      if (warp == 0 && exists) {
        for (int n = 1; n < kCombineWarps; ++n) {
          const float4 y = partial[n][lane];
          sum = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
        }
        const float values[4] = {sum.x * merged.shrink, sum.y * merged.shrink, sum.z * merged.shrink, sum.w * merged.shrink};
        if (p.o_aligned && column < p.head_dim_v) {  // then columns come in whole fours
          T* to = static_cast<T*>(p.o.data) + o_offset + column;
          if constexpr (sizeof(T) == 4) *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
          else *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack<T>(values[0], values[1]), ptx::pack<T>(values[2], values[3]));
        }
        for (int n = 0; !p.o_aligned && n < 4; ++n) {
          if (column + n >= p.head_dim_v) break;
          if (p.o_is_float)
            static_cast<float*>(p.o.data)[o_offset + column + n] = values[n];
          else
            static_cast<T*>(p.o.data)[o_offset + column + n] = ptx::from_float<T>(values[n]);
        }
      }
      __syncthreads();
    }
    if (p.lse && threadIdx.x == 0)
      p.lse.data[(q.packed_q ? row * p.lse.row : b * p.lse.batch + i * p.lse.row) + h * p.lse.head] = merged.lse;
  }
}

}  // namespace tilewise::cuda
