// Forward, tile by tile:
//
//   pack      K^T and V into panels, once per key head, shared by all query blocks and all heads of the group
//             (a single query block packs as it goes: nothing is read twice then)
//   tasks     one block of query rows x one part of the keys:
//               for each block of keys:  S = Q K^T -> P = exp(S - max), strip by strip   (forward tiles)
//                                        O += P V                                        (product tiles)
//             O, row maximum and row sum stay in the worker's scratch; nothing is n x n
//   combine   parts of the keys by their lse, where the plan split them
//
// Decoding is the same with another first and last step: a handful of query rows reads K and V where they lie.
//
// Blocks of keys start at multiples of block_n and a row never looks at its neighbours, so a row's result depends on its
// sequence alone: not on threads, not on block_m, not on the rest of the batch.
#include "cpu/forward.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kv_append.h"
#include "cpu/logits.h"
#include "cpu/query_rows.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"

namespace tilewise {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMaxBlockN = 256;
constexpr int64_t kPackChunk = 256;        // keys per packing task
constexpr int64_t kSplitLength = 1024;     // keys per part when the plan splits by itself: independent of the capacity
constexpr int64_t kDirectRows = 12;        // query rows per key head up to which reading K and V in place beats packing them
constexpr double kSerialFlops = 4e6;       // below this, waking a thread costs more than it brings (~20 us on one core)
constexpr float kSlack = 8;                // lazy maximum: probabilities stay below 2^8

// How a problem is cut. A pure function of problem and tiles, except that scratch counts the workers.
struct Cut {
  bool direct;                   // few query rows: K and V are read where they lie
  int64_t group, lanes, panel;
  int64_t block_m, block_n;
  int64_t steps_q;               // lanes of a row of q or a column of k
  int64_t dv_columns;            // head_dim_v in whole vectors
  int64_t v_panels;
  int64_t m_blocks;              // of the longest sequence
  int64_t splits, split_length;
  bool prepack;
  int64_t packed_keys;           // per key head, all sequences, in whole panels
  int64_t row_lanes;             // P: lanes per row of block_n columns

  Cut(const TileKernels& k, const tw_problem& p, const Choice& choice, bool direct) : direct(direct) {
    group = group_size(p);
    lanes = k.lanes;
    panel = k.panel();
    steps_q = k.pairs ? divide_up(p.head_dim, 2) : direct ? round_up(p.head_dim, lanes) : p.head_dim;
    dv_columns = round_up(std::max<int64_t>(p.head_dim_v, 1), lanes);
    v_panels = divide_up(dv_columns, panel);
    // A panel of keys (64 x d floats) and the block's P and O stay in L2; 256 columns amortise the pass over O.
    block_n = choice.block_n > 0 ? choice.block_n : std::max(p.head_dim, p.head_dim_v) > 128 ? 128 : kMaxBlockN;
    row_lanes = k.pairs ? block_n / 2 : block_n;

    const int64_t rows = p.seqlen_q * group;
    const int64_t heads = p.num_heads_k * (p.batch_invariant ? 1 : p.batch);
    block_m = 96;  // 16 strips; smaller where there would be too few tasks for many cores
    while (block_m > 24 && heads * divide_up(rows, block_m) < 64) block_m /= 2;
    if (choice.block_m > 0) block_m = choice.block_m;
    m_blocks = std::max<int64_t>(divide_up(rows, block_m), 1);
    prepack = m_blocks > 1 && !direct;

    if (p.num_splits > 0 || choice.splits > 0) {
      splits = p.num_splits > 0 ? p.num_splits : choice.splits;
      split_length = round_up(std::max<int64_t>(divide_up(p.seqlen_k, splits), 1), block_n);
    } else {
      // Whether to split depends on the longest sequences: a promise of batch invariance forbids it.
      const bool split = !p.batch_invariant && heads * m_blocks < 32 && p.seqlen_k > kSplitLength;
      split_length = split ? kSplitLength : round_up(std::max<int64_t>(p.seqlen_k, 1), block_n);
      splits = std::max<int64_t>(divide_up(p.seqlen_k, split_length), 1);
    }
    packed_keys = p.k_layout == TW_PACKED ? round_down(p.total_k, panel) + (p.batch + 1) * panel
                                          : p.batch * round_up(p.seqlen_k, panel);
  }

  // What a choice may say: whole strips of rows, whole words of dropout's bits, and no more splits than there are blocks.
  static Status check(const Choice& choice, const tw_problem& p) {
    if (choice.block_m % kStrip != 0 || choice.block_m > 4 * 96)
      return invalid("config: block_m ", choice.block_m, ": must be a multiple of ", kStrip, " up to 384");
    if (choice.block_n % 64 != 0 || choice.block_n > kMaxBlockN)
      return invalid("config: block_n ", choice.block_n, ": must be a multiple of 64 up to ", kMaxBlockN);
    const int64_t most = std::max<int64_t>(divide_up(p.seqlen_k, 64), 1);
    if (choice.splits > most)
      return invalid("config: splits ", choice.splits, ": must be at most ", most, " of these ", p.seqlen_k, " keys");
    return Status();
  }

  int64_t tasks(const tw_problem& p) const { return p.batch * p.num_heads_k * m_blocks * splits; }

  // First packed key of a sequence; the gaps leave room for rounding each up to whole panels.
  int64_t packed_begin(const tw_problem& p, const Sequence& s) const {
    return p.k_layout == TW_PACKED ? round_down(s.k_begin, panel) + s.batch * panel
                                   : s.batch * round_up(p.seqlen_k, panel);
  }
};

// Packed K^T and V of one key head (prepacked) or of one block of keys.
struct PackedKeys {
  float* k;               // [keys / panel][steps_q][panel]
  float* v;               // [v_panels][keys(/2)][panel]
  int64_t v_panel_stride;
  int64_t keys_per_step;  // 2 with pairs
};

struct Scratch {  // of one worker
  float *q, *p, *o, *sum, *max, *limit, *addend;
  int64_t *begin, *end;  // visible keys per row
  uint64_t* keep;
  const void** rows;     // pointers of the rows being packed
  char* rotated;         // query rows after rotary embedding, in q's dtype
  float* products;       // direct: q.k of a strip, [strip, block_n]
  const char* zero_row;  // direct: stands for keys past the sequence
  PackedKeys block;
};

struct Workspace {
  float* k;                // prepacked, per key head
  float* v;
  int32_t* v_nonfinite;    // [b, hk]
  float* partial_o;        // [splits, rows, dv_columns]
  double* partial_lse;     // [splits, rows], base 2
  float* row_max;          // [splits, rows], base 2, for max_logit
  char* scratch;
  int64_t scratch_bytes;

  Workspace(const TileKernels& kernels, const tw_problem& p, const Cut& c, void* base, int64_t workers, int64_t* bytes) {
    Arena arena(base);
    const int64_t rows = query_rows(p) * p.num_heads_q;
    k = arena.take<float>(c.prepack ? p.num_heads_k * c.packed_keys * c.steps_q : 0);
    v = arena.take<float>(c.prepack ? p.num_heads_k * v_panel_stride(kernels, c) * c.v_panels : 0);
    v_nonfinite = arena.take<int32_t>(p.batch * p.num_heads_k);
    partial_o = arena.take<float>(c.splits > 1 ? c.splits * rows * c.dv_columns : 0);
    partial_lse = arena.take<double>(c.splits > 1 ? c.splits * rows : 0);
    row_max = arena.take<float>(has(p, TW_HAS_MAX_LOGIT) ? c.splits * rows : 0);
    const int64_t before = arena.used();
    scratch = arena.take<char>(0);
    scratch_of(kernels, p, c, nullptr, &scratch_bytes);
    *bytes = before + workers * scratch_bytes;
  }

  static int64_t v_panel_stride(const TileKernels& kernels, const Cut& c) {
    return c.packed_keys / (kernels.pairs ? 2 : 1) * c.panel;
  }

  PackedKeys head(const TileKernels& kernels, const Cut& c, int64_t hk, int64_t first_key) const {
    const int64_t per_step = kernels.pairs ? 2 : 1, stride = v_panel_stride(kernels, c);
    return {k + (hk * c.packed_keys + first_key) * c.steps_q,
            v + hk * stride * c.v_panels + first_key / per_step * c.panel, stride, per_step};
  }

  static Scratch scratch_of(const TileKernels& kernels, const tw_problem& p, const Cut& c, char* base, int64_t* bytes) {
    Arena arena(base);
    Scratch s;
    const int64_t rows = c.block_m + kStrip;  // the last strip may be padded
    s.q = arena.take<float>(rows * c.steps_q);
    s.p = arena.take<float>(rows * c.row_lanes);
    s.o = arena.take<float>(rows * c.dv_columns);
    s.sum = arena.take<float>(rows * c.lanes);
    s.max = arena.take<float>(rows);
    s.limit = arena.take<float>(rows);
    s.begin = arena.take<int64_t>(rows);
    s.end = arena.take<int64_t>(rows);
    s.addend = arena.take<float>(kStrip * c.panel);
    s.keep = arena.take<uint64_t>(p.dropout_p > 0 ? rows * c.block_n / 64 : 0);
    s.rows = arena.take<const void*>(std::max(rows, c.block_n));
    s.rotated = arena.take<char>(p.rotary_dim > 0 ? rows * p.head_dim * dtype_size(p.dtype) : 0);
    const int64_t per_step = kernels.pairs ? 2 : 1;
    s.products = arena.take<float>(c.direct ? kStrip * c.block_n : 0);
    s.zero_row = arena.take<char>(c.direct ? std::max(p.head_dim, p.head_dim_v) * 4 : 0);
    const bool packs = !c.prepack && !c.direct;
    s.block.k = arena.take<float>(!packs ? 0 : c.block_n * c.steps_q);
    s.block.v = arena.take<float>(!packs ? 0 : c.v_panels * c.block_n / per_step * c.panel);
    s.block.v_panel_stride = c.block_n / per_step * c.panel;
    s.block.keys_per_step = per_step;
    *bytes = arena.used();
    return s;
  }
};

class Forward {
 public:
  Forward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace, bool direct)
      : kernels_(kernels), p_(plan.problem), t_(tensors), cut_(kernels, p_, plan.target.choice, direct), rules_(p_, tensors, kernels.pairs),
        mask_(mask_of(p_)), target_(plan.target),
        threads_(flops(p_) < kSerialFlops ? 1 : plan.target.num_threads),
        space_(kernels, p_, cut_, workspace, plan.target.num_threads, &workspace_bytes_) {}

  void run() {
    append_kv(p_, t_);
    std::memset(space_.v_nonfinite, 0, static_cast<size_t>(p_.batch * p_.num_heads_k) * sizeof(int32_t));
    if (cut_.prepack) {
      const int64_t chunks = divide_up(p_.seqlen_k, kPackChunk);
      each(p_.num_heads_k * p_.batch * chunks, [&](int64_t task, int worker) {
        pack_chunk(task / (p_.batch * chunks), task / chunks % p_.batch, task % chunks, scratch(worker));
      });
    }
    // Heads outermost (their packed keys stay in cache); within a head the last query block first: under a causal mask
    // it is the longest, and the end of the queue holds the short ones.
    each(cut_.tasks(p_), [&](int64_t task, int worker) {
      const int64_t split = task % cut_.splits;
      const int64_t m_block = cut_.m_blocks - 1 - task / cut_.splits % cut_.m_blocks;
      const int64_t head = task / (cut_.splits * cut_.m_blocks);
      Scratch s = scratch(worker);
      query_block(head / p_.num_heads_k, head % p_.num_heads_k, m_block, split, s);
    });
    if (cut_.splits > 1) combine();
    if (t_.max_logit != nullptr) reduce_max_logit();
    clear_unused_query_rows(p_, t_, *t_.o, t_.lse);
    if (t_.dropout_mask != nullptr) write_dropout_mask(p_, t_, rules_.dropout);
  }

 private:
  template <class F>
  void each(int64_t tasks, F&& f) {
    parallel_for(target_.executor, threads_, tasks, f);
  }

  Scratch scratch(int worker) const {
    int64_t bytes;
    return Workspace::scratch_of(kernels_, p_, cut_, space_.scratch + worker * space_.scratch_bytes, &bytes);
  }

  std::atomic_ref<int32_t> v_nonfinite(int64_t b, int64_t hk) const {
    return std::atomic_ref<int32_t>(space_.v_nonfinite[b * p_.num_heads_k + hk]);
  }

  // Keys [begin, end) of a sequence into `to`, whose first key is `begin`; zeros up to a whole panel.
  void pack(const Sequence& s, int64_t hk, int64_t begin, int64_t end, const Scratch& scratch, const PackedKeys& to) {
    for (int64_t j = begin; j < end; j += cut_.panel) {
      for (int64_t n = 0; n < cut_.panel; ++n) scratch.rows[n] = key_address(p_, t_, *t_.k, s, j + n, hk);
      kernels_.pack_keys(scratch.rows, p_.head_dim, p_.dtype, to.k + (j - begin) * cut_.steps_q);
      for (int64_t n = 0; n < cut_.panel; ++n) scratch.rows[n] = key_address(p_, t_, *t_.v, s, j + n, hk);
      if (kernels_.pack_values(scratch.rows, cut_.panel, p_.head_dim_v, p_.dtype,
                               to.v + (j - begin) / to.keys_per_step * cut_.panel, to.v_panel_stride))
        v_nonfinite(s.batch, hk).store(1, std::memory_order_relaxed);
    }
  }

  void pack_chunk(int64_t hk, int64_t b, int64_t chunk, const Scratch& scratch) {
    const Sequence s = sequence_of(p_, t_, b);
    const int64_t begin = chunk * kPackChunk, end = std::min(begin + kPackChunk, s.seqlen_k);
    if (begin >= end) return;
    pack(s, hk, begin, end, scratch, space_.head(kernels_, cut_, hk, cut_.packed_begin(p_, s) + begin));
  }

  void query_block(int64_t b, int64_t hk, int64_t m_block, int64_t split, Scratch& s) {
    const Sequence sequence = sequence_of(p_, t_, b);
    const HeadRows rows{p_, t_, sequence, hk, cut_.group};
    const int64_t first = m_block * cut_.block_m, count = std::min(cut_.block_m, rows.count() - first);
    if (count <= 0) return;
    const int64_t key_begin = split * cut_.split_length;
    const int64_t key_end = split + 1 == cut_.splits ? sequence.seqlen_k
                                                     : std::min(key_begin + cut_.split_length, sequence.seqlen_k);
    load_queries(rows, first, count, s);
    int64_t begin = key_end, end = key_begin;  // keys that some row sees
    for (int64_t r = 0; r < count; ++r) {
      const KeyRange keys = mask_.keys(rows.query(first + r), sequence.seqlen_q, sequence.seqlen_k);
      s.begin[r] = std::max(keys.begin, key_begin);
      s.end[r] = std::max(std::min(keys.end, key_end), s.begin[r]);
      if (s.end[r] > s.begin[r]) begin = std::min(begin, s.begin[r]), end = std::max(end, s.end[r]);
    }
    for (int64_t r = count; r < count + kStrip; ++r) s.begin[r] = s.begin[count - 1], s.end[r] = s.end[count - 1];

    PackedKeys packed = s.block;
    for (int64_t n = round_down(begin, cut_.block_n); n < end; n += cut_.block_n) {
      const int64_t n_end = std::min(n + cut_.block_n, end);
      if (rules_.dropout.active())
        fill_keep(kernels_, rules_, rows, first, count + kStrip, n, n_end - n, cut_.block_n / 64, s.keep);
      if (cut_.direct) {
        direct_block(rows, first, count, n, n_end, s);
        continue;
      }
      if (cut_.prepack)
        packed = space_.head(kernels_, cut_, hk, cut_.packed_begin(p_, sequence) + n);
      else
        pack(sequence, hk, n, n_end, s, packed);
      const bool visible_only = v_nonfinite(b, hk).load(std::memory_order_relaxed) != 0;
      scores(rows, first, 0, count, n, n_end, packed.k, visible_only, s);
      values(count, n, n_end, packed, visible_only, s);
    }
    finish(rows, first, count, split, s);
  }

  void load_queries(const HeadRows& rows, int64_t first, int64_t count, Scratch& s) {
    for (int64_t r = 0; r < count; ++r) s.rows[r] = rows.address(*t_.q, first + r);
    if (p_.rotary_dim > 0) {
      const int64_t bytes = p_.head_dim * dtype_size(p_.dtype);
      float row[256];
      for (int64_t r = 0; r < count; ++r) {
        rotate_query_row(p_, t_, rows.sequence, rows.query(first + r), rows.head(first + r), row);
        char* to = s.rotated + r * bytes;
        for (int64_t c = 0; c < p_.head_dim; ++c) store_element(to, p_.dtype, c, row[c]);
        s.rows[r] = to;
      }
    }
    kernels_.pack_rows(s.rows, count, p_.head_dim, p_.dtype, rules_.q_scale, s.q, cut_.steps_q);
    std::memset(s.q + count * cut_.steps_q, 0, static_cast<size_t>(kStrip * cut_.steps_q) * sizeof(float));
    const int64_t padded = count + kStrip;
    std::fill(s.o, s.o + padded * cut_.dv_columns, 0.0f);
    std::fill(s.sum, s.sum + padded * cut_.lanes, 0.0f);
    std::fill(s.max, s.max + padded, 0.0f);
    std::fill(s.limit, s.limit + padded, -kInfinity);
  }

  // Visible columns of a strip within the block of keys [n, n_end), as [begin, end) relative to n; begin on a panel.
  KeyRange strip_columns(const Scratch& s, int64_t r, int64_t rows, int64_t n, int64_t n_end) const {
    int64_t begin = n_end, end = n;
    for (int64_t x = r; x < r + rows; ++x)
      if (s.end[x] > s.begin[x]) begin = std::min(begin, s.begin[x]), end = std::max(end, s.end[x]);
    begin = std::max(begin, n);
    end = std::min(end, n_end);
    if (begin >= end) return {0, 0};
    return {round_down(begin - n, cut_.panel), end - n};
  }

  // Strips [r_begin, r_end) of the block. Without packed keys, s.products holds q.k of the one strip.
  void scores(const HeadRows& rows, int64_t first, int64_t r_begin, int64_t r_end, int64_t n, int64_t n_end,
              const float* packed_k, bool mark_masked, Scratch& s) {
    ForwardTile tile{};
    tile.ldq = packed_k != nullptr ? cut_.steps_q : cut_.block_n;
    tile.steps = cut_.steps_q;
    tile.pre = rules_.pre;
    tile.post = rules_.post;
    tile.modified = rules_.modified;
    tile.mark_masked = mark_masked;
    tile.softcap = rules_.softcap;
    tile.addend = rules_.has_addend ? s.addend : nullptr;
    tile.keep_stride = cut_.block_n / 64;
    tile.ldp = cut_.row_lanes;
    tile.ldo = tile.o_columns = cut_.dv_columns;
    // max_logit needs the maximum itself. In units of t, before `post`.
    tile.slack = t_.max_logit != nullptr ? 0.0f : rules_.post > 0 ? kSlack / rules_.post : kSlack;
    int32_t begin[kStrip], end[kStrip];
    tile.begin = begin;
    tile.end = end;
    const bool always_general = rules_.modified || rules_.dropout.active();

    for (int64_t panel = 0; panel < n_end - n; panel += cut_.panel) {  // outermost: a panel of K^T stays in L1
      tile.k = packed_k != nullptr ? packed_k + panel * cut_.steps_q : nullptr;
      for (int64_t r = r_begin; r < r_end; r += kStrip) {
        const int64_t strip = std::min<int64_t>(kStrip, r_end - r);
        const KeyRange columns = strip_columns(s, r, strip, n, n_end);
        if (panel < columns.begin || panel >= columns.end) continue;
        const int64_t vectors = std::min<int64_t>(divide_up(columns.end - panel, cut_.lanes), kernels_.panel_vectors);
        bool general = always_general;
        for (int64_t x = 0; x < kStrip; ++x) {
          begin[x] = static_cast<int32_t>(std::clamp<int64_t>(s.begin[r + x] - n - panel, 0, cut_.panel));
          end[x] = static_cast<int32_t>(std::clamp<int64_t>(s.end[r + x] - n - panel, 0, cut_.panel));
          if (x < strip) general |= begin[x] > 0 || end[x] < vectors * cut_.lanes;
        }
        if (rules_.has_addend)
          fill_addend(rows, first + r, kStrip, n + panel, vectors * cut_.lanes, cut_.panel, s.addend);
        if (rules_.dropout.active()) {
          tile.keep = s.keep + r * tile.keep_stride + panel / 64;
          tile.keep_shift = static_cast<int32_t>(panel % 64);
        }
        tile.q = packed_k != nullptr ? s.q + r * cut_.steps_q : s.products + panel;
        tile.p = s.p + r * cut_.row_lanes + (kernels_.pairs ? panel / 2 : panel);
        tile.p_written = panel - columns.begin;
        tile.max = s.max + r;
        tile.limit = s.limit + r;
        tile.sum = s.sum + r * cut_.lanes;
        tile.o = s.o + r * cut_.dv_columns;
        kernels_.forward[general][row_variant(strip)][vectors - 1](tile);
      }
    }
  }

  void values(int64_t count, int64_t n, int64_t n_end, const PackedKeys& packed, bool visible_only, Scratch& s) {
    ProductTile tile{};
    tile.row_stride = cut_.row_lanes;
    tile.step_stride = 1;
    tile.ldb = cut_.panel;
    tile.ldc = cut_.dv_columns;
    for (int64_t vp = 0; vp < cut_.v_panels; ++vp) {
      const int64_t width = std::min(cut_.panel, cut_.dv_columns - vp * cut_.panel);
      for (int64_t r = 0; r < count; r += kStrip) {
        const int64_t strip = std::min<int64_t>(kStrip, count - r);
        const KeyRange columns = strip_columns(s, r, strip, n, n_end);
        if (columns.begin >= columns.end) continue;
        const int64_t first_step = columns.begin / packed.keys_per_step;
        tile.steps = divide_up(round_up(columns.end, cut_.lanes), packed.keys_per_step) - first_step;
        tile.a = s.p + r * cut_.row_lanes + first_step;
        tile.b = packed.v + vp * packed.v_panel_stride + first_step * cut_.panel;
        tile.c = s.o + r * cut_.dv_columns + vp * cut_.panel;
        if (visible_only)
          accumulate_visible(kernels_, tile, strip, width);
        else
          kernels_.product[0][row_variant(strip)][width / cut_.lanes - 1](tile);
      }
    }
  }

  // One block of keys for the few rows of a decoding step.
  void direct_block(const HeadRows& rows, int64_t first, int64_t count, int64_t n, int64_t n_end, Scratch& s) {
    const auto gather = [&](const tw_tensor& x, int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const char* row = key_address(p_, t_, x, rows.sequence, n + j, rows.hk);
        s.rows[j - begin] = row != nullptr ? row : s.zero_row;
      }
    };
    std::memset(const_cast<char*>(s.zero_row), 0, static_cast<size_t>(std::max(p_.head_dim, p_.head_dim_v) * 4));
    for (int64_t r = 0; r < count; r += kStrip) {
      const int64_t strip = std::min<int64_t>(kStrip, count - r);
      const KeyRange columns = strip_columns(s, r, strip, n, n_end);
      if (columns.begin >= columns.end) continue;
      DirectTile tile{};
      tile.keys = s.rows;
      tile.dtype = p_.dtype;
      gather(*t_.k, columns.begin, round_up(columns.end, cut_.lanes));
      tile.n = round_up(columns.end, cut_.lanes) - columns.begin;
      tile.head_dim = p_.head_dim;
      tile.a = s.q + r * cut_.steps_q;
      tile.lda = cut_.steps_q;
      tile.c = s.products + columns.begin;
      tile.ldc = cut_.block_n;
      kernels_.direct_scores[row_variant(strip)](tile);

      gather(*t_.v, columns.begin, columns.end);
      tile.n = columns.end - columns.begin;
      tile.head_dim = p_.head_dim_v;
      // A key that only some rows see must not reach the others through 0 * NaN.
      bool mixed = rules_.has_addend;
      for (int64_t x = r; x < r + strip; ++x) mixed |= s.begin[x] != s.begin[r] || s.end[x] != s.end[r];
      const bool visible_only = mixed && kernels_.any_nonfinite(s.rows, tile.n, p_.head_dim_v, p_.dtype);
      scores(rows, first, r, r + strip, n, n_end, nullptr, visible_only, s);

      tile.a = s.p + r * cut_.row_lanes + columns.begin;
      tile.lda = cut_.row_lanes;
      tile.c = s.o + r * cut_.dv_columns;
      tile.ldc = cut_.dv_columns;
      if (visible_only)
        direct_values_visible(tile, strip, s);
      else
        kernels_.direct_values[row_variant(strip)](tile);
    }
  }

  // Row by row, with zeros for the keys that the row's probabilities mark as masked.
  void direct_values_visible(const DirectTile& tile, int64_t rows, const Scratch& s) const {
    const void* keys[kMaxBlockN];
    for (int64_t r = 0; r < rows; ++r) {
      DirectTile row = tile;
      row.a += r * tile.lda;
      row.c += r * tile.ldc;
      row.keys = keys;
      for (int64_t j = 0; j < tile.n; ++j) keys[j] = std::signbit(row.a[j]) ? s.zero_row : tile.keys[j];
      kernels_.direct_values[0](row);
    }
  }

  // Normalises the block's rows and stores them: to o and lse, or as a part to be combined.
  void finish(const HeadRows& rows, int64_t first, int64_t count, int64_t split, Scratch& s) {
    const int64_t total_rows = query_rows(p_) * p_.num_heads_q;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = first + r;
      float sum = 0;
      for (int64_t lane = 0; lane < cut_.lanes; ++lane) sum += s.sum[r * cut_.lanes + lane];
      const bool empty = s.limit[r] == -kInfinity && sum == 0;  // saw no key
      const float max = empty ? -kInfinity : std::isnan(sum) ? sum : s.max[r] * rules_.post;
      const double lse = empty ? -kInfinity : static_cast<double>(s.max[r]) * rules_.post + std::log2(static_cast<double>(sum));
      float* o = s.o + r * cut_.dv_columns;
      const int64_t slot = split * total_rows + row_number(rows, row);
      if (t_.max_logit != nullptr) space_.row_max[slot] = max;
      if (cut_.splits > 1) {
        const float inverse = empty ? 0 : 1 / sum;
        for (int64_t c = 0; c < cut_.dv_columns; ++c) space_.partial_o[slot * cut_.dv_columns + c] = o[c] * inverse;
        space_.partial_lse[slot] = lse;
      } else {
        store(rows, row, o, empty ? 0 : 1 / sum, lse);
      }
    }
  }

  // o * factor is the softmax-weighted sum, lse its log-sum-exp in base 2; the sink joins here, once per row.
  void store(const HeadRows& rows, int64_t row, const float* o, float factor, double lse) {
    if (t_.sink != nullptr) {
      const double sink = kLog2E * static_cast<const float*>(t_.sink->data)[rows.head(row) * t_.sink->stride[0]];
      const double max = std::max(lse, sink);
      if (max > -kInfinity) {
        const double own = std::exp2(lse - max), total = own + std::exp2(sink - max);
        factor = static_cast<float>(factor * (own / total));
        lse = max + std::log2(total);
      }
    }
    if (rules_.dropout.active()) factor *= rules_.dropout.scale;
    kernels_.store_row(o, factor, p_.head_dim_v, t_.o->dtype, rows.address(*t_.o, row));
    if (t_.lse != nullptr) *rows.lse_address(*t_.lse, row) = static_cast<float>(lse * kLn2);
  }

  // Number of a query row in [all query rows, hq].
  int64_t row_number(const HeadRows& rows, int64_t row) const {
    const int64_t query = p_.q_layout == TW_PACKED ? rows.sequence.q_begin + rows.query(row)
                                                   : rows.sequence.batch * p_.seqlen_q + rows.query(row);
    return query * p_.num_heads_q + rows.head(row);
  }

  void combine() {
    each(p_.batch * p_.num_heads_k * cut_.m_blocks, [&](int64_t task, int worker) {
      const int64_t head = task / cut_.m_blocks;
      const Sequence sequence = sequence_of(p_, t_, head / p_.num_heads_k);
      const HeadRows rows{p_, t_, sequence, head % p_.num_heads_k, cut_.group};
      const int64_t first = task % cut_.m_blocks * cut_.block_m;
      float* o = scratch(worker).o;
      for (int64_t row = first; row < std::min(first + cut_.block_m, rows.count()); ++row) combine_row(rows, row, o);
    });
  }

  // One part alone is copied bit for bit: its weight is exactly 1.
  void combine_row(const HeadRows& rows, int64_t row, float* o) {
    const int64_t total_rows = query_rows(p_) * p_.num_heads_q, number = row_number(rows, row);
    const auto part_lse = [&](int64_t split) { return space_.partial_lse[split * total_rows + number]; };
    double max = -kInfinity;
    for (int64_t split = 0; split < cut_.splits; ++split) max = std::max(max, part_lse(split));
    std::fill(o, o + cut_.dv_columns, 0.0f);
    double sum = 0;
    for (int64_t split = 0; split < cut_.splits; ++split) {
      const double lse = part_lse(split);
      if (lse == -kInfinity) continue;  // empty part
      const double weight = std::exp2(lse - max);  // NaN in any part reaches the sum
      sum += weight;
      const float* part = space_.partial_o + (split * total_rows + number) * cut_.dv_columns;
      for (int64_t c = 0; c < cut_.dv_columns; ++c) o[c] += static_cast<float>(weight) * part[c];
    }
    const bool empty = sum == 0;
    store(rows, row, o, empty ? 0 : static_cast<float>(1 / sum), empty ? -kInfinity : max + std::log2(sum));
  }

  void reduce_max_logit() {
    const int64_t total_rows = query_rows(p_) * p_.num_heads_q;
    each(p_.batch * p_.num_heads_k, [&](int64_t task, int) {
      const Sequence sequence = sequence_of(p_, t_, task / p_.num_heads_k);
      const HeadRows rows{p_, t_, sequence, task % p_.num_heads_k, cut_.group};
      for (int64_t g = 0; g < cut_.group; ++g) {
        float max = -kInfinity;
        for (int64_t row = g; row < rows.count(); row += cut_.group)
          for (int64_t split = 0; split < cut_.splits; ++split) {
            const float value = space_.row_max[split * total_rows + row_number(rows, row)];
            if (value > max || std::isnan(value)) max = value;
          }
        const tw_tensor& out = *t_.max_logit;
        static_cast<float*>(out.data)[sequence.batch * out.stride[0] + rows.head(g) * out.stride[1]] =
            static_cast<float>(max * kLn2);
      }
    });
  }

  const TileKernels& kernels_;
  const tw_problem& p_;
  const tw_tensors& t_;
  const Cut cut_;
  const LogitRules rules_;
  const Mask mask_;
  const Target& target_;
  const int threads_;
  int64_t workspace_bytes_ = 0;
  const Workspace space_;
};

Status plan_any(const TileKernels& kernels, const tw_problem& problem, const Target& target, bool direct, Plan* plan) {
  TW_RETURN_IF_ERROR(Cut::check(target.choice, problem));
  const Cut cut(kernels, problem, target.choice, direct);
  Workspace(kernels, problem, cut, nullptr, target.num_threads, &plan->workspace_bytes);
  plan->block_m = cut.block_m;
  plan->block_n = cut.block_n;
  plan->num_splits = cut.splits;
  plan->num_tasks = cut.tasks(problem);
  plan->config = concat("block ", cut.block_m, "x", cut.block_n, ", tile ", kStrip, "x", cut.panel, ", ",
                        cut.direct    ? "K and V read in place"
                        : cut.prepack ? "K and V packed once"
                                      : "K and V packed block by block");
  if (cut.splits > 1) plan->config += concat(", keys in parts of ", cut.split_length);
  return Status();
}

}  // namespace

Status plan_forward(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan) {
  return plan_any(kernels, problem, target, false, plan);
}

Status run_forward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace) {
  Forward(kernels, plan, tensors, workspace, false).run();
  return Status();
}

std::string refuse_decode(const tw_problem& problem) {
  if (problem.batch_invariant) return "batch_invariant: beside a longer sequence another kernel would run";
  const int64_t rows = problem.seqlen_q * group_size(problem);
  return rows <= kDirectRows ? ""
                             : concat("seqlen_q * group = ", rows, " query rows per key head, takes at most ", kDirectRows);
}

Status plan_decode(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan) {
  return plan_any(kernels, problem, target, true, plan);
}

Status run_decode(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace) {
  Forward(kernels, plan, tensors, workspace, true).run();
  return Status();
}

}  // namespace tilewise
