// Backward, tile by tile, with P recomputed from q, k and lse:
//
//   prepare   q and dO as rows (A operand) and as panels (B operand), delta = rowsum(dO * O) - dlse, per key head
//   tasks     one key head x one range of keys (x the whole batch where dbias is summed over it):
//               for each block of keys, for each block of query rows that sees it:
//                 P = exp2(S - lse)     dS = P * (dO V^T - delta)
//                 dV += P^T dO          dK += dS^T Q          dQ[range] += dS K
//               dK and dV of the block stay in the worker's scratch and are rounded once
//   reduce    dQ over the ranges, in order
//
// Five products, no atomics: each range of keys owns its rows of dK and dV and a float32 partial dQ, so gradients are
// bit-identical for any number of threads. Extra memory is linear: rows, panels and `ranges` partial dQ.
#include "cpu/backward.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/logits.h"
#include "cpu/query_rows.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"

namespace tilewise {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlockM = 192;       // query rows: a multiple of the strip (6); P and dS of a block take 2 x 147 KB of L2
constexpr int64_t kMaxBlockN = 256;
constexpr int64_t kMaxRanges = 8;      // partial dQ in memory: each is as large as dQ in float32
constexpr int64_t kWantedTasks = 16;
constexpr double kSerialFlops = 4e6;
constexpr int64_t kMaxHeadDim = 256;

struct Cut {
  int64_t group, lanes, panel, keys_per_step;  // keys_per_step: rows per lane along the sequence, 2 with pairs
  int64_t block_n;
  int64_t steps_q, steps_v;                    // lanes of a row of q, of dO
  int64_t d_columns, dv_columns, d_panels, dv_panels;
  int64_t ranges, range_length;
  bool whole_batch;                            // a task walks the batch: dbias is summed over batch or heads
  int64_t packed_rows;                         // per key head, all sequences, each in whole strips
  int64_t chunks;                              // of kBlockM query rows, of the longest sequence

  Cut(const TileKernels& k, const tw_problem& p, const Choice& choice) {
    group = group_size(p);
    lanes = k.lanes;
    panel = k.panel();
    keys_per_step = k.pairs ? 2 : 1;
    // K^T, V^T, K, dK and dV of a block share L2 with P and dS.
    block_n = choice.block_n > 0 ? choice.block_n : std::max(p.head_dim, p.head_dim_v) > 128 ? 64 : 192;
    steps_q = k.pairs ? divide_up(p.head_dim, 2) : p.head_dim;
    steps_v = k.pairs ? divide_up(p.head_dim_v, 2) : p.head_dim_v;
    d_columns = round_up(p.head_dim, lanes);
    dv_columns = round_up(p.head_dim_v, lanes);
    d_panels = divide_up(d_columns, panel);
    dv_panels = divide_up(dv_columns, panel);
    whole_batch = has(p, TW_HAS_DBIAS) && (p.bias_dims & (TW_DIM_B | TW_DIM_H)) != (TW_DIM_B | TW_DIM_H);
    const int64_t heads = whole_batch ? 1 : std::max<int64_t>(p.batch * p.num_heads_k, 1);
    ranges = std::clamp<int64_t>(divide_up(kWantedTasks, heads), 1, kMaxRanges);
    if (choice.splits > 0) ranges = choice.splits;
    if (p.batch_invariant) ranges = 1;  // where ranges begin would depend on the longest sequence
    range_length = round_up(std::max<int64_t>(divide_up(p.seqlen_k, ranges), 2 * block_n), block_n);
    ranges = std::max<int64_t>(divide_up(p.seqlen_k, range_length), 1);
    packed_rows = p.q_layout == TW_PACKED ? round_down(p.total_q * group, kStrip) + (p.batch + 1) * kStrip
                                          : p.batch * round_up(p.seqlen_q * group, kStrip);
    chunks = divide_up(p.seqlen_q * group, kBlockM);
  }

  static Status check(const Choice& choice, const tw_problem& p) {
    if (choice.block_m != 0 && choice.block_m != kBlockM)
      return invalid("config: block_m ", choice.block_m, ": backward has ", kBlockM, " alone");
    if (choice.block_n % 64 != 0 || choice.block_n > kMaxBlockN)
      return invalid("config: block_n ", choice.block_n, ": must be a multiple of 64 up to ", kMaxBlockN);
    if (choice.splits > kMaxRanges || (choice.splits > 1 && p.batch_invariant))
      return invalid("config: splits ", choice.splits, ": must be at most ", p.batch_invariant ? 1 : kMaxRanges, " here");
    return Status();
  }

  int64_t tasks(const tw_problem& p) const { return ranges * (whole_batch ? 1 : p.batch * p.num_heads_k); }

  int64_t packed_begin(const tw_problem& p, const Sequence& s) const {
    return p.q_layout == TW_PACKED ? round_down(s.q_begin * group, kStrip) + s.batch * kStrip
                                   : s.batch * round_up(p.seqlen_q * group, kStrip);
  }
};

// Where tiles of dS are summed for dbias: the tensor itself, or a float32 copy with as many slices as needed.
struct BiasGradient {
  float* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};  // 0 for broadcast dimensions
  int64_t range_stride = 0;          // != 0: one slice per range (bias broadcast over keys)
  int64_t elements = 0;              // of the copy; 0 = the tensor itself
};

struct Scratch {
  float *kt, *vt, *kp;             // [block_n / panel][steps][panel] twice; [d_panels][block_n (/2)][panel]
  float *dk, *dv;                  // [block_n + strip, columns]
  float *probability, *factor, *ds_logit;  // [block_m, block_n]
  float *p, *ds, *ds_rows;         // operands, see tiles.h
  float* addend;
  uint64_t* keep;
  int64_t *begin, *end;            // visible keys per row of the block
  const void** rows;
  char* converted;                 // rows of dO in the compute dtype
  double* alibi;                   // [group]
};

struct Workspace {
  float *q_rows, *q_panels, *do_rows, *do_panels, *lse, *delta, *sink_rows;
  float* dq;                       // [ranges, hk, packed_rows, d_columns]
  double* alibi;                   // [ranges + 1, b, hq]; the last slice holds their sum
  double* sink_sums;               // [hq]
  float* bias;                     // BiasGradient copy
  int32_t* nonfinite;              // [b, hk]: q or dO hold inf or NaN
  char* scratch;
  int64_t scratch_bytes;

  Workspace(const TileKernels& k, const tw_problem& p, const Cut& c, int64_t bias_elements, void* base, int64_t workers,
            int64_t* bytes) {
    Arena arena(base);
    const int64_t rows = p.num_heads_k * c.packed_rows;
    q_rows = arena.take<float>(rows * c.steps_q);
    do_rows = arena.take<float>(rows * c.steps_v);
    q_panels = arena.take<float>(p.num_heads_k * c.d_panels * c.packed_rows / c.keys_per_step * c.panel);
    do_panels = arena.take<float>(p.num_heads_k * c.dv_panels * c.packed_rows / c.keys_per_step * c.panel);
    lse = arena.take<float>(rows);
    delta = arena.take<float>(rows);
    sink_rows = arena.take<float>(has(p, TW_HAS_DSINK) ? rows : 0);
    dq = arena.take<float>(has(p, TW_HAS_DQ) ? c.ranges * rows * c.d_columns : 0);
    alibi = arena.take<double>(has(p, TW_HAS_DALIBI) ? (c.ranges + 1) * p.batch * p.num_heads_q : 0);
    sink_sums = arena.take<double>(has(p, TW_HAS_DSINK) ? p.num_heads_q : 0);
    bias = arena.take<float>(bias_elements);
    nonfinite = arena.take<int32_t>(p.batch * p.num_heads_k);
    const int64_t before = arena.used();
    scratch = arena.take<char>(0);
    scratch_of(k, p, c, nullptr, &scratch_bytes);
    *bytes = before + workers * scratch_bytes;
  }

  static Scratch scratch_of(const TileKernels& k, const tw_problem& p, const Cut& c, char* base, int64_t* bytes) {
    Arena arena(base);
    Scratch s;
    const int64_t tile = kBlockM * c.block_n + kMaxLanes;  // strips of keys read a few floats past the last row
    s.kt = arena.take<float>(c.block_n * c.steps_q);
    s.vt = arena.take<float>(c.block_n * c.steps_v);
    s.kp = arena.take<float>(c.d_panels * c.block_n / c.keys_per_step * c.panel);
    s.dk = arena.take<float>((c.block_n + kStrip) * c.d_columns);
    s.dv = arena.take<float>((c.block_n + kStrip) * c.dv_columns);
    s.probability = arena.take<float>(tile);
    s.p = k.pairs || p.dropout_p > 0 ? arena.take<float>(tile / c.keys_per_step + kMaxLanes) : s.probability;
    s.ds = arena.take<float>(tile / c.keys_per_step + kMaxLanes);
    s.ds_rows = k.pairs ? arena.take<float>(tile / 2) : s.ds;
    s.factor = arena.take<float>(p.softcap > 0 ? tile : 0);
    s.ds_logit = arena.take<float>(has(p, TW_HAS_DBIAS) || has(p, TW_HAS_DALIBI) ? tile : 0);
    s.addend = arena.take<float>(kStrip * c.panel);
    s.keep = arena.take<uint64_t>(p.dropout_p > 0 ? kBlockM * c.block_n / 64 : 0);
    s.begin = arena.take<int64_t>(kBlockM);
    s.end = arena.take<int64_t>(kBlockM);
    s.rows = arena.take<const void*>(kBlockM);
    s.converted = arena.take<char>(k.pairs ? kBlockM * p.head_dim_v * 2 : 0);
    s.alibi = arena.take<double>(has(p, TW_HAS_DALIBI) ? c.group : 0);
    *bytes = arena.used();
    return s;
  }
};

// Elements of the float32 copy that dbias needs beside the tensor: none if every dimension that tasks divide is full.
int64_t bias_copy_elements(const tw_problem& p, const Cut& c) {
  if (!has(p, TW_HAS_DBIAS)) return 0;
  const int64_t shape[4] = {p.bias_dims & TW_DIM_B ? p.batch : 1, p.bias_dims & TW_DIM_H ? p.num_heads_q : 1,
                            p.bias_dims & TW_DIM_Q ? p.seqlen_q : 1, p.bias_dims & TW_DIM_K ? p.seqlen_k : 1};
  const int64_t slices = p.bias_dims & TW_DIM_K ? 1 : c.ranges;
  return slices * shape[0] * shape[1] * shape[2] * shape[3];
}

class Backward {
 public:
  Backward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace)
      : kernels_(kernels), p_(plan.problem), t_(tensors), cut_(kernels, p_, plan.target.choice), rules_(p_, tensors, kernels.pairs),
        mask_(mask_of(p_)), target_(plan.target), scale_(static_cast<float>(softmax_scale_of(p_))),
        threads_(flops(p_) < kSerialFlops ? 1 : plan.target.num_threads),
        space_(kernels, p_, cut_, bias_copy_elements(p_, cut_), workspace, plan.target.num_threads, &workspace_bytes_) {}

  void run() {
    const int64_t heads = p_.batch * p_.num_heads_k;
    std::memset(space_.nonfinite, 0, static_cast<size_t>(heads) * sizeof(int32_t));
    begin_bias();
    each(heads * cut_.chunks, [&](int64_t task, int worker) {
      const int64_t head = task / cut_.chunks;
      prepare(head / p_.num_heads_k, head % p_.num_heads_k, task % cut_.chunks * kBlockM, scratch(worker));
    });
    // Ranges outermost: under a causal mask the first range is seen by all rows and takes longest.
    each(cut_.tasks(p_), [&](int64_t task, int worker) {
      const Scratch s = scratch(worker);
      const int64_t per_range = cut_.whole_batch ? 1 : heads;
      const int64_t first = cut_.whole_batch ? 0 : task % per_range, last = cut_.whole_batch ? heads : first + 1;
      for (int64_t head = first; head < last; ++head)
        key_range(head / p_.num_heads_k, head % p_.num_heads_k, task / per_range, s);
    });
    if (t_.dq != nullptr) {
      each(heads * cut_.chunks, [&](int64_t task, int) {
        const int64_t head = task / cut_.chunks;
        store_dq(head / p_.num_heads_k, head % p_.num_heads_k, task % cut_.chunks * kBlockM);
      });
      clear_unused_query_rows(p_, t_, *t_.dq, nullptr);
    }
    if (t_.dk != nullptr) clear_unused_key_rows(p_, t_, *t_.dk);
    if (t_.dv != nullptr) clear_unused_key_rows(p_, t_, *t_.dv);
    if (t_.dsink != nullptr) store_dsink();
    if (t_.dalibi != nullptr) store_dalibi();
    if (t_.dbias != nullptr) store_dbias();
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

  int64_t row_slot(const HeadRows& rows, int64_t row) const {  // in [hk, packed_rows]
    return rows.hk * cut_.packed_rows + cut_.packed_begin(p_, rows.sequence) + row;
  }
  int64_t q_panel_stride() const { return cut_.packed_rows / cut_.keys_per_step * cut_.panel; }
  // Panels of q or dO from `row` on.
  float* row_panels(float* panels, int64_t count, const HeadRows& rows, int64_t row) const {
    return panels + rows.hk * count * q_panel_stride() +
           (cut_.packed_begin(p_, rows.sequence) + row) / cut_.keys_per_step * cut_.panel;
  }

  // ---- prepare ----

  void prepare(int64_t b, int64_t hk, int64_t first, const Scratch& s) {
    const Sequence sequence = sequence_of(p_, t_, b);
    const HeadRows rows{p_, t_, sequence, hk, cut_.group};
    const int64_t count = std::min(kBlockM, rows.count() - first);
    if (count <= 0) return;
    const int64_t padded = round_up(count, kStrip), slot = row_slot(rows, first);
    bool nonfinite = false;

    for (int64_t r = 0; r < padded; ++r) s.rows[r] = r < count ? rows.address(*t_.q, first + r) : nullptr;
    nonfinite |= kernels_.pack_rows(s.rows, padded, p_.head_dim, p_.dtype, rules_.q_scale, space_.q_rows + slot * cut_.steps_q,
                                    cut_.steps_q);
    kernels_.pack_values(s.rows, padded, p_.head_dim, p_.dtype, row_panels(space_.q_panels, cut_.d_panels, rows, first),
                         q_panel_stride());

    int32_t dtype = t_.dout->dtype;
    for (int64_t r = 0; r < padded; ++r) s.rows[r] = r < count ? rows.address(*t_.dout, first + r) : nullptr;
    if (kernels_.pairs && dtype != p_.dtype) {  // a float32 dO: the dot products take bfloat16
      for (int64_t r = 0; r < count; ++r) {
        char* to = s.converted + r * p_.head_dim_v * 2;
        for (int64_t c = 0; c < p_.head_dim_v; ++c)
          store_element(to, p_.dtype, c, load_element(s.rows[r], dtype, c));
        s.rows[r] = to;
      }
      dtype = p_.dtype;
    }
    nonfinite |= kernels_.pack_rows(s.rows, padded, p_.head_dim_v, dtype, 1, space_.do_rows + slot * cut_.steps_v, cut_.steps_v);
    kernels_.pack_values(s.rows, padded, p_.head_dim_v, dtype, row_panels(space_.do_panels, cut_.dv_panels, rows, first),
                         q_panel_stride());

    for (int64_t r = 0; r < padded; ++r) row_statistics(rows, first + r, r < count);
    if (t_.dq != nullptr)
      for (int64_t range = 0; range < cut_.ranges; ++range)
        std::memset(dq_row(rows, range, first), 0, static_cast<size_t>(padded * cut_.d_columns) * sizeof(float));
    if (nonfinite)
      std::atomic_ref<int32_t>(space_.nonfinite[b * p_.num_heads_k + hk]).store(1, std::memory_order_relaxed);
  }

  // lse in base 2 and delta; a row that sees no key (or pads a strip) gets lse = +inf, so that P = 0.
  void row_statistics(const HeadRows& rows, int64_t row, bool exists) {
    const int64_t slot = row_slot(rows, row);
    if (!exists) {
      space_.lse[slot] = kInfinity;
      space_.delta[slot] = 0;
      return;
    }
    const float lse = *rows.lse_address(*t_.lse, row);
    space_.lse[slot] = lse == -kInfinity ? kInfinity : static_cast<float>(lse * kLog2E);
    const void *o = rows.address(*t_.o, row), *dout = rows.address(*t_.dout, row);
    float delta = 0;
    if (t_.o->dtype == t_.dout->dtype) {
      delta = kernels_.dot_rows(dout, o, p_.head_dim_v, t_.o->dtype);
    } else {
      for (int64_t c = 0; c < p_.head_dim_v; ++c)
        delta += static_cast<float>(load_element(o, t_.o->dtype, c) * load_element(dout, t_.dout->dtype, c));
    }
    if (t_.dlse != nullptr) delta -= *rows.lse_address(*t_.dlse, row);
    space_.delta[slot] = delta;
    if (t_.dsink != nullptr) {  // d lse / d sink = exp(sink - lse), and o shrinks alike
      const float sink = static_cast<const float*>(t_.sink->data)[rows.head(row) * t_.sink->stride[0]];
      space_.sink_rows[slot] = -std::exp(sink - lse) * delta;
    }
  }

  float* dq_row(const HeadRows& rows, int64_t range, int64_t row) const {
    return space_.dq + (range * p_.num_heads_k * cut_.packed_rows + row_slot(rows, row)) * cut_.d_columns;
  }

  // ---- one range of keys ----

  void key_range(int64_t b, int64_t hk, int64_t range, const Scratch& s) {
    const Sequence sequence = sequence_of(p_, t_, b);
    const HeadRows rows{p_, t_, sequence, hk, cut_.group};
    if (t_.dalibi != nullptr) std::fill(s.alibi, s.alibi + cut_.group, 0.0);
    const int64_t end = std::min((range + 1) * cut_.range_length, sequence.seqlen_k);
    const bool nonfinite_rows = std::atomic_ref<int32_t>(space_.nonfinite[b * p_.num_heads_k + hk]).load() != 0;
    for (int64_t n = range * cut_.range_length; n < end; n += cut_.block_n) {
      const int64_t n_end = std::min(n + cut_.block_n, end);
      const bool nonfinite = pack_keys(sequence, hk, n, n_end, s) || nonfinite_rows;
      std::memset(s.dk, 0, static_cast<size_t>((cut_.block_n + kStrip) * cut_.d_columns) * sizeof(float));
      std::memset(s.dv, 0, static_cast<size_t>((cut_.block_n + kStrip) * cut_.dv_columns) * sizeof(float));
      const KeyRange queries = mask_.rows_of_keys(n, n_end, sequence.seqlen_q, sequence.seqlen_k);
      for (int64_t m = round_down(queries.begin * cut_.group, kBlockM); m < queries.end * cut_.group; m += kBlockM) {
        const int64_t count = std::min(kBlockM, rows.count() - m);
        tiles(rows, range, m, count, n, n_end, nonfinite, s.alibi, s);
        if (t_.dv != nullptr || t_.dk != nullptr) key_gradients(rows, m, count, n, n_end, nonfinite, s);
        if (t_.dq != nullptr) query_gradients(rows, range, m, count, n, n_end, nonfinite, s);
      }
      store_key_gradients(sequence, hk, n, n_end, s);
    }
    if (t_.dalibi != nullptr)
      std::copy(s.alibi, s.alibi + cut_.group, space_.alibi + (range * p_.batch + b) * p_.num_heads_q + rows.head(0));
  }

  // K^T, V^T and K of a block; true if k holds inf or NaN. (A v that does is covered: masked tiles give dS = 0.)
  bool pack_keys(const Sequence& s, int64_t hk, int64_t n, int64_t n_end, const Scratch& scratch) {
    bool nonfinite = false;
    const int64_t per_step = cut_.keys_per_step;
    for (int64_t j = n; j < n_end; j += cut_.panel) {
      for (int64_t x = 0; x < cut_.panel; ++x) scratch.rows[x] = key_address(p_, t_, *t_.v, s, j + x, hk);
      kernels_.pack_keys(scratch.rows, p_.head_dim_v, p_.dtype, scratch.vt + (j - n) * cut_.steps_v);
      for (int64_t x = 0; x < cut_.panel; ++x) scratch.rows[x] = key_address(p_, t_, *t_.k, s, j + x, hk);
      nonfinite |= kernels_.pack_keys(scratch.rows, p_.head_dim, p_.dtype, scratch.kt + (j - n) * cut_.steps_q);
      kernels_.pack_values(scratch.rows, cut_.panel, p_.head_dim, p_.dtype, scratch.kp + (j - n) / per_step * cut_.panel,
                           cut_.block_n / per_step * cut_.panel);
    }
    return nonfinite;
  }

  // Visible keys of a strip within [n, n_end), relative to n; begin on a panel.
  KeyRange strip_columns(const Scratch& s, int64_t r, int64_t n, int64_t n_end) const {
    int64_t begin = n_end, end = n;
    for (int64_t x = r; x < r + kStrip; ++x)
      if (s.end[x] > s.begin[x]) begin = std::min(begin, s.begin[x]), end = std::max(end, s.end[x]);
    begin = std::max(begin, n);
    end = std::min(end, n_end);
    if (begin >= end) return {0, 0};
    return {round_down(begin - n, cut_.panel), end - n};
  }

  // P and dS of `count` query rows from m on (padded to strips) and the keys [n, n_end).
  void tiles(const HeadRows& rows, int64_t range, int64_t m, int64_t count, int64_t n, int64_t n_end, bool nonfinite,
             double* alibi, const Scratch& s) {
    const int64_t padded = round_up(count, kStrip), slot = row_slot(rows, m);
    for (int64_t r = 0; r < padded; ++r) {
      const KeyRange keys = r < count ? mask_.keys(rows.query(m + r), rows.sequence.seqlen_q, rows.sequence.seqlen_k)
                                      : KeyRange{0, 0};
      s.begin[r] = keys.begin;
      s.end[r] = keys.end;
    }
    const bool dropout = rules_.dropout.active(), logit_gradients = t_.dbias != nullptr || t_.dalibi != nullptr;
    if (dropout)
      fill_keep(kernels_, rules_, rows, m, padded, n, n_end - n, cut_.block_n / 64, s.keep);

    ProbabilityTile probability{};
    probability.ldq = probability.steps = cut_.steps_q;
    probability.pre = rules_.pre;
    probability.post = rules_.post;
    probability.modified = rules_.modified;
    probability.mark_masked = nonfinite;
    probability.softcap = rules_.softcap;
    probability.addend = rules_.has_addend ? s.addend : nullptr;
    probability.keep_stride = cut_.block_n / 64;
    probability.ld = probability.ldp = cut_.block_n;
    GradientTile gradient{};
    gradient.ld_dout = gradient.steps = cut_.steps_v;
    gradient.ld = gradient.ld_ds = cut_.block_n;
    gradient.ld_ds_rows = cut_.block_n / 2;
    gradient.keep_stride = cut_.block_n / 64;
    gradient.keep_scale = rules_.dropout.scale;
    gradient.mark_masked = nonfinite;
    int32_t begin[kStrip], end[kStrip];
    probability.begin = begin;
    probability.end = end;

    // What a tile needs to know of its strip and panel.
    struct Place {
      int64_t vectors;  // 0: nothing visible
      bool general;
    };
    const auto place = [&](int64_t r, int64_t panel) -> Place {
      const KeyRange columns = strip_columns(s, r, n, n_end);
      if (panel < columns.begin || panel >= columns.end) return {0, false};
      const int64_t vectors = std::min<int64_t>(divide_up(columns.end - panel, cut_.lanes), kernels_.panel_vectors);
      bool general = rules_.modified || dropout || nonfinite || logit_gradients;
      for (int64_t x = 0; x < kStrip; ++x) {
        begin[x] = static_cast<int32_t>(std::clamp<int64_t>(s.begin[r + x] - n - panel, 0, cut_.panel));
        end[x] = static_cast<int32_t>(std::clamp<int64_t>(s.end[r + x] - n - panel, 0, cut_.panel));
        general |= begin[x] > 0 || end[x] < vectors * cut_.lanes;
      }
      return {vectors, general};
    };
    const int64_t pairs = cut_.keys_per_step;
    const auto keep_of = [&](auto& tile, int64_t r, int64_t panel) {
      if (!dropout) return;
      tile.keep = s.keep + r * tile.keep_stride + panel / 64;
      tile.keep_shift = static_cast<int32_t>(panel % 64);
    };

    for (int64_t panel = 0; panel < n_end - n; panel += cut_.panel) {
      // K^T first, then V^T: together the two panels would not fit into a 32 or 48 KB L1 at head_dim 128.
      probability.k = s.kt + panel * cut_.steps_q;
      for (int64_t r = 0; r < padded; r += kStrip) {
        const Place at = place(r, panel);
        if (at.vectors < kernels_.panel_vectors) hide_tile(r, panel, at.vectors * cut_.lanes, nonfinite, s);
        if (at.vectors == 0) continue;
        if (rules_.has_addend)
          fill_addend(rows, m + r, kStrip, n + panel, at.vectors * cut_.lanes, cut_.panel, s.addend);
        keep_of(probability, r, panel);
        probability.q = space_.q_rows + (slot + r) * cut_.steps_q;
        probability.lse = space_.lse + slot + r;
        probability.probability = s.probability + r * cut_.block_n + panel;
        probability.softcap_factor = s.factor + (p_.softcap > 0 ? r * cut_.block_n + panel : 0);
        probability.p = s.p + r / pairs * cut_.block_n + panel;
        kernels_.probability[at.general][at.vectors - 1](probability);
      }
      gradient.v = s.vt + panel * cut_.steps_v;
      for (int64_t r = 0; r < padded; r += kStrip) {
        const Place at = place(r, panel);
        if (at.vectors == 0) continue;
        keep_of(gradient, r, panel);
        gradient.dout = space_.do_rows + (slot + r) * cut_.steps_v;
        gradient.probability = s.probability + r * cut_.block_n + panel;
        gradient.softcap_factor = p_.softcap > 0 ? s.factor + r * cut_.block_n + panel : nullptr;
        gradient.delta = space_.delta + slot + r;
        gradient.ds = s.ds + r / pairs * cut_.block_n + panel;
        gradient.ds_rows = s.ds_rows + r * gradient.ld_ds_rows + panel / 2;
        gradient.ds_logit = logit_gradients ? s.ds_logit + r * cut_.block_n + panel : nullptr;
        kernels_.gradient[at.general][at.vectors - 1](gradient);
        if (logit_gradients)
          add_logit_gradients(rows, range, m + r, std::min<int64_t>(kStrip, count - r), n + panel,
                              std::min(at.vectors * cut_.lanes, n_end - n - panel), gradient.ds_logit, alibi);
      }
    }
  }

  // Columns of a tile that no row sees count as masked: zero, or the mark that accumulate_visible skips.
  void hide_tile(int64_t r, int64_t panel, int64_t from, bool mark, const Scratch& s) const {
    uint32_t bits = mark ? (kernels_.pairs ? 0x80008000u : 0x80000000u) : 0;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    const int64_t pairs = cut_.keys_per_step;
    for (int64_t x = 0; x < kStrip / pairs; ++x) {
      const int64_t at = (r / pairs + x) * cut_.block_n + panel;
      std::fill(s.p + at + from, s.p + at + cut_.panel, value);
      std::fill(s.ds + at + from, s.ds + at + cut_.panel, value);
    }
    if (kernels_.pairs)
      for (int64_t x = r; x < r + kStrip; ++x) {
        float* row = s.ds_rows + x * (cut_.block_n / 2) + panel / 2;
        std::fill(row + from / 2, row + cut_.panel / 2, value);
      }
  }

  void product(const ProductTile& tile, bool strided, int64_t rows, int64_t columns, bool visible_only) const {
    if (visible_only)
      accumulate_visible(kernels_, tile, rows, columns);
    else
      kernels_.product[strided][row_variant(rows)][columns / cut_.lanes - 1](tile);
  }

  // dV += P^T dO, dK += dS^T Q for strips of keys, over the query rows that see them.
  void key_gradients(const HeadRows& rows, int64_t m, int64_t count, int64_t n, int64_t n_end, bool visible_only,
                     const Scratch& s) {
    const int64_t per_step = cut_.keys_per_step, padded = round_up(count, kStrip);
    ProductTile tile{};
    tile.row_stride = 1;
    tile.step_stride = cut_.block_n;
    tile.ldb = cut_.panel;
    const auto accumulate = [&](const float* a, float* panels, int64_t panel_count, int64_t columns, float* c) {
      for (int64_t x = 0; x < panel_count; ++x) {
        const int64_t width = std::min(cut_.panel, columns - x * cut_.panel);
        for (int64_t key = 0; key < n_end - n; key += kStrip) {
          const int64_t strip = std::min<int64_t>(kStrip, n_end - n - key);
          const KeyRange queries = mask_.rows_of_keys(n + key, n + key + strip, rows.sequence.seqlen_q, rows.sequence.seqlen_k);
          const int64_t first = round_down(std::max<int64_t>(queries.begin * cut_.group - m, 0), kStrip);
          const int64_t last = std::min(round_up(queries.end * cut_.group - m, kStrip), padded);
          if (first >= last) continue;
          tile.a = a + first / per_step * cut_.block_n + key;
          tile.b = row_panels(panels, panel_count, rows, m + first) + x * q_panel_stride();
          tile.steps = (last - first) / per_step;
          tile.c = c + key * columns + x * cut_.panel;
          tile.ldc = columns;
          product(tile, true, strip, width, visible_only);
        }
      }
    };
    if (t_.dv != nullptr) accumulate(s.p, space_.do_panels, cut_.dv_panels, cut_.dv_columns, s.dv);
    if (t_.dk != nullptr) accumulate(s.ds, space_.q_panels, cut_.d_panels, cut_.d_columns, s.dk);
  }

  // dQ += dS K for strips of query rows, over the keys that they see.
  void query_gradients(const HeadRows& rows, int64_t range, int64_t m, int64_t count, int64_t n, int64_t n_end,
                       bool visible_only, const Scratch& s) {
    const int64_t per_step = cut_.keys_per_step, ld = cut_.block_n / per_step;
    ProductTile tile{};
    tile.row_stride = ld;
    tile.step_stride = 1;
    tile.ldb = cut_.panel;
    tile.ldc = cut_.d_columns;
    for (int64_t x = 0; x < cut_.d_panels; ++x) {
      const int64_t width = std::min(cut_.panel, cut_.d_columns - x * cut_.panel);
      for (int64_t r = 0; r < count; r += kStrip) {
        const KeyRange columns = strip_columns(s, r, n, n_end);
        if (columns.begin >= columns.end) continue;
        const int64_t first = columns.begin / per_step;
        tile.steps = round_up(columns.end, cut_.lanes) / per_step - first;
        tile.a = s.ds_rows + r * ld + first;
        tile.b = s.kp + x * (cut_.block_n / per_step) * cut_.panel + first * cut_.panel;
        tile.c = dq_row(rows, range, m + r) + x * cut_.panel;
        product(tile, false, kStrip, width, visible_only);
      }
    }
  }

  void store_key_gradients(const Sequence& s, int64_t hk, int64_t n, int64_t n_end, const Scratch& scratch) {
    for (int64_t j = n; j < n_end; ++j) {
      if (t_.dk != nullptr)
        kernels_.store_row(scratch.dk + (j - n) * cut_.d_columns, scale_, p_.head_dim, t_.dk->dtype,
                           key_address(p_, t_, *t_.dk, s, j, hk));
      if (t_.dv != nullptr)
        kernels_.store_row(scratch.dv + (j - n) * cut_.dv_columns, rules_.dropout.active() ? rules_.dropout.scale : 1.0f,
                           p_.head_dim_v, t_.dv->dtype, key_address(p_, t_, *t_.dv, s, j, hk));
    }
  }

  void store_dq(int64_t b, int64_t hk, int64_t first) {
    const Sequence sequence = sequence_of(p_, t_, b);
    const HeadRows rows{p_, t_, sequence, hk, cut_.group};
    float sum[kMaxHeadDim];
    for (int64_t row = first; row < std::min(first + kBlockM, rows.count()); ++row) {
      std::fill(sum, sum + cut_.d_columns, 0.0f);
      for (int64_t range = 0; range < cut_.ranges; ++range) {
        const float* part = dq_row(rows, range, row);
        for (int64_t c = 0; c < cut_.d_columns; ++c) sum[c] += part[c];
      }
      kernels_.store_row(sum, scale_, p_.head_dim, t_.dq->dtype, rows.address(*t_.dq, row));
    }
  }

  // ---- gradients of the logit's additive terms ----

  void begin_bias() {
    if (t_.dbias == nullptr) return;
    const tw_tensor& out = *t_.dbias;
    const bool in_place = out.dtype == TW_FLOAT32 && (p_.bias_dims & TW_DIM_K);
    int64_t stride = 1;
    for (int n = 3; n >= 0; --n) {
      bias_.stride[n] = out.shape[n] == 1 ? 0 : in_place ? out.stride[n] : stride;
      stride *= out.shape[n];
    }
    bias_.range_stride = p_.bias_dims & TW_DIM_K ? 0 : stride;
    bias_.elements = in_place ? 0 : bias_copy_elements(p_, cut_);
    bias_.data = in_place ? static_cast<float*>(out.data) : space_.bias;
    if (in_place)
      each_bias_element([&](int64_t offset, int64_t) { static_cast<float*>(out.data)[offset] = 0; });
    else
      std::fill(bias_.data, bias_.data + bias_.elements, 0.0f);
  }

  // f(offset in dbias, number of the element).
  template <class F>
  void each_bias_element(F&& f) const {
    const tw_tensor& out = *t_.dbias;
    int64_t number = 0;
    for (int64_t b = 0; b < out.shape[0]; ++b)
      for (int64_t h = 0; h < out.shape[1]; ++h)
        for (int64_t i = 0; i < out.shape[2]; ++i)
          for (int64_t j = 0; j < out.shape[3]; ++j) f(bias_offset(out, b, h, i, j), number++);
  }

  void add_logit_gradients(const HeadRows& rows, int64_t range, int64_t first, int64_t count, int64_t j, int64_t columns,
                           const float* ds, double* alibi) const {
    const Sequence& s = rows.sequence;
    for (int64_t r = 0; r < count; ++r, ds += cut_.block_n) {
      const int64_t i = rows.query(first + r), h = rows.head(first + r);
      if (t_.dbias != nullptr) {
        float* to = bias_.data + range * bias_.range_stride + s.batch * bias_.stride[0] + h * bias_.stride[1] +
                    i * bias_.stride[2] + j * bias_.stride[3];
        for (int64_t c = 0; c < columns; ++c) to[c * bias_.stride[3]] += ds[c];
      }
      if (t_.dalibi != nullptr) {
        const float diagonal = static_cast<float>(i + s.seqlen_k - s.seqlen_q - j);
        float sum = 0;
        for (int64_t c = 0; c < columns; ++c) sum -= ds[c] * std::fabs(diagonal - static_cast<float>(c));
        alibi[h - rows.hk * cut_.group] += static_cast<double>(sum);
      }
    }
  }

  void store_dbias() const {
    if (bias_.elements == 0) return;
    const int64_t slice = bias_.range_stride;
    each_bias_element([&](int64_t offset, int64_t number) {
      double sum = bias_.data[number];
      if (slice != 0)
        for (int64_t range = 1; range < cut_.ranges; ++range) sum += static_cast<double>(bias_.data[range * slice + number]);
      store_element(t_.dbias->data, t_.dbias->dtype, offset, sum);
    });
  }

  void store_dalibi() const {
    const tw_tensor& out = *t_.dalibi;
    const int64_t count = p_.batch * p_.num_heads_q;
    double* sums = space_.alibi + cut_.ranges * count;
    std::fill(sums, sums + count, 0.0);
    for (int64_t range = 0; range < cut_.ranges; ++range)
      for (int64_t n = 0; n < count; ++n) sums[n] += space_.alibi[range * count + n];
    for (int64_t h = 0; h < p_.num_heads_q; ++h) {
      double all = 0;
      for (int64_t b = 0; b < p_.batch; ++b) {
        const double sum = sums[b * p_.num_heads_q + h];
        all += sum;
        if (out.ndim == 2) static_cast<float*>(out.data)[alibi_offset(out, b, h)] = static_cast<float>(sum);
      }
      if (out.ndim == 1) static_cast<float*>(out.data)[alibi_offset(out, 0, h)] = static_cast<float>(all);
    }
  }

  void store_dsink() const {
    double* sums = space_.sink_sums;
    std::fill(sums, sums + p_.num_heads_q, 0.0);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence sequence = sequence_of(p_, t_, b);
      for (int64_t hk = 0; hk < p_.num_heads_k; ++hk) {
        const HeadRows rows{p_, t_, sequence, hk, cut_.group};
        for (int64_t row = 0; row < rows.count(); ++row)
          sums[rows.head(row)] += static_cast<double>(space_.sink_rows[row_slot(rows, row)]);
      }
    }
    for (int64_t h = 0; h < p_.num_heads_q; ++h)
      static_cast<float*>(t_.dsink->data)[h * t_.dsink->stride[0]] = static_cast<float>(sums[h]);
  }

  const TileKernels& kernels_;
  const tw_problem& p_;
  const tw_tensors& t_;
  const Cut cut_;
  const LogitRules rules_;
  const Mask mask_;
  const Target& target_;
  const float scale_;
  const int threads_;
  int64_t workspace_bytes_ = 0;
  const Workspace space_;
  BiasGradient bias_;
};

}  // namespace

Status plan_backward(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan) {
  TW_RETURN_IF_ERROR(Cut::check(target.choice, problem));
  const Cut cut(kernels, problem, target.choice);
  Workspace(kernels, problem, cut, bias_copy_elements(problem, cut), nullptr, target.num_threads, &plan->workspace_bytes);
  plan->block_m = kBlockM;
  plan->block_n = cut.block_n;
  plan->num_splits = cut.ranges;
  plan->num_tasks = cut.tasks(problem);
  plan->config = concat("block ", kBlockM, "x", cut.block_n, ", tile ", kStrip, "x", cut.panel, ", keys in ranges of ",
                        cut.range_length, cut.whole_batch ? ", a task walks the batch for dbias" : "");
  return Status();
}

Status run_backward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace) {
  Backward(kernels, plan, tensors, workspace).run();
  return Status();
}

}  // namespace tilewise
