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
// Keys are the rows, so that P^T and dS^T are A operands as they leave the accumulators. Copies, masks and the pointwise step are
// in tile/gradient_sm80.cuh.
#pragma once
#include <type_traits>

#include "cuda/backward_pre.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/tile/gradient_sm80.cuh"

namespace tilewise::cuda {

template <BackwardConfig C>
struct BackwardKernel : GradientSm80<C> {
  using G = GradientSm80<C>;
  using typename G::T, typename G::KCopy, typename G::QCopy;
  using G::kGeneral, G::kDrops, G::kSplit, G::kBlockM, G::kBlockN, G::kM, G::kN, G::kD, G::kSteps, G::kWide, G::kSplits,
      G::kUnroll, G::kBytes, G::kPairBytes, G::kTileQ, G::kTileK, G::kTilePair, G::kPartQ, G::kPartK, G::kPartPair,
      G::in_shared, G::p, G::b, G::head_k, G::key_block, G::s, G::warp, G::lane, G::group, G::first_tile, G::num_tiles,
      G::key_row, G::query_column, G::load_queries, G::load_rows, G::load_row_scalars, G::restore_nonfinite, G::note_nan_rows, G::kBadQ, G::kBadDout,
      G::draws_of_keys, G::pointwise,
      G::pointwise_general, G::mask;

  // dQ: warps = query groups x column parts. Two groups of 16 queries a warp read less from shared memory than one, if enough
  // columns are left to it.
  static constexpr int dq_columns(int row_groups) { return C.head_dim / 8 * (kBlockM / 16 / row_groups) / C.num_warps; }
  static constexpr int kDqM = sizeof(T) == 2 && dq_columns(2) % 2 == 0 && dq_columns(2) >= 4 ? 2 : 1;
  static constexpr int kQueryGroups = kBlockM / 16 / kDqM;
  static constexpr int kDQ = dq_columns(kDqM);  // n8 tiles of dQ per warp
  static constexpr int kPartDQ = (kWide || kDQ > 8) && kDQ % 4 == 0 ? 4 : kDQ;  // of them at a time
  static_assert(kDQ % 2 == 0);
  static constexpr int kStepsAtOnce = kSplits && kM * kN < 4 ? 4 / (kM * kN) : 1;
  static constexpr uint32_t kNoTurn = 0xffffffffu;  // a turn takes 32 rows or more of the sum of dQ, so 2^32 do not fit any GPU

  // Where this thread's pairs of a tile of P^T or dS^T go: its first key and query.
  __device__ __forceinline__ PackedAddress<kPairBytes> pair_address(uint32_t tile) const {
    return packed(LaneAddress<kPairBytes>(tile, lane >> 2, 0, 4 * (lane & 3))).moved(warp / kSplit * kM * 16, warp % kSplit * kN * 16);
  }

  // Columns [16 step, 16 step + 16) of this warp's part of P^T or dS^T.
  __device__ __forceinline__ void store_pairs(uint32_t tile, const float (&x)[kM][kN][4], int step) const {
    const auto to = pair_address(tile);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int quarter = 0; quarter < (kN == 1 ? 2 : 4); ++quarter) {
        const int n = 2 * step + quarter / 2, half = quarter % 2;
        const float first = x[m][n][2 * half], second = x[m][n][2 * half + 1];
        if constexpr (kWide) store_pair<T, kPairBytes, kPartPair>(tile, key_row(m, half), query_column(n), first, second);
        else ptx::store_shared(to.at(m * 16 + half * 8, n * 16), ptx::pack<T>(first, second));
      }
  }

  // Passes the turn of a tile on, once the sums of all warps are under way for an iteration, so that one thread's fence finds
  // little to wait for. After a barrier.
  __device__ __forceinline__ void pass_turn(uint32_t turn, int n) const {
    if (turn != kNoTurn && threadIdx.x == n % C.num_warps * 32) ptx::add_release(p.turn + turn, 1);  // its fence serves all threads before the barrier
  }

  // Are the sums of dQ ordered?
  static constexpr bool kOrdered = C.kind == BackwardKind::kOrdered;
  __device__ __forceinline__ static bool ordered(const BackwardParams& p) {
    if constexpr (C.knows_order()) return kOrdered;
    else return p.deterministic;
  }
  int direction;  // kOrdered: of the walk over the queries, 1 or -1
  __device__ __forceinline__ int start_tile() const { return kOrdered && direction < 0 ? first_tile + num_tiles - 1 : first_tile; }
  // A turn is of kTurnTiles tiles of queries; does the block come to another one with this tile, does it leave it?
  static constexpr int kTurnTiles = C.turn_rows() / kBlockM;
  __device__ __forceinline__ bool starts_turn(int tile) const { return tile % kTurnTiles == 0 || tile == first_tile; }
  __device__ __forceinline__ bool ends_turn(int tile) const {
    return tile % kTurnTiles == kTurnTiles - 1 || tile == first_tile + num_tiles - 1;
  }
  __device__ __forceinline__ bool opens_turn(int tile) const { return kOrdered && direction < 0 ? ends_turn(tile) : starts_turn(tile); }
  __device__ __forceinline__ bool closes_turn(int tile) const { return kOrdered && direction < 0 ? starts_turn(tile) : ends_turn(tile); }
  // How many key blocks add to dQ of these queries before this one. With a mask to the right, the last block that sees them comes
  // first: it has just started there, when the blocks before it are still on their way, and nobody waits.
  __device__ __forceinline__ int turn_of(int turn) const {
    const int shift = s.seqlen_k - s.seqlen_q, first_row = turn * C.turn_rows();
    if (p.score.window_right >= 0 && !(kOrdered && direction < 0)) {
      const int last_row = min(first_row + C.turn_rows(), s.seqlen_q) - 1;
      return min(last_row + shift + p.score.window_right, s.seqlen_k - 1) / kBlockN - key_block;
    }
    const int first_key = p.score.window_left >= 0 ? max(0, first_row + shift - p.score.window_left) : 0;
    return key_block - first_key / kBlockN;
  }

  // dv += P^T dO, dk += dS^T Q for one step of queries and this warp's columns.
  __device__ __forceinline__ static void multiply_two(float (&dv)[kM][kD][4], float (&dk)[kM][kD][4], const OperandA<T> (&p)[kM],
                                                      const OperandA<T> (&ds)[kM], const PackedAddress<kBytes>& dout,
                                                      const PackedAddress<kBytes>& q, int step, int column) {
#pragma unroll
    for (int d = 0; d < kD; d += 2) {
      OperandB<T> b[2];
      load_bt<T>(b, dout, step, column + d * 8);
      multiply<T>(dv, d, p, b);
      load_bt<T>(b, q, step, column + d * 8);
      multiply<T>(dk, d, ds, b);
    }
  }

  // dQ of this tile of queries, added to the float32 sum. Returns the turn to pass on, or kNoTurn.
  __device__ __forceinline__ uint32_t add_dq(uint32_t s_ds, uint32_t s_k, int head, int tile) const {
    const int query_group = warp % kQueryGroups, part = warp / kQueryGroups;
    const auto lane_ds = packed(lane_address_at<T, kPairBytes, kPartPair>(s_ds, lane));
    const auto lane_k = packed(lane_address_bt<T, kBytes, kPartK>(s_k, lane));
    const int64_t padded = head * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + tile * kBlockM;
    float* out = p.dq_sum + (padded + query_group * kDqM * 16) * C.head_dim + (part * kDQ * 32 + lane) * 4;
    uint32_t turn = kNoTurn;
    int seen = 0, wanted = 0;
    if (ordered(p)) {  // asked for here, the answer is there after the products
      turn = (static_cast<uint32_t>(head) * p.sequence.batch + b) * p.num_query_blocks + tile / kTurnTiles;
      if (opens_turn(tile)) {
        wanted = turn_of(tile / kTurnTiles);
        if (lane == 0) seen = ptx::load_relaxed(p.turn + turn);
      }
    }
#pragma unroll 1
    for (int first = 0; first < kDQ; first += kPartDQ, out += kPartDQ * 128) {
      float dq[kDqM][kPartDQ][4];
#pragma unroll
      for (int m = 0; m < kDqM; ++m)
#pragma unroll
        for (int n = 0; n < kPartDQ; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dq[m][n][e] = 0.f;
#pragma unroll kWide && !kSplits ? 1 : kBlockN / 16
      for (int step = 0; step < kBlockN / 16; ++step) {
        OperandA<T> a[kDqM];
#pragma unroll
        for (int m = 0; m < kDqM; ++m) load_at<T>(a[m], lane_ds, step, query_group * kDqM + m);
        multiply_bt<T>(dq, a, lane_k, step, (part * kDQ + first) * 8);
      }
      if (ordered(p) && first == 0) {
        // Until the key blocks before this one have added theirs. No value is read that they wrote, only added to in the
        // second-level cache, so a relaxed load that finds the turn is enough; whoever has to wait acquires.
        if (lane == 0)
          while (seen != wanted) seen = ptx::load_acquire(p.turn + turn);
        __syncwarp();
      }
#pragma unroll
      for (int m = 0; m < kDqM; ++m)
#pragma unroll
        for (int n = 0; n < kPartDQ; ++n)
          ptx::add_global(out + m * 16 * C.head_dim + n * 128, dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
    }
    return closes_turn(tile) ? turn : kNoTurn;
  }

  __device__ __forceinline__ void store_rows(const RowTensor& x, bool is_float, const float (&d)[kM][kD][4], float factor,
                                             int cols, const uint32_t* nan_rows = nullptr) const {
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
        float row_factor = factor;
        if constexpr (kGeneral || kDrops)
          if (nan_rows && (nan_rows[key_row(m, half) / 32] >> key_row(m, half) % 32 & 1) != 0) row_factor = __int_as_float(0x7fffffff);
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          const int col = (warp % kSplit * kD + n) * 8 + 2 * (lane & 3);
          if (col >= cols) continue;
          const float first = used ? d[m][n][2 * half] * row_factor : 0.f, second = used ? d[m][n][2 * half + 1] * row_factor : 0.f;
          store_columns<T>(x.data, base + j * x.row + col, is_float, pairs, col + 1 < cols, first, second);
        }
      }
  }

  __device__ __forceinline__ void run(uint32_t shared, uint32_t* marks, float* reduction) {
    const uint32_t s_k = shared, s_v = s_k + in_shared(kTileK);                        // [block_n, head_dim]
    const uint32_t s_q = s_v + kTileK, s_do = s_q + C.num_stages * in_shared(kTileQ);  // [stages, block_m, head_dim]
    const uint32_t s_arriving = s_do + C.num_stages * in_shared(kTileQ);               // [block_m, head_dim] of Q or dO to be split
    const uint32_t s_ds = s_arriving + (kSplits ? kTileQ : 0);                         // [block_n, block_m]
    const uint32_t s_p = s_ds + (C.pair_tiles() - 1) * in_shared(kTilePair);           // likewise, if the columns are split
    const uint32_t s_lse = s_ds + C.pair_tiles() * in_shared(kTilePair);               // [stages, 2, block_m] float
    uint32_t* const key_marks = marks;                                      // [block_n], see Nonfinite
    auto* const nan_rows = reinterpret_cast<uint32_t*>(reduction + 8);      // one bit a key, see note_nan_rows()
    static_assert(C.num_warps <= 8 && kBlockN <= 128);
    if (threadIdx.x < kBlockN) key_marks[threadIdx.x] = 0;
    if (threadIdx.x < 4) nan_rows[threadIdx.x] = 0;
    for (int n = threadIdx.x; n < 2 * kBlockM; n += C.num_threads()) marks[kBlockN + n] = 0;
    const uint32_t s_free = s_lse + C.num_stages * 2 * kBlockM * 4 + C.mark_bytes() + 56;  // mbarrier: dS may be written again
    __syncthreads();

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
      if (threadIdx.x == 0) ptx::mbarrier_init(s_free, C.num_threads());  // seen by all at the barrier before the first tile
      const int j0 = key_block * kBlockN;
      const T* k = key_rows<const T>(p.k, p.sequence, s, head_k);
      const T* v = key_rows<const T>(p.v, p.sequence, s, head_k);
      const uint32_t k_arrives = kSplits ? s_q : s_k;
      static_assert(!kSplits || kTileK <= 2 * in_shared(kTileQ));
      if (!kGeneral || p.aligned) {
        KCopy::template load<false>(k_arrives, k + j0 * p.k.row, p.k.row, s.seqlen_k - j0, p.head_dim);
        KCopy::template load<false>(s_v, v + j0 * p.v.row, p.v.row, s.seqlen_k - j0, p.head_dim_v);
      } else {
        KCopy::load_rows(k_arrives, k, [&](int r) { return (j0 + r) * p.k.row; }, s.seqlen_k - j0, p.head_dim, false);
        KCopy::load_rows(s_v, v, [&](int r) { return (j0 + r) * p.v.row; }, s.seqlen_k - j0, p.head_dim_v, false);
      }
      if constexpr (kSplits) load_rows(p.q, head_k * group, first_tile, s_arriving, p.head_dim);
      else load_queries(head_k * group, start_tile(), s_q, s_do, s_lse);
      ptx::cp_async_commit();

      const int warp_keys = warp / kSplit * kM * 16;
      const auto lane_k = packed(lane_address_a<T, kBytes, kPartK>(s_k, lane)).moved(warp_keys, 0);
      const auto lane_v = packed(lane_address_a<T, kBytes>(s_v, lane)).moved(warp_keys, 0);
      // Queries of [full_begin, full_end) see every key of the block.
      const Range of_last = visible_queries(p.score, min(j0 + kBlockN, s.seqlen_k) - 1, s.seqlen_q, s.seqlen_k);
      const Range of_first = visible_queries(p.score, j0, s.seqlen_q, s.seqlen_k);
      const bool block_full = j0 + kBlockN <= s.seqlen_k;

      const auto is_masked = [&](int tile) {
        const int i0 = tile * kBlockM;
        return !block_full || i0 < of_last.begin || i0 + kBlockM > of_first.end || (kGeneral && p.score.bias != nullptr);
      };
      // Waits until this thread's copies are here, and clears a tile with masked pairs of inf and NaN. Before a barrier.
      bool masked = false;
      const auto receive = [&](int n, int tile) {
        const uint32_t stage = C.num_stages == 2 ? n & 1 : 0;
        ptx::cp_async_wait<0>();
        masked = is_masked(tile);
        bool found = false;
        if (masked) {
          uint32_t* const query_marks = marks + kBlockN + (n & 1) * kBlockM;  // two sets: one is cleared while one is written
          found = QCopy::template remove_nonfinite<kBadQ>(s_q + stage * kTileQ, query_marks);
          found |= QCopy::template remove_nonfinite<kBadDout>(s_do + stage * kTileQ, query_marks);
        }
        return found;
      };
      const auto load = [&](int n, int head, int tile) {
        const uint32_t stage = C.num_stages == 2 ? n & 1 : 0;
        if (n < total)
          load_queries(head, tile, s_q + stage * kTileQ, s_do + stage * kTileQ, s_lse + stage * 2 * kBlockM * 4);
        ptx::cp_async_commit();
      };
      const auto advance = [&](int& head, int& tile, int by) {  // by 0 or 1
        if constexpr (kOrdered) {
          tile += by * direction;
          while (static_cast<unsigned>(tile - first_tile) >= static_cast<unsigned>(num_tiles)) tile -= direction * num_tiles, ++head;
          return;
        }
        tile += by;
        // The loop, which runs once at most, is what leaves ptxas registers enough with two stages, the condition with one.
        if constexpr (C.num_stages == 2) {
          while (tile >= first_tile + num_tiles) tile -= num_tiles, ++head;
        } else {
          if (tile >= first_tile + num_tiles) tile -= num_tiles, ++head;
        }
      };

      int head = head_k * group, tile = start_tile();
      float dalibi = 0.f;
      uint32_t turn = kNoTurn;
      bool bad_queries = false, bad_keys;
      typename G::Draws draws{DropoutHead(0, 0, 0), {}};  // BackwardKind::kDropout
      if constexpr (kSplits) {
        ptx::cp_async_wait<0>();
        const bool found = KCopy::remove_nonfinite(s_q, key_marks);
        __syncwarp();  // a neighbouring lane may have zeroed a chunk of this one
        split_tile<KCopy>(s_q, s_k);
        bad_keys = __syncthreads_or(found);
        even_columns_first<KCopy>(s_v);
      } else {
        bad_queries = receive(0, tile);
        bad_keys = __syncthreads_or(KCopy::remove_nonfinite(s_k, key_marks));
        bad_queries = __syncthreads_or(bad_queries);
      }
      // A tile of Q or dO has arrived: makes it parts. `next` starts the copies into the place that is free then.
      const auto split_arrived = [&](uint32_t to, uint32_t* query_marks, auto mark, auto&& next) {
        ptx::cp_async_wait<0>();
        bool found = false;
        if (masked) {
          found = QCopy::template remove_nonfinite<mark>(s_arriving, query_marks);
          __syncwarp();
        }
        split_tile<QCopy>(s_arriving, to);
        next();
        ptx::cp_async_commit();
        if (masked)
          bad_queries |= static_cast<bool>(__syncthreads_or(found));
        else
          __syncthreads();
      };
      const auto load_ahead = [&](int n, int by) {
        int next_head = head, next_tile = tile;
        advance(next_head, next_tile, by);
        load(n, next_head, next_tile);
      };
      if constexpr (C.num_stages == 2) load_ahead(1, 1);
#pragma unroll 1
      for (int n = 0; n < total; ++n) {
        const uint32_t stage = C.num_stages == 2 ? n & 1 : 0;
        const uint32_t q_tile = s_q + stage * kTileQ, do_tile = s_do + stage * kTileQ, lse_tile = s_lse + stage * 2 * kBlockM * 4;
        const int i0 = tile * kBlockM;
        if (kDrops && (n == 0 || tile == first_tile)) draws = draws_of_keys(dropout, head);
        uint32_t* const query_marks = marks + kBlockN + (n & 1) * kBlockM;

        if constexpr (kSplits) {
          masked = is_masked(tile);
          split_arrived(q_tile, query_marks, std::integral_constant<uint32_t, kBadQ>(), [&] {
            load_rows(p.dout, head, tile, s_arriving, p.head_dim_v);
            load_row_scalars(head, tile, s_lse);
          });
        }
        float x[kM][kN][4], dp[kM][kN][4];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < kN; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][i][e] = dp[m][i][e] = 0.f;
        const int part = warp % kSplit;  // of the queries
        const auto address_b = [&](uint32_t of) {
          if constexpr (kSplits) return packed(narrow_address_b<kBytes, kPartQ, kN>(of, lane)).moved(part * kN * 8, 0);
          else return packed(lane_address_b<T, kBytes>(of, lane)).moved(part * kN * 8, 0);
        };
        const auto lane_q = address_b(q_tile), lane_do = address_b(do_tile);
        const auto multiply_by_rows = [&](float(&c)[kM][kN][4], const auto& lane_a, const auto& lane_b) {
          if constexpr (kSplits) {
#pragma unroll 1
            for (int step = 0; step < kSteps; step += kStepsAtOnce) multiply_narrow<kStepsAtOnce>(c, lane_a, lane_b, step);
          } else {
            multiply_rows<T, kSteps, kUnroll>(c, lane_a, lane_b);
          }
        };
        multiply_by_rows(x, lane_k, lane_q);
        if constexpr (kSplits)
          split_arrived(do_tile, query_marks, std::integral_constant<uint32_t, kBadDout>(), [&] {
            int next_head = head, next_tile = tile;
            advance(next_head, next_tile, 1);
            if (n + 1 < total) load_rows(p.q, next_head, next_tile, s_arriving, p.head_dim);
          });
        multiply_by_rows(dp, lane_v, lane_do);

        if (bad_keys || bad_queries) {
          restore_nonfinite(x, key_marks, query_marks);
          if constexpr (kGeneral || kDrops)
            if (bad_queries && dropout.active()) note_nan_rows(nan_rows, query_marks, i0, head);
        }
        if constexpr (kGeneral) {
          dalibi += pointwise_general(x, dp, lse_tile, i0, head, dropout);
        } else {
          // Two copies of the code, or one and a pass for masks: the first is 5 % faster where two warps share keys, the second 3 %
          // where none do.
          if constexpr (kSplit == 1 && !kWide) {
            pointwise(x, dp, lse_tile, false, i0, dropout, draws);
            if (masked) mask(x, dp, i0);
          } else if (masked) {
            pointwise(x, dp, lse_tile, true, i0, dropout, draws);
          } else {
            pointwise(x, dp, lse_tile, false, i0, dropout, draws);
          }
        }

        auto lane_do_t = packed(lane_address_bt<T, kBytes, kPartQ>(do_tile, lane));
        auto lane_q_t = packed(lane_address_bt<T, kBytes, kPartQ>(q_tile, lane));
        if (n > 0) ptx::mbarrier_wait(s_free, (n - 1) & 1);  // every warp is done with the last dS
        if constexpr (kSplit == 1) {
#pragma unroll
          for (int step = 0; step < kN / 2; ++step) {
            OperandA<T> a[kM];
            operand_of<T>(a, x, step);
            multiply_bt<T>(dv, a, lane_do_t, step);
          }
#pragma unroll
          for (int step = 0; step < kN / 2; ++step) {
            OperandA<T> a[kM];
            store_pairs(s_ds, dp, step);
            operand_of<T>(a, dp, step);
            multiply_bt<T>(dk, a, lane_q_t, step);
          }
        } else {
#pragma unroll
          for (int step = 0; step < (kN + 1) / 2; ++step) {
            store_pairs(s_p, x, step);
            if constexpr (!C.one_pair_tile) store_pairs(s_ds, dp, step);
          }
          // Where this warp's columns start at a whole group of chunks, the addresses start there.
          constexpr bool kWhole = kD * 16 % TileLayout<kBytes>::kGroup == 0 && !kWide;
          const int column = kWhole ? 0 : part * kD * 8;
          if constexpr (kWhole) lane_do_t = lane_do_t.moved(0, part * kD * 16), lane_q_t = lane_q_t.moved(0, part * kD * 16);
          if constexpr (!kWide) {  // this warp's own queries need not wait for the others
            auto own_do = lane_do_t.moved(part * kN * 8, 0), own_q = lane_q_t.moved(part * kN * 8, 0);
#pragma unroll
            for (int step = 0; step < kN / 2; ++step) {
              OperandA<T> a_p[kM], a_ds[kM];
              operand_of<T>(a_p, x, step);
              operand_of<T>(a_ds, dp, step);
              multiply_two(dv, dk, a_p, a_ds, own_do, own_q, step, column);
            }
          }
          ptx::barrier_sync(1 + warp / kSplit, kSplit * 32);  // P and dS of these keys are complete
          const auto lane_p = packed(lane_address_a<T, kPairBytes, kPartPair>(s_p, lane)).moved(warp_keys, 0);
          const auto lane_ds = packed(lane_address_a<T, kPairBytes, kPartPair>(s_ds, lane)).moved(warp_keys, 0);
          if constexpr (C.one_pair_tile) {
            static_assert(kWide && kM == 1);
            const auto multiply_all = [&](float (&c)[kM][kD][4], const auto& lane_b) {
#pragma unroll 1
              for (int step = 0; step < kBlockM / 16; ++step) {
                OperandA<T> a[kM];
                load_a<T>(a[0], lane_ds, 0, step);
                multiply_bt<T>(c, a, lane_b, step, column);
              }
            };
            multiply_all(dv, lane_do_t);
            ptx::barrier_sync(1 + warp / kSplit, kSplit * 32);  // all have read P
#pragma unroll
            for (int step = 0; step < kN / 2; ++step) store_pairs(s_ds, dp, step);
            ptx::barrier_sync(1 + warp / kSplit, kSplit * 32);
            multiply_all(dk, lane_q_t);
          } else if constexpr (kWide) {
#pragma unroll 1
            for (int step = 0; step < kBlockM / 16; ++step) {
              OperandA<T> a_p[kM], a_ds[kM];
#pragma unroll
              for (int m = 0; m < kM; ++m) load_a<T>(a_p[m], lane_p, m * 16, step);
              multiply_bt<T>(dv, a_p, lane_do_t, step, column);
#pragma unroll
              for (int m = 0; m < kM; ++m) load_a<T>(a_ds[m], lane_ds, m * 16, step);
              multiply_bt<T>(dk, a_ds, lane_q_t, step, column);
            }
          } else {
#pragma unroll
            for (int other = 1; other < kSplit; ++other) {
              const int from = part ^ other;
              const auto other_p = lane_p.moved(0, from * kN * 8 * 2), other_ds = lane_ds.moved(0, from * kN * 8 * 2);
              const auto other_do = lane_do_t.moved(from * kN * 8, 0), other_q = lane_q_t.moved(from * kN * 8, 0);
#pragma unroll
              for (int step = 0; step < kN / 2; ++step) {
                OperandA<T> a_p[kM], a_ds[kM];
#pragma unroll
                for (int m = 0; m < kM; ++m) load_a<T>(a_p[m], other_p, m * 16, step);
#pragma unroll
                for (int m = 0; m < kM; ++m) load_a<T>(a_ds[m], other_ds, m * 16, step);
                multiply_two(dv, dk, a_p, a_ds, other_do, other_q, step, column);
              }
            }
          }
        }

        const int this_head = head, this_tile = tile;
        const bool was_bad = bad_queries;
        advance(head, tile, 1);
        bad_queries = false;
        if constexpr (C.num_stages == 2) {
          if (n + 1 < total) bad_queries = receive(n + 1, tile);
        }
        // dS is complete, the next tile is here, and every warp is done with this one.
        if (C.num_stages == 2 && masked)
          bad_queries = __syncthreads_or(bad_queries);
        else
          __syncthreads();
        pass_turn(turn, n);  // before the next loads: its fence would wait for them
        if constexpr (!kSplits) load_ahead(n + C.num_stages, C.num_stages - 1);
        if (was_bad && threadIdx.x < kBlockM) query_marks[threadIdx.x] = 0;
        if (p.dq_sum) turn = add_dq(s_ds, s_k, this_head, this_tile);
        // Every thread for itself: one lane a warp, behind a __syncwarp, was 3 to 4 % slower at d 64 and d 128, and to racecheck the
        // reads of the other lanes seemed unordered.
        __syncwarp();
        ptx::mbarrier_arrive(s_free);
        if constexpr (kGeneral) {
          if (p.dalibi_parts && head != this_head) {
            reduce_dalibi(dalibi, this_head, reduction);
            dalibi = 0.f;
          }
        }
        if constexpr (C.num_stages == 1 && !kSplits) {
          if (n + 1 < total) {
            bad_queries = receive(n + 1, tile);
            if (masked)
              bad_queries = __syncthreads_or(bad_queries);
            else
              __syncthreads();
          }
        }
      }
      ptx::cp_async_wait<0>();
      __syncthreads();
      pass_turn(turn, 0);
      if (threadIdx.x == 0) ptx::mbarrier_invalidate(s_free);  // the block may take another task
    } else if (kGeneral && p.dalibi_parts) {
      for (int head = head_k * group; head < (head_k + 1) * group; ++head) reduce_dalibi(0.f, head, reduction);
    }
    store_rows(p.dk, p.dk_is_float, dk, p.gradient_scale, p.head_dim);
    store_rows(p.dv, p.dv_is_float, dv, kDrops ? dropout.scale : 1.f, p.head_dim_v, nan_rows);
  }

  __device__ __forceinline__ void reduce_dalibi(float value, int head, float* reduction) const {
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    __syncthreads();
    if (lane == 0) reduction[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.f;
      for (int n = 0; n < C.num_warps; ++n) sum += reduction[n];
      p.dalibi_parts[((static_cast<int64_t>(b) * p.sequence.num_heads_q + head) * p.num_key_blocks + key_block) * p.dalibi_split] = sum;
    }
  }
};

// Task `index`: key block inside key head inside batch entry (one more when keys are packed); with causal masks the blocks with
// the most queries come first. Or with ordered sums the next ticket's: then, with a mask to the right, the last keys of a section come
// first (see turn_of()), so that its longest blocks come last. Of the last `descending` heads they come first, and all walk from the
// last queries down, each behind the one before: the launch ends with short blocks.
template <BackwardConfig C>
__device__ __forceinline__ void backward_sm80_task(const BackwardParams& p, unsigned index, unsigned char* shared) {
  using Kernel = BackwardKernel<C>;
  if (Kernel::ordered(p)) {  // whoever waits for a turn waits for a block that has started before
    auto* ticket = reinterpret_cast<unsigned*>(shared);
    if (threadIdx.x == 0) *ticket = atomicAdd(reinterpret_cast<unsigned*>(p.ticket), 1u);
    __syncthreads();
    index = *ticket;
    __syncthreads();
  }
  const unsigned heads = p.sequence.num_heads_k * (p.sequence.batch + p.sequence.packed_k), blocks = p.num_key_blocks;
  // The heads at the end, if they are to come in the order of their keys, are a section of their own.
  const unsigned others = heads - (Kernel::kOrdered ? p.descending : 0);
  const bool descends = Kernel::kOrdered && index >= others * blocks;
  const unsigned first = descends ? others : index / (p.section * blocks) * p.section, inside = index - first * blocks;
  const unsigned width = descends ? heads - others : min(static_cast<unsigned>(p.section), others - first);
  unsigned key_block = inside / width;
  index = first + inside % width;
  if (Kernel::ordered(p) && p.score.window_right >= 0 && !descends) key_block = blocks - 1 - key_block;  // in the order of their turns
  const int h = static_cast<int>(index % p.sequence.num_heads_k);
  const int b = static_cast<int>(index / p.sequence.num_heads_k);
  if (b >= p.sequence.batch) {
    zero_key_tail<typename Kernel::T>(p, h, key_block, Kernel::kBlockN, threadIdx.x / 32, C.num_warps);
    return;
  }
  Kernel kernel{{p}, descends ? -1 : 1};
  kernel.b = b;
  kernel.head_k = h;
  kernel.key_block = static_cast<int>(key_block);
  kernel.s = resolve(p.sequence, b);
  kernel.warp = threadIdx.x / 32;
  kernel.lane = threadIdx.x % 32;
  kernel.group = p.sequence.num_heads_q / p.sequence.num_heads_k;
  kernel.dbias_unit = Kernel::kGeneral && p.dbias.sum ? ldexpf(1.f, dbias_exponent(p.dbias, p.head_dim_v)) : 0.f;
  const int j0 = kernel.key_block * Kernel::kBlockN;
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

template <Element kElement, BackwardKind kKind, int kHeadDim>
__device__ constexpr bool backward_taken_here(Shape shape) {
  return taken_here(backward_config(kElement, kKind, kHeadDim, false), backward_config(kElement, kKind, kHeadDim, true),
                    roomy_config(kElement, kKind, kHeadDim), shape);
}

// Grid: one block a task.
template <Element kElement, BackwardKind kKind, int kHeadDim, bool kSmall>
__global__ void __launch_bounds__(backward_config(kElement, kKind, kHeadDim, kSmall).num_threads(), 1)
    backward_sm80_kernel(const __grid_constant__ BackwardParams p) {
  if constexpr (!backward_taken_here<kElement, kKind, kHeadDim>(kSmall ? Shape::kSmall : Shape::kLarge)) {
    __trap();
  } else {
    extern __shared__ __align__(128) unsigned char shared[];
    backward_sm80_task<backward_config(kElement, kKind, kHeadDim, kSmall)>(p, blockIdx.x, shared);
  }
}

// In the shape for GPUs with 227 KiB.
template <Element kElement, BackwardKind kKind, int kHeadDim>
__global__ void __launch_bounds__(roomy_config(kElement, kKind, kHeadDim).num_threads(), 1)
    backward_sm80_roomy_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  backward_sm80_task<roomy_config(kElement, kKind, kHeadDim)>(p, blockIdx.x, shared);
}

// Part `index` of `parts` of what the main pass finds set to zero: sums of dq, of dbias and dalibi, turns and tickets.
__device__ __forceinline__ void clear_part(const BackwardParams& p, unsigned index, unsigned parts) {
  const int64_t at = static_cast<int64_t>(index) * blockDim.x + threadIdx.x, step = static_cast<int64_t>(parts) * blockDim.x;
  if (p.dq_sum) {
    const int64_t sums = p.sequence.num_heads_q * p.padded_rows * p.head_dim_rounded / 4;
    for (int64_t n = at; n < sums; n += step) reinterpret_cast<float4*>(p.dq_sum)[n] = make_float4(0, 0, 0, 0);
  }
  if (p.dbias.sum)  // its flags lie behind it
    for (auto* word = reinterpret_cast<uint32_t*>(p.dbias.sum) + at; word < p.dbias.largest; word += step) *word = 0;
  if (p.dalibi_parts) {
    const int64_t count = int64_t{p.sequence.batch} * p.sequence.num_heads_q * p.num_key_blocks * p.dalibi_split;
    for (int64_t n = at; n < count; n += step) p.dalibi_parts[n] = 0.f;
  }
  if (!p.deterministic) return;
  const int64_t turns = int64_t{p.sequence.num_heads_q} * p.sequence.batch * p.num_query_blocks;
  for (int64_t n = at; n < turns; n += step) p.turn[n] = 0;
  if (at == 0) *p.ticket = 0;
}

// All of the main pass again, behind a condition that rarely holds, for sm_90's rows, in the kind that takes every option: zeros for
// the sums of dq, then the tasks. Few blocks share both by tickets, since blocks that only find out that there is nothing to do
// take their time; whoever needs the zeros waits for tickets that were taken before. lse and delta are those of sm_90's row.
template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(conditional_config(kElement, kHeadDim).num_threads(), 1)
    backward_sm80_again_kernel(const __grid_constant__ BackwardParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  if (p.again->wanted == 0) return;
  __shared__ unsigned index;  // not in registers: they are all taken
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) index = atomicAdd(&p.again->ticket, 1u);
    __syncthreads();
    constexpr unsigned kZeroTasks = 1024;
    if (index < kZeroTasks) {
      clear_part(p, index, kZeroTasks);
      __syncthreads();
      if (threadIdx.x == 0) ptx::add_release(&p.again->cleared, 1);
    } else {
      __syncthreads();  // all have read it
      if (threadIdx.x == 0) {
        ptx::wait_acquire(&p.again->cleared, kZeroTasks);
        index -= kZeroTasks;
      }
      __syncthreads();
      if (index >= static_cast<unsigned>(p.num_key_blocks) * p.sequence.num_heads_k * (p.sequence.batch + p.sequence.packed_k)) return;
      backward_sm80_task<conditional_config(kElement, kHeadDim)>(p, index, shared);
    }
    __syncthreads();
  }
#endif
}

}  // namespace tilewise::cuda
