#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/dtype.h"
#include "harness/inputs.h"
#include "harness/random.h"

namespace tilewise::harness {
namespace {

bool has(const tw_problem& p, tw_feature feature) { return (p.features & feature) != 0; }

// Streams of random numbers, one per tensor.
enum Stream : uint64_t { kLengths, kQ, kK, kV, kKNew, kVNew, kDout, kDlse, kBias, kSink, kAlibi, kRank, kPages };

}  // namespace

class InputMaker {
 public:
  InputMaker(const tw_problem& problem, const InputOptions& options, Inputs* in)
      : p(problem), options(options), in(*in), length_random{{options.seed, kLengths}} {}

  tw_status make(std::string* error) {
    in.problem_ = p;
    in.options_ = options;
    in.lengths_.assign(static_cast<size_t>(p.batch), {});
    query_lengths();
    if (!key_lengths(error)) return TW_INVALID_ARGUMENT;
    if (p.k_layout == TW_PAGED && !pages(error)) return TW_INVALID_ARGUMENT;
    mark_rows();
    vectors();
    if (options.nan_rows) nan_rows();
    if (has(p, TW_HAS_BIAS)) bias();
    options_tensors();
    if (p.rotary_dim > 0) rotary();
    index_tensors();
    outputs();
    return TW_OK;
  }

 private:
  Lengths& entry(int64_t b) { return in.lengths_[static_cast<size_t>(b)]; }
  Layout layout() const { return options.layout; }
  Layout layout_of_next() const {
    if (options.layout != Layout::kMixed) return options.layout;
    return static_cast<Layout>((options.seed + mixed++) % static_cast<uint64_t>(Layout::kExpanded));
  }
  Layout output_layout() const {
    const Layout layout = layout_of_next();
    return layout == Layout::kExpanded ? Layout::kContiguous : layout;
  }
  int unaligned() const { return static_cast<int>(options.seed % 7) + 1; }
  Buffer input(int32_t dtype, std::vector<int64_t> shape, bool vectors = true) const {
    return Buffer(dtype, std::move(shape), Buffer::Use::kInput, layout_of_next(), vectors, unaligned());
  }
  Buffer output(int32_t dtype, std::vector<int64_t> shape, bool vectors = true) const {
    return Buffer(dtype, std::move(shape), Buffer::Use::kOutput, output_layout(), vectors, unaligned());
  }

  // ---- lengths ----

  // Lengths of b sequences in `total` rows, the longest `longest` rows if they fit; some are 0. Sometimes a tail is left.
  std::vector<int64_t> partition(int64_t total, int64_t longest, RandomSequence& random) const {
    std::vector<int64_t> lengths(static_cast<size_t>(p.batch), 0);
    if (p.batch == 0) return lengths;
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t n = order.size(); n > 1; --n) std::swap(order[n - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(n)))]);
    int64_t rest = total;
    for (size_t n = 0; n < order.size(); ++n) {
      const int64_t most = std::min(longest, rest);
      lengths[order[n]] = n == 0 ? most : random.one_in(4) ? 0 : random.between(0, most);
      rest -= lengths[order[n]];
    }
    const bool leave_tail = random.one_in(3);
    for (size_t n = 0; n < order.size() && !leave_tail; ++n) {
      const int64_t more = std::min(longest - lengths[order[n]], rest);
      if (lengths[order[n]] == 0 && n % 2 == 1) continue;  // keep some empty
      lengths[order[n]] += more;
      rest -= more;
    }
    return lengths;
  }

  // Part of `length` in use: all, none, or some.
  int64_t used(int64_t length, RandomSequence& random) const {
    if (p.batch == 1) return random.between(length - length / 3, length);
    if (random.one_in(5)) return 0;
    return random.one_in(4) ? length : random.between(0, length);
  }

  void query_lengths() {
    std::vector<int64_t> lengths(static_cast<size_t>(p.batch), p.seqlen_q);
    if (p.q_layout == TW_PACKED) lengths = partition(p.total_q, p.seqlen_q, length_random);
    packed_q = lengths;
    int64_t begin = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      entry(b).q_begin = begin;
      begin += lengths[static_cast<size_t>(b)];
      entry(b).seqlen_q = has(p, TW_HAS_SEQUSED_Q) ? used(lengths[static_cast<size_t>(b)], length_random) : lengths[static_cast<size_t>(b)];
    }
  }

  bool key_lengths(std::string* error) {
    std::vector<int64_t> lengths(static_cast<size_t>(p.batch), p.seqlen_k);
    if (p.k_layout == TW_PACKED) {
      // Self-attention has one set of lengths; every third seed keeps them apart all the same.
      const bool alike = p.q_layout == TW_PACKED && p.total_q == p.total_k && p.seqlen_q == p.seqlen_k && options.seed % 3 != 0;
      lengths = alike ? packed_q : partition(p.total_k, p.seqlen_k, length_random);
    }
    packed_k = lengths;
    int64_t begin = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      Lengths& e = entry(b);
      e.k_begin = begin;
      const int64_t length = lengths[static_cast<size_t>(b)];
      begin += length;
      e.used_k = has(p, TW_HAS_SEQUSED_K) ? used(length - p.seqlen_new, length_random) : length;
      if (has(p, TW_HAS_LEFTPAD_K)) e.leftpad = length_random.between(0, std::min<int64_t>(p.seqlen_k, e.used_k + (b % 4 == 3) * 4));
      if (has(p, TW_HAS_LEFTPAD_K) && b % 2 == 0) e.leftpad = std::min<int64_t>(e.leftpad, 9);
      e.rotary_base = has(p, TW_HAS_ROTARY_SEQLENS) ? length_random.between(0, p.seqlen_k) : e.used_k;
      e.seqlen_k = std::max<int64_t>(0, e.used_k + p.seqlen_new - e.leftpad);
      e.cache_row = b;
    }
    if (!has(p, TW_HAS_CACHE_BATCH_IDX)) return true;
    const int64_t rows = p.cache_batch != 0 ? p.cache_batch : p.batch;
    if (rows < p.batch && p.seqlen_new > 0) {
      *error = "appending needs a cache row for each batch entry, cache_batch >= b";
      return false;
    }
    std::vector<int64_t> order(static_cast<size_t>(rows));
    std::iota(order.begin(), order.end(), int64_t{0});
    for (int64_t n = rows; n > 1; --n) std::swap(order[static_cast<size_t>(n - 1)], order[static_cast<size_t>(length_random.below(n))]);
    for (int64_t b = 0; b < p.batch; ++b) entry(b).cache_row = order[static_cast<size_t>(b % rows)];
    return true;
  }

  bool pages(std::string* error) {
    const int64_t max_pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    in.page_table = input(TW_INT32, {p.batch, max_pages}, false);
    int64_t needed = 0;
    for (int64_t b = 0; b < p.batch; ++b) needed += (entry(b).used_k + p.seqlen_new + p.page_size - 1) / p.page_size;
    if ((p.seqlen_new > 0 && needed > p.num_pages) || (needed > 0 && p.num_pages == 0)) {
      *error = "pages: " + std::to_string(needed) + " pages are in use and must be distinct where keys are appended";
      return false;
    }
    std::vector<int64_t> order(static_cast<size_t>(p.num_pages));
    std::iota(order.begin(), order.end(), int64_t{0});
    RandomSequence random{{options.seed, kPages}};
    for (int64_t n = p.num_pages; n > 1; --n) std::swap(order[static_cast<size_t>(n - 1)], order[static_cast<size_t>(random.below(n))]);
    const double unused[] = {-1, -2147483648.0, static_cast<double>(p.num_pages), 2147483647};
    int64_t next = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t count = (entry(b).used_k + p.seqlen_new + p.page_size - 1) / p.page_size;
      for (int64_t n = 0; n < max_pages; ++n)
        in.page_table.set(b * max_pages + n, n < count             ? static_cast<double>(order[static_cast<size_t>(next++ % p.num_pages)])
                                             : options.dead == Dead::kZero ? 0
                                                                            : unused[(b + n) % 4]);
    }
    return true;
  }

  void mark_rows() {
    const int64_t q_rows = p.q_layout == TW_PACKED ? p.total_q : p.batch * p.seqlen_q;
    in.query_index_.assign(static_cast<size_t>(q_rows), -1);
    key_rows = p.k_layout == TW_PACKED  ? p.total_k
               : p.k_layout == TW_PAGED ? p.num_pages * p.page_size
                                        : (p.cache_batch != 0 ? p.cache_batch : p.batch) * p.seqlen_k;
    in.key_index_.assign(static_cast<size_t>(key_rows), -1);
    if (p.num_heads_k == 0) return;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Lengths& e = entry(b);
      for (int64_t i = 0; i < e.seqlen_q; ++i)
        if (p.num_heads_q > 0) in.query_index_[static_cast<size_t>(in.q_row(b, i, 0) / p.num_heads_q)] = i;
      for (int64_t position = e.leftpad; position < e.used_k; ++position)
        in.key_index_[static_cast<size_t>(in.k_row(b, position, 0) / p.num_heads_k)] = position - e.leftpad;
    }
  }

  // ---- values ----

  // Scale for which the kinds are made: the problem's, unless it is zero or extreme.
  double design_scale() const {
    const double scale = std::abs(p.softmax_scale);
    return scale >= 1e-3 && scale <= 10 ? scale : 1 / std::sqrt(static_cast<double>(p.head_dim));
  }

  // Element c of row `row` (head `head`, index `index` in its sequence) of a tensor.
  double value(Stream stream, int64_t row, int64_t head, int64_t index, int64_t c, int64_t width) const {
    const auto n = static_cast<uint64_t>(row * width + c);
    const double noise = Random{options.seed, stream}.normal(n);
    const bool is_q = stream == kQ, is_k = stream == kK || stream == kKNew;
    const double unit = design_scale() * static_cast<double>(p.head_dim);
    switch (options.kind) {
      case InputKind::kGaussian: return noise;
      case InputKind::kPeaked: return is_q || is_k ? 3 * noise : noise;
      case InputKind::kLowrank: {
        if (!is_q && !is_k) return 1 + 0.25 * noise;
        const Random rank{options.seed, kRank};
        const auto column = static_cast<uint64_t>(c), r = static_cast<uint64_t>(row);
        return Random{options.seed, stream + 100}.normal(2 * r) * rank.normal(2 * column) +
               Random{options.seed, stream + 100}.normal(2 * r + 1) * rank.normal(2 * column + 1) + 0.1 * noise;
      }
      case InputKind::kConstant: return is_q ? 0.53 : is_k ? 0.27 : 1.25;  // q.k rounds: else the baseline would be lucky
      case InputKind::kOnehot: {
        if (!is_q && !is_k) return noise;
        const int64_t hot = is_q ? (7 * index + head) % width : index % width;
        return c == hot ? 8 : 0;
      }
      case InputKind::kGrowing:
        if (is_q) return 1 + 0.05 * noise;
        return is_k ? 0.15 * static_cast<double>(index) / unit + 0.05 * noise : noise;
      case InputKind::kNegative:
        if (is_q) return 1 + 0.05 * noise;
        return is_k ? -200 / unit + 0.05 * noise : noise;
    }
    return noise;
  }

  void kill(Buffer& x, int64_t n) const {
    if (options.dead == Dead::kNan)
      x.poison(n);
    else
      x.set(n, options.dead == Dead::kZero ? 0 : n % 2 ? INFINITY : -INFINITY);
  }
  void kill_all(Buffer& x) const {
    for (int64_t n = 0; n < x.size(); ++n) kill(x, n);
  }

  // Rows of `index` (per token, -1 = dead) times heads. Dead rows first: in expanded tensors a live row may share them.
  void fill(Buffer& x, Stream stream, int64_t heads, const std::vector<int64_t>& index) const {
    const int64_t width = x.row_size();
    for (const bool live : {false, true})
      for (int64_t row = 0; row < x.num_rows(); ++row) {
        const int64_t i = index[static_cast<size_t>(row / heads)];
        if ((i >= 0) != live) continue;
        for (int64_t c = 0; c < width; ++c) {
          if (live)
            x.set(row * width + c, value(stream, row, row % heads, i, c, width));
          else
            kill(x, row * width + c);
        }
      }
  }

  std::vector<int64_t> query_shape(int64_t width) const {
    if (p.q_layout == TW_PACKED) return {p.total_q, p.num_heads_q, width};
    return {p.batch, p.seqlen_q, p.num_heads_q, width};
  }
  std::vector<int64_t> key_shape(int64_t width) const {
    if (p.k_layout == TW_PACKED) return {p.total_k, p.num_heads_k, width};
    if (p.k_layout == TW_PAGED) return {p.num_pages, p.page_size, p.num_heads_k, width};
    return {p.cache_batch != 0 ? p.cache_batch : p.batch, p.seqlen_k, p.num_heads_k, width};
  }
  std::vector<int64_t> lse_shape() const {
    if (p.q_layout == TW_PACKED) return {p.num_heads_q, p.total_q};
    return {p.batch, p.num_heads_q, p.seqlen_q};
  }

  void vectors() {
    in.q = input(p.dtype, query_shape(p.head_dim));
    fill(in.q, kQ, p.num_heads_q, in.query_index_);
    in.k = input(p.dtype, key_shape(p.head_dim));
    in.v = input(p.dtype, key_shape(p.head_dim_v));
    if (layout() == Layout::kExpanded && p.k_layout == TW_DENSE && p.seqlen_new == 0) in.k.expand(0), in.v.expand(0);
    fill(in.k, kK, p.num_heads_k, in.key_index_);
    fill(in.v, kV, p.num_heads_k, in.key_index_);
    if (p.seqlen_new > 0) {
      std::vector<int64_t> index;
      for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t n = 0; n < p.seqlen_new; ++n) index.push_back(std::max<int64_t>(0, entry(b).used_k + n - entry(b).leftpad));
      in.k_new = input(p.dtype, {p.batch, p.seqlen_new, p.num_heads_k, p.head_dim});
      in.v_new = input(p.dtype, {p.batch, p.seqlen_new, p.num_heads_k, p.head_dim_v});
      fill(in.k_new, kKNew, p.num_heads_k, index);
      fill(in.v_new, kVNew, p.num_heads_k, index);
    }
    if (p.pass == TW_BACKWARD) {
      const int32_t o_dtype = options.float32_o ? int32_t{TW_FLOAT32} : p.dtype;
      in.dout = input(o_dtype, query_shape(p.head_dim_v));
      if (layout() == Layout::kExpanded)
        for (int dim = 0; dim + 1 < static_cast<int>(in.dout.shape().size()); ++dim) in.dout.expand(dim);
      fill(in.dout, kDout, p.num_heads_q, in.query_index_);
      if (has(p, TW_HAS_DLSE)) {
        in.dlse = input(TW_FLOAT32, lse_shape(), false);
        kill_all(in.dlse);
        for (int64_t b = 0; b < p.batch; ++b)
          for (int64_t h = 0; h < p.num_heads_q; ++h)
            for (int64_t i = 0; i < entry(b).seqlen_q; ++i) {
              const int64_t at = in.lse_index(b, i, h);
              in.dlse.set(at, Random{options.seed, kDlse}.normal(static_cast<uint64_t>(at)));
            }
      }
      in.o = input(o_dtype, query_shape(p.head_dim_v));
      in.lse = input(TW_FLOAT32, lse_shape(), false);
    }
  }

  // Keys 5 and the last NaN, value 40 infinite; backward: query 3 and the gradient of row 7 NaN. Of the first sequence.
  void nan_rows() {
    const auto put = [](Buffer& x, int64_t row, double value) {
      for (int64_t c = 0; c < x.row_size(); ++c) x.set(row * x.row_size() + c, value);
    };
    const Lengths& e = entry(0);
    for (int64_t h = 0; h < p.num_heads_k; ++h) {
      for (const int64_t j : {int64_t{5}, e.seqlen_k - 1})
        if (j >= 0 && j < e.seqlen_k) put(in.k, in.k_row(0, j + e.leftpad, h), NAN), put(in.v, in.k_row(0, j + e.leftpad, h), NAN);
      if (e.seqlen_k > 41) put(in.v, in.k_row(0, 40 + e.leftpad, h), INFINITY);
    }
    for (int64_t h = 0; p.pass == TW_BACKWARD && h < p.num_heads_q; ++h) {
      if (e.seqlen_q > 3) put(in.q, in.q_row(0, 3, h), NAN);
      if (e.seqlen_q > 7) put(in.dout, in.q_row(0, 7, h), NAN);
    }
  }

  // Float bias: N(0, 1), some -inf, in every seventh row all -inf. Bool: two of three visible, in every seventh row none. kNegative: every
  // third row sees the first half of the keys only, and what is hidden has -10,000.
  // What no pair sees is poisoned.
  void bias() {
    std::vector<int64_t> shape = {p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k};
    for (int n = 0; n < 4; ++n)
      if (!(p.bias_dims >> n & 1)) shape[static_cast<size_t>(n)] = 1;
    in.bias = input(p.bias_dtype, shape, false);
    if (layout() == Layout::kExpanded && shape[1] > 1) in.bias.expand(1);
    kill_all(in.bias);
    const Random random{options.seed, kBias};
    const int64_t heads = shape[1] == 1 ? std::min<int64_t>(1, p.num_heads_q) : p.num_heads_q;
    const bool rows_differ = shape[2] > 1 && shape[3] > 1;
    const double hiding = options.kind == InputKind::kNegative ? -1e4 : -INFINITY;
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < entry(b).seqlen_q; ++i)
          for (int64_t j = 0; j < entry(b).seqlen_k; ++j) {
            if (!in.in_mask(b, i, j)) continue;
            const int64_t at = in.bias_index(b, h, i, j);
            const auto n = static_cast<uint64_t>(at);
            const bool late = options.kind == InputKind::kNegative && shape[3] > 1 && (!rows_differ || i % 3 == 0) && 2 * j >= entry(b).seqlen_k;
            const bool hidden = late || (rows_differ && i % 7 == 3) || (shape[3] > 1 && random.below(n + (uint64_t{1} << 40), 3) == 0);
            const double spread = options.kind == InputKind::kPeaked ? 3 : options.kind == InputKind::kConstant ? 0 : 1;
            if (p.bias_dtype == TW_BOOL)
              in.bias.set(at, !hidden);
            else
              in.bias.set(at, hidden && options.kind != InputKind::kConstant ? hiding : spread * random.normal(n));
          }
  }

  void options_tensors() {
    if (has(p, TW_HAS_ALIBI)) {
      const bool per_batch = p.alibi_dims & TW_DIM_B;
      in.alibi_slopes = input(TW_FLOAT32, per_batch ? std::vector<int64_t>{p.batch, p.num_heads_q} : std::vector<int64_t>{p.num_heads_q}, false);
      for (int64_t n = 0; n < in.alibi_slopes.size(); ++n)
        in.alibi_slopes.set(n, std::exp2(-8.0 * static_cast<double>(n % p.num_heads_q + 1) / static_cast<double>(p.num_heads_q)) *
                                   (1 + 0.5 * static_cast<double>(n / p.num_heads_q)));
    }
    if (has(p, TW_HAS_SINK)) {
      in.sink = input(TW_FLOAT32, {p.num_heads_q}, false);
      for (int64_t h = 0; h < p.num_heads_q; ++h) in.sink.set(h, 2 * Random{options.seed, kSink}.normal(static_cast<uint64_t>(h)));
    }
    if (has(p, TW_HAS_RNG_STATE)) {
      in.rng_state = Buffer(TW_INT64, {2}, Buffer::Use::kInput);
      in.rng_state.set(0, static_cast<double>(options.seed + 77));
      in.rng_state.set(1, 5);
    }
  }

  void rotary() {
    const bool moving = p.causal || p.window_left >= 0 || p.window_right >= 0;
    int64_t positions = 1;
    for (int64_t b = 0; b < p.batch; ++b)
      positions = std::max(positions, entry(b).rotary_base + std::max(p.seqlen_new, moving ? entry(b).seqlen_q : int64_t{1}));
    const int64_t half = p.rotary_dim / 2;
    const int32_t dtype = options.seed % 2 ? p.dtype : int32_t{TW_FLOAT32};
    in.rotary_cos = input(dtype, {positions, half});
    in.rotary_sin = input(dtype, {positions, half});
    for (int64_t n = 0; n < positions * half; ++n) {
      const double angle = static_cast<double>(n / half) * std::pow(10000.0, -static_cast<double>(n % half) / static_cast<double>(half));
      in.rotary_cos.set(n, std::cos(angle));
      in.rotary_sin.set(n, std::sin(angle));
    }
  }

  void index_tensors() {
    const Layout index_layout = layout() == Layout::kEveryOther || layout() == Layout::kMixed ? Layout::kEveryOther : Layout::kContiguous;
    const auto make = [&](Buffer& x, auto&& value_of) {
      x = Buffer(TW_INT32, {p.batch}, Buffer::Use::kInput, index_layout, false);
      for (int64_t b = 0; b < p.batch; ++b) x.set(b, static_cast<double>(value_of(entry(b))));
    };
    const auto boundaries = [&](Buffer& x, const std::vector<int64_t>& lengths) {
      x = Buffer(TW_INT32, {p.batch + 1}, Buffer::Use::kInput, index_layout, false);
      for (int64_t b = 0, begin = 0; b < p.batch; ++b) x.set(b + 1, static_cast<double>(begin += lengths[static_cast<size_t>(b)]));
    };
    if (p.q_layout == TW_PACKED) boundaries(in.cu_seqlens_q, packed_q);
    if (p.k_layout == TW_PACKED) boundaries(in.cu_seqlens_k, packed_k);
    if (has(p, TW_HAS_SEQUSED_Q)) make(in.seqused_q, [](const Lengths& e) { return e.seqlen_q; });
    if (has(p, TW_HAS_SEQUSED_K)) make(in.seqused_k, [](const Lengths& e) { return e.used_k; });
    if (has(p, TW_HAS_CACHE_BATCH_IDX)) make(in.cache_batch_idx, [](const Lengths& e) { return e.cache_row; });
    if (has(p, TW_HAS_LEFTPAD_K)) make(in.leftpad_k, [](const Lengths& e) { return e.leftpad; });
    if (has(p, TW_HAS_ROTARY_SEQLENS)) make(in.rotary_seqlens, [](const Lengths& e) { return e.rotary_base; });
  }

  void outputs() {
    const auto dtype = [&](int32_t native) { return options.float32_outputs && native != TW_FLOAT64 ? int32_t{TW_FLOAT32} : native; };
    if (p.pass == TW_FORWARD) {
      in.o = output(dtype(p.dtype), query_shape(p.head_dim_v));
      if (has(p, TW_HAS_LSE)) in.lse = output(TW_FLOAT32, lse_shape(), false);
      if (has(p, TW_HAS_MAX_LOGIT)) in.max_logit = output(TW_FLOAT32, {p.batch, p.num_heads_q}, false);
      if (has(p, TW_HAS_DROPOUT_MASK)) in.dropout_mask = output(TW_BOOL, {p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k}, false);
    } else {
      if (has(p, TW_HAS_DQ)) in.dq = output(dtype(p.dtype), query_shape(p.head_dim));
      if (has(p, TW_HAS_DK)) in.dk = output(dtype(p.dtype), key_shape(p.head_dim));
      if (has(p, TW_HAS_DV)) in.dv = output(dtype(p.dtype), key_shape(p.head_dim_v));
      if (has(p, TW_HAS_DBIAS)) in.dbias = output(dtype(p.bias_dtype), in.bias.shape(), false);
      if (has(p, TW_HAS_DALIBI)) in.dalibi = output(TW_FLOAT32, in.alibi_slopes.shape(), false);
      if (has(p, TW_HAS_DSINK)) in.dsink = output(TW_FLOAT32, {p.num_heads_q}, false);
    }
    in.poison_outputs();
  }

  const tw_problem& p;
  const InputOptions& options;
  Inputs& in;
  RandomSequence length_random;
  std::vector<int64_t> packed_q, packed_k;  // lengths of the packed sequences
  int64_t key_rows = 0;
  mutable uint64_t mixed = 0;  // tensors made
};

tw_status Inputs::make(const tw_problem& problem, const InputOptions& options, std::unique_ptr<Inputs>* out, std::string* error) {
  auto inputs = std::make_unique<Inputs>();
  const tw_status status = InputMaker(problem, options, inputs.get()).make(error);
  if (status == TW_OK) *out = std::move(inputs);
  return status;
}

}  // namespace tilewise::harness
