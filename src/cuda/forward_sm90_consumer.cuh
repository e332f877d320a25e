// A consumer warpgroup of forward_sm90: 64 query rows of tile after tile. run() is at the end, the steps before it; what becomes of a tile's
// rows when its last product is out: forward_sm90_output.cuh.
#pragma once
#include "cuda/params_sm90.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/forward_sm90_output.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/panel_sm90.cuh"
#include "cuda/tile/softmax_sm90.cuh"

namespace tilewise::cuda {

// ScoreKind::kBias: do references of this warp's rows follow their maxima in every step? A base, since a member, be it unused, changes what
// the compiler makes of the other kernels.
template <bool kBiased>
struct LateRows {
  bool late = false;
};
template <>
struct LateRows<false> {};

template <ForwardSm90Config C>
struct ConsumerSm90 : OutputSm90<C>, LateRows<C.biased()> {
  using Output = OutputSm90<C>;
  using typename Output::Ending, typename Output::T;
  using Output::begin_ending, Output::finish, Output::hand_over, Output::is_part, Output::take_over, Output::tell;
  using Output::first_of_consumer, Output::head_of_warp, Output::release, Output::row_of_thread, Output::row_of_warp, Output::rows_of_consumer,
      Output::work;
  using Output::consumer, Output::k, Output::kLate, Output::kLook, Output::kO, Output::kSum, Output::lane, Output::memory, Output::o,
      Output::o_empty, Output::o_parity, Output::p, Output::q, Output::rows, Output::shared, Output::told_last, Output::v, Output::warp;
  using Range = SoftmaxRange<C.element>;
  static constexpr int kS = C.block_n / 2;  // registers of S, and of P, which is twice as dense
  static constexpr int kP = C.block_n / 4;
  static constexpr int kQ = C.q_in_registers ? C.head_dim / 4 : 1;
  static constexpr Noted kNoted = kSum ? Noted::kSum : C.element == Element::kFloat16 ? Noted::kMaximum : Noted::kNothing;

  uint32_t probabilities[kP];  // P(j-1), as the A operand of the next product
  uint32_t query[kQ];
  struct Draws {
    DropoutHead head{0, 0, 0};
    DropoutHead::Part row{};
  } draws;  // ScoreKind::kGeneral
  static constexpr int kDraws = kS / 16;  // of a step: 32 keys each

  unsigned tile = 0;   // number of the next tile's Work in shared memory
  int steps;           // key tiles of this consumer
  int unmasked_steps;  // of these, the first ones need no mask at their lower end
  int upper_steps;     // the first ones that need one at their upper end
  int skip_v = 0;      // stages of V that belong to tiles which this consumer does not need; of the next tile
  int next_skip_v = 0;

  __device__ __forceinline__ void my_turn() const {
    if constexpr (C.ping_pong) ptx::barrier_sync(1 + consumer, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C.ping_pong) ptx::barrier_arrive(1 + (consumer + 1 == C.consumers ? 0 : consumer + 1), 256);
  }
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
        if constexpr (C.biased()) release_bias(wait_for_bias());
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

  // A descriptor, which is the same in all threads. Where the compiler does not see it, it moves each to uniform registers, up to two for a
  // product: with options at d 64, once draws of dropout left it registers.
  __device__ __forceinline__ static uint32_t of_warp(uint32_t descriptor) {
    if constexpr (C.general() && C.head_dim == 64) return ptx::uniform(descriptor);
    else return descriptor;
  }

  // S = Q K^T
  __device__ __forceinline__ void issue_scores(float (&s)[kS]) {
    const uint32_t b = of_warp(ptx::descriptor(shared.k(k.stage)));
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
    const uint32_t b = of_warp(ptx::descriptor(s_v, panel_distance));
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

  // ScoreKind::kBias: the tile of a step is in the ring while the keys are.
  struct BiasTile {
    uint32_t address, empty;
  };
  __device__ __forceinline__ BiasTile wait_for_bias() const {
    static_assert(!C.biased() || C.stages % 2 == 0);
    const uint32_t turn = k.stage + (C.stages % 4 == 2 ? 2 * k.parity : 0);  // tiles before it, modulo 4
    const uint32_t stage = turn & ((1u << p.bias.stage_bits) - 1);
    ptx::mbarrier_wait(shared.bias_full(consumer, stage), turn >> p.bias.stage_bits & 1);
    return {shared.bias(consumer, stage), shared.bias_empty(consumer, stage)};
  }
  __device__ __forceinline__ void release_bias(const BiasTile& tile) const {
    __syncwarp();
    release(tile.empty);
  }
  // Reads it in the layout of S and adds it, or hides what it hides.
  template <BiasKind kKind>
  __device__ __forceinline__ void add_bias(float (&s)[kS], const BiasTile& tile) const {
    if constexpr (kKind == BiasKind::k16) {
      const int row = (warp * 16 + (lane & 15)) & p.bias.row_mask;
#pragma unroll
      for (int n = 0; n < kS / 8; ++n) {  // 16 columns
        uint32_t pairs[4];
        ptx::ldmatrix_x4(pairs, tile.address + Panels<64>::chunk_offset(row, 2 * n + (lane >> 4)));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 pair = ptx::unpack<T>(pairs[e]);
          float* const to = s + 8 * n + 2 * e;
          to[0] = fmaf(to[0], p.bias.scale, pair.x), to[1] = fmaf(to[1], p.bias.scale, pair.y);
        }
      }
    } else {
      const int rows[2] = {(warp * 16 + (lane >> 2)) & p.bias.row_mask, (warp * 16 + 8 + (lane >> 2)) & p.bias.row_mask};
#pragma unroll
      for (int n = 0; n < kS / 2; ++n) {  // pairs of columns, of two rows in turn
        float* const to = s + 2 * n;
        if constexpr (kKind == BiasKind::kMask) {
          const uint32_t pair = ptx::load_shared_2(tile.address + mask_offset(rows[n % 2], n / 2 * 8 + 2 * (lane & 3)));
          to[0] = pair & 0xff ? to[0] : kMinusInf, to[1] = pair > 0xff ? to[1] : kMinusInf;
        } else {
          const uint32_t chunk = Panels<64>::chunk_offset(rows[n % 2], n / 2 * 2 + (lane >> 1 & 1));
          const float2 pair = ptx::load_shared_8(tile.address + chunk + 8 * (lane & 1));
          to[0] = fmaf(to[0], p.bias.scale, pair.x), to[1] = fmaf(to[1], p.bias.scale, pair.y);
        }
      }
    }
    release_bias(tile);
  }
  __device__ __forceinline__ void add_bias(float (&s)[kS], const BiasTile& tile) const {
    if (p.bias.kind == BiasKind::k16) add_bias<BiasKind::k16>(s, tile);
    else if (p.bias.kind == BiasKind::kMask) add_bias<BiasKind::kMask>(s, tile);
    else add_bias<BiasKind::kFloat32>(s, tile);
  }
  // Where a bias is all that there is: bias and exponentials in one piece, without a branch for everything else in between.
  __device__ __forceinline__ void quick_weights(float (&s)[kS], const BiasTile& bias, float (&noted)[2]) const {
    const auto of_kind = [&]<BiasKind kKind>() {
      add_bias<kKind>(s, bias);
      exponentials<kNoted>(s, rows.reference, p.scale_log2, noted);
    };
    if (p.bias.kind == BiasKind::k16) of_kind.template operator()<BiasKind::k16>();
    else if (p.bias.kind == BiasKind::kMask) of_kind.template operator()<BiasKind::kMask>();
    else of_kind.template operator()<BiasKind::kFloat32>();
  }

  // ScoreKind::kGeneral and kBias: from q . k to logits in natural units; before the mask, which -inf would not survive.
  __device__ __forceinline__ void options(float (&s)[kS], const BiasTile& bias, int n) {
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
      if constexpr (C.biased()) add_bias(s, bias);
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
  // Dropout: what of the draws is fixed for the tile; the draws of a step, made while O is on its way; zeros for what they take, in packed
  // pairs. The sums have it. 16 rows and 32 keys share the draws of core/dropout.h.
  __device__ __forceinline__ void begin_draws() {
    if constexpr (C.drops()) {
      if (!p.forward.score.dropout.active()) return;
      const Work& w = work(tile - 1);
      const Dropout dropout = resolve_dropout(p.forward.score);
      const int64_t head = static_cast<int64_t>(w.batch) * p.forward.sequence.num_heads_q + head_of_warp(w);
      draws.head = DropoutHead(dropout.seed, dropout.offset, head).from_column(lane & 3);
      draws.row = draws.head.row_part((w.first_row + row_of_warp()) / 2 + (lane >> 2));
    }
  }
  __device__ __forceinline__ void draw_keys(Draw (&drawn)[kDraws], int n) const {
    if constexpr (C.drops())
      if (p.forward.score.dropout.active())
#pragma unroll
        for (int x = 0; x < kDraws; ++x) drawn[x] = draws.head.draw(draws.row, draws.head.column_part(first_key(n) / 8 + 4 * x));
  }
  __device__ __forceinline__ void note_maximum(const float (&s)[kS]) {
    if (C.biased() && !p.forward.max_logit) return;
    if constexpr (C.general())
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.maximum[half] = fmaxf(rows.maximum[half], row_max(s, half));
  }

  __device__ __forceinline__ void pack(const float (&s)[kS], const Draw (&drawn)[kDraws]) {
#pragma unroll
    for (int n = 0; n < kP; ++n) probabilities[n] = ptx::pack<T>(s[2 * n], s[2 * n + 1]);
    if constexpr (C.drops())
      if (p.forward.score.dropout.active())
#pragma unroll
        for (int n = 0; n < kP; ++n) probabilities[n] &= keep_mask(numbers_of(drawn[n / 8], n / 2 % 4, n % 2), p.forward.score.dropout);
  }

  // P of this step. In a branch that the compiler cannot see through: it would move the wait for O, which nothing here
  // depends on, above the exponentials, and with it all their overlap.
  __device__ __forceinline__ void weights(float (&s)[kS], float (&noted)[2]) const {
    if (p.always) exponentials<kNoted>(s, rows.reference, p.scale_log2, noted);
  }
  // ScoreKind::kBias: the same, first of all moving references where rows may not have met their first large logit yet (softmax_sm90.cuh).
  __device__ __forceinline__ void late_weights(float (&s)[kS], float (&noted)[2], float (&factor)[2]) {
    if (this->late) this->late = follow_rows<C.element>(rows, s, p.scale_log2, noted, factor);
    else weights(s, noted);
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
    float s[kS], noted[2] = {0.f, 0.f}, factor[2] = {1.f, 1.f};
    bool followed = false;
    BiasTile bias;
    issue(s);
    if constexpr (C.biased()) bias = wait_for_bias();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    Draw drawn[kDraws];
    bool quick = false;
    if constexpr (C.biased()) {
      quick = p.bias.alone && !this->late && n < unmasked_steps && n >= upper_steps;
      followed = this->late;
    }
    if (quick) {
      quick_weights(s, bias, noted);
    } else {
      options(s, bias, n);
      if constexpr (kMasked) mask_step(s, n);
      note_maximum(s);
      if constexpr (C.biased()) late_weights(s, noted, factor);
      else weights(s, noted);
      draw_keys(drawn, n);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(o);
    ptx::wgmma_pin(probabilities);
    release(shared.v_empty(v.stage));
    v.advance();
    if constexpr (C.biased())
      if (followed && __any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) scale_rows(o, factor);
    if constexpr (kSum) {
      rows.sum[0] += noted[0];
      rows.sum[1] += noted[1];
    }
    // What tells that P has grown; the references then take it along.
    constexpr bool kSumsTell = kNoted == Noted::kNothing;
    const float sums[2] = {kSumsTell ? o[kO - 4] : 0.f, kSumsTell ? o[kO - 2] : 0.f};
    const float largest = kSumsTell ? fmaxf(sums[0], sums[1]) : fmaxf(noted[0], noted[1]);
    if (__any_sync(0xffffffffu, largest > Range::kLarge)) raise_references<C.element>(rows, s, o, sums);
    pack(s, drawn);
  }

  // P of a tile's first keys, from its S: here the rows get their m.
  __device__ __forceinline__ void first_weights(float (&s)[kS], const BiasTile& bias, float (&noted)[2], Draw (&drawn)[kDraws]) {
    options(s, bias, 0);
    mask_first(s);
    if constexpr (C.biased()) {
      float factor[2];  // of an O that is not there
      forget_rows(rows);
      note_maximum(s);
      if (p.always) this->late = follow_rows<C.element>(rows, s, p.scale_log2, noted, factor);
    } else {
      start_rows<C.element>(rows, s, p.scale_log2);
      note_maximum(s);
      weights(s, noted);
    }
    begin_draws();
    draw_keys(drawn, 0);
  }

  // The last product of the tile so far, behind the first one of the next. next_tile() has gone on already.
  __device__ __forceinline__ void step_across() {
    float s[kS], noted[2] = {0.f, 0.f};
    BiasTile bias;
    issue(s);
    skip_v = next_skip_v;
    const RowStatistics done_rows = rows;
    Ending end = begin_ending(work(tile - 2), done_rows);
    if constexpr (C.biased()) bias = wait_for_bias();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    Draw drawn[kDraws];
    first_weights(s, bias, noted, drawn);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(o);
    ptx::wgmma_pin(probabilities);
    release(shared.v_empty(v.stage));
    v.advance();
    if constexpr (kSum) rows.sum[0] = noted[0], rows.sum[1] = noted[1];
    pack(s, drawn);
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
    BiasTile bias;
    if constexpr (C.biased()) bias = wait_for_bias();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(s);
    release(shared.k_empty(k.stage));
    k.advance();
    Draw drawn[kDraws];
    first_weights(s, bias, noted, drawn);
    if constexpr (kSum) rows.sum[0] = noted[0], rows.sum[1] = noted[1];
    pack(s, drawn);
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
        Output::tell_store_warp(-1, true);
      }
      if (*shared.again(memory, consumer, warp) >= 0) ptx::mbarrier_wait(shared.o_empty(consumer), o_parity);
    } else if constexpr (C.stages_o) {
      if (threadIdx.x % 128 == 0) ptx::tma_store_wait_all();
      ptx::barrier_sync(5 + consumer, 128);
    }
    if (!C.whole() && p.forward.sequence.packed_q) Output::zero_unowned_rows();
    Output::compute_again();
  }
};

}  // namespace tilewise::cuda
