// The end of a block of forward_sm80: O divided by its sums, with the sink, to memory; lse and max_logit; or the parts of a split.
#pragma once
#include "cuda/tile/copy.cuh"
#include "cuda/tile/scores_sm80.cuh"
#include "cuda/tile/softmax_sm80.cuh"

namespace tilewise::cuda {

template <ForwardConfig C>
struct ForwardOutput : ScoresSm80<C> {
  using Scores = ScoresSm80<C>;
  using typename Scores::T;
  using Scores::b, Scores::first_head, Scores::first_row, Scores::lane, Scores::natural, Scores::p, Scores::s, Scores::split, Scores::warp;
  using Scores::head, Scores::query, Scores::query_offset, Scores::warp_row;
  using Scores::kD, Scores::kGeneral, Scores::kM;
  static constexpr int kBytes = C.head_dim * static_cast<int>(sizeof(T));  // of a row
  using Layout = TileLayout<kBytes>;
  using QCopy = TileCopy<T, C.block_m, C.head_dim, C.num_threads()>;

  __device__ __forceinline__ void store_row_pair(int r, int n, float x, float y) const {
    const int col = n * 8 + 2 * (lane & 3);
    if (col < p.head_dim_v)
      store_columns<T>(p.o.data, query_rows_offset(p.o) + query_offset(p.o, r) + col, p.o_is_float, false, col + 1 < p.head_dim_v, x, y);
  }

  __device__ __forceinline__ int64_t query_rows_offset(const RowTensor& x) const {
    return (p.sequence.packed_q ? s.q_begin * x.row : b * x.batch) + first_head * x.head;
  }

  // Row of the partial results: (batch, head, query), or (head, packed query).
  __device__ __forceinline__ int64_t split_row(int r) const {
    const int64_t rows = p.sequence.packed_q ? p.sequence.total_q : int64_t{p.sequence.batch} * p.sequence.seqlen_q;
    const int64_t row = (p.sequence.packed_q ? s.q_begin : static_cast<int64_t>(b) * p.sequence.seqlen_q) + query(r);
    return (static_cast<int64_t>(split) * p.sequence.num_heads_q + head(r)) * rows + row;
  }

  // Divides by the sums, adds the sink, writes o, lse and max_logit.
  __device__ __forceinline__ void epilogue(RowState<kM>& row, float (&o)[kM][kD][4], float c, float scale_down,
                                           uint32_t s_o) const {
    const bool splits = kGeneral && p.num_splits > 1;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row(m, half), i = query(r);
        const bool exists = i < s.capacity_q, used = i < s.seqlen_q;
        float sum = ptx::quad_sum(row.sum[m][half]);
        const float unit = kGeneral && natural ? 1.f : p.score.scale;
        const bool sees = row.reference[m][half] != kMinusInf;
        // In natural units; the product that exponentials() subtracted, where it did.
        float reference = !sees ? kMinusInf : row.large ? row.reference[m][half] * unit : row.reference[m][half] * c * kLn2;
        float factor = 1.f;
        if constexpr (kGeneral) {
          if (p.score.sink && !splits && used) {
            const float sink = p.score.sink[head(r) * p.score.sink_head];
            if (sink > reference) {  // take the larger as reference, so that neither exponential overflows
              factor = reference == kMinusInf ? 0.f : ptx::exp2_approx((reference - sink) * kLog2E);
              reference = sink;
              sum = sum * factor + 1.f;
            } else if (sink != kMinusInf) {
              sum += ptx::exp2_approx((sink - reference) * kLog2E);
            }
          }
        }
        const bool empty = !used || (reference == kMinusInf && sum == 0.f);  // a row may see keys whose logits are all NaN
        // A row that saw no key has sum 0 and, with a sink, reference sink: o = 0 either way.
        const float inverse = empty ? 0.f : factor * scale_down / sum;
        const float lse = empty ? kMinusInf : reference + logf(sum);
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          // Not 0 * o: o of a row that is not used may hold anything.
          o[m][n][2 * half] = empty ? 0.f : o[m][n][2 * half] * inverse;
          o[m][n][2 * half + 1] = empty ? 0.f : o[m][n][2 * half + 1] * inverse;
        }
        if (exists && (lane & 3) == 0) {
          if (splits)
            p.split_lse[split_row(r)] = lse;
          else if (p.lse)
            row_scalars(p.lse, p.sequence, s, b, head(r))[i * p.lse.row] = lse;
          if constexpr (kGeneral)
            if (p.max_logit && used && (row.maximum[m][half] != kMinusInf || isnan(sum)))  // a NaN logit makes the sum NaN
              ptx::atomic_max(p.max_logit + b * p.max_logit_batch + head(r) * p.max_logit_head,
                              isnan(sum) ? sum : row.maximum[m][half] * unit);
        }
        if (splits) {
          if (exists) {
            float* out = p.split_o + split_row(r) * p.split_columns + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < kD; ++n)
              if (n * 8 < p.split_columns) *reinterpret_cast<float2*>(out + n * 8) = make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
          }
        } else if (kGeneral && (!p.o_aligned || p.pack > 1)) {
          if (exists)
#pragma unroll
            for (int n = 0; n < kD; ++n) store_row_pair(r, n, o[m][n][2 * half], o[m][n][2 * half + 1]);
        }
      }
    if (splits || (kGeneral && (!p.o_aligned || p.pack > 1))) return;
    // Through this warp's own rows of the Q tile, to write 16 bytes per lane.
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kD; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = s_o + Layout::byte_offset(warp_row(m, half), (n * 8 + 2 * (lane & 3)) * static_cast<int>(sizeof(T)));
          if constexpr (sizeof(T) == 4) ptx::store_shared(at, make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]));
          else ptx::store_shared(at, ptx::pack<T>(o[m][n][2 * half], o[m][n][2 * half + 1]));
        }
    __syncwarp();
    T* out = static_cast<T*>(p.o.data) + query_rows_offset(p.o);
    constexpr int kPerChunk = QCopy::kPerChunk, kChunks = C.head_dim / kPerChunk, kItems = kM * 16 * kChunks;
#pragma unroll
    for (int item = lane; item < kItems; item += 32) {
      const int r = warp * kM * 16 + item / kChunks, chunk = item % kChunks;
      const uint4 x = ptx::load_shared_16(s_o + Layout::chunk_offset(r, chunk));
      if (first_row + r < s.capacity_q && chunk * kPerChunk < p.head_dim_v)
        *reinterpret_cast<uint4*>(out + (first_row + r) * p.o.row + chunk * kPerChunk) = x;
    }
  }
};

}  // namespace tilewise::cuda
