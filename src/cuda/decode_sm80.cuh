// Decoding: one or a few queries a sequence over many keys, on mma.sync and cp.async (sm_80 and newer).
//
// Every byte of K and V is read once, and nothing else takes time if enough of them are under way. So the query heads that
// share a key head are the rows of one product, the keys are split over as many blocks as fill the GPU, and inside a block
// every warp walks keys of its own, through a ring of its own in shared memory, without a barrier:
//
//   K(n) V(n) K(n+1) V(n+1) ...     requested kAhead steps early
//   S = Q K^T, P = exp(S - m), O = O + P V     for 16 rows and the warp's 16 or 32 keys
//
// The warps of a block merge their results through shared memory, the splits through the workspace (combine.cuh).
#pragma once
#include "cuda/config_decode.h"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/packed_tail.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
struct DecodeKernel {
  static constexpr DecodeConfig C = decode_config(kElement, kHeadDim);
  static_assert(C.valid());
  using T = typename ElementType<kElement>::Type;
  static constexpr int kBytes = C.row_bytes();
  static constexpr int kRows = C.kRows, kWarps = C.num_warps, kKeys = C.keys;
  static constexpr int kN = kKeys / 8;          // n8 tiles of S
  static constexpr int kD = kHeadDim / 8;       // n8 tiles of O
  static constexpr int kSteps = kHeadDim / 16;  // k16 steps of Q K^T
  static constexpr bool kKeepQ = kHeadDim <= 128;  // Q stays in registers
  static constexpr int kRowsPerPass = 32 / kD;  // a warp copies rows of kD chunks of 16 bytes
  static constexpr int kPasses = kKeys / kRowsPerPass;
  using Layout = TileLayout<kBytes>;

  const ForwardParams& p;
  int b, head_k, first_head, first_row, num_rows, split;  // first_row: packed row; num_rows: of these 16 that exist
  int pack_inverse;  // 2^16 / pack, rounded up
  DeviceSequence s;
  int warp, lane;
  bool natural;  // logits carry the scale already, as softcap, ALiBi and a scale <= 0 need it
  // The two rows of this thread, lane / 4 and lane / 4 + 8; beyond num_rows the last row once more.
  int query_of[2];
  Range keys_of[2];
  float slope[2];

  // Packed row r of this block -> query and head. A division by a multiplication: exact, as rows stay below 64.
  __device__ __forceinline__ int query(int r) const { return (first_row + r) * pack_inverse >> 16; }
  __device__ __forceinline__ int head(int r) const { return first_head + first_row + r - query(r) * p.pack; }

  __device__ __forceinline__ void place_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = min(half * 8 + (lane >> 2), num_rows - 1);
      query_of[half] = query(r);
      keys_of[half] = visible_keys(p.score, query_of[half], s.seqlen_q, s.seqlen_k);
      slope[half] = p.score.alibi ? p.score.alibi[b * p.score.alibi_batch + head(r) * p.score.alibi_head] : 0.f;
    }
  }

  // ---- from global to shared memory ----

  // Where a paged key lies: lane l knows it for row l of a unit.
  struct Place {
    int page, row;
  };
  __device__ __forceinline__ Place place_of(int j) const {
    const int position = j + s.leftpad, n = position / p.sequence.page_size;
    return {p.sequence.page_table[b * p.sequence.page_table_batch + n * p.sequence.page_table_page],
            position - n * p.sequence.page_size};
  }

  // Eight elements of any alignment, or zeros.
  __device__ __forceinline__ static uint4 read_chunk(const T* from, bool exists) {
    const auto pair = [&](int n) {
      const auto* halves = reinterpret_cast<const uint16_t*>(from) + n;
      return exists ? halves[0] | static_cast<uint32_t>(halves[1]) << 16 : 0;
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  }

  // Rows j0 .. of k or v (base: row 0, or page 0), up to key `end`; zeros beyond, and beyond column `cols`. A warp has its
  // scheduler nearly to itself, so every instruction here is time: whole units of aligned rows take a few a row.
  __device__ __forceinline__ void load_unit(uint32_t unit, const T* base, int64_t page_stride, int64_t row_stride, int cols,
                                            Place place, int j0, int end) const {
    const int lane_row = lane / kD, chunk = lane % kD;
    const bool paged = p.sequence.page_size > 0, column = chunk * 8 < cols;
    const int64_t page_offset = paged ? place.page * page_stride + place.row * row_stride : 0;
    // Permuting the chunks of a row is an XOR in bits 4 to 6, in which the addresses of whole groups of 8 rows are 0.
    const uint32_t lane_to = unit + Layout::chunk_offset(lane_row, chunk);
    const auto to = [&](int pass) { return (lane_to ^ (pass * kRowsPerPass & 7) << 4) + pass * kRowsPerPass * kBytes; };
    const T* from = base + chunk * 8;
    if (p.aligned && j0 + kKeys <= end) {
      if (paged) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
          ptx::cp_async_16(to(pass), from + __shfl_sync(0xffffffffu, page_offset, lane_row + pass * kRowsPerPass), column ? 16 : 0);
      } else {
        from += (j0 + lane_row) * row_stride;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass, from += kRowsPerPass * row_stride) ptx::cp_async_16(to(pass), from, column ? 16 : 0);
      }
      return;
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = lane_row + pass * kRowsPerPass;
      const int64_t offset = paged ? __shfl_sync(0xffffffffu, page_offset, row) : (j0 + row) * row_stride;
      const bool exists = column && j0 + row < end;
      if (p.aligned) ptx::cp_async_16(to(pass), exists ? from + offset : base, exists ? 16 : 0);
      else ptx::store_shared(to(pass), read_chunk(from + offset, exists));
    }
  }

  // The rows of Q that exist, zeros for the others. By all warps; not by cp.async, so that nobody waits for it but its reader.
  __device__ __forceinline__ void load_queries(uint32_t s_q) const {
    const T* q = static_cast<const T*>(p.q.data) + query_rows_offset(p.q);
#pragma unroll
    for (int item = threadIdx.x; item < kRows * kD; item += C.num_threads()) {
      const int r = item / kD, chunk = item % kD;
      const bool exists = r < num_rows && query(r) < s.seqlen_q && chunk * 8 < p.head_dim;
      const T* from = q + row_offset(p.q, r) + chunk * 8;
      uint4 x{};
      if (p.aligned && exists) x = *reinterpret_cast<const uint4*>(from);
      else x = read_chunk(from, exists);
      ptx::store_shared(s_q + Layout::chunk_offset(r, chunk), x);
    }
  }

  __device__ __forceinline__ int64_t query_rows_offset(const RowTensor& x) const {
    return (p.sequence.packed_q ? s.q_begin * x.row : b * x.batch) + first_head * x.head;
  }
  __device__ __forceinline__ int64_t row_offset(const RowTensor& x, int r) const {
    return query(r) * x.row + (head(r) - first_head) * x.head;
  }

  // ---- logits ----

  // Scale, softcap and ALiBi, in natural units.
  __device__ __forceinline__ void options(float (&x)[1][kN][4], int j0) const {
    if (!natural) return;
    const float inverse = 1.f / p.score.softcap;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& logit = x[0][n][e];
        logit *= p.score.scale;
        if (p.score.softcap > 0) logit = p.score.softcap * tanh_of<T>(logit * inverse);
        if (p.score.alibi) {
          const int j = j0 + n * 8 + 2 * (lane & 3) + (e & 1);
          logit -= slope[e >> 1] * fabsf(static_cast<float>(query_of[e >> 1] + s.seqlen_k - s.seqlen_q - j));
        }
      }
  }

  __device__ __forceinline__ void mask(float (&x)[1][kN][4], int j0) const {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = j0 + n * 8 + 2 * (lane & 3) + (e & 1);
        if (j < keys_of[e >> 1].begin || j >= keys_of[e >> 1].end) x[0][n][e] = kMinusInf;
      }
  }

  // ---- softmax: a reference that moves only when a logit exceeds it by 2^8 ----

  struct RowState {
    float reference[2] = {kMinusInf, kMinusInf};  // in the units of the logits
    float sum[2] = {0.f, 0.f};                    // of this thread's columns
    float maximum[2] = {kMinusInf, kMinusInf};    // the true one
  };

  // x becomes P = exp(x - reference). Subtracts before it multiplies: with logits of 1e12, c times the reference would round
  // by more than an exponent can hold, and here two instructions an element cost nothing.
  __device__ __forceinline__ static void exponentials(RowState& row, float (&x)[1][kN][4], float (&o)[1][kD][4], float c) {
    float maximum[2];
    bool exceeds = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(x[0][0][2 * half], x[0][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) largest = fmaxf(largest, fmaxf(x[0][n][2 * half], x[0][n][2 * half + 1]));
      maximum[half] = ptx::quad_max(largest);
      row.maximum[half] = fmaxf(row.maximum[half], maximum[half]);
      exceeds |= (maximum[half] - row.reference[half]) * c > 8.f;  // false for -inf - -inf
    }
    if (__any_sync(0xffffffffu, exceeds)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = row.reference[half], now = fmaxf(old, maximum[half]);
        if (now == old) continue;
        const float factor = ptx::exp2_approx((old - now) * c);
        row.reference[half] = now;
        row.sum[half] *= factor;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          o[0][n][2 * half] *= factor;
          o[0][n][2 * half + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = row.reference[half] == kMinusInf ? 0.f : row.reference[half];
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          x[0][n][e] = ptx::exp2_approx((x[0][n][e] - reference) * c);
          row.sum[half] += x[0][n][e];
        }
    }
  }

  // A hidden key's probability is 0, but 0 * NaN = NaN. So where a unit has hidden keys, chunks of V (8 columns) with inf or
  // NaN do not go through the product: they are added here for the rows that see them, and zeroed. Rare, so compact.
  __device__ __forceinline__ void take_nonfinite(const float (&x)[1][kN][4], float (&o)[1][kD][4], int j0, uint32_t unit) const {
    bool found = false;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 v = ptx::load_shared_16(unit + Layout::chunk_offset(lane / kD + pass * kRowsPerPass, lane % kD));
      found |= ptx::has_nonfinite<T>(v.x) || ptx::has_nonfinite<T>(v.y) || ptx::has_nonfinite<T>(v.z) ||
               ptx::has_nonfinite<T>(v.w);
    }
    if (!__any_sync(0xffffffffu, found)) return;
#pragma unroll 1
    for (int j = 0; j < kKeys; ++j) {
      float weight[2];
      bool sees[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t mine = 0;  // of key j; masks, as a comparison would become a dynamic index
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            mine |= __float_as_uint(x[0][n][2 * half + e]) & -static_cast<uint32_t>(2 * n + e == j / 8 * 2 + j % 2);
        const float weighs = __uint_as_float(__shfl_sync(0xffffffffu, mine, (lane & ~3) | (j % 8) / 2));
        weight[half] = ptx::to_float(ptx::from_float<T>(weighs));
        sees[half] = j0 + j >= keys_of[half].begin && j0 + j < keys_of[half].end;
      }
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        const uint32_t at = unit + Layout::byte_offset(j, (n * 8 + 2 * (lane & 3)) * 2);
        const uint32_t pair = __float_as_uint(ptx::load_shared_4(at));
        if (!__any_sync(0xffffffffu, ptx::has_nonfinite<T>(pair))) continue;
        const float2 v = ptx::unpack<T>(pair);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (sees[half]) {
            o[0][n][2 * half] += weight[half] * v.x;
            o[0][n][2 * half + 1] += weight[half] * v.y;
          }
        ptx::store_shared(at, 0u);
      }
    }
    __syncwarp();
  }

  // ---- results ----

  // Row of the partial results: (batch, head, query), or (head, packed query).
  __device__ __forceinline__ int64_t split_row(int r) const {
    const int64_t rows = p.sequence.packed_q ? p.sequence.total_q : int64_t{p.sequence.batch} * p.sequence.seqlen_q;
    const int64_t row = (p.sequence.packed_q ? s.q_begin : static_cast<int64_t>(b) * p.sequence.seqlen_q) + query(r);
    return (static_cast<int64_t>(split) * p.sequence.num_heads_q + head(r)) * rows + row;
  }

  __device__ __forceinline__ void store_four(int r, int column, float4 x) const {
    if (p.num_splits > 1) {
      *reinterpret_cast<float4*>(p.split_o + split_row(r) * p.split_columns + column) = x;
      return;
    }
    const int64_t at = query_rows_offset(p.o) + row_offset(p.o, r) + column;
    if (p.o_aligned) {
      *reinterpret_cast<uint2*>(static_cast<T*>(p.o.data) + at) = make_uint2(ptx::pack<T>(x.x, x.y), ptx::pack<T>(x.z, x.w));
    } else {
      store_columns<T>(p.o.data, at, p.o_is_float, false, true, x.x, x.y);
      store_columns<T>(p.o.data, at + 2, p.o_is_float, false, true, x.z, x.w);
    }
  }

  // Merges the warps' results, adds the sink unless the splits are still to be merged, writes o, lse and max_logit. `merge`
  // takes the place of the rings.
  __device__ __forceinline__ void epilogue(const RowState& row, const float (&o)[1][kD][4], float c, float* merge) const {
    constexpr int kStride = C.merge_columns();
    float* const references = merge + kWarps * kRows * kStride;  // [warp, row]
    float* const sums = references + kWarps * kRows;
    float* const maxima = sums + kWarps * kRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = half * 8 + (lane >> 2);
      const float sum = ptx::quad_sum(row.sum[half]);
      if (r >= num_rows) continue;
      float* to = merge + (warp * kRows + r) * kStride + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < kD; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[0][n][2 * half], o[0][n][2 * half + 1]);
      if ((lane & 3) == 0) {
        references[warp * kRows + r] = row.reference[half];
        sums[warp * kRows + r] = sum;
        maxima[warp * kRows + r] = row.maximum[half];
      }
    }
    __syncthreads();

    constexpr int kGroups = kHeadDim / 4;  // a thread takes four columns of one row
    for (int item = threadIdx.x; item < num_rows * kGroups; item += C.num_threads()) {
      const int r = item / kGroups, column = item % kGroups * 4;
      if (column >= p.head_dim_v) continue;
      const bool used = query(r) < s.seqlen_q;
      float reference = kMinusInf, maximum = kMinusInf, sum = 0.f, factor[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        reference = fmaxf(reference, references[w * kRows + r]);
        maximum = fmaxf(maximum, maxima[w * kRows + r]);
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float own = references[w * kRows + r], own_sum = sums[w * kRows + r];
        // A warp that saw no key. One whose keys all gave NaN has no reference either, but its sum is NaN, and stays.
        factor[w] = own == kMinusInf && own_sum == 0.f ? 0.f : ptx::exp2_approx((own - reference) * c);
        sum += factor[w] * own_sum;
      }
      reference *= natural ? 1.f : p.score.scale;
      float total_factor = 1.f;
      if (p.score.sink && p.num_splits == 1 && used) {
        const float sink = p.score.sink[head(r) * p.score.sink_head];
        if (sink > reference) {  // take the larger as reference, so that neither exponential overflows
          total_factor = reference == kMinusInf ? 0.f : ptx::exp2_approx((reference - sink) * kLog2E);
          reference = sink;
          sum = sum * total_factor + 1.f;
        } else if (sink != kMinusInf) {
          sum += ptx::exp2_approx((sink - reference) * kLog2E);
        }
      }
      const bool empty = !used || (reference == kMinusInf && !isnan(sum));
      const float inverse = total_factor / sum;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (!empty) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float4 y = *reinterpret_cast<const float4*>(merge + (w * kRows + r) * kStride + column);
          const float f = factor[w] * inverse;
          x = make_float4(x.x + f * y.x, x.y + f * y.y, x.z + f * y.z, x.w + f * y.w);
        }
      }
      store_four(r, column, x);
      if (column != 0) continue;
      const float lse = empty ? kMinusInf : reference + logf(sum);
      if (p.num_splits > 1)
        p.split_lse[split_row(r)] = lse;
      else if (p.lse)
        row_scalars(p.lse, p.sequence, s, b, head(r))[query(r) * p.lse.row] = lse;
      if (p.max_logit && used && (maximum != kMinusInf || isnan(sum)))  // a NaN logit makes the sum NaN
        ptx::atomic_max(p.max_logit + b * p.max_logit_batch + head(r) * p.max_logit_head,
                        isnan(sum) ? sum : maximum * (natural ? 1.f : p.score.scale));
    }
  }

  // ---- all of it ----

  // Keys that some row of the block sees, and of these the split's share, in whole steps of the block.
  __device__ __forceinline__ Range split_keys() const {
    if (query(0) >= s.seqlen_q) return {0, 0};
    const int last_query = min(query(num_rows - 1), s.seqlen_q - 1);
    Range keys = visible_keys(p.score, query(0), s.seqlen_q, s.seqlen_k);
    keys.end = max(keys.begin, visible_keys(p.score, last_query, s.seqlen_q, s.seqlen_k).end);
    const int steps = (keys.end - keys.begin + C.block_n() - 1) / C.block_n();
    if (p.num_splits == 1) return keys;
    const int share = (steps + p.num_splits - 1) / p.num_splits * C.block_n();
    keys.begin = min(keys.end, keys.begin + split * share);
    keys.end = min(keys.end, keys.begin + share);
    return keys;
  }

  __device__ __forceinline__ void run(unsigned char* shared) {
    const uint32_t s_q = ptx::shared_address(shared);  // [16, head_dim]
    const uint32_t ring = s_q + kRows * kBytes + warp * C.ring_bytes();  // [unit][keys, head_dim]
    const float c = natural ? kLog2E : p.score.scale_log2;
    float o[1][kD][4];
#pragma unroll
    for (int n = 0; n < kD; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.f;
    RowState row;

    const Range keys = split_keys();
    if (keys.end > keys.begin) {
      const T *k, *v;
      const bool paged = p.sequence.page_size > 0;
      if (paged) {
        k = static_cast<const T*>(p.k.data) + head_k * p.k.head;
        v = static_cast<const T*>(p.v.data) + head_k * p.v.head;
      } else {
        k = key_rows<const T>(p.k, p.sequence, s, head_k);
        v = key_rows<const T>(p.v, p.sequence, s, head_k);
      }
      int write_j0 = keys.begin + warp * kKeys, write = 0, read = 0;  // units
      Place place{}, next_place{};
      const auto look_up = [&](int j0) {  // a step before it is needed
        if (paged && j0 < keys.end) next_place = place_of(min(j0 + lane % kKeys, keys.end - 1));
      };
      const auto unit = [&](int n) { return ring + n * C.unit_bytes(); };
      const auto advance = [](int& n) { n = n + 1 == C.units() ? 0 : n + 1; };
      const auto request = [&](bool is_v) {  // K, then V of the same keys
        if (!is_v) place = next_place;
        if (write_j0 < keys.end) {
          load_unit(unit(write), is_v ? v : k, is_v ? p.v.batch : p.k.batch, is_v ? p.v.row : p.k.row,
                    is_v ? p.head_dim_v : p.head_dim, place, write_j0, keys.end);
          if (!is_v) look_up(write_j0 + C.block_n());
        }
        ptx::cp_async_commit();
        advance(write);
        if (is_v) write_j0 += C.block_n();
      };
      look_up(write_j0);
#pragma unroll 1
      for (int n = 0; n < 2 * C.ahead; ++n) request(n & 1);  // a loop: a kernel of some microseconds fetches its code as well

      place_rows();
      // Units inside these bounds are visible to every row of the block.
      const int full_begin = visible_keys(p.score, min(query(num_rows - 1), s.seqlen_q - 1), s.seqlen_q, s.seqlen_k).begin;
      const int full_end = visible_keys(p.score, query(0), s.seqlen_q, s.seqlen_k).end;

      load_queries(s_q);
      __syncthreads();
      const auto lane_q = lane_address_a<T, kBytes>(s_q, lane);
      OperandA<T> q[kKeepQ ? kSteps : 1][1];
      if constexpr (kKeepQ) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_a<T>(q[step][0], lane_q, 0, step);
      }

#pragma unroll 1
      for (int j0 = keys.begin + warp * kKeys; j0 < keys.end; j0 += C.block_n()) {
        ptx::cp_async_wait<2 * C.ahead - 1>();
        __syncwarp();  // K is here, and every lane is done with the last V, whose place the next request takes
        request(false);
        float x[1][kN][4], odd[1][kN][4];  // even and odd steps apart: half the latency of one chain of products
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[0][n][e] = odd[0][n][e] = 0.f;
        const auto lane_k = lane_address_b<T, kBytes>(unit(read), lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if constexpr (!kKeepQ) load_a<T>(q[0][0], lane_q, 0, step);
          multiply_b<T>(step % 2 == 0 ? x : odd, q[kKeepQ ? step : 0], lane_k, step);
        }
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[0][n][e] += odd[0][n][e];
        advance(read);
        options(x, j0);
        const bool masked = j0 < full_begin || j0 + kKeys > full_end;
        if (masked) mask(x, j0);
        exponentials(row, x, o, c);

        ptx::cp_async_wait<2 * C.ahead - 1>();
        __syncwarp();  // V is here, and every lane is done with K
        request(true);
        if (masked) take_nonfinite(x, o, j0, unit(read));
        const auto lane_v = lane_address_bt<T, kBytes>(unit(read), lane);
#pragma unroll
        for (int step = 0; step < kN / 2; ++step) {
          OperandA<T> operand[1];
          operand_of<T>(operand, x, step);
          multiply_bt<T>(o, operand, lane_v, step);
        }
        advance(read);
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // every warp is done with its ring
    }
    epilogue(row, o, c, reinterpret_cast<float*>(shared + kRows * kBytes));
  }
};

// Grid: x = block of 16 packed rows, inside key head, inside split, inside batch entry (one more when rows are packed).
template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(decode_config(kElement, kHeadDim).num_threads(), 2)
    decode_sm80_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Kernel = DecodeKernel<kElement, kHeadDim>;
  // The merge may: its blocks fit beside these. Who else comes next may not: large blocks that lie down between those of this
  // kernel leave some multiprocessors with two and some with none (4 to 10 % lost at one block a multiprocessor).
  if (p.num_splits > 1) ptx::let_next_kernel_start();
  // Divisions take their time: none where there is nothing to divide, and all before the wait.
  unsigned index = blockIdx.x;
  const auto take = [&](int count) {
    if (count == 1) return 0;
    const unsigned rest = index % count;
    index /= count;
    return static_cast<int>(rest);
  };
  const int block = take(p.num_blocks);
  const int h = take(p.sequence.num_heads_k);
  const int split = take(p.num_splits);
  const int b = static_cast<int>(index);
  const int pack_inverse = (65536 + p.pack - 1) / p.pack;
  ptx::wait_for_previous_kernels();
  if (b >= p.sequence.batch) {
    if (split == 0)
      for (int n = 0; n < p.pack; ++n) zero_packed_tail<typename Kernel::T>(p, h * p.pack + n, block, Kernel::kRows);
    return;
  }
  Kernel kernel{p};
  kernel.b = b;
  kernel.s = resolve(p.sequence, b);
  kernel.first_row = block * Kernel::kRows;
  kernel.pack_inverse = pack_inverse;
  kernel.num_rows = min(Kernel::kRows, kernel.s.capacity_q * p.pack - kernel.first_row);
  if (kernel.num_rows <= 0) return;
  kernel.first_head = h * p.pack;
  kernel.head_k = h;  // the whole group shares the tile
  kernel.split = split;
  kernel.warp = threadIdx.x / 32;
  kernel.lane = threadIdx.x % 32;
  kernel.natural = p.score.softcap > 0 || p.score.alibi || !(p.score.scale > 1e-30f);
  kernel.run(shared);
}

}  // namespace tilewise::cuda
