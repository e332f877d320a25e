// Merge of the partial results of split keys: lse = log(sum exp(lse_s)), o = sum exp(lse_s - lse) o_s, then the sink.
#pragma once
#include "cuda/params.h"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

inline constexpr int kCombineWarps = 4;

// One warp per (head, row).
template <class T>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const __grid_constant__ ForwardParams p) {
  const SequenceParams& q = p.sequence;
  const int64_t rows = q.packed_q ? q.total_q : static_cast<int64_t>(q.batch) * q.seqlen_q;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (item >= rows * q.num_heads_q) return;
  const int h = static_cast<int>(item / rows);
  const int64_t row = item % rows;
  if (q.packed_q && row >= q.cu_seqlens_q.at(q.batch)) return;  // zeroed by the main kernel
  const int64_t part = rows * q.num_heads_q;
  float maximum = kMinusInf;
  for (int split = lane; split < p.num_splits; split += 32) maximum = fmaxf(maximum, p.split_lse[split * part + item]);
  for (int mask = 16; mask > 0; mask /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
  float sum = 0.f;
  for (int split = lane; split < p.num_splits; split += 32) {
    const float lse = p.split_lse[split * part + item];
    // A NaN lse (from a visible NaN) must come through: it is no maximum, so test for it here.
    sum += lse == kMinusInf ? 0.f : expf(lse - maximum);
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  float lse = sum == 0.f ? kMinusInf : maximum + logf(sum);
  float shrink = 1.f;  // share of the keys against the sink
  // A row outside every sequence has lse -inf in every part and takes no sink.
  bool used = true;
  if (p.score.sink) {
    const int64_t b = q.packed_q ? -1 : row / q.seqlen_q;
    if (q.seqused_q) used = q.packed_q ? false : row % q.seqlen_q < q.seqused_q.at(b);
    if (q.packed_q && q.seqused_q) {  // find the sequence: only holes need it
      int64_t low = 0, high = q.batch;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (q.cu_seqlens_q.at(middle) <= row ? low : high) = middle;
      }
      used = row - q.cu_seqlens_q.at(low) < q.seqused_q.at(low);
    }
    if (used) {
      const float sink = p.score.sink[h * p.score.sink_head];
      if (lse == kMinusInf) {
        lse = sink;
      } else if (sink != kMinusInf) {
        const float larger = fmaxf(lse, sink);
        const float total = larger + logf(expf(lse - larger) + expf(sink - larger));
        shrink = expf(lse - total);
        lse = total;
      }
    }
  }
  const int64_t o_offset = (q.packed_q ? row * p.o.row : row / q.seqlen_q * p.o.batch + row % q.seqlen_q * p.o.row) + h * p.o.head;
  for (int col = lane; col < p.head_dim_v; col += 32) {
    float value = 0.f;
    for (int split = 0; split < p.num_splits; ++split) {
      const float part_lse = p.split_lse[split * part + item];
      if (part_lse == kMinusInf) continue;
      value += expf(part_lse - maximum) * p.split_o[(split * part + item) * p.split_columns + col];
    }
    if (sum != 0.f) value *= shrink / sum;
    if (p.o_is_float)
      static_cast<float*>(p.o.data)[o_offset + col] = value;
    else
      static_cast<T*>(p.o.data)[o_offset + col] = ptx::from_float<T>(value);
  }
  if (p.lse && lane == 0)
    p.lse.data[(q.packed_q ? row * p.lse.row : row / q.seqlen_q * p.lse.batch + row % q.seqlen_q * p.lse.row) + h * p.lse.head] = lse;
}

}  // namespace tilewise::cuda
