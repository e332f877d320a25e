// A consumer warpgroup of forward_sm90: 64 query rows of tile after tile. run() is at the end, the steps before it.
#pragma once
#include "cuda/params_sm90.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/forward_sm90_shared.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/exact_rows.cuh"
#include "cuda/tile/panel_sm90.cuh"
#include "cuda/tile/softmax_sm90.cuh"

namespace tilewise::cuda {

template <ForwardSm90Config C>
struct ConsumerSm90 {
  using T = typename ElementType<C.element>::Type;
  using Range = SoftmaxRange<C.element>;
  static constexpr int kS = C.block_n / 2;       // registers of S, of P twice as dense, of O
  static constexpr int kP = C.block_n / 4;
  static constexpr int kO = C.pv_columns() / 2;
  static constexpr int kQ = C.q_in_registers ? C.head_dim / 4 : 1;
  static constexpr bool kSum = !C.ones();
  // Is the store warp told of a tile's O behind the products of the next step? Gains 1 to 2 % with few keys, and costs as much under a
  // causal mask, whose inner steps have no clock to spare.
  static constexpr bool kLate = C.whole() && C.store_warps();
  static constexpr Noted kNoted = kSum ? Noted::kSum : C.element == Element::kFloat16 ? Noted::kMaximum : Noted::kNothing;

  const ForwardSm90Params& p;
  const SharedSm90<C> shared;
  unsigned char* const memory;
  const int consumer, warp, lane;  // warp of the warpgroup

  float o[kO];
  uint32_t probabilities[kP];  // P(j-1), as the A operand of the next product
  uint32_t query[kQ];
  RowStatistics rows;
  bool o_empty = true;  // the next product starts a tile: it does not add to what O holds
  int untold = -1;          // kLate: Work of a tile whose O is staged, until the store warp is told
  float untold_lse[2];
  bool told_last = false;   // the store warp knows that there is no more
  Ring<C.q_slots> q;
  Ring<C.stages> k, v;
  uint32_t o_parity = 1;

  unsigned tile = 0;   // number of the next tile's Work in shared memory
  int steps;           // key tiles of this consumer
  int unmasked_steps;  // of these, the first ones need no mask at their lower end
  int upper_steps;     // the first ones that need one at their upper end
  int skip_v = 0;      // stages of V that belong to tiles which this consumer does not need; of the next tile
  int next_skip_v = 0;

  __device__ __forceinline__ void release(uint32_t barrier) const {
    ptx::stress();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void my_turn() const {
    if constexpr (C.ping_pong) ptx::barrier_sync(1 + consumer, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C.ping_pong) ptx::barrier_arrive(1 + (consumer + 1 == C.consumers ? 0 : consumer + 1), 256);
  }
  // Rows are counted in their head of the tile; several heads may share a tile.
  __device__ __forceinline__ int in_head(int row) const { return C.whole() ? row : row & ((1u << p.order.row_bits) - 1); }
  __device__ __forceinline__ int head_of_warp(const Work& w) const {
    return w.head + (C.whole() ? 0 : (consumer * 64 + warp * 16) >> p.order.row_bits);
  }
  __device__ __forceinline__ int row_of_warp() const { return in_head(consumer * 64 + warp * 16); }
  __device__ __forceinline__ int row_of_thread(int half) const { return row_of_warp() + half * 8 + (lane >> 2); }
  __device__ __forceinline__ int first_of_consumer() const { return in_head(consumer * 64); }  // its last one: 63 below, at most
  __device__ __forceinline__ int rows_of_consumer() const { return min(64, p.order.tile_rows); }
  __device__ __forceinline__ const Work& work(unsigned n) const { return *shared.work(memory, n); }

  // Key past the last one of this consumer's first key tile.
  __device__ __forceinline__ int top_key(const Work& w, int skip) const {
    return key_tiles<C>(p, w).top - skip * C.block_n;
  }
  // Whole key tiles beyond the ends of all of this consumer's rows.
  __device__ __forceinline__ int skipped(const Work& w, const KeyTiles& tiles) const {
    if (C.whole() || !C.skips() || p.window_right < 0) return 0;
    const int end = w.first_row + w.seqlen_k - w.seqlen_q + p.window_right + first_of_consumer() + rows_of_consumer();
    return min(tiles.count - 1, max(0, tiles.top - end) / C.block_n);
  }

  __device__ __forceinline__ bool next_tile() {
    ptx::mbarrier_wait(shared.q_full(q.stage), q.parity);
    const Work w = work(tile);
    if constexpr (!kLate) {
      if (w.first_row < 0) return false;
      ++tile;
    }
    if constexpr (C.q_in_registers) {
      const uint32_t s_q = shared.q(q.stage);
      const int r = consumer * 64 + warp * 16 + (lane & 15);
#pragma unroll
      for (int step = 0; step < C.head_dim / 16; ++step)
        ptx::ldmatrix_x4(*reinterpret_cast<uint32_t(*)[4]>(query + 4 * step),
                         s_q + Panels<C.block_m()>::chunk_offset(r, 2 * step + (lane >> 4)));
      __syncwarp();
      release(shared.q_empty(q.stage));
      q.advance();
    }
    if constexpr (kLate) {  // Q was taken before this was known: it may be what lay there
      if (w.first_row < 0) return false;
      ++tile;
    }
    const KeyTiles tiles = key_tiles<C>(p, w);
    const int skip = skipped(w, tiles);
    steps = tiles.count - skip;
    if constexpr (C.whole()) {
      unmasked_steps = steps;
      return true;
    }
    int low = 0;  // first key that all rows see
    if (p.window_left >= 0)
      low = max(0, w.first_row + first_of_consumer() + rows_of_consumer() - 1 + w.seqlen_k - w.seqlen_q - p.window_left);
    unmasked_steps = min(steps, max(0, tiles.top - skip * C.block_n - low) / C.block_n);
    int high = w.seqlen_k;  // one past the last key that all rows see
    if (p.window_right >= 0)
      high = min(high, w.first_row + first_of_consumer() + w.seqlen_k - w.seqlen_q + p.window_right + 1);
    upper_steps = (max(0, tiles.top - skip * C.block_n - high) + C.block_n - 1) / C.block_n;
    if constexpr (C.skips()) {
      next_skip_v = skip;
      for (int n = 0; n < skip; ++n) {
        ptx::mbarrier_wait(shared.k_full(k.stage), k.parity);
        my_turn();
        pass_turn();
        release(shared.k_empty(k.stage));
        k.advance();
      }
    }
    return true;
  }

  __device__ __forceinline__ void skip_values() {
    if constexpr (C.skips()) {
      for (; skip_v > 0; --skip_v) {
        ptx::mbarrier_wait(shared.v_full(v.stage), v.parity);
        release(shared.v_empty(v.stage));
        v.advance();
      }
    }
  }

  // S = Q K^T
  __device__ __forceinline__ void issue_scores(float (&s)[kS]) {
    const uint32_t b = ptx::descriptor(shared.k(k.stage));
    ptx::wgmma_pin(s);
    if constexpr (C.q_in_registers) {
      ptx::wgmma_pin(query);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < C.head_dim / 16; ++step)
        ptx::Wgmma<T, C.block_n>::template rs<0>(s, query[4 * step], query[4 * step + 1], query[4 * step + 2],
                                                 query[4 * step + 3], b + Panels<C.block_n>::column_step(step), step != 0);
    } else {
      const uint32_t a = ptx::descriptor(shared.q(q.stage) + (C.slots_per_tile() > 1 ? 0 : consumer * 64 * 128));
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < C.head_dim / 16; ++step)
        ptx::Wgmma<T, C.block_n>::ss(s, a + Panels<C.q_rows>::column_step(step),
                                     b + Panels<C.block_n>::column_step(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  // O += P V, and sums += P 1
  __device__ __forceinline__ void issue_output() {
    const uint32_t s_v = shared.v(v.stage);
    const uint32_t panel_distance = C.ones() && C.panels() == 1 ? shared.ones(v.stage) - s_v : C.block_n * 128;
    const uint32_t b = ptx::descriptor(s_v, panel_distance);
    ptx::wgmma_pin(o);
    ptx::wgmma_pin(probabilities);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.block_n / 16; ++step)
      ptx::Wgmma<T, C.pv_columns()>::template rs<1>(o, probabilities[4 * step], probabilities[4 * step + 1],
                                                    probabilities[4 * step + 2], probabilities[4 * step + 3],
                                                    b + Panels<C.block_n>::row_step(step), step != 0 || !o_empty);
    ptx::wgmma_commit();
    o_empty = false;
  }

  // Scores of keys that a row does not see become -inf: those past its last key and, if there is a window or the tile
  // begins before key 0, those before its first.
  template <bool kUpper, bool kLower>
  __device__ __forceinline__ void mask(float (&s)[kS], const Work& w, int first_key) const {
    const int offset = w.seqlen_k - w.seqlen_q + w.first_row;
    const int shift = first_key + 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int last = w.seqlen_k - 1, first = 0;
      if (p.window_right >= 0) last = min(last, row_of_thread(half) + offset + p.window_right);
      if (p.window_left >= 0) first = max(first, row_of_thread(half) + offset - p.window_left);
      last -= shift, first -= shift;
#pragma unroll
      for (int n = 0; n < kS / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((kUpper && 8 * n + e > last) || (kLower && 8 * n + e < first)) s[4 * n + 2 * half + e] = kMinusInf;
    }
  }

  __device__ __forceinline__ int first_key(int n) const { return top_key(work(tile - 1), next_skip_v) - (n + 1) * C.block_n; }
  __device__ __forceinline__ void mask_first(float (&s)[kS]) const {
    if constexpr (C.whole()) return;
    if (unmasked_steps == 0)
      mask<true, true>(s, work(tile - 1), first_key(0));
    else if (upper_steps > 0)
      mask<true, false>(s, work(tile - 1), first_key(0));
  }
  __device__ __forceinline__ void mask_step(float (&s)[kS], int n) const {
    if constexpr (!C.general())
      mask<false, true>(s, work(tile - 1), first_key(n));
    else if (n >= unmasked_steps || n < upper_steps)
      mask<true, true>(s, work(tile - 1), first_key(n));
  }

  // ScoreKind::kGeneral: from q . k to logits in natural units; before the mask, which -inf would not survive.
  __device__ __forceinline__ void options(float (&s)[kS], int n) const {
    if constexpr (C.general()) {
      const ScoreParams& score = p.forward.score;
      if (score.softcap > 0) {
        const float inner = score.scale / score.softcap * (2 * kLog2E), outer = -2.f * score.softcap;
#pragma unroll
        for (int x = 0; x < kS; ++x)  // score.cuh's tanh_of, times softcap
          s[x] = fmaf(outer, ptx::reciprocal_approx(ptx::exp2_approx(s[x] * inner) + 1.f), score.softcap);
      } else if (p.natural) {
#pragma unroll
        for (int x = 0; x < kS; ++x) s[x] *= score.scale;
      }
      if (score.alibi) {
        const Work& w = work(tile - 1);
        const float slope = score.alibi[w.batch * score.alibi_batch + head_of_warp(w) * score.alibi_head];
        const int key = first_key(n) + 2 * (lane & 3);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float distance = static_cast<float>(w.first_row + row_of_thread(half) + w.seqlen_k - w.seqlen_q - key);
#pragma unroll
          for (int x = 0; x < kS / 4; ++x)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[4 * x + 2 * half + e] -= slope * fabsf(distance - static_cast<float>(8 * x + e));
        }
      }
    }
  }
  // Zeros for what dropout takes; the sums have it. 16 rows and 32 keys share the draws of core/dropout.h.
  __device__ __forceinline__ void drop(float (&s)[kS], int n) const {
    if constexpr (C.general()) {
      if (!p.forward.score.dropout.active()) return;
      const Dropout dropout = resolve_dropout(p.forward.score);
      const Work& w = work(tile - 1);
      const int64_t head = static_cast<int64_t>(w.batch) * p.forward.sequence.num_heads_q + head_of_warp(w);
      const DropoutHead draws(dropout.seed, dropout.offset, head);
      const DropoutHead::Part row = draws.row_part((w.first_row + row_of_warp()) / 2 + (lane >> 2));
#pragma unroll
      for (int x = 0; x < kS / 16; ++x) {
        const Philox4 draw = draws.draw(row, draws.column_part(first_key(n) / 8 + 4 * x + (lane & 3)));
#pragma unroll
        for (int pair = 0; pair < 8; ++pair) {
          const KeptPair kept = kept_pair(numbers_of(draw, pair / 2, pair % 2), dropout);
          if (!kept.low) s[16 * x + 2 * pair] = 0.f;
          if (!kept.high) s[16 * x + 2 * pair + 1] = 0.f;
        }
      }
    }
  }
  __device__ __forceinline__ void note_maximum(const float (&s)[kS]) {
    if constexpr (C.general())
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.maximum[half] = fmaxf(rows.maximum[half], row_max(s, half));
  }

  __device__ __forceinline__ void pack(const float (&s)[kS]) {
#pragma unroll
    for (int n = 0; n < kP; ++n) probabilities[n] = ptx::pack<T>(s[2 * n], s[2 * n + 1]);
  }

  // P of this step. In a branch that the compiler cannot see through: it would move the wait for O, which nothing here
  // depends on, above the exponentials, and with it all their overlap.
  __device__ __forceinline__ void weights(float (&s)[kS], float (&noted)[2]) const {
    if (p.always) exponentials<kNoted>(s, rows.reference, p.scale_log2, noted);
  }

  // Both products of a step.
  __device__ __forceinline__ void issue(float (&s)[kS]) {
    ptx::mbarrier_wait(shared.k_full(k.stage), k.parity);
    my_turn();
    issue_scores(s);
    skip_values();
    ptx::mbarrier_wait(shared.v_full(v.stage), v.parity);
    issue_output();
    pass_turn();
    tell();
  }

  // A step inside a tile.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n) {
    float s[kS], noted[2] = {0.f, 0.f};
    issue(s);
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    options(s, n);
    if constexpr (kMasked) mask_step(s, n);
    note_maximum(s);
    weights(s, noted);
    drop(s, n);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(o);
    ptx::wgmma_pin(probabilities);
    release(shared.v_empty(v.stage));
    v.advance();
    if constexpr (kSum) {
      rows.sum[0] += noted[0];
      rows.sum[1] += noted[1];
    }
    // What tells that P has grown; the references then take it along.
    constexpr bool kSumsTell = kNoted == Noted::kNothing;
    const float sums[2] = {kSumsTell ? o[kO - 4] : 0.f, kSumsTell ? o[kO - 2] : 0.f};
    const float largest = kSumsTell ? fmaxf(sums[0], sums[1]) : fmaxf(noted[0], noted[1]);
    if (__any_sync(0xffffffffu, largest > Range::kLarge)) raise_references<C.element>(rows, s, o, sums);
    pack(s);
  }

  // P of a tile's first keys, from its S: here the rows get their m.
  __device__ __forceinline__ void first_weights(float (&s)[kS], float (&noted)[2]) {
    options(s, 0);
    mask_first(s);
    start_rows<C.element>(rows, s, p.scale_log2);
    note_maximum(s);
    weights(s, noted);
    drop(s, 0);
  }

  // The last product of the tile so far, behind the first one of the next. next_tile() has gone on already.
  __device__ __forceinline__ void step_across() {
    float s[kS], noted[2] = {0.f, 0.f};
    issue(s);
    skip_v = next_skip_v;
    const RowStatistics done_rows = rows;
    Ending end = begin_ending(work(tile - 2), done_rows);
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    first_weights(s, noted);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(o);
    ptx::wgmma_pin(probabilities);
    release(shared.v_empty(v.stage));
    v.advance();
    if constexpr (kSum) rows.sum[0] = noted[0], rows.sum[1] = noted[1];
    pack(s);
    if (is_part(work(tile - 2)))  // a block finishes no part before its last one
      hand_over(done_rows);
    else
      finish(tile - 2, end, false);
    o_empty = true;
    skip_values();
  }

  __device__ __forceinline__ void first_step() {
    float s[kS], noted[2] = {0.f, 0.f};
    skip_v = next_skip_v;
    ptx::mbarrier_wait(shared.k_full(k.stage), k.parity);
    my_turn();
    issue_scores(s);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    first_weights(s, noted);
    if constexpr (kSum) rows.sum[0] = noted[0], rows.sum[1] = noted[1];
    pack(s);
  }

  __device__ __forceinline__ void last_step() {
    my_turn();
    skip_values();
    ptx::mbarrier_wait(shared.v_full(v.stage), v.parity);
    issue_output();
    pass_turn();
    tell();
    const Work& done = work(tile - 1);
    Ending end = begin_ending(done, rows);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(o);
    release(shared.v_empty(v.stage));
    v.advance();
    if (is_part(done)) {
      if (!done.finishes) return hand_over(rows);
      take_over();
      end = begin_ending(done, rows);
      end.flags |= kLook;  // a part that counts for nothing may have held infinities
    }
    finish(tile - 1, end, true);
  }

  // The end of a tile: o = O / sum, lse, and a note of rows to be computed again. What needs no O is done while the tensor
  // cores still work on it; one vote of the warp finds out whether anything is out of the ordinary. The warpgroup issues no
  // products from here to the next step, and the other one soon waits for it: 100 clocks are 1 % of a tile of 512 keys.
  struct Ending {
    uint32_t flags;
    float inverse[2];
    float lse[2];
  };
  static constexpr uint32_t kSees = 1;    // this thread's first row sees a key; its second one: kSees << 1
  static constexpr uint32_t kNoRows = 4;  // block_m reaches past the end
  static constexpr uint32_t kTail = 8;    // of a packed sequence: the next one's rows follow, a box would overwrite them
  static constexpr uint32_t kLook = 16;   // values may not be finite
  static constexpr uint32_t kAgain = 32;  // some row of the warp has to be computed again

  __device__ __forceinline__ Ending begin_ending(const Work& done, const RowStatistics& statistics) const {
    const ForwardParams& f = p.forward;
    Ending end;
    end.flags = kSees | kSees << 1 | (!C.whole() && p.check ? kLook : 0);
    if (!C.whole() && !done.plain) {
      const int first = done.first_row + first_of_consumer();
      end.flags = (first >= done.capacity_q ? kNoRows : 0) |
                  (f.sequence.packed_q && first + rows_of_consumer() > done.capacity_q ? kTail : 0) |
                  (p.check ? kLook : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = done.first_row + row_of_thread(half);
        const int diagonal = i + done.seqlen_k - done.seqlen_q;
        const int last_key = p.window_right < 0 ? done.seqlen_k - 1 : min(done.seqlen_k - 1, diagonal + p.window_right);
        const int first_key = p.window_left < 0 ? 0 : max(0, diagonal - p.window_left);
        end.flags |= i < done.seqlen_q && last_key >= first_key ? kSees << half : 0;
      }
    }
    const uint32_t mine = end.flags;  // the vote will add those of other lanes
    if constexpr (kSum) {
      const float weight[2] = {ptx::quad_sum(statistics.sum[0]), ptx::quad_sum(statistics.sum[1])};
      float sink = kMinusInf, sum[2] = {weight[0], weight[1]};
      if (!C.whole() && f.score.sink) {
        sink = f.score.sink[head_of_warp(done) * f.score.sink_head] * kLog2E;
        sum[0] += ptx::exp2_approx(sink - statistics.reference[0]);
        sum[1] += ptx::exp2_approx(sink - statistics.reference[1]);
      }
      divide(end, weight, sum);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        end.lse[half] = C.whole() || mine & (kSees << half) ? (statistics.reference[half] + ptx::log2_approx(sum[half])) * kLn2
                        : done.first_row + row_of_thread(half) < done.seqlen_q ? sink * kLn2 : kMinusInf;
    }
    if constexpr (C.general()) {
      if (f.max_logit) {  // one atomic a warp
        float maximum = kMinusInf;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (mine & (kSees << half)) maximum = fmaxf(maximum, statistics.maximum[half]);
#pragma unroll
        for (int n = 1; n < 32; n *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, n));
        if (lane == 0 && maximum != kMinusInf)
          ptx::atomic_max(f.max_logit + done.batch * f.max_logit_batch + head_of_warp(done) * f.max_logit_head, maximum);
      }
    }
    return end;
  }

  // The inverse sums. weight: of the keys; sum: with the sink.
  __device__ __forceinline__ void divide(Ending& end, const float (&weight)[2], const float (&sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool sees = C.whole() || end.flags & (kSees << half);
      // The first tile's maximum is in the sum, so in float32 it is never small unless something went wrong.
      if (sees && !(weight[half] > 0x1p-60f && sum[half] < 0x1p127f)) end.flags |= kAgain;
      // |O| <= sum max |V| cannot overflow while the sum is below 1, nor in float16, whose V end at 2^16.
      // A row that sees no key has O = 0 or, from masked values that are not finite, NaN.
      if ((C.element == Element::kBfloat16 && weight[half] >= 1.f) || !sees) end.flags |= kLook;
      end.inverse[half] = sees ? ptx::reciprocal_approx(sum[half]) : 0.f;
      if constexpr (C.general()) end.inverse[half] *= p.forward.score.dropout.active() ? p.forward.score.dropout.scale : 1.f;
    }
  }

  // number: of the tile's Work; last: this consumer has no other tile.
  __device__ __forceinline__ void finish(unsigned number, Ending& end, bool last) {
    const Work& done = work(number);
    if constexpr (!kSum) {
      const float weight[2] = {o[kO - 4], o[kO - 2]};
      divide(end, weight, weight);
    }
    end.flags = __reduce_or_sync(0xffffffffu, end.flags);  // takes a while: nothing asks for it yet
#pragma unroll
    for (int n = 0; n < C.head_dim / 2; ++n) o[n] *= end.inverse[n >> 1 & 1];
    if (!C.whole() && end.flags & kNoRows) return;
    store(number, end.flags, last);
    if constexpr (kSum) {
      if (kLate && untold >= 0) untold_lse[0] = end.lse[0], untold_lse[1] = end.lse[1];
      else store_lse(done, end.lse);
    }
  }

  // kLate: what is left of a tile with its O in shared memory; the fence waits for that. A vote for what all threads know: the
  // compiler does not, and would move descriptors in every step.
  __device__ __forceinline__ void tell() {
    if constexpr (kLate) {
      if (!__any_sync(0xffffffffu, untold >= 0)) return;
      ptx::fence_async_shared();
      tell_store_warp(untold, false);
      if constexpr (kSum) store_lse(work(untold), untold_lse);
      untold = -1;
    }
  }

  __device__ __forceinline__ void store_lse(const Work& done, const float (&lse)[2]) const {
    const RowScalar& to = p.forward.lse;
    if (!to || (lane & 3) != 0) return;
    float* out = to.data + done.lse + row_of_thread(0) * to.row;
    if constexpr (!C.whole()) out += (head_of_warp(done) - done.head) * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (C.whole() || done.plain || done.first_row + row_of_thread(half) < done.capacity_q) out[8 * half * to.row] = lse[half];
  }

  __device__ __forceinline__ void store(unsigned number, uint32_t flags, bool last) {
    const Work& done = work(number);
    const bool unusual = flags & (kAgain | kLook);
    uint32_t largest = 0;
    if (!C.stages_o || (!C.whole() && flags & kTail)) largest = store_rows(done);
    else if (unusual) largest = store_box_of<true>(done, number, last);
    else store_box_of<false>(done, number, last);
    if (unusual) note_again(done, flags & kAgain || ptx::has_nonfinite<T>(largest));
  }

  // A warp's rows to be computed again form a list through memory: one link for 16 rows, written only if they need it.
  __device__ __forceinline__ void note_again(const Work& done, bool again) const {
    if (!__any_sync(0xffffffffu, again) || lane != 0) return;
    const int head = done.batch * p.forward.sequence.num_heads_q + head_of_warp(done);
    const int rows16 = head * p.again_stride + (done.first_row + row_of_warp()) / 16;
    int* const list = shared.again(memory, consumer, warp);
    p.again[rows16] = *list;
    *list = rows16;
  }
  __device__ __forceinline__ void compute_again() const {
    __syncwarp();
    int rows16 = *shared.again(memory, consumer, warp);
#pragma unroll 1
    while (rows16 >= 0) {
      ExactRows<T, C.head_dim, C.general()>(p.forward, rows16 / p.again_stride, rows16 % p.again_stride * 16).run();
      rows16 = p.again[rows16];  // as lane 0 of this warp wrote it
    }
  }

  // Packed rows that no sequence owns: zeros, lse -inf. By all consumers of all blocks.
  __device__ __forceinline__ void zero_unowned_rows() const {
    const ForwardParams& f = p.forward;
    const int64_t begin = f.sequence.cu_seqlens_q.at(f.sequence.batch), heads = f.sequence.num_heads_q;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * C.consumers + consumer) * 4 + warp;
    for (int64_t n = first; n < (f.sequence.total_q - begin) * heads; n += gridDim.x * C.consumers * 4) {
      const int64_t row = begin + n / heads, head = n % heads;
      T* const out = static_cast<T*>(f.o.data) + row * f.o.row + head * f.o.head;
      for (int column = 8 * lane; column < f.head_dim_v; column += 256) *reinterpret_cast<uint4*>(out + column) = {0, 0, 0, 0};
      if (f.lse && lane == 0) f.lse.data[head * f.lse.head + row * f.lse.row] = kMinusInf;
    }
  }

  // Both return the largest magnitudes that they stored (if kCheck).
  template <bool kCheck>
  __device__ __forceinline__ uint32_t store_box_of(const Work& done, unsigned number, bool last) {
    uint32_t largest = 0;
    const uint32_t to = shared.o(consumer);
    const int r = warp * 16 + (lane & 15);
    if constexpr (C.store_warps()) {
      ptx::mbarrier_wait(shared.o_empty(consumer), o_parity);
    } else {
      if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
      ptx::barrier_sync(5 + consumer, 128);
    }
#pragma unroll
    for (int step = 0; step < C.head_dim / 16; ++step) {
      const float* x = o + step * 8;
      const uint32_t a = ptx::pack<T>(x[0], x[1]), b = ptx::pack<T>(x[2], x[3]);
      const uint32_t c = ptx::pack<T>(x[4], x[5]), d = ptx::pack<T>(x[6], x[7]);
      if constexpr (kCheck)
        largest = ptx::max_magnitude<T>(ptx::max_magnitude<T>(ptx::max_magnitude<T>(largest, a), b), ptx::max_magnitude<T>(c, d));
      ptx::stmatrix_x4(to + Panels<64>::chunk_offset(r, 2 * step + (lane >> 4)), a, b, c, d);
    }
    o_parity ^= 1;
    if constexpr (kLate) {
      untold = static_cast<int>(number % C.kWorkSlots);
      if (last) {
        ptx::fence_async_shared();
        tell_store_warp(untold, true);
        untold = -1;
      }
      return largest;
    }
    ptx::fence_async_shared();
    if constexpr (!C.store_warps()) ptx::barrier_sync(5 + consumer, 128);
    if constexpr (C.store_warps())
      tell_store_warp(static_cast<int>(number % C.kWorkSlots), last);
    else if (threadIdx.x % 128 == 0)
      store_box<C>(p, to, query_box<C>(p, done, consumer * 64));
    return largest;
  }

  __device__ __forceinline__ void tell_store_warp(int number, bool last) {
    if (threadIdx.x % 128 == 0) *shared.staged(memory, consumer) = {number, last};
    __syncwarp();
    release(shared.o_full(consumer));
    told_last = last;
  }

  // A quad holds 8 columns of a row in pairs: exchanged, every thread has 16 bytes of two rows to write.
  __device__ __forceinline__ uint32_t store_rows(const Work& done) const {
    uint32_t largest = 0;
    const int r = done.first_row + row_of_thread(0), column = 8 * (lane & 3);
    T* const out = static_cast<T*>(p.forward.o.data) + head_of_warp(done) * p.forward.o.head + column +
                   (p.forward.sequence.packed_q ? 0 : done.batch * p.forward.o.batch) + (done.q_begin + r) * p.forward.o.row;
#pragma unroll
    for (int n = 0; n < C.head_dim / 32; ++n) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = o + 16 * n + 4 * i;
        upper[i] = ptx::pack<T>(x[0], x[1]), lower[i] = ptx::pack<T>(x[2], x[3]);
        largest = ptx::max_magnitude<T>(ptx::max_magnitude<T>(largest, upper[i]), lower[i]);
      }
      transpose_quad(upper, lane & 3);
      transpose_quad(lower, lane & 3);
      const bool exists = 32 * n + column < p.forward.head_dim_v;
      ptx::store_global_if(exists && r < done.capacity_q, out + 32 * n, upper);
      ptx::store_global_if(exists && r + 8 < done.capacity_q, out + 32 * n + 8 * p.forward.o.row, lower);
    }
    return largest;
  }

  // A part of a tile goes to memory as this thread holds it, for the same thread of the block that finishes the tile.
  static __device__ __forceinline__ bool is_part(const Work& w) {
    return C.shares_tiles() && w.num_key_tiles > 0;
  }
  __device__ __forceinline__ float4* part(int block) const {  // [kO / 4: O, 1: statistics][128]
    return reinterpret_cast<float4*>(p.parts + block * C.part_floats() + consumer * (128 * (kO + 4))) + threadIdx.x % 128;
  }
  __device__ __forceinline__ volatile unsigned long long* part_ready(int block) const {
    return p.part_ready + block * C.part_flags() + consumer * 4 + warp;
  }
  __device__ __forceinline__ void hand_over(const RowStatistics& done_rows) const {
    float4* const to = part(blockIdx.x);
#pragma unroll
    for (int n = 0; n < kO / 4; ++n) to[n * 128] = make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]);
    to[kO / 4 * 128] =
        make_float4(done_rows.reference[0], done_rows.reference[1], done_rows.sum[0], done_rows.sum[1]);
    __syncwarp();
    __threadfence();
    if (lane == 0) *part_ready(blockIdx.x) = p.order.launch;
  }
  // Adds what the blocks before this one have of its tile: always in the same order, whoever comes first.
  __device__ __forceinline__ void take_over() {
    const TileOrder& order = p.order;
    const int tile_begin = order.share_begin(blockIdx.x) / order.key_tiles * order.key_tiles;
#pragma unroll 1
    for (int block = blockIdx.x; order.share_begin(block) > tile_begin;) {
      --block;
      if (lane == 0) {
        while (*part_ready(block) != p.order.launch) __nanosleep(100);
        *part_ready(block) = 0;  // the same launch may come again, from a graph
      }
      __threadfence();
      __syncwarp();
      const float4* const from = part(block);
      const float4 theirs = ptx::load_from_l2(from + kO / 4 * 128);
      const float reference[2] = {fmaxf(rows.reference[0], theirs.x), fmaxf(rows.reference[1], theirs.y)};
      const float mine[2] = {ptx::exp2_approx(rows.reference[0] - reference[0]),
                             ptx::exp2_approx(rows.reference[1] - reference[1])};
      const float factor[2] = {ptx::exp2_approx(theirs.x - reference[0]), ptx::exp2_approx(theirs.y - reference[1])};
      const float sums[2] = {theirs.z, theirs.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.reference[half] = reference[half];
        rows.sum[half] = rows.sum[half] * mine[half] + sums[half] * factor[half];
      }
#pragma unroll
      for (int n = 0; n < kO / 4; ++n) {
        const float4 x = ptx::load_from_l2(from + n * 128);
        o[4 * n] = o[4 * n] * mine[0] + x.x * factor[0], o[4 * n + 1] = o[4 * n + 1] * mine[0] + x.y * factor[0];
        o[4 * n + 2] = o[4 * n + 2] * mine[1] + x.z * factor[1], o[4 * n + 3] = o[4 * n + 3] * mine[1] + x.w * factor[1];
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (C.ping_pong && consumer == C.consumers - 1) pass_turn();  // the first turn is the first consumer's
    if (lane == 0) *shared.again(memory, consumer, warp) = -1;
#pragma unroll
    for (int n = 0; n < kO; ++n) o[n] = 0.f;
    if constexpr (C.slots_per_tile() > 1)
      for (int n = 0; n < consumer; ++n) q.advance();
    if (next_tile()) {
      first_step();
      while (true) {
        // do, not for: a loop that might run zero times makes the compiler copy the accumulators. And no loop around this one: the
        // compiler would take stage numbers for different from thread to thread, and move descriptors, two for each product.
        int n = 1;
        // ScoreKind::kGeneral looks in every step what to mask: its first tile may not be the only one with rows that end in it.
        if (!C.general() && n < unmasked_steps) do {
            step<false>(n);
          } while (++n < unmasked_steps);
        if (!C.whole() && n < steps) do {
            step<true>(n);
          } while (++n < steps);
        if constexpr (!C.q_in_registers) {  // all products with this Q are done
          release(shared.q_empty(q.stage));
          for (int n = 0; n < C.slots_per_tile(); ++n) q.advance();
        }
        if (!next_tile()) break;
        step_across();
      }
      last_step();
    }
    // All of O is on its way; what is written below must come after it.
    if constexpr (C.store_warps()) {
      if (!told_last) {
        ptx::mbarrier_wait(shared.o_empty(consumer), o_parity);
        o_parity ^= 1;
        tell_store_warp(-1, true);
      }
      if (*shared.again(memory, consumer, warp) >= 0) ptx::mbarrier_wait(shared.o_empty(consumer), o_parity);
    } else if constexpr (C.stages_o) {
      if (threadIdx.x % 128 == 0) ptx::tma_store_wait_all();
      ptx::barrier_sync(5 + consumer, 128);
    }
    if (!C.whole() && p.forward.sequence.packed_q) zero_unowned_rows();
    compute_again();
  }
};

}  // namespace tilewise::cuda
