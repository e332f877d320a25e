// The float64 reference against attention written out naively, and its gradients against finite differences of that.
#include "cpu/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dropout.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "unit/helpers.h"

namespace tilewise {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Case {
  std::string name;
  int64_t hq = 2, hk = 2, d = 5, dv = 5;
  std::vector<int32_t> lengths_q = {6, 6}, lengths_k = {6, 6};
  std::vector<int32_t> used_q = {}, used_k = {};  // empty: all
  bool packed_q = false, packed_k = false;
  bool causal = false;
  int64_t left = -1, right = -1;
  double scale = kNan, softcap = 0, dropout = 0;
  int alibi = 0;                  // dimensions of the slopes: 1, 2; 0 = none
  int bias = -1, bool_mask = -1;  // tw_dim bits; -1 = none
  bool sink = false;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// A problem of float64 tensors with everything needed to run it. Rows outside of all sequences hold NaN.
struct Example {
  const Case c;
  int64_t batch, sq, sk, rows_q, rows_k;  // rows in storage
  std::vector<int32_t> cu_q{0}, cu_k{0}, used_q, used_k;
  std::vector<double> q, k, v, bias, dout;
  std::vector<double> slopes, sink;  // multiples of 1/64, exact in float32
  std::vector<float> dlse;
  std::vector<uint8_t> bool_mask;
  std::mt19937 random{7};

  static int64_t longest(const std::vector<int32_t>& lengths) {
    return *std::max_element(lengths.begin(), lengths.end());
  }
  double number() { return std::uniform_real_distribution<double>(-1.5, 1.5)(random); }
  double coarse() { return std::round(number() * 64) / 64; }
  int64_t row_q(int64_t b, int64_t i) const { return c.packed_q ? cu_q[b] + i : b * sq + i; }
  int64_t row_k(int64_t b, int64_t j) const { return c.packed_k ? cu_k[b] + j : b * sk + j; }
  int64_t bias_count(int dims) const {
    return (dims & TW_DIM_B ? batch : 1) * (dims & TW_DIM_H ? c.hq : 1) * (dims & TW_DIM_Q ? sq : 1) *
           (dims & TW_DIM_K ? sk : 1);
  }
  std::vector<int64_t> bias_shape(int dims) const {
    return {dims & TW_DIM_B ? batch : 1, dims & TW_DIM_H ? c.hq : 1, dims & TW_DIM_Q ? sq : 1,
            dims & TW_DIM_K ? sk : 1};
  }
  int64_t bias_index(int dims, int64_t b, int64_t h, int64_t i, int64_t j) const {
    int64_t at = dims & TW_DIM_B ? b : 0;
    if (dims & TW_DIM_H) at = at * c.hq + h;
    if (dims & TW_DIM_Q) at = at * sq + i;
    if (dims & TW_DIM_K) at = at * sk + j;
    return at;
  }

  explicit Example(const Case& given) : c(given), batch(static_cast<int64_t>(c.lengths_q.size())) {
    sq = longest(c.lengths_q), sk = longest(c.lengths_k);
    for (int32_t n : c.lengths_q) cu_q.push_back(cu_q.back() + n);
    for (int32_t n : c.lengths_k) cu_k.push_back(cu_k.back() + n);
    rows_q = c.packed_q ? cu_q.back() + 2 : batch * sq;  // a tail of two rows that belong to no sequence
    rows_k = c.packed_k ? cu_k.back() + 2 : batch * sk;
    used_q = c.used_q.empty() ? c.lengths_q : c.used_q;
    used_k = c.used_k.empty() ? c.lengths_k : c.used_k;
    q.assign(rows_q * c.hq * c.d, kNan), dout.assign(rows_q * c.hq * c.dv, kNan), dlse.assign(rows_q * c.hq, NAN);
    k.assign(rows_k * c.hk * c.d, kNan), v.assign(rows_k * c.hk * c.dv, kNan);
    for (int64_t b = 0; b < batch; ++b) {
      const auto fill = [&](auto& x, int64_t row, int64_t width) {
        for (int64_t n = 0; n < width; ++n) x[row * width + n] = coarse();
      };
      for (int64_t i = 0; i < used_q[b]; ++i) {
        fill(q, row_q(b, i), c.hq * c.d), fill(dout, row_q(b, i), c.hq * c.dv);
        for (int64_t h = 0; h < c.hq; ++h) dlse[lse_index(b, h, i)] = static_cast<float>(coarse());
      }
      for (int64_t j = 0; j < used_k[b]; ++j) fill(k, row_k(b, j), c.hk * c.d), fill(v, row_k(b, j), c.hk * c.dv);
    }
    if (c.bias >= 0) bias.resize(bias_count(c.bias));
    for (double& x : bias) x = number();
    if (c.bool_mask >= 0) bool_mask.resize(bias_count(c.bool_mask));
    for (uint8_t& x : bool_mask) x = random() % 3 != 0;
    if (c.alibi) slopes.resize(c.alibi == 1 ? c.hq : batch * c.hq);
    for (double& x : slopes) x = coarse();
    if (c.sink) sink.resize(c.hq);
    for (double& x : sink) x = coarse();
  }

  int64_t lse_index(int64_t b, int64_t h, int64_t i) const {
    return c.packed_q ? h * rows_q + row_q(b, i) : (b * c.hq + h) * sq + i;
  }

  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t diagonal = i + used_k[b] - used_q[b], right = c.causal ? 0 : c.right;
    if (c.left >= 0 && j < diagonal - c.left) return false;
    if (right >= 0 && j > diagonal + right) return false;
    return c.bool_mask < 0 || bool_mask[bias_index(c.bool_mask, b, h, i, j)] != 0;
  }

  struct Outputs {
    std::vector<double> o, lse, max_logit;
  };

  // Attention as the contract has it, with no trick but the subtraction of the maximum.
  Outputs naive() const {
    Outputs out;
    out.o.assign(rows_q * c.hq * c.dv, 0);
    out.lse.assign(rows_q * c.hq, -INFINITY);
    out.max_logit.assign(batch * c.hq, -INFINITY);
    const double scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(c.d)) : c.scale;
    const Dropout dropout = Dropout::make(c.dropout, 11, 5);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < c.hq; ++h)
        for (int64_t i = 0; i < used_q[b]; ++i) {
          std::vector<double> s(used_k[b], -INFINITY);
          const int64_t hk = h / (c.hq / c.hk);
          double max = sink.empty() ? -INFINITY : sink[h];
          for (int64_t j = 0; j < used_k[b]; ++j) {
            if (!visible(b, h, i, j)) continue;
            double product = 0;
            for (int64_t n = 0; n < c.d; ++n)
              product += q[(row_q(b, i) * c.hq + h) * c.d + n] * k[(row_k(b, j) * c.hk + hk) * c.d + n];
            s[j] = scale * product;
            if (c.softcap > 0) s[j] = c.softcap * std::tanh(s[j] / c.softcap);
            if (c.alibi)
              s[j] -= slopes[c.alibi == 1 ? h : b * c.hq + h] * std::abs(double(i + used_k[b] - used_q[b] - j));
            if (c.bias >= 0) s[j] += bias[bias_index(c.bias, b, h, i, j)];
            max = std::max(max, s[j]);
            out.max_logit[b * c.hq + h] = std::max(out.max_logit[b * c.hq + h], s[j]);
          }
          if (max == -INFINITY) continue;
          double sum = sink.empty() ? 0 : std::exp(sink[h] - max);
          for (double x : s) sum += std::exp(x - max);
          out.lse[lse_index(b, h, i)] = max + std::log(sum);
          for (int64_t j = 0; j < used_k[b]; ++j) {
            if (s[j] == -INFINITY) continue;
            double p = std::exp(s[j] - max) / sum;
            if (c.dropout > 0) p = dropout.keep(b * c.hq + h, i, j) ? p / (1 - c.dropout) : 0;
            for (int64_t n = 0; n < c.dv; ++n)
              out.o[(row_q(b, i) * c.hq + h) * c.dv + n] += p * v[(row_k(b, j) * c.hk + hk) * c.dv + n];
          }
        }
    return out;
  }

  double loss() const {
    const Outputs out = naive();
    double sum = 0;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < used_q[b]; ++i)
        for (int64_t h = 0; h < c.hq; ++h) {
          const int64_t row = row_q(b, i) * c.hq + h, at = lse_index(b, h, i);
          for (int64_t n = 0; n < c.dv; ++n) sum += dout[row * c.dv + n] * out.o[row * c.dv + n];
          if (out.lse[at] != -INFINITY) sum += static_cast<double>(dlse[at]) * out.lse[at];
        }
    return sum;
  }
};

// Runs the reference on an Example; outputs begin as NaN.
struct Result {
  std::vector<double> o, dq, dk, dv, dbias;
  std::vector<float> lse, max_logit, dalibi, dsink;
  std::vector<uint8_t> dropout_mask;

  Result(Example& x, tw_pass pass, int num_threads = 2) {
    const Case& c = x.c;
    tw_problem p = default_problem();
    p.pass = pass, p.dtype = TW_FLOAT64;
    p.causal = c.causal, p.window_left = c.left, p.window_right = c.right;
    p.softmax_scale = c.scale, p.softcap = c.softcap;
    p.dropout_p = c.dropout, p.dropout_seed = 11, p.dropout_offset = 5;
    p.batch = x.batch, p.seqlen_q = x.sq, p.seqlen_k = x.sk;
    p.num_heads_q = c.hq, p.num_heads_k = c.hk, p.head_dim = c.d, p.head_dim_v = c.dv;
    if (c.packed_q) p.q_layout = TW_PACKED, p.total_q = x.rows_q;
    if (c.packed_k) p.k_layout = TW_PACKED, p.total_k = x.rows_k;

    const auto rows = [](bool packed, int64_t rows, int64_t batch, int64_t n, int64_t heads, int64_t width) {
      return packed ? std::vector<int64_t>{rows, heads, width} : std::vector<int64_t>{batch, n, heads, width};
    };
    const auto q_shape = rows(c.packed_q, x.rows_q, x.batch, x.sq, c.hq, c.d);
    const auto o_shape = rows(c.packed_q, x.rows_q, x.batch, x.sq, c.hq, c.dv);
    const auto k_shape = rows(c.packed_k, x.rows_k, x.batch, x.sk, c.hk, c.d);
    const auto v_shape = rows(c.packed_k, x.rows_k, x.batch, x.sk, c.hk, c.dv);
    const auto lse_shape =
        c.packed_q ? std::vector<int64_t>{c.hq, x.rows_q} : std::vector<int64_t>{x.batch, c.hq, x.sq};
    o.assign(x.dout.size(), kNan), dq.assign(x.q.size(), kNan), dk.assign(x.k.size(), kNan),
        dv.assign(x.v.size(), kNan);
    dbias.assign(x.bias.size(), kNan), lse.assign(x.dlse.size(), NAN), max_logit.assign(x.batch * c.hq, NAN);
    dalibi.assign(x.slopes.size(), NAN), dsink.assign(x.sink.size(), NAN);
    dropout_mask.assign(x.batch * c.hq * x.sq * x.sk, 9);
    std::vector<float> slopes(x.slopes.begin(), x.slopes.end()), sink(x.sink.begin(), x.sink.end());

    tw_tensor q = view(x.q, q_shape), k = view(x.k, k_shape), v = view(x.v, v_shape), out = view(o, o_shape),
              out_lse = view(lse, lse_shape), out_max = view(max_logit, {x.batch, c.hq}), dout = view(x.dout, o_shape),
              dlse = view(x.dlse, lse_shape), out_dq = view(dq, q_shape), out_dk = view(dk, k_shape),
              out_dv = view(dv, v_shape), cu_q = view(x.cu_q), cu_k = view(x.cu_k), used_q = view(x.used_q),
              used_k = view(x.used_k);
    const std::vector<int64_t> slopes_shape =
        c.alibi == 1 ? std::vector<int64_t>{c.hq} : std::vector<int64_t>{x.batch, c.hq};
    tw_tensor slopes_view = view(slopes, slopes_shape), out_dalibi = view(dalibi, slopes_shape),
              sink_view = view(sink, {c.hq}), out_dsink = view(dsink, {c.hq}),
              mask_view = view(dropout_mask.data(), TW_BOOL, {x.batch, c.hq, x.sq, x.sk});
    tw_tensor bias = {}, out_dbias = {};
    tw_tensors t = {};
    t.struct_size = sizeof t;
    t.q = &q, t.k = &k, t.v = &v;
    if (c.packed_q) t.cu_seqlens_q = &cu_q;
    if (c.packed_k) t.cu_seqlens_k = &cu_k;
    if (!c.used_q.empty()) t.seqused_q = &used_q, p.features |= TW_HAS_SEQUSED_Q;
    if (!c.used_k.empty()) t.seqused_k = &used_k, p.features |= TW_HAS_SEQUSED_K;
    if (c.alibi) {
      t.alibi_slopes = &slopes_view, p.features |= TW_HAS_ALIBI;
      p.alibi_dims = c.alibi == 1 ? int32_t{TW_DIM_H} : int32_t{TW_DIM_B | TW_DIM_H};
    }
    if (c.bias >= 0) bias = view(x.bias, x.bias_shape(c.bias)), p.bias_dims = c.bias, p.bias_dtype = TW_FLOAT64;
    if (c.bool_mask >= 0)
      bias = view(x.bool_mask.data(), TW_BOOL, x.bias_shape(c.bool_mask)), p.bias_dims = c.bool_mask,
      p.bias_dtype = TW_BOOL;
    if (bias.ndim) t.bias = &bias, p.features |= TW_HAS_BIAS;
    if (c.sink) t.sink = &sink_view, p.features |= TW_HAS_SINK;
    if (pass == TW_FORWARD) {
      t.o = &out, t.lse = &out_lse, t.max_logit = &out_max, t.dropout_mask = &mask_view;
      p.features |= TW_HAS_LSE | TW_HAS_MAX_LOGIT | TW_HAS_DROPOUT_MASK;
    } else {
      t.dout = &dout, t.dlse = &dlse, t.dq = &out_dq, t.dk = &out_dk, t.dv = &out_dv;
      p.features |= TW_HAS_DLSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV;
      if (c.bias >= 0) out_dbias = view(dbias, x.bias_shape(c.bias)), t.dbias = &out_dbias, p.features |= TW_HAS_DBIAS;
      if (c.alibi) t.dalibi = &out_dalibi, p.features |= TW_HAS_DALIBI;
      if (c.sink) t.dsink = &out_dsink, p.features |= TW_HAS_DSINK;
    }
    Target target;
    target.num_threads = num_threads;
    Plan plan;
    plan.problem = p;
    plan.target = target;
    EXPECT_TRUE(plan_reference(p, target, &plan).ok());
    constexpr int64_t kGuard = 16;
    std::vector<double> workspace(plan.workspace_bytes / 8 + kGuard, kNan);
    std::fill(workspace.end() - kGuard, workspace.end(), 77.0);
    EXPECT_TRUE(run_reference(plan, t, workspace.data(), nullptr).ok());
    for (int64_t n = 1; n <= kGuard; ++n) EXPECT_EQ(*(workspace.end() - n), 77.0) << "workspace overrun";
  }
};

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&](const std::string& name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    change(c);
    list.push_back(c);
  };
  add("full", [](Case&) {});
  add("one_key", [](Case& c) { c.lengths_q = {1}, c.lengths_k = {1}; });
  add("causal", [](Case& c) { c.causal = true; });
  add("causal_more_keys", [](Case& c) { c.causal = true, c.lengths_k = {9, 9}; });
  add("causal_more_queries", [](Case& c) { c.causal = true, c.lengths_k = {3, 3}; });
  add("window", [](Case& c) { c.left = 2, c.right = 1; });
  add("window_empty_rows", [](Case& c) { c.left = 0, c.right = 1, c.lengths_q = {9, 9}, c.lengths_k = {4, 4}; });
  add("window_left_causal", [](Case& c) { c.left = 3, c.causal = true, c.lengths_k = {8, 8}; });
  add("window_right_only", [](Case& c) { c.right = 2; });
  add("scale_zero", [](Case& c) { c.scale = 0; });
  add("scale_negative", [](Case& c) { c.scale = -0.5; });
  add("softcap", [](Case& c) { c.softcap = 1.5, c.scale = 1; });
  add("alibi_h", [](Case& c) { c.alibi = 1, c.lengths_k = {8, 8}; });
  add("alibi_bh_softcap_causal", [](Case& c) { c.alibi = 2, c.softcap = 2, c.causal = true; });
  for (int dims = 0; dims < 16; ++dims)
    add("bias_" + std::to_string(dims), [=](Case& c) { c.bias = dims, c.lengths_k = {7, 7}; });
  add("bias_softcap_packed", [](Case& c) {
    c.bias = TW_DIM_H | TW_DIM_K, c.softcap = 2, c.packed_q = c.packed_k = true, c.lengths_q = {4, 6};
  });
  for (int dims : {15, 12, 8, 4, 0}) add("mask_" + std::to_string(dims), [=](Case& c) { c.bool_mask = dims; });
  add("sink", [](Case& c) { c.sink = true; });
  add("sink_empty_rows", [](Case& c) { c.sink = true, c.causal = true, c.lengths_k = {3, 3}; });
  add("dropout", [](Case& c) { c.dropout = 0.4; });
  add("dropout_sink_causal_gqa", [](Case& c) { c.dropout = 0.3, c.sink = true, c.causal = true, c.hq = 4; });
  add("gqa", [](Case& c) { c.hq = 6, c.hk = 2; });
  add("mqa_wide_v", [](Case& c) { c.hq = 3, c.hk = 1, c.dv = 9; });
  add("narrow_v", [](Case& c) { c.d = 17, c.dv = 3; });
  add("no_keys", [](Case& c) { c.lengths_k = {0, 0}; });
  add("no_keys_sink", [](Case& c) { c.lengths_k = {0, 0}, c.sink = true; });
  add("no_queries", [](Case& c) { c.lengths_q = {0, 0}; });
  add("packed", [](Case& c) {
    c.packed_q = c.packed_k = true, c.lengths_q = {0, 4, 7, 0, 2}, c.lengths_k = {3, 6, 5, 0, 0}, c.causal = true;
  });
  add("packed_seqused", [](Case& c) {
    c.packed_q = c.packed_k = true, c.lengths_q = {4, 7, 3}, c.lengths_k = {5, 6, 5}, c.used_q = {2, 7, 0},
    c.used_k = {5, 3, 4};
    c.hq = 4, c.sink = true, c.dropout = 0.2;
  });
  add("packed_q_dense_k", [](Case& c) { c.packed_q = true, c.lengths_q = {4, 1}, c.used_k = {6, 2}; });
  add("dense_q_packed_k", [](Case& c) { c.packed_k = true, c.lengths_k = {4, 1}; });
  add("dense_seqused", [](Case& c) { c.used_q = {3, 6}, c.used_k = {5, 0}, c.alibi = 1, c.bias = 8, c.left = 3; });
  return list;
}

class ReferenceTest : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Options, ReferenceTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ReferenceTest, ForwardEqualsNaive) {
  Example x(GetParam());
  const Result run(x, TW_FORWARD);
  const Example::Outputs want = x.naive();
  for (size_t n = 0; n < want.o.size(); ++n) ASSERT_NEAR(run.o[n], want.o[n], 1e-12) << "o[" << n << "]";
  const auto same = [](float got, double want) {
    return got == static_cast<float>(want) || std::abs(got - want) < 1e-6 * std::max(1.0, std::abs(want));
  };
  for (size_t n = 0; n < want.lse.size(); ++n)
    ASSERT_TRUE(same(run.lse[n], want.lse[n])) << "lse[" << n << "] " << run.lse[n] << " " << want.lse[n];
  for (size_t n = 0; n < want.max_logit.size(); ++n)
    ASSERT_TRUE(same(run.max_logit[n], want.max_logit[n])) << run.max_logit[n] << " " << want.max_logit[n];
  const Dropout dropout = Dropout::make(x.c.dropout, 11, 5);
  for (int64_t b = 0, n = 0; b < x.batch; ++b)
    for (int64_t h = 0; h < x.c.hq; ++h)
      for (int64_t i = 0; i < x.sq; ++i)
        for (int64_t j = 0; j < x.sk; ++j, ++n)
          ASSERT_EQ(run.dropout_mask[n], i < x.used_q[b] && j < x.used_k[b] && dropout.keep(b * x.c.hq + h, i, j));
}

TEST_P(ReferenceTest, GradientsEqualFiniteDifferences) {
  Example x(GetParam());
  const Result run(x, TW_BACKWARD);
  constexpr double kStep = 1e-4;  // truncation about 1e-8, rounding about 1e-12 / 1e-4
  const auto check = [&](const char* name, std::vector<double>& input, const auto& gradient, double tolerance) {
    ASSERT_EQ(input.size(), gradient.size());
    for (size_t n = 0; n < input.size(); ++n) {
      double want = 0;
      if (!std::isnan(input[n])) {  // NaN: belongs to no sequence
        const double before = input[n];
        input[n] = before + kStep;
        const double above = x.loss();
        input[n] = before - kStep;
        want = (above - x.loss()) / (2 * kStep);
        input[n] = before;
      }
      ASSERT_NEAR(gradient[n], want, tolerance * std::max(1.0, std::abs(want))) << name << "[" << n << "]";
    }
  };
  check("dq", x.q, run.dq, 1e-6);
  check("dk", x.k, run.dk, 1e-6);
  check("dv", x.v, run.dv, 1e-6);
  check("dbias", x.bias, run.dbias, 1e-6);
  check("dalibi", x.slopes, run.dalibi, 2e-6);  // float32 outputs
  check("dsink", x.sink, run.dsink, 2e-6);
}

TEST_P(ReferenceTest, ThreadsChangeNothing) {
  Example x(GetParam());
  const auto same = [](const auto& a, const auto& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
  };
  const Result forward_1(x, TW_FORWARD, 1), forward_3(x, TW_FORWARD, 3), backward_1(x, TW_BACKWARD, 1),
      backward_3(x, TW_BACKWARD, 3);
  EXPECT_TRUE(same(forward_1.o, forward_3.o) && same(forward_1.lse, forward_3.lse));
  EXPECT_TRUE(same(backward_1.dq, backward_3.dq) && same(backward_1.dk, backward_3.dk) &&
              same(backward_1.dv, backward_3.dv));
  EXPECT_TRUE(same(backward_1.dbias, backward_3.dbias) && same(backward_1.dalibi, backward_3.dalibi) &&
              same(backward_1.dsink, backward_3.dsink));
}

// Keys that a row does not see may hold anything: the results are those with zeros there, bit for bit.
TEST(ReferencePoison, HiddenKeysNeverLeak) {
  for (const double poison : {kNan, double{INFINITY}, -double{INFINITY}}) {
    Case c;
    c.bool_mask = TW_DIM_K;
    c.lengths_q = {3, 3}, c.hq = 4;
    Example zero(c), poisoned(c);
    for (int64_t j = 0; j < zero.sk; ++j) zero.bool_mask[j] = poisoned.bool_mask[j] = j % 2;
    for (int64_t b = 0; b < zero.batch; ++b)
      for (int64_t j = 0; j < zero.sk; j += 2) {
        std::fill_n(zero.k.begin() + zero.row_k(b, j) * c.hk * c.d, c.hk * c.d, 0.0);
        std::fill_n(zero.v.begin() + zero.row_k(b, j) * c.hk * c.dv, c.hk * c.dv, 0.0);
        std::fill_n(poisoned.k.begin() + poisoned.row_k(b, j) * c.hk * c.d, c.hk * c.d, poison);
        std::fill_n(poisoned.v.begin() + poisoned.row_k(b, j) * c.hk * c.dv, c.hk * c.dv, poison);
      }
    const Result a(zero, TW_FORWARD), b(poisoned, TW_FORWARD), da(zero, TW_BACKWARD), db(poisoned, TW_BACKWARD);
    EXPECT_EQ(a.o, b.o);
    EXPECT_EQ(a.lse, b.lse);
    EXPECT_EQ(a.max_logit, b.max_logit);
    EXPECT_EQ(da.dq, db.dq);
    EXPECT_EQ(da.dk, db.dk);
    EXPECT_EQ(da.dv, db.dv);
  }
}

TEST(ReferencePoison, VisibleNanReachesItsOutputsOnly) {
  Case c;
  c.causal = true;
  Example x(c);
  x.k[(x.row_k(0, 4) * c.hk + 1) * c.d] = kNan;  // key 4 of batch entry 0, head 1: rows 4 and 5 see it
  const Result run(x, TW_FORWARD);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t i = 0; i < 6; ++i)
      for (int64_t h = 0; h < 2; ++h)
        EXPECT_EQ(std::isnan(run.o[(x.row_q(b, i) * 2 + h) * c.dv]), b == 0 && h == 1 && i >= 4)
            << b << " " << i << " " << h;
  EXPECT_TRUE(std::isnan(run.max_logit[1]));
  EXPECT_FALSE(std::isnan(run.max_logit[0]) || std::isnan(run.max_logit[2]));
}

TEST(ReferenceExtremes, OneKeyGivesItsValueExactly) {
  Case c;
  c.lengths_q = {1}, c.lengths_k = {1}, c.scale = 1;
  Example x(c);
  for (double& n : x.q) n = 1e6;
  for (double& n : x.k) n = 1e6 / 5;
  EXPECT_EQ(Result(x, TW_FORWARD).o, x.v);
  for (double& n : x.k) n = -n;
  EXPECT_EQ(Result(x, TW_FORWARD).o, x.v);
}

TEST(ReferenceExtremes, BiasOfMinusInfinityGivesWeightZero) {
  Case c;
  c.bias = TW_DIM_Q | TW_DIM_K;
  Example x(c);
  for (int64_t j = 0; j < x.sk; ++j) x.bias[j] = -INFINITY, x.bias[x.sk + j] = j == 2 ? 0.25 : -INFINITY;
  const Result run(x, TW_FORWARD), gradients(x, TW_BACKWARD);
  for (int64_t h = 0; h < c.hq; ++h) {
    EXPECT_EQ(run.lse[x.lse_index(0, h, 0)], -INFINITY);
    for (int64_t n = 0; n < c.dv; ++n) {
      EXPECT_EQ(run.o[(x.row_q(0, 0) * c.hq + h) * c.dv + n], 0);
      EXPECT_EQ(run.o[(x.row_q(0, 1) * c.hq + h) * c.dv + n], x.v[(x.row_k(0, 2) * c.hk + h) * c.dv + n]);
    }
  }
  for (double n : gradients.dq) EXPECT_TRUE(std::isfinite(n));
  for (double n : gradients.dk) EXPECT_TRUE(std::isfinite(n));
  for (double n : gradients.dbias) EXPECT_TRUE(std::isfinite(n));
}

}  // namespace
}  // namespace tilewise
