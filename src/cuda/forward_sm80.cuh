// Forward attention on mma.sync and cp.async (sm_80 and newer).
//
// One block computes block_m query rows of one head. It walks the visible keys in tiles of block_n, from the last to
// the first, and keeps per row a reference m, the sum l of exp(s - m) and the output o, all in registers:
//
//   S = Q K^T          while V of this tile is under way
//   P = exp(S - m)     while K of the next tile is under way
//   O = O + P V
//
// With two stages of K and V (`staged` in config_sm80.h) both of the next tile are under way all the while, one barrier a tile.
// A warp owns whole rows, so the softmax needs no shared memory. The reference follows the row maximum lazily: l and o
// are rescaled only when a logit exceeds it by 2^8. Any reference gives the same quotient o / l; P <= 2^8 fits float16.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/bias_tile.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/packed_tail.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/softmax_sm80.cuh"

namespace tilewise::cuda {

template <ForwardConfig C>
struct ForwardKernel {
  static_assert(C.valid());
  using T = typename ElementType<C.element>::Type;
  static constexpr bool kGeneral = C.kind == ForwardKind::kGeneral || C.kind == ForwardKind::kFewRows;
  static constexpr bool kMayPack = kGeneral || sizeof(T) == 2;  // plain kernels never do; float32 of 256 columns ran 6 % slower for the question
  static constexpr bool kDrops = kGeneral || C.kind == ForwardKind::kDropout;
  static constexpr bool kStaged = C.num_stages == 2;
  // What the compiler makes of the main loop decides, measured (docs/kernels/forward_sm80.md): with 64 columns registers are left
  // for exceeds() and for warps that skip tiles, above only if sums are early and the block's place is looked up again at the end.
  static constexpr bool kLight = kStaged && C.head_dim <= 64;
  static constexpr bool kEarlySums = kStaged && !kLight;
  static constexpr bool kSkips = kLight;
  // Lanes' addresses in one register: d 128 with dropout 344 TFLOP/s (336 with all keys exponentiated first; in more registers 325), d 256
  // in two blocks 331 (320). With one stage nowhere else: d 192 305 (309), d 256 with dropout 305 (311).
  static constexpr bool kPacked =
      kStaged ? C.head_dim < 128 || kDrops : C.kind == ForwardKind::kPlain && sizeof(T) == 2 && C.head_dim > 192 && C.block_m == 64;
  static constexpr bool kFast = C.head_dim <= 128 && sizeof(T) == 2;  // registers are left for the faster copies and finer steps
  static constexpr int kBytes = C.head_dim * static_cast<int>(sizeof(T));  // of a row
  static constexpr int kM = C.row_groups();      // row groups of 16 per warp
  static constexpr int kN = C.block_n / 8;       // n8 tiles of S
  static constexpr int kD = C.head_dim / 8;      // n8 tiles of O
  static constexpr int kSteps = C.head_dim / 16; // k16 steps of Q K^T
  static constexpr int kUnroll = sizeof(T) == 4 ? C.unroll : kSteps;  // a step of float32 is long enough, and its parts need registers
  static constexpr bool kSplits = C.split != Split::kWarp;     // the block splits K and V
  static constexpr bool kInTurn = C.split == Split::kInTurn;
  static constexpr int kPartQ = C.split == Split::kAll ? C.query_bytes() / 3 : 0;  // bytes of one of three tiles
  static constexpr int kPartK = kSplits ? C.key_bytes() / 3 : 0;
  using QCopy = TileCopy<T, C.block_m, C.head_dim, C.num_threads()>;
  using KCopy = TileCopy<T, C.block_n, C.head_dim, C.num_threads()>;
  using Layout = TileLayout<kBytes>;

  const ForwardParams& p;
  int b, head_k, first_head, first_row, split;  // first_head: of the packed heads; first_row: packed row
  DeviceSequence s;
  int warp, lane;
  uint32_t s_bias;  // tile of the bias; 0: there is none in shared memory
  bool natural;  // logits carry the scale already, as softcap, ALiBi, bias and a scale <= 0 need it

  // Warps 32 threads apart by four share a scheduler: with a mask to the right, whose later rows see more, each gets as much.
  __device__ __forceinline__ static int warp_of_rows(int warp) { return sizeof(T) == 4 && C.num_warps == 8 && warp >= 4 ? 11 - warp : warp; }

  // The block's place in the grid: split, batch entry and head; returns the row block. A section of heads takes turns, with the longest row
  // blocks first.
  __device__ __forceinline__ int locate(unsigned index) {
    const int pack = kMayPack ? p.pack : 1;
    const int heads = p.sequence.num_heads_q / pack;
    const unsigned blocks = p.num_blocks, first = index / (p.section * blocks) * p.section, inside = index - first * blocks;
    const unsigned width = min(static_cast<unsigned>(p.section), gridDim.x / blocks - first);
    const int block = static_cast<int>(blocks - 1 - inside / width);
    index = first + inside % width;
    first_head = static_cast<int>(index % heads) * pack;
    index /= heads;
    split = static_cast<int>(index % p.num_splits);
    b = static_cast<int>(index / p.num_splits);
    return block;
  }

  // And its sequence and rows; then the thread's.
  __device__ __forceinline__ void enter(int block, unsigned thread) {
    s = resolve(p.sequence, b);
    first_row = block * C.block_m;
    warp = warp_of_rows(thread / 32);
    lane = thread % 32;
  }

  // Packed row r of this block -> query and head.
  __device__ __forceinline__ int query(int r) const { return kGeneral && p.pack > 1 ? (first_row + r) / p.pack : first_row + r; }
  __device__ __forceinline__ int head(int r) const {
    return kGeneral && p.pack > 1 ? first_head + (first_row + r) % p.pack : first_head;
  }
  __device__ __forceinline__ int64_t query_offset(const RowTensor& x, int r) const {
    return query(r) * x.row + (head(r) - first_head) * x.head;
  }
  __device__ __forceinline__ int warp_row(int m, int half) const { return warp * kM * 16 + m * 16 + half * 8 + (lane >> 2); }

  __device__ __forceinline__ void load_keys(const RowTensor& x, const T* base, uint32_t tile, int j0, int cols) const {
    if constexpr (kGeneral) {
      if (p.sequence.page_size > 0) {
        KCopy::load_rows(tile, static_cast<const T*>(x.data) + head_k * x.head,
                         [&](int r) { return paged_row(x, p.sequence, s, b, j0 + r); }, s.seqlen_k - j0, cols, p.aligned);
        return;
      }
      if (!p.aligned) {
        KCopy::load_rows(tile, base, [&](int r) { return (j0 + r) * x.row; }, s.seqlen_k - j0, cols, false);
        return;
      }
    }
    KCopy::template load<kFast>(tile, base + j0 * x.row, x.row, s.seqlen_k - j0, cols);
  }

  // Softcap, scale, ALiBi and bias of a tile of S, in natural units.
  __device__ __forceinline__ void options(float (&x)[kM][kN][4], int j0) const {
    const ScoreParams& score = p.score;
    if (!natural) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] *= score.scale;
    if (score.softcap > 0) {
      const float inverse = 1.f / score.softcap;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][n][e] = score.softcap * tanh_of<T>(x[m][n][e] * inverse);
    }
    if (score.alibi)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row(m, half);
        const float slope = score.alibi[b * score.alibi_batch + head(r) * score.alibi_head];
        const float distance = static_cast<float>(query(r) + s.seqlen_k - s.seqlen_q - j0 - 2 * (lane & 3));
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) x[m][n][2 * half + e] -= slope * fabsf(distance - (n * 8 + e));
      }
    if (score.bias) with_bias(score, [&](const auto* bias) { add_bias(x, j0, bias); });
  }

  template <class B>
  __device__ __forceinline__ void add_bias(float (&x)[kM][kN][4], int j0, const B* bias) const {
    using Tile = BiasTile<C.block_m, C.block_n>;
    const ScoreParams& score = p.score;
    const int column = 2 * (lane & 3), pitch = Tile::one_row(score, p.pack) ? 0 : Tile::pitch(sizeof(B));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row(m, half);
        const auto add = [&](int n, int e, float value) {
          float& logit = x[m][n][2 * half + e];
          logit = sizeof(B) == 1 && value == kMinusInf ? kMinusInf : logit + value;  // what a boolean mask hides may be NaN
        };
        if (s_bias != 0) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const float2 pair = shared_bias_pair(s_bias + r * pitch + (n * 8 + column) * sizeof(B), bias);
            add(n, 0, pair.x), add(n, 1, pair.y);
          }
        } else {
          const B* row = bias + bias_offset(r) + (j0 + column) * score.bias_key;
          const int keys = query(r) < s.seqlen_q ? s.seqlen_k - j0 - column : 0;  // of other rows, anything: nobody reads them
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e < keys) add(n, e, bias_of(row[(n * 8 + e) * score.bias_key]));
        }
      }
  }
  __device__ __forceinline__ int64_t bias_offset(int r) const {
    return b * p.score.bias_batch + head(r) * p.score.bias_head + query(r) * p.score.bias_row;
  }
  __device__ __forceinline__ void load_bias_tile(int j0) const {
    if constexpr (kGeneral)
      if (s_bias != 0)
        BiasTile<C.block_m, C.block_n>::load(s_bias, p.score, p.pack, j0, s.seqlen_k - j0, C.num_threads(),
                                             [&](int r) { return query(r) < s.seqlen_q ? bias_offset(r) : int64_t{-1}; });
  }

  __device__ __forceinline__ void mask(float (&x)[kM][kN][4], int j0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range keys = visible_keys(p.score, query(warp_row(m, half)), s.seqlen_q, s.seqlen_k);
        const int begin = keys.begin - j0 - 2 * (lane & 3), end = keys.end - j0 - 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (n * 8 + e < begin || n * 8 + e >= end) x[m][n][2 * half + e] = kMinusInf;
      }
  }

  // What of dropout's draws is fixed for this thread's rows. The general kernel, mostly without dropout, finds it out again for each draw.
  struct Draws {
    DropoutHead head;
    DropoutHead::Part rows[kM];  // or at row_words()
  };
  __device__ __forceinline__ static uint32_t row_words() {  // its address costs fewer registers than a copy of it
    extern __shared__ __align__(128) unsigned char shared[];
    return ptx::shared_address(shared) + C.row_words_offset() + ptx::thread_index() * 16;
  }
  __device__ __forceinline__ Draws draws_of_rows() const {
    const Dropout dropout = resolve_dropout(p.score);
    Draws draws{DropoutHead(dropout.seed, dropout.offset, static_cast<int64_t>(b) * p.sequence.num_heads_q + first_head), {}};
#pragma unroll
    for (int m = 0; m < kM; ++m) draws.rows[m] = draws.head.row_part((first_row / 16 + warp * kM + m) * 8 + (lane >> 2));
    draws.head = draws.head.from_column(lane & 3);
    if constexpr (C.shares_row_words()) {
      static_assert(kM <= 2);
      ptx::store_shared(row_words(), make_uint4(draws.rows[0].first, draws.rows[0].second, draws.rows[kM - 1].first, draws.rows[kM - 1].second));
    }
    return draws;
  }
  // The draws for this thread's rows and 32 keys.
  __device__ __forceinline__ void draw_keys(Draw (&drawn)[kM], int j0, const Draws& fixed) const {
    Draws draws = fixed;
    if constexpr (kGeneral) draws = draws_of_rows();
    if constexpr (C.shares_row_words()) {
      const uint4 words = ptx::load_shared_16(row_words());
      draws.rows[0] = {words.x, words.y};
      draws.rows[kM - 1] = {words.z, words.w};
    }
    const DropoutHead::Part keys = draws.head.column_part(j0 >> 3);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      drawn[m] = draws.head.draw(draws.rows[m], keys);
      // One after the other: side by side they take registers that the general kernel's loop has not, with dropout or without.
      if constexpr (kGeneral) __syncwarp();
    }
  }

  // The operand of 16 keys, with zeros for what dropout takes; the sums have it. float32: in x, too, see pair_at().
  __device__ __forceinline__ void operand_of_kept(OperandA<T> (&a)[kM], float (&x)[kM][kN][4], int step, const Draw (&drawn)[kM],
                                                  bool drops) const {
    const Dropout& dropout = p.score.dropout;
    if constexpr (sizeof(T) == 4) {
      if (drops)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const KeptPair kept = kept_pair(numbers_of(drawn[m], n % 4, half), dropout);
              if (!kept.low) x[m][n][2 * half] = 0.f;
              if (!kept.high) x[m][n][2 * half + 1] = 0.f;
            }
    }
    operand_of<T>(a, x, step);
    if constexpr (sizeof(T) == 2) {
      if (drops)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int quarter = 0; quarter < 4; ++quarter)
            a[m].x[quarter] &= keep_mask(numbers_of(drawn[m], (2 * step + quarter / 2) % 4, quarter % 2), dropout);
    }
  }

  // The probabilities of row (m, half) for the keys 2t and 2t + 1 of the eight that hold key j, from what went into P V. No
  // dynamic index.
  __device__ __forceinline__ static float2 pair_at(const OperandA<T> (&operand)[kN / 2][kM], const float (&x)[kM][kN][4], int m,
                                                   int half, int j) {
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t here = -static_cast<uint32_t>(n == j / 8);
      if constexpr (sizeof(T) == 4) {
        first |= __float_as_uint(x[m][n][2 * half]) & here;
        second |= __float_as_uint(x[m][n][2 * half + 1]) & here;
      } else {
        first |= operand[n / 2][m].x[(n & 1) * 2 + half] & here;
      }
    }
    if constexpr (sizeof(T) == 4) return make_float2(__uint_as_float(first), __uint_as_float(second));
    else return ptx::unpack<T>(first);
  }

  // Adds p_ij v_j for the visible pairs of the chunks of V that remove_nonfinite() took out. Rare, so compact.
  __device__ __forceinline__ void add_nonfinite(const OperandA<T> (&operand)[kN / 2][kM], const float (&x)[kM][kN][4],
                                                float (&o)[kM][kD][4], int j0, const uint32_t* marks, const T* v_base) const {
#pragma unroll 1
    for (int j = 0; j < C.block_n; ++j) {
      const uint32_t mark = marks[j];
      if (mark == 0) continue;
      const T* v_row = v_base + (p.sequence.page_size > 0 ? paged_row(p.v, p.sequence, s, b, j0 + j) : (j0 + j) * p.v.row);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 both = pair_at(operand, x, m, half, j);
          const float weight = __shfl_sync(0xffffffffu, j & 1 ? both.y : both.x, (lane & ~3) | (j % 8) / 2);
          const int r = warp_row(m, half), i = query(r);
          if (i >= s.seqlen_q || !visible(p.score, score_row(p.score, s, b, head(r), i), j0 + j)) continue;
#pragma unroll
          for (int n = 0; n < kD; ++n)
            if (mark >> n & 1) {
              const int col = n * 8 + 2 * (lane & 3);
              if (col < p.head_dim_v) o[m][n][2 * half] += weight * ptx::to_float(v_row[col]);
              if (col + 1 < p.head_dim_v) o[m][n][2 * half + 1] += weight * ptx::to_float(v_row[col + 1]);
            }
        }
    }
  }

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

  // Keys of this block, as tiles [begin, end), of which this split takes its share.
  __device__ __forceinline__ Range key_tiles(int last_row) const {
    const Range first = visible_keys(p.score, query(0), s.seqlen_q, s.seqlen_k);
    const Range last = visible_keys(p.score, min(query(last_row), s.seqlen_q - 1), s.seqlen_q, s.seqlen_k);
    Range tiles{first.begin / C.block_n, (last.end + C.block_n - 1) / C.block_n};
    if (last.end <= first.begin || query(0) >= s.seqlen_q) tiles.end = tiles.begin;
    if (kGeneral && p.num_splits > 1) {
      const int count = tiles.end - tiles.begin, share = (count + p.num_splits - 1) / p.num_splits;
      tiles.begin = tiles.begin + split * share;
      tiles.end = min(tiles.end, tiles.begin + share);
    }
    return tiles;
  }

  __device__ __forceinline__ static auto lane_address(const auto& address) {
    if constexpr (kPacked) return packed(address);
    else return address;
  }

  // Lets the products of a step wait for its sums. The sums hang on nothing else, so that ptxas puts them off to the end of the
  // tile, keeps every probability in a register until then and has none left to load V ahead: d 128, 349 instead of 379 TFLOP/s.
  __device__ __forceinline__ void await_sums(OperandA<T> (&a)[kM], const RowState<kM>& row) const {
    const uint32_t zero = p.num_blocks >> 31;  // which the compiler does not know
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) a[m].x[2 + half] |= __float_as_uint(row.sum[m][half]) & zero;
  }

  // O += P V for a tile whose logits are x, with everything between: references, exponentials, sums, dropout, the pairs whose value
  // is inf or NaN.
  template <class LaneV>
  __device__ __forceinline__ void add_values(RowState<kM>& row, float (&x)[kM][kN][4], float (&o)[kM][kD][4], const LaneV& lane_v, float c,
                                             int j0, const Draws& draws, bool drops, bool masked, bool nonfinite, uint32_t* marks,
                                             const T* v) const {
    if (!kSkips || masked || !row.settled || exceeds(row, x)) {
      update_reference<kGeneral>(row, x, o, c);
      if constexpr (kSkips) settle(row, c);
    }
    float shift[kM][2];
    make_shift(shift, row, x, c);
    // A group of keys at a time, so that the tensor cores work on one while the next is exponentiated: 16 keys, 32 where
    // a draw may come between, all where registers are short.
    constexpr int kGroup = !kFast || (kGeneral && C.head_dim > 64) ? kN : kDrops ? 4 : 2;
    // Steps whose draws come before the first product: all of them above d 128 (d 256 329 TFLOP/s, one after the other 311), else one.
    constexpr int kAhead = kDrops && C.head_dim > 128 ? kN / 2 : 1;
    OperandA<T> operand[kN / 2][kM];
    Draw drawn[kM];
#pragma unroll
    for (int n = 0; n < kN; n += kGroup) {
      exponentials(row, shift, x, c, n, n + kGroup);
#pragma unroll
      for (int first = n / 2; first < (n + kGroup) / 2; first += kAhead) {
#pragma unroll
        for (int step = first; step < first + kAhead; ++step) {
          if (drops && step % 2 == 0) draw_keys(drawn, j0 + step * 16, draws);
          operand_of_kept(operand[step], x, step, drawn, drops);
        }
#pragma unroll
        for (int step = first; step < first + kAhead; ++step) {
          if constexpr (kEarlySums) await_sums(operand[step], row);
          multiply_bt<T>(o, operand[step], lane_v, step);
        }
      }
    }
    if (nonfinite) {
      const T* v_base = p.sequence.page_size > 0 ? static_cast<const T*>(p.v.data) + head_k * p.v.head : v;
      add_nonfinite(operand, x, o, j0, marks, v_base);
      if constexpr (!kSkips) clear_marks(marks);  // where warps skip tiles, all of them at one place
    }
  }

  __device__ __forceinline__ static void clear_marks(uint32_t* marks) {
    __syncthreads();
    if (threadIdx.x < C.block_n) marks[threadIdx.x] = 0;
    if constexpr (kStaged) __syncthreads();  // the next tile's search comes before the next barrier
  }

  __device__ __forceinline__ void run(uint32_t shared, uint32_t* marks) {
    const uint32_t s_q = shared;                                       // [block_m, head_dim]
    const uint32_t s_k = s_q + C.query_bytes();                        // [block_n, head_dim]
    const uint32_t s_v = s_k + (kInTurn ? 0 : C.key_bytes());          // [block_n, head_dim]
    const uint32_t s_arriving = s_v + C.key_bytes();                   // [block_n, head_dim], of the K or V to be split
    const uint32_t k_arrives = kSplits ? s_arriving : s_k, v_arrives = kSplits ? s_arriving : s_v;
    const float c = kGeneral && natural ? kLog2E : p.score.scale_log2;

    float o[kM][kD][4];
    RowState<kM> row;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kD; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][n][e] = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row.reference[m][half] = row.maximum[m][half] = kMinusInf;
        row.sum[m][half] = 0.f;
      }
    }
    row.large = row.settled = false;

    Draws draws{DropoutHead(0, 0, 0), {}};
    if constexpr (kDrops && !kGeneral) draws = draws_of_rows();
    const bool drops = kDrops && (!kGeneral || p.score.dropout.active());
    const float scale_down = kDrops && p.score.dropout.active() ? p.score.dropout.scale : 1.f;

    const int last_row = C.block_m - 1;
    const Range tiles = key_tiles(last_row);
    if (tiles.end > tiles.begin) {
      const T* q = static_cast<const T*>(p.q.data) + query_rows_offset(p.q);
      const T* k = nullptr;
      const T* v = nullptr;
      if (!kGeneral || p.sequence.page_size == 0) {
        k = key_rows<const T>(p.k, p.sequence, s, head_k);
        v = key_rows<const T>(p.v, p.sequence, s, head_k);
      }
      const uint32_t q_arrives = C.split == Split::kAll ? s_k : s_q;
      static_assert(C.split != Split::kAll || C.block_m * kBytes <= 2 * C.key_bytes() + C.block_n * kBytes);
      if (kGeneral && (p.pack > 1 || !p.aligned))
        QCopy::load_rows(q_arrives, q, [&](int r) { return query_offset(p.q, r); }, s.seqlen_q * p.pack - first_row, p.head_dim,
                         p.aligned);
      else
        QCopy::template load<false>(q_arrives, q + first_row * p.q.row, p.q.row, s.seqlen_q - first_row, p.head_dim);
      if (threadIdx.x < C.block_n) marks[threadIdx.x] = 0;
      if constexpr (C.split == Split::kAll) {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        split_tile<QCopy>(q_arrives, s_q);
        __syncthreads();  // every thread has read Q where K and V will be
      }
      load_keys(p.k, k, k_arrives, (tiles.end - 1) * C.block_n, p.head_dim);
      load_bias_tile((tiles.end - 1) * C.block_n);
      if (kStaged) load_keys(p.v, v, s_v, (tiles.end - 1) * C.block_n, p.head_dim_v);
      ptx::cp_async_commit();
      if constexpr (kStaged) __syncthreads();  // marks are zero before another thread sets one
      if constexpr (kSplits && C.split != Split::kAll) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        even_columns_first<QCopy>(s_q);
      }

      // Tiles inside these bounds are visible to every row of the block.
      const int full_begin = visible_keys(p.score, min(query(last_row), s.seqlen_q - 1), s.seqlen_q, s.seqlen_k).begin;
      const int full_end = visible_keys(p.score, query(0), s.seqlen_q, s.seqlen_k).end;

      const auto lane_q = lane_address_a<T, kBytes, kPartQ>(s_q + warp * kM * 16 * (kPartQ > 0 ? kBytes / 2 : kBytes), lane);
      const auto is_masked = [&](int j0) { return j0 < full_begin || j0 + C.block_n > full_end; };

      if constexpr (kStaged) {
        constexpr uint32_t kStageBytes = 2 * C.block_n * kBytes;
        auto lane_k = lane_address(lane_address_b<T, kBytes>(s_k, lane));
        auto lane_v = lane_address(lane_address_bt<T, kBytes>(s_v, lane));
        uint32_t stage = 0;  // where the tile lies, in bytes
        // Waits for a tile and starts the copies of the next one; true: its V held inf or NaN where some pair is masked.
        const auto receive = [&](int tile, bool masked) {
          ptx::cp_async_wait<0>();
          bool nonfinite = false;
          if (masked)
            nonfinite = __syncthreads_or(KCopy::remove_nonfinite(s_v + stage, marks));
          else
            __syncthreads();  // K and V are here, and every warp is done with the last tile
          if (tile > tiles.begin) {
            load_keys(p.k, k, s_k + (kStageBytes - stage), (tile - 1) * C.block_n, p.head_dim);
            load_keys(p.v, v, s_v + (kStageBytes - stage), (tile - 1) * C.block_n, p.head_dim_v);
          }
          ptx::cp_async_commit();
          return nonfinite;
        };
        const auto advance = [&] {
          const uint32_t step = kStageBytes - 2 * stage;  // to the other stage
          lane_k.move(step);
          lane_v.move(step);
          stage += step;
        };
        int first_tile = tiles.end - 1;  // of those that this warp sees; the ones before it, it only copies and waits for
        if constexpr (kSkips) {
          const int warp_end = visible_keys(p.score, first_row + (warp + 1) * kM * 16 - 1, s.seqlen_q, s.seqlen_k).end;
          first_tile = max(tiles.begin, min(first_tile, (warp_end - 1) / C.block_n));
        }
#pragma unroll 1
        for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
          const int j0 = tile * C.block_n;
          const bool masked = is_masked(j0);
          const bool nonfinite = receive(tile, masked);
          if (!kSkips || tile <= first_tile) {
            float x[kM][kN][4] = {};
            multiply_rows<T, kSteps, kUnroll>(x, lane_q, lane_k);
            if (masked) mask(x, j0);
            add_values(row, x, o, lane_v, c, j0, draws, drops, masked, nonfinite, marks, v);
          }
          if (kSkips && nonfinite) clear_marks(marks);
          advance();
        }
      } else {
        const auto lane_k = lane_address(lane_address_b<T, kBytes, kPartK>(s_k, lane));
        const auto lane_v = lane_address(lane_address_bt<T, kBytes, kPartK>(s_v, lane));
#pragma unroll 1
        for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
          const int j0 = tile * C.block_n;
          ptx::cp_async_wait<0>();
          if constexpr (kInTurn) __syncthreads();  // every warp is done with the last V
          if constexpr (kSplits) split_tile<KCopy>(s_arriving, s_k);
          __syncthreads();  // K is here, and every warp is done with the last V
          load_keys(p.v, v, v_arrives, j0, p.head_dim_v);
          ptx::cp_async_commit();

          float x[kM][kN][4] = {};
          // A warp none of whose rows sees the tile only copies and waits (16-bit elements: not worth the branches).
          bool sees = true;
          if (sizeof(T) == 4 && is_masked(j0)) {
            const int first = query(warp * kM * 16), last = min(query(warp * kM * 16 + kM * 16 - 1), s.seqlen_q - 1);
            sees = j0 < visible_keys(p.score, last, s.seqlen_q, s.seqlen_k).end &&
                   j0 + C.block_n > visible_keys(p.score, first, s.seqlen_q, s.seqlen_k).begin;
          }
          if (sees) multiply_rows<T, kSteps, kUnroll>(x, lane_q, lane_k);

          bool masked = is_masked(j0);
          if constexpr (kGeneral) options(x, j0);
          if (masked) mask(x, j0);
          if constexpr (kGeneral) masked |= p.score.bias != nullptr && p.score.bias_dtype == TW_BOOL;

          ptx::cp_async_wait<0>();
          bool nonfinite = false;
          if constexpr (kSplits) {
            const bool found = KCopy::remove_nonfinite(s_arriving, marks);
            if constexpr (kInTurn) __syncthreads();  // every warp is done with K
            else __syncwarp();                       // a neighbouring lane may have zeroed a chunk of this one
            split_tile<KCopy>(s_arriving, s_v);
            nonfinite = __syncthreads_or(found);
          } else if (masked || sizeof(T) == 4)  // the parts of an infinite float32 sum to NaN: it never goes through the products
            nonfinite = __syncthreads_or(KCopy::remove_nonfinite(s_v, marks));
          else
            __syncthreads();  // V is here, and every warp is done with K
          if (tile > tiles.begin) {
            load_keys(p.k, k, k_arrives, j0 - C.block_n, p.head_dim);
            load_bias_tile(j0 - C.block_n);
          }
          ptx::cp_async_commit();

          if (!sees) {
            if (nonfinite) clear_marks(marks);
            continue;
          }
          add_values(row, x, o, lane_v, c, j0, draws, drops, masked, nonfinite, marks, v);
        }
      }
      ptx::cp_async_wait<0>();
    }
    if constexpr (kEarlySums) {  // what the main loop did not need takes no registers from it
      enter(locate(ptx::block_index()), ptx::thread_index());
    }
    epilogue(row, o, c, scale_down, s_q);
  }
};

// Grid: x = head in its section, inside row block, longest first, inside section of heads, splits and batch entries (one more when rows are
// packed).
template <ForwardConfig C>
__device__ __forceinline__ void forward_sm80_block(const ForwardParams& p, unsigned char* shared) {
  using Kernel = ForwardKernel<C>;
  const int pack = Kernel::kMayPack ? p.pack : 1;
  Kernel kernel{p};
  const int block = kernel.locate(blockIdx.x);
  if (kernel.b >= p.sequence.batch) {
    if (kernel.split == 0)
      for (int n = 0; n < pack; ++n) zero_packed_tail<typename Kernel::T>(p, kernel.first_head + n, block, C.block_m);
    return;
  }
  kernel.enter(block, threadIdx.x);
  if (kernel.first_row >= kernel.s.capacity_q * pack) return;
  kernel.head_k = kernel.first_head / (p.sequence.num_heads_q / p.sequence.num_heads_k);
  kernel.natural = Kernel::kGeneral && (p.score.softcap > 0 || p.score.alibi || p.score.bias || !(p.score.scale > 1e-30f));
  kernel.s_bias = Kernel::kGeneral && p.bias_in_tiles ? ptx::shared_address(shared) + C.shared_bytes() : 0;
  kernel.run(ptx::shared_address(shared),
             reinterpret_cast<uint32_t*>(shared + C.shared_bytes() - C.block_n * 4));
}

template <Element kElement, ForwardKind kKind, int kHeadDim>
__device__ constexpr bool forward_taken_here(Shape shape) {
  return taken_here(forward_config(kElement, kKind, kHeadDim, false), forward_config(kElement, kKind, kHeadDim, true),
                    roomy_config(kElement, kKind, kHeadDim), shape);
}

template <Element kElement, ForwardKind kKind, int kHeadDim, bool kSmall>
__global__ void __launch_bounds__(forward_config(kElement, kKind, kHeadDim, kSmall).num_threads(), 1)
    forward_sm80_kernel(const __grid_constant__ ForwardParams p) {
  if constexpr (!forward_taken_here<kElement, kKind, kHeadDim>(kSmall ? Shape::kSmall : Shape::kLarge)) {
    __trap();
  } else {
    extern __shared__ __align__(128) unsigned char shared[];
    forward_sm80_block<forward_config(kElement, kKind, kHeadDim, kSmall)>(p, shared);
  }
}

// In the shape for GPUs with 227 KiB.
template <Element kElement, ForwardKind kKind, int kHeadDim>
__global__ void __launch_bounds__(roomy_config(kElement, kKind, kHeadDim).num_threads(), 1)
    forward_sm80_roomy_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_sm80_block<roomy_config(kElement, kKind, kHeadDim)>(p, shared);
}

}  // namespace tilewise::cuda
