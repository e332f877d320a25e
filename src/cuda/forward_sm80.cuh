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
//
// What becomes of S between the products: tile/scores_sm80.cuh and tile/softmax_sm80.cuh; the block's end: forward_sm80_output.cuh.
#pragma once
#include "cuda/forward_sm80_output.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/packed_tail.cuh"

namespace tilewise::cuda {

template <ForwardConfig C>
struct ForwardKernel : ForwardOutput<C> {
  static_assert(C.valid());
  using Output = ForwardOutput<C>;
  using Scores = ScoresSm80<C>;
  using typename Output::QCopy, typename Scores::Draws, typename Scores::T;
  using Scores::b, Scores::first_head, Scores::first_row, Scores::head_k, Scores::lane, Scores::natural, Scores::p, Scores::s, Scores::s_bias,
      Scores::split, Scores::warp;
  using Output::epilogue, Output::kBytes, Output::query_rows_offset;
  using Scores::add_nonfinite, Scores::draw_keys, Scores::draws_of_rows, Scores::load_bias_tile, Scores::mask, Scores::operand_of_kept, Scores::options,
      Scores::query, Scores::query_offset, Scores::warp_row;
  using Scores::kD, Scores::kDrops, Scores::kGeneral, Scores::kM, Scores::kMayPack, Scores::kN;
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
  static constexpr int kSteps = C.head_dim / 16; // k16 steps of Q K^T
  static constexpr int kUnroll = sizeof(T) == 4 ? C.unroll : kSteps;  // a step of float32 is long enough, and its parts need registers
  static constexpr bool kSplits = C.split != Split::kWarp;     // the block splits K and V
  static constexpr bool kInTurn = C.split == Split::kInTurn;
  static constexpr int kPartQ = C.split == Split::kAll ? C.query_bytes() / 3 : 0;  // bytes of one of three tiles
  static constexpr int kPartK = kSplits ? C.key_bytes() / 3 : 0;
  using KCopy = TileCopy<T, C.block_n, C.head_dim, C.num_threads()>;

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
