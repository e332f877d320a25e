// Backward attention on mma.sync and cp.async (sm_80 and newer).
//
// One block owns block_n keys of one key head and walks the queries that see them, head by head of its group, in tiles
// of block_m rows; dK and dV stay in registers:
//
//   S^T  = K Q^T          dP^T = V dO^T
//   P^T  = exp(S^T - lse)                       dV += P^T dO
//   dS^T = P^T * (dP^T - delta)                 dK += dS^T Q
//   dQ  += dS K           through shared memory (the only operand that needs it) and a float32 sum in global memory
//
// Keys are the rows, so that P^T and dS^T are A operands as they leave the accumulators.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/params.h"
#include "cuda/ptx/reduce.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/key_block.cuh"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

template <BackwardConfig C>
struct BackwardKernel {
  static_assert(C.valid());
  using T = typename ElementType<C.element>::Type;
  static constexpr bool kGeneral = C.kind == BackwardKind::kGeneral;
  static constexpr bool kDrops = C.kind == BackwardKind::kDropout;  // the general kernel asks at run time
  static constexpr int kSplit = C.column_split;
  static constexpr int kBlockM = C.block_m, kBlockN = C.block_n();
  static constexpr int kM = C.row_groups;                // groups of 16 keys per warp
  static constexpr int kN = kBlockM / 8 / kSplit;        // n8 tiles of S^T: queries
  static constexpr int kD = C.head_dim / 8 / kSplit;     // n8 tiles of dK, dV: columns
  static constexpr int kSteps = C.head_dim / 16;
  static constexpr int kQueryGroups = kBlockM / 16;      // of dQ: warps = query groups x column parts
  static constexpr int kQueryParts = C.num_warps / kQueryGroups;
  static constexpr int kDQ = C.head_dim / 8 / kQueryParts;  // n8 tiles of dQ per warp
  static_assert(kDQ % 2 == 0 && kN % 2 == 0 && kD % 2 == 0);
  using KCopy = TileCopy<kBlockN, C.head_dim, C.num_threads()>;
  using QCopy = TileCopy<kBlockM, C.head_dim, C.num_threads()>;
  using Layout = TileLayout<C.head_dim>;
  using PairLayout = TileLayout<kBlockM>;  // [key, query]
  static constexpr int kTileQ = kBlockM * C.head_dim * 2, kTileK = kBlockN * C.head_dim * 2, kTilePair = kBlockN * kBlockM * 2;

  const BackwardParams& p;
  int b, head_k, key_block;
  DeviceSequence s;
  int warp, lane;
  int group, first_tile, num_tiles;  // query heads per key head; tiles of queries that see the block

  __device__ __forceinline__ int key_row(int m, int half) const {  // in the block
    return (warp / kSplit * kM + m) * 16 + half * 8 + (lane >> 2);
  }
  __device__ __forceinline__ int query_column(int n) const {  // in the tile; and its right neighbour
    return warp % kSplit * (kBlockM / kSplit) + n * 8 + 2 * (lane & 3);
  }

  __device__ __forceinline__ void load_queries(int head, int tile, uint32_t s_q, uint32_t s_do, uint32_t s_lse) const {
    const int i0 = tile * kBlockM;
    const T* q = query_rows<const T>(p.q, p.sequence, s, b, head);
    const T* dout = query_rows<const T>(p.dout, p.sequence, s, b, head);
    if (!kGeneral || p.aligned) {
      QCopy::template load<false>(s_q, q + i0 * p.q.row, p.q.row, s.seqlen_q - i0, p.head_dim);
      QCopy::template load<false>(s_do, dout + i0 * p.dout.row, p.dout.row, s.seqlen_q - i0, p.head_dim_v);
    } else {
      QCopy::load_rows(s_q, q, [&](int r) { return (i0 + r) * p.q.row; }, s.seqlen_q - i0, p.head_dim, false);
      QCopy::load_rows(s_do, dout, [&](int r) { return (i0 + r) * p.dout.row; }, s.seqlen_q - i0, p.head_dim_v, false);
    }
    const int64_t padded = head * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + i0;
    for (int n = threadIdx.x; n < 2 * kBlockM; n += C.num_threads())
      ptx::cp_async_4(s_lse + n * 4, n < kBlockM ? p.lse_log2 + padded + n : p.delta + padded + n - kBlockM);
  }

  // Inf and NaN in K, Q and dO. The products dQ = dS K, dK = dS^T Q, dV = P^T dO run over whole tiles, and 0 * NaN of a
  // masked pair would reach rows that do not see each other. So the non-finite chunks of K, and those of Q and dO in
  // tiles with a masked pair, are zeros in shared memory, and the scores of their rows become NaN, which the visible
  // pairs carry into every gradient that they take part in. V needs no care: it only meets the masked product P * dP.
  __device__ __forceinline__ void restore_nonfinite(float (&x)[kM][kN][4], const uint32_t* key_marks,
                                                    const uint32_t* query_marks) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key_marks[key_row(m, e >> 1)] | query_marks[query_column(n) + (e & 1)]) x[m][n][e] = __int_as_float(0x7fffffff);
  }

  // The decisions for this thread's keys and queries i and i + 1 (i even), and the 16 rows around them. Draws are laid out
  // for rows of queries: of the two that the thread needs, it makes the one of its own parity of key, and the lane of the
  // neighbouring key has made the other.
  __device__ __forceinline__ void draw_keep(uint32_t (&keep)[2], const Dropout& dropout, int i, int head) const {
    static_assert(kM <= 2);  // one block of 32 columns
    if (!dropout.active()) return;  // p below 2^-17: the threshold does not fit the comparison, and keeps all
    const int parity = lane >> 2 & 1;
    const Philox4 draw = dropout.draw(static_cast<int64_t>(b) * p.sequence.num_heads_q + head, i >> 4, (i & 7) + parity,
                                      (key_block * kBlockN + key_row(0, 0)) >> 5, lane >> 3);
    const uint32_t own = keep_bits(draw, dropout.threshold << 16);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 4);
    // Bits of the other parity are never asked for: move this thread's to the even places.
    keep[0] = (parity ? other : own) >> parity;
    keep[1] = (parity ? own : other) >> parity;
  }
  // Place of (query tile n, key group m, half) in a draw, its key's parity removed: Dropout::element.
  __device__ __forceinline__ int keep_index(int n, int m, int half) const {
    const int group = kM == 2 ? 2 * m + half : (warp / kSplit % 2) * 2 + half;
    return group * 4 + (n & 1) * 2;
  }

  // x: S^T becomes P^T (dropped and scaled, as dV wants it); dp: dP^T becomes dS^T, the gradient of scale * (q . k).
  __device__ __forceinline__ void pointwise(float (&x)[kM][kN][4], float (&dp)[kM][kN][4], uint32_t s_lse, bool masked,
                                            int i0, int head, const Dropout& dropout) const {
    const float c = p.score.scale_log2;
    Range queries[kM][2];
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          queries[m][half] = visible_queries(p.score, key_block * kBlockN + key_row(m, half), s.seqlen_q, s.seqlen_k);
          queries[m][half].begin -= i0 + query_column(0);
          queries[m][half].end -= i0 + query_column(0);
        }
    }
    uint32_t keep[2] = {0xffff, 0xffff};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = ptx::load_shared_8(s_lse + query_column(n) * 4);
      const float2 delta = ptx::load_shared_8(s_lse + (kBlockM + query_column(n)) * 4);
      if (kDrops && n % 2 == 0) draw_keep(keep, dropout, i0 + query_column(n), head);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[m][n][e] = ptx::exp2_approx(fmaf(x[m][n][e], c, e & 1 ? -lse.y : -lse.x));
          if constexpr (kDrops) {  // dV is scaled by 1 / (1 - p) at the end
            const bool kept = keep[e & 1] >> keep_index(n, m, e >> 1) & 1;
            dp[m][n][e] = x[m][n][e] * fmaf(kept ? dp[m][n][e] : 0.f, dropout.scale, e & 1 ? -delta.y : -delta.x);
            x[m][n][e] = kept ? x[m][n][e] : 0.f;
          } else {
            dp[m][n][e] = x[m][n][e] * (dp[m][n][e] - (e & 1 ? delta.y : delta.x));
          }
          if (masked && (n * 8 + (e & 1) < queries[m][e >> 1].begin || n * 8 + (e & 1) >= queries[m][e >> 1].end))
            x[m][n][e] = dp[m][n][e] = 0.f;  // not a product: dP of a masked pair may be NaN
        }
    }
  }

  // The same with every option. Returns this thread's part of dalibi.
  __device__ __forceinline__ float pointwise_general(float (&x)[kM][kN][4], float (&dp)[kM][kN][4], uint32_t s_lse, int i0,
                                                     int head, const Dropout& dropout) const {
    const ScoreParams& score = p.score;
    const bool drops = dropout.active();
    const float slope = score.alibi ? score.alibi[b * score.alibi_batch + head * score.alibi_head] : 0.f;
    const int64_t bias_base = b * score.bias_batch + head * score.bias_head;
    const int64_t dbias_base = b * p.dbias_batch + head * p.dbias_head;
    const float inverse_cap = score.softcap > 0 ? 1.f / score.softcap : 0.f;
    const int j0 = key_block * kBlockN;
    float dalibi = 0.f;
    Range queries[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        queries[m][half] = visible_queries(score, j0 + key_row(m, half), s.seqlen_q, s.seqlen_k);
    uint32_t keep[2] = {0xffff, 0xffff};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = ptx::load_shared_8(s_lse + query_column(n) * 4);
      const float2 delta = ptx::load_shared_8(s_lse + (kBlockM + query_column(n)) * 4);
      if (drops && n % 2 == 0) draw_keep(keep, dropout, i0 + query_column(n), head);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e >> 1, column = e & 1;
          const int i = i0 + query_column(n) + column, j = j0 + key_row(m, half);
          bool sees = i >= queries[m][half].begin && i < queries[m][half].end;
          float logit = x[m][n][e] * score.scale, derivative = 1.f;
          if (score.softcap > 0) {
            const float tangent = tanh_of(logit * inverse_cap);
            logit = score.softcap * tangent;
            derivative = 1.f - tangent * tangent;
          }
          const float distance = fabsf(static_cast<float>(i + s.seqlen_k - s.seqlen_q - j));
          if (score.alibi) logit -= slope * distance;
          if (score.bias && sees) {
            const float bias = load_bias(score, bias_base + i * score.bias_row + j * score.bias_key);
            sees = bias != kMinusInf;
            logit += bias;
          }
          const float probability = ptx::exp2_approx(fmaf(logit, kLog2E, column ? -lse.y : -lse.x));
          const float factor = !drops ? 1.f : keep[column] >> keep_index(n, m, half) & 1 ? dropout.scale : 0.f;
          const float gradient = sees ? probability * (dp[m][n][e] * factor - (column ? delta.y : delta.x)) : 0.f;
          if (p.dbias_sum && sees)
            atomicAdd(p.dbias_sum + dbias_base + i * p.dbias_row + j * p.dbias_key, gradient);
          if (p.dalibi_parts) dalibi -= gradient * distance;
          x[m][n][e] = sees ? probability * factor : 0.f;
          dp[m][n][e] = sees ? gradient * derivative : 0.f;
        }
    }
    return dalibi;
  }

  __device__ __forceinline__ static void pack_fragments(uint32_t (&a)[kM][4], const float (&x)[kM][kN][4], int step) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        a[m][quarter] = ptx::pack<T>(x[m][2 * step + quarter / 2][quarter % 2 * 2],
                                     x[m][2 * step + quarter / 2][quarter % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void store_fragments(uint32_t tile, const uint32_t (&a)[kM][4], int step) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        ptx::store_shared(tile + PairLayout::pair_offset(key_row(m, quarter % 2), query_column(2 * step + quarter / 2)),
                          a[m][quarter]);
  }

  // Passes the turn on, once this warp's sums have arrived. Called an iteration later, when that costs no waiting.
  __device__ __forceinline__ void pass_turn(int*& turn) const {
    if (turn == nullptr) return;
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::add_release(turn, 1);
    turn = nullptr;
  }

  // dQ of this tile of queries, added to the float32 sum. Returns the turn to pass on, if sums are ordered.
  __device__ __forceinline__ int* add_dq(uint32_t s_ds, uint32_t s_k, int head, int tile) const {
    const int query_group = warp % kQueryGroups, part = warp / kQueryGroups;
    const auto lane_ds = lane_address_at<kBlockM>(s_ds, lane);
    const auto lane_k = lane_address_bt<C.head_dim>(s_k, lane);
    float dq[1][kDQ][4];
#pragma unroll
    for (int n = 0; n < kDQ; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[0][n][e] = 0.f;
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      uint32_t a[1][4];
      ptx::ldmatrix_x4_trans(a[0], lane_ds.at(step, query_group));
#pragma unroll
      for (int n = 0; n < kDQ; n += 2) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4_trans(fragment, lane_k.at(step, part * (kDQ / 2) + n / 2));
        ptx::mma_m16n8k16<T>(dq[0][n], a[0], fragment[0], fragment[1]);
        ptx::mma_m16n8k16<T>(dq[0][n + 1], a[0], fragment[2], fragment[3]);
      }
    }
    int* turn = nullptr;
    if (p.deterministic) {  // wait until the key blocks before this one have added theirs; each warp has its own turns
      turn = p.turn + ((static_cast<int64_t>(head) * p.sequence.batch + b) * p.num_query_blocks + tile) * C.num_warps + warp;
      if (lane == 0) {
        int first_block = 0;  // that sees this tile
        if (p.score.window_left >= 0)
          first_block = max(0, tile * kBlockM + s.seqlen_k - s.seqlen_q - p.score.window_left) / kBlockN;
        while (ptx::load_acquire(turn) != key_block - first_block) {
        }
      }
      __syncwarp();
    }
    const int64_t padded = head * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + tile * kBlockM;
    float* out = p.dq_sum + (padded + query_group * 16) * C.head_dim + (part * kDQ * 32 + lane) * 4;
#pragma unroll
    for (int n = 0; n < kDQ; ++n) ptx::add_global(out + n * 128, dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
    return turn;
  }

  __device__ __forceinline__ void store_rows(const RowTensor& x, bool is_float, const float (&d)[kM][kD][4], float factor,
                                             int cols) const {
    if (x.data == nullptr) return;
    const int64_t base = (p.sequence.packed_k ? s.k_begin * x.row : s.cache_row * x.batch) + head_k * x.head;
    const bool pairs = (reinterpret_cast<uintptr_t>(x.data) % 4 == 0) && ((x.row | x.batch | x.head) & 1) == 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = key_block * kBlockN + key_row(m, half);
        if (j >= s.capacity_k) continue;
        const bool used = j < s.seqlen_k;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          const int col = (warp % kSplit * kD + n) * 8 + 2 * (lane & 3);
          if (col >= cols) continue;
          const float first = used ? d[m][n][2 * half] * factor : 0.f, second = used ? d[m][n][2 * half + 1] * factor : 0.f;
          const int64_t at = base + j * x.row + col;
          if (is_float) {
            static_cast<float*>(x.data)[at] = first;
            static_cast<float*>(x.data)[at + 1] = second;
          } else if (pairs) {
            *reinterpret_cast<uint32_t*>(static_cast<T*>(x.data) + at) = ptx::pack<T>(first, second);
          } else {
            static_cast<T*>(x.data)[at] = ptx::from_float<T>(first);
            static_cast<T*>(x.data)[at + 1] = ptx::from_float<T>(second);
          }
        }
      }
  }

  __device__ __forceinline__ void run(uint32_t shared, uint32_t* marks, float* reduction) {
    const uint32_t s_k = shared, s_v = s_k + kTileK;                       // [block_n, head_dim]
    const uint32_t s_q = s_v + kTileK, s_do = s_q + C.num_stages * kTileQ;  // [stages, block_m, head_dim]
    const uint32_t s_ds = s_do + C.num_stages * kTileQ;                     // [block_n, block_m]
    const uint32_t s_p = s_ds + (C.pair_tiles() - 1) * kTilePair;           // likewise, if the columns are split
    const uint32_t s_lse = s_ds + C.pair_tiles() * kTilePair;               // [stages, 2, block_m] float
    uint32_t* const key_marks = marks;                                      // [block_n], see Nonfinite
    if (threadIdx.x < kBlockN) key_marks[threadIdx.x] = 0;
    for (int n = threadIdx.x; n < 2 * kBlockM; n += C.num_threads()) marks[kBlockN + n] = 0;
    __syncthreads();
    bool bad_keys = false;

    float dk[kM][kD][4], dv[kM][kD][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kD; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][n][e] = dv[m][n][e] = 0.f;

    Dropout dropout;
    if constexpr (kGeneral || kDrops) dropout = resolve_dropout(p.score);
    const int total = group * num_tiles;
    if (total > 0) {
      const int j0 = key_block * kBlockN;
      const T* k = key_rows<const T>(p.k, p.sequence, s, head_k);
      const T* v = key_rows<const T>(p.v, p.sequence, s, head_k);
      if (!kGeneral || p.aligned) {
        KCopy::template load<false>(s_k, k + j0 * p.k.row, p.k.row, s.seqlen_k - j0, p.head_dim);
        KCopy::template load<false>(s_v, v + j0 * p.v.row, p.v.row, s.seqlen_k - j0, p.head_dim_v);
      } else {
        KCopy::load_rows(s_k, k, [&](int r) { return (j0 + r) * p.k.row; }, s.seqlen_k - j0, p.head_dim, false);
        KCopy::load_rows(s_v, v, [&](int r) { return (j0 + r) * p.v.row; }, s.seqlen_k - j0, p.head_dim_v, false);
      }
      load_queries(head_k * group, first_tile, s_q, s_do, s_lse);
      ptx::cp_async_commit();

      const uint32_t warp_keys = warp / kSplit * kM * 16;
      const auto lane_k = lane_address_a<C.head_dim>(s_k + warp_keys * Layout::kRowBytes, lane);
      const auto lane_v = lane_address_a<C.head_dim>(s_v + warp_keys * Layout::kRowBytes, lane);
      // Queries of [full_begin, full_end) see every key of the block.
      const Range of_last = visible_queries(p.score, min(j0 + kBlockN, s.seqlen_k) - 1, s.seqlen_q, s.seqlen_k);
      const Range of_first = visible_queries(p.score, j0, s.seqlen_q, s.seqlen_k);
      const bool block_full = j0 + kBlockN <= s.seqlen_k;

      int head = head_k * group, tile = first_tile;
      float dalibi = 0.f;
      int* turn = nullptr;
#pragma unroll 1
      for (int n = 0; n < total; ++n) {
        const uint32_t stage = C.num_stages == 2 ? n & 1 : 0;
        const uint32_t q_tile = s_q + stage * kTileQ, do_tile = s_do + stage * kTileQ, lse_tile = s_lse + stage * 2 * kBlockM * 4;
        int next_head = head, next_tile = tile + 1;
        if (next_tile == first_tile + num_tiles) next_tile = first_tile, ++next_head;
        const int i0 = tile * kBlockM;
        bool masked = !block_full || i0 < of_last.begin || i0 + kBlockM > of_first.end;
        if constexpr (kGeneral) masked |= p.score.bias != nullptr;
        uint32_t* const query_marks = marks + kBlockN + (n & 1) * kBlockM;  // two sets: one is cleared while one is written
        ptx::cp_async_wait<0>();
        // The tile is here, and every warp is done with the last one and its dS.
        bool bad_queries = false;
        if (n == 0) {
          bad_keys = __syncthreads_or(KCopy::template remove_nonfinite<T>(s_k, key_marks));
        }
        if (masked) {
          bool found = QCopy::template remove_nonfinite<T>(q_tile, query_marks);
          found |= QCopy::template remove_nonfinite<T>(do_tile, query_marks);
          bad_queries = __syncthreads_or(found);
        } else {
          __syncthreads();
        }
        if (C.num_stages == 2 && n + 1 < total)
          load_queries(next_head, next_tile, s_q + (stage ^ 1) * kTileQ, s_do + (stage ^ 1) * kTileQ,
                       s_lse + (stage ^ 1) * 2 * kBlockM * 4);
        ptx::cp_async_commit();

        const uint32_t part_rows = warp % kSplit * (kBlockM / kSplit);
        float x[kM][kN][4], dp[kM][kN][4];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < kN; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][i][e] = dp[m][i][e] = 0.f;
        const auto lane_q = lane_address_b<C.head_dim>(q_tile + part_rows * Layout::kRowBytes, lane);
        const auto lane_do = lane_address_b<C.head_dim>(do_tile + part_rows * Layout::kRowBytes, lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t a[kM][4];
#pragma unroll
          for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], lane_k.at(m, step));
          mma_step_b<T, kM, kN>(x, a, lane_q, step);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t a[kM][4];
#pragma unroll
          for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], lane_v.at(m, step));
          mma_step_b<T, kM, kN>(dp, a, lane_do, step);
        }

        pass_turn(turn);
        if (bad_keys || bad_queries) restore_nonfinite(x, key_marks, query_marks);
        if constexpr (kGeneral) {
          dalibi += pointwise_general(x, dp, lse_tile, i0, head, dropout);
        } else {
          if (masked)
            pointwise(x, dp, lse_tile, true, i0, head, dropout);
          else
            pointwise(x, dp, lse_tile, false, i0, head, dropout);
        }

        const auto lane_do_t = lane_address_bt<C.head_dim>(do_tile, lane);
        const auto lane_q_t = lane_address_bt<C.head_dim>(q_tile, lane);
        if constexpr (kSplit == 1) {
#pragma unroll
          for (int step = 0; step < kN / 2; ++step) {
            uint32_t a[kM][4];
            pack_fragments(a, x, step);
            mma_step_bt<T, kM, kD>(dv, a, lane_do_t, step);
          }
#pragma unroll
          for (int step = 0; step < kN / 2; ++step) {
            uint32_t a[kM][4];
            pack_fragments(a, dp, step);
            store_fragments(s_ds, a, step);
            mma_step_bt<T, kM, kD>(dk, a, lane_q_t, step);
          }
          __syncthreads();  // dS is complete
        } else {
#pragma unroll
          for (int step = 0; step < kN / 2; ++step) {
            uint32_t a[kM][4];
            pack_fragments(a, x, step);
            store_fragments(s_p, a, step);
            pack_fragments(a, dp, step);
            store_fragments(s_ds, a, step);
          }
          __syncthreads();  // P and dS are complete
          const auto lane_p = lane_address_a<kBlockM>(s_p + warp_keys * PairLayout::kRowBytes, lane);
          const auto lane_ds = lane_address_a<kBlockM>(s_ds + warp_keys * PairLayout::kRowBytes, lane);
          const int column = warp % kSplit * (kD / 2);
#pragma unroll
          for (int step = 0; step < kBlockM / 16; ++step) {
            uint32_t a_p[kM][4], a_ds[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              ptx::ldmatrix_x4(a_p[m], lane_p.at(m, step));
              ptx::ldmatrix_x4(a_ds[m], lane_ds.at(m, step));
            }
#pragma unroll
            for (int d = 0; d < kD; d += 2) {
              uint32_t fragment[4];
              ptx::ldmatrix_x4_trans(fragment, lane_do_t.at(step, column + d / 2));
#pragma unroll
              for (int m = 0; m < kM; ++m) {
                ptx::mma_m16n8k16<T>(dv[m][d], a_p[m], fragment[0], fragment[1]);
                ptx::mma_m16n8k16<T>(dv[m][d + 1], a_p[m], fragment[2], fragment[3]);
              }
              ptx::ldmatrix_x4_trans(fragment, lane_q_t.at(step, column + d / 2));
#pragma unroll
              for (int m = 0; m < kM; ++m) {
                ptx::mma_m16n8k16<T>(dk[m][d], a_ds[m], fragment[0], fragment[1]);
                ptx::mma_m16n8k16<T>(dk[m][d + 1], a_ds[m], fragment[2], fragment[3]);
              }
            }
          }
        }
        if constexpr (C.num_stages == 1) {
          if constexpr (kSplit > 1) __syncthreads();  // every warp is done with Q and dO
          if (n + 1 < total) load_queries(next_head, next_tile, s_q, s_do, s_lse);
          ptx::cp_async_commit();
        }
        if (bad_queries && threadIdx.x < kBlockM) query_marks[threadIdx.x] = 0;
        if (p.dq_sum) turn = add_dq(s_ds, s_k, head, tile);
        if constexpr (kGeneral) {
          if (p.dalibi_parts && next_head != head) {
            reduce_dalibi(dalibi, head, reduction);
            dalibi = 0.f;
          }
        }
        head = next_head;
        tile = next_tile;
      }
      pass_turn(turn);
      ptx::cp_async_wait<0>();
    } else if (kGeneral && p.dalibi_parts) {
      for (int head = head_k * group; head < (head_k + 1) * group; ++head) reduce_dalibi(0.f, head, reduction);
    }
    store_rows(p.dk, p.dk_is_float, dk, p.score.scale, p.head_dim);
    store_rows(p.dv, p.dv_is_float, dv, kDrops ? dropout.scale : 1.f, p.head_dim_v);
  }

  __device__ __forceinline__ void reduce_dalibi(float value, int head, float* reduction) const {
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    __syncthreads();
    if (lane == 0) reduction[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.f;
      for (int n = 0; n < C.num_warps; ++n) sum += reduction[n];
      p.dalibi_parts[(static_cast<int64_t>(b) * p.sequence.num_heads_q + head) * p.num_key_blocks + key_block] = sum;
    }
  }
};

// Grid: key block inside key head inside batch entry (one more when keys are packed); with causal masks the blocks with
// the most queries come first.
template <Element kElement, BackwardKind kKind, int kHeadDim, bool kSmall>
__global__ void __launch_bounds__(backward_config(kElement, kKind, kHeadDim, kSmall).num_threads(),
                                  backward_config(kElement, kKind, kHeadDim, kSmall).min_blocks)
    backward_sm80_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr BackwardConfig C = backward_config(kElement, kKind, kHeadDim, kSmall);
  using Kernel = BackwardKernel<C>;
  if (p.only_if && *p.only_if == 0) return;
  unsigned index = blockIdx.x;
  if (p.deterministic) {  // whoever waits for a turn waits for a block that has started before
    auto* ticket = reinterpret_cast<unsigned*>(shared);
    if (threadIdx.x == 0) *ticket = atomicAdd(reinterpret_cast<unsigned*>(p.ticket), 1u);
    __syncthreads();
    index = *ticket;
    __syncthreads();
  }
  const int key_block = static_cast<int>(index % p.num_key_blocks);
  index /= p.num_key_blocks;
  const int h = static_cast<int>(index % p.sequence.num_heads_k);
  const int b = static_cast<int>(index / p.sequence.num_heads_k);
  if (b >= p.sequence.batch) {
    zero_key_tail<typename Kernel::T>(p, h, key_block, Kernel::kBlockN);
    return;
  }
  Kernel kernel{p};
  kernel.b = b;
  kernel.head_k = h;
  kernel.key_block = key_block;
  kernel.s = resolve(p.sequence, b);
  kernel.warp = threadIdx.x / 32;
  kernel.lane = threadIdx.x % 32;
  kernel.group = p.sequence.num_heads_q / p.sequence.num_heads_k;
  const int j0 = key_block * Kernel::kBlockN;
  if (j0 < kernel.s.capacity_k || (Kernel::kGeneral && p.dalibi_parts)) {
    kernel.first_tile = kernel.num_tiles = 0;
    if (j0 < kernel.s.seqlen_k && kernel.s.seqlen_q > 0) {
      const int last = min(j0 + Kernel::kBlockN, kernel.s.seqlen_k) - 1;
      const Range first_key = visible_queries(p.score, j0, kernel.s.seqlen_q, kernel.s.seqlen_k);
      const Range last_key = visible_queries(p.score, last, kernel.s.seqlen_q, kernel.s.seqlen_k);
      // Ranges of consecutive keys overlap or touch, and both ends rise with the key.
      if (last_key.end > first_key.begin) {
        kernel.first_tile = first_key.begin / Kernel::kBlockM;
        kernel.num_tiles = (last_key.end + Kernel::kBlockM - 1) / Kernel::kBlockM - kernel.first_tile;
      }
    }
    kernel.run(ptx::shared_address(shared), reinterpret_cast<uint32_t*>(shared + C.shared_bytes() - C.mark_bytes() - 64),
               reinterpret_cast<float*>(shared + C.shared_bytes() - 64));
  }
}

}  // namespace tilewise::cuda
