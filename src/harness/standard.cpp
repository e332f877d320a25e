#include "harness/standard.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/dtype.h"

namespace tilewise::harness {
namespace {

double round_to(int32_t dtype, double value) {
  alignas(8) char memory[8];
  store_element(memory, dtype, 0, value);
  return load_element(memory, dtype, 0);
}

void round_all(int32_t dtype, std::vector<double>* values) {
  for (double& value : *values) value = round_to(dtype, value);
}

// One batch entry and query head at a time, in Real; `rounds`: intermediates go through the dtype.
template <class Real>
class Standard {
 public:
  Standard(Inputs& in, Arithmetic arithmetic)
      : in(in), p(in.problem()), d(p.head_dim), dv(p.head_dim_v), oracle(arithmetic == Arithmetic::kOracle),
        rounds(arithmetic == Arithmetic::kInType && (p.dtype == TW_FLOAT16 || p.dtype == TW_BFLOAT16)) {}

  StandardResult run() {
    const double default_scale = 1 / std::sqrt(static_cast<double>(d));
    scale = static_cast<Real>(std::isnan(p.softmax_scale) ? default_scale : p.softmax_scale);
    seed = p.dropout_seed, offset = p.dropout_offset;
    if (in.rng_state.exists()) {
      seed = static_cast<uint64_t>(in.rng_state.get(0));
      offset = static_cast<uint64_t>(in.rng_state.get(1));
    }
    allocate();
    append();
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.num_heads_q; ++h) {
        load(b, h);
        scores(b, h);
        softmax(b, h);
        if (p.pass == TW_FORWARD)
          forward(b, h);
        else
          backward(b, h);
      }
    if (!oracle) round_outputs();
    return std::move(out);
  }

 private:
  using Matrix = std::vector<Real>;
  static constexpr Real kNone = -static_cast<Real>(INFINITY);

  static void raise(double* value, double to) {
    if (to > *value && std::isfinite(to)) *value = to;
  }
  static double largest(const Matrix& x) {
    double most = 0;
    for (Real value : x) raise(&most, std::abs(static_cast<double>(value)));
    return most;
  }

  Real rounded(Real value) const { return rounds ? static_cast<Real>(round_to(p.dtype, value)) : value; }

  static std::vector<double> zeros(const Buffer& x, double value = 0) {
    return std::vector<double>(static_cast<size_t>(x.exists() ? x.size() : 0), value);
  }

  void allocate() {
    if (p.pass == TW_FORWARD) {
      out.o = zeros(in.o), out.lse = zeros(in.lse, -INFINITY), out.max_logit = zeros(in.max_logit, -INFINITY);
      out.dropout_mask = zeros(in.dropout_mask);
    } else {
      out.dq = zeros(in.dq), out.dk = zeros(in.dk), out.dv = zeros(in.dv), out.dbias = zeros(in.dbias);
      out.dalibi = zeros(in.dalibi), out.dsink = zeros(in.dsink);
      o_values = in.o.values(), dout_values = in.dout.values();
    }
    out.seeing.assign(static_cast<size_t>(in.q.num_rows()), false);
    out.seen.assign(static_cast<size_t>(in.k.num_rows()), false);
    q_values = in.q.values(), k_values = in.k.values(), v_values = in.v.values();
  }

  // Row of d elements, its first rotary_dim turned by the angles of `position`; float32 arithmetic, rounded to the dtype.
  void rotate(double* row, int64_t position) const {
    if (p.rotary_dim == 0) return;
    const int64_t half = p.rotary_dim / 2;
    for (int64_t n = 0; n < half; ++n) {
      double& x = row[p.rotary_interleaved ? 2 * n : n];
      double& y = row[p.rotary_interleaved ? 2 * n + 1 : n + half];
      const double cosine = in.rotary_cos.get(position * half + n), sine = in.rotary_sin.get(position * half + n);
      const double old_x = x, old_y = y;
      if (p.dtype == TW_FLOAT64) {
        x = old_x * cosine - old_y * sine;
        y = old_x * sine + old_y * cosine;
      } else {
        const auto fx = static_cast<float>(old_x), fy = static_cast<float>(old_y);
        const auto fc = static_cast<float>(cosine), fs = static_cast<float>(sine);
        x = round_to(p.dtype, static_cast<double>(fx * fc - fy * fs));
        y = round_to(p.dtype, static_cast<double>(fx * fs + fy * fc));
      }
    }
  }

  void append() {
    if (!in.appends()) return;
    const std::vector<double> k_new = in.k_new.values(), v_new = in.v_new.values();
    for (int64_t b = 0; b < p.batch; ++b) {
      const Lengths& e = in.lengths()[static_cast<size_t>(b)];
      for (int64_t n = 0; n < p.seqlen_new; ++n)
        for (int64_t h = 0; h < p.num_heads_k; ++h) {
          const int64_t from = (b * p.seqlen_new + n) * p.num_heads_k + h, to = in.k_row(b, e.used_k + n, h);
          std::copy_n(&k_new[static_cast<size_t>(from * d)], d, &k_values[static_cast<size_t>(to * d)]);
          std::copy_n(&v_new[static_cast<size_t>(from * dv)], dv, &v_values[static_cast<size_t>(to * dv)]);
          rotate(&k_values[static_cast<size_t>(to * d)], e.rotary_base + n);
        }
    }
    out.k = k_values, out.v = v_values;
  }

  void load(int64_t b, int64_t h) {
    const Lengths& e = in.lengths()[static_cast<size_t>(b)];
    sq = e.seqlen_q, sk = e.seqlen_k;
    const int64_t kh = h / (p.num_heads_q / p.num_heads_k);
    const bool moving = p.causal || p.window_left >= 0 || p.window_right >= 0;
    const auto rows = [](int64_t n, int64_t width) { return Matrix(static_cast<size_t>(n * width)); };
    q = rows(sq, d), k = rows(sk, d), v = rows(sk, dv);
    std::vector<double> row(static_cast<size_t>(d));
    for (int64_t i = 0; i < sq; ++i) {
      std::copy_n(&q_values[static_cast<size_t>(in.q_row(b, i, h) * d)], d, row.data());
      rotate(row.data(), e.rotary_base + (moving ? i : 0));
      std::transform(row.begin(), row.end(), &q[static_cast<size_t>(i * d)], [](double x) { return static_cast<Real>(x); });
    }
    for (int64_t j = 0; j < sk; ++j) {
      const int64_t from = in.k_row(b, j + e.leftpad, kh);
      for (int64_t c = 0; c < d; ++c) k[static_cast<size_t>(j * d + c)] = static_cast<Real>(k_values[static_cast<size_t>(from * d + c)]);
      for (int64_t c = 0; c < dv; ++c) {
        v[static_cast<size_t>(j * dv + c)] = static_cast<Real>(v_values[static_cast<size_t>(from * dv + c)]);
        raise(&out.magnitude.o, std::abs(v_values[static_cast<size_t>(from * dv + c)]));
      }
    }
  }

  // c[m, n] += a[m, k] b[n, k]^T, rows of c in order of k: sequential float sums, but vectors along n.
  static Matrix multiply_transposed(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t depth) {
    Matrix bt(static_cast<size_t>(n * depth)), c(static_cast<size_t>(m * n), 0);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t x = 0; x < depth; ++x) bt[static_cast<size_t>(x * n + j)] = b[static_cast<size_t>(j * depth + x)];
    for (int64_t i = 0; i < m; ++i)
      for (int64_t x = 0; x < depth; ++x) axpy(a[static_cast<size_t>(i * depth + x)], &bt[static_cast<size_t>(x * n)], &c[static_cast<size_t>(i * n)], n);
    return c;
  }
  static void axpy(Real factor, const Real* x, Real* y, int64_t n) {
    for (int64_t c = 0; c < n; ++c) y[c] += factor * x[c];
  }

  // s, exact[.] (float32 scores for lse), capped[.] = d capped / d score; kNone where hidden.
  void scores(int64_t b, int64_t h) {
    s = multiply_transposed(q, k, sq, sk, d);
    exact.assign(s.size(), kNone);
    slope_of_cap.assign(p.softcap > 0 ? s.size() : 0, 1);
    seen.assign(s.size(), false);
    const Real slope = in.alibi_slopes.exists()
                           ? static_cast<Real>(in.alibi_slopes.get((p.alibi_dims & TW_DIM_B ? b * p.num_heads_q : 0) + h))
                           : 0;
    const auto cap = static_cast<Real>(p.softcap);
    for (int64_t i = 0; i < sq; ++i)
      for (int64_t j = 0; j < sk; ++j) {
        const auto n = static_cast<size_t>(i * sk + j);
        if (!in.visible(b, h, i, j)) {
          s[n] = kNone;
          continue;
        }
        seen[n] = true;
        Real x = s[n] * scale, r = rounded(rounded(s[n]) * scale);
        raise(&out.max_score, std::abs(static_cast<double>(x)));
        if (cap > 0) {
          const Real t = std::tanh(r / cap);
          slope_of_cap[n] = 1 - t * t;
          x = cap * std::tanh(x / cap), r = rounded(cap * rounded(t));
        }
        if (in.alibi_slopes.exists()) {
          const Real distance = -slope * static_cast<Real>(std::abs(static_cast<double>(i + sk - sq - j)));
          x += distance, r = rounded(r + distance);
        }
        if (in.bias.exists() && in.bias.dtype() != TW_BOOL) {
          const auto added = static_cast<Real>(in.bias.get(in.bias_index(b, h, i, j)));
          x += added, r = rounded(r + added);
        }
        if (std::isfinite(x)) raise(&out.max_score, std::abs(static_cast<double>(x)));
        if (std::isfinite(x) && !std::isfinite(r)) out.overflow = true;
        exact[n] = x, s[n] = r;
        if (x == kNone) continue;
        out.seeing[static_cast<size_t>(in.q_row(b, i, h))] = true;
        out.seen[static_cast<size_t>(in.k_row(b, j + in.lengths()[static_cast<size_t>(b)].leftpad, h / (p.num_heads_q / p.num_heads_k)))] = true;
      }
  }

  // p from s: by the row's own sum, or in the backward pass from the float32 lse that is given, as the contract has it; a
  // framework in 16 bits normalises by its own sum.
  void softmax(int64_t b, int64_t h) {
    const Real sink = in.sink.exists() ? static_cast<Real>(in.sink.get(h)) : kNone;
    probability.assign(s.size(), 0);
    lse.assign(static_cast<size_t>(sq), kNone);
    for (int64_t i = 0; i < sq; ++i) {
      const auto sums = [&](const Matrix& x, Real* max) {
        *max = sink;
        for (int64_t j = 0; j < sk; ++j) *max = at(x, i, j) > *max ? at(x, i, j) : *max;
        Real sum = sink == kNone ? 0 : std::exp(sink - *max);
        for (int64_t j = 0; j < sk; ++j)
          if (at(x, i, j) != kNone) sum += std::exp(at(x, i, j) - *max);
        return sum;
      };
      Real max, exact_max;
      const Real sum = sums(s, &max), exact_sum = sums(exact, &exact_max);
      lse[static_cast<size_t>(i)] = exact_sum == 0 ? kNone : exact_max + std::log(exact_sum);
      const bool given = p.pass == TW_BACKWARD && (!rounds || p.dtype == TW_FLOAT32);
      const Real given_lse = given ? static_cast<Real>(in.lse.get(in.lse_index(b, i, h))) : 0;
      for (int64_t j = 0; j < sk; ++j)
        if (at(s, i, j) != kNone)
          probability[static_cast<size_t>(i * sk + j)] = rounded(given ? std::exp(at(s, i, j) - given_lse) : std::exp(at(s, i, j) - max) / sum);
    }
  }

  Real at(const Matrix& x, int64_t i, int64_t j) const { return x[static_cast<size_t>(i * sk + j)]; }

  Real kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (p.dropout_p == 0) return 1;
    return tw_dropout_keep(p.dropout_p, seed, offset, b * p.num_heads_q + h, i, j) ? static_cast<Real>(1 / (1 - p.dropout_p)) : 0;
  }

  void forward(int64_t b, int64_t h) {
    Real max = kNone;
    Matrix row(static_cast<size_t>(dv));
    for (int64_t i = 0; i < sq; ++i) {
      std::fill(row.begin(), row.end(), 0);
      for (int64_t j = 0; j < sk; ++j) {
        const auto n = static_cast<size_t>(i * sk + j);
        if (!seen[n]) continue;
        if (exact[n] > max || std::isnan(exact[n])) max = exact[n];
        if (lse[static_cast<size_t>(i)] == kNone) continue;
        axpy(rounded(probability[n] * kept(b, h, i, j)), &v[static_cast<size_t>(j * dv)], row.data(), dv);
      }
      std::copy(row.begin(), row.end(), &out.o[static_cast<size_t>(in.q_row(b, i, h) * dv)]);
      if (!out.lse.empty()) out.lse[static_cast<size_t>(in.lse_index(b, i, h))] = static_cast<double>(lse[static_cast<size_t>(i)]);
    }
    if (!out.max_logit.empty()) out.max_logit[static_cast<size_t>(b * p.num_heads_q + h)] = static_cast<double>(max);
    if (out.dropout_mask.empty()) return;
    for (int64_t i = 0; i < sq; ++i)
      for (int64_t j = 0; j < sk; ++j)
        out.dropout_mask[static_cast<size_t>(((b * p.num_heads_q + h) * p.seqlen_q + i) * p.seqlen_k + j)] = kept(b, h, i, j) != 0;
  }

  void backward(int64_t b, int64_t h) {
    const Lengths& e = in.lengths()[static_cast<size_t>(b)];
    const int64_t kh = h / (p.num_heads_q / p.num_heads_k);
    Matrix dout(static_cast<size_t>(sq * dv));
    std::vector<Real> delta(static_cast<size_t>(sq), 0);  // rowsum(dout * o) - dlse
    std::vector<double> delta_terms(static_cast<size_t>(sq), 0);
    for (int64_t i = 0; i < sq; ++i) {
      const int64_t from = in.q_row(b, i, h) * dv;
      for (int64_t c = 0; c < dv; ++c) {
        dout[static_cast<size_t>(i * dv + c)] = static_cast<Real>(dout_values[static_cast<size_t>(from + c)]);
        const Real term = dout[static_cast<size_t>(i * dv + c)] * static_cast<Real>(o_values[static_cast<size_t>(from + c)]);
        delta[static_cast<size_t>(i)] += term, delta_terms[static_cast<size_t>(i)] += std::abs(static_cast<double>(term));
      }
      if (!in.dlse.exists()) continue;
      const double dlse = in.dlse.get(in.lse_index(b, i, h));
      delta[static_cast<size_t>(i)] -= static_cast<Real>(dlse), delta_terms[static_cast<size_t>(i)] += std::abs(dlse);
    }
    const Matrix dp = multiply_transposed(dout, v, sq, sk, dv);
    // Sums of |dS| and of P by row and by key, the latter over the whole group of query heads.
    std::vector<double> row_terms(static_cast<size_t>(sq), 0);
    if (h % (p.num_heads_q / p.num_heads_k) == 0)
      key_terms.assign(static_cast<size_t>(sk), 0), key_weights.assign(static_cast<size_t>(sk), 0);
    if (bias_terms.empty()) bias_terms.assign(out.dbias.size(), 0);
    if (alibi_terms.empty()) alibi_terms.assign(out.dalibi.size(), 0);
    if (sink_terms.empty()) sink_terms.assign(out.dsink.size(), 0);
    const auto alibi_at = static_cast<size_t>((p.alibi_dims & TW_DIM_B ? b * p.num_heads_q : 0) + h);
    Matrix dq(static_cast<size_t>(sq * d), 0), dk(static_cast<size_t>(sk * d), 0), dvs(static_cast<size_t>(sk * dv), 0);
    for (int64_t i = 0; i < sq; ++i)
      for (int64_t j = 0; j < sk; ++j) {
        const auto n = static_cast<size_t>(i * sk + j);
        const Real weight = probability[n];
        if (!seen[n] || s[n] == kNone) continue;
        const Real keep = kept(b, h, i, j);
        axpy(rounded(weight * keep), &dout[static_cast<size_t>(i * dv)], &dvs[static_cast<size_t>(j * dv)], dv);
        Real ds = rounded(weight * (rounded(dp[n]) * keep - delta[static_cast<size_t>(i)]));
        const double term = static_cast<double>(weight) *
                            (std::abs(static_cast<double>(dp[n] * keep)) + delta_terms[static_cast<size_t>(i)]);
        row_terms[static_cast<size_t>(i)] += term, key_terms[static_cast<size_t>(j)] += term;
        key_weights[static_cast<size_t>(j)] += static_cast<double>(weight * keep);
        if (!out.dbias.empty()) {
          const auto at = static_cast<size_t>(in.bias_index(b, h, i, j));
          out.dbias[at] += static_cast<double>(ds), bias_terms[at] += term;
        }
        if (!out.dalibi.empty()) {
          const double distance = std::abs(static_cast<double>(i + sk - sq - j));
          out.dalibi[alibi_at] -= distance * static_cast<double>(ds), alibi_terms[alibi_at] += distance * term;
        }
        if (!slope_of_cap.empty()) ds = rounded(ds * slope_of_cap[n]);
        ds = rounded(ds * scale);
        axpy(ds, &k[static_cast<size_t>(j * d)], &dq[static_cast<size_t>(i * d)], d);
        axpy(ds, &q[static_cast<size_t>(i * d)], &dk[static_cast<size_t>(j * d)], d);
      }
    if (!out.dsink.empty())
      for (int64_t i = 0; i < sq; ++i) {
        const auto row_lse = static_cast<Real>(in.lse.get(in.lse_index(b, i, h)));
        const Real weight = std::exp(static_cast<Real>(in.sink.get(h)) - row_lse);
        out.dsink[static_cast<size_t>(h)] -= static_cast<double>(weight * delta[static_cast<size_t>(i)]);
        sink_terms[static_cast<size_t>(h)] += static_cast<double>(weight) * delta_terms[static_cast<size_t>(i)];
      }
    const double factor = std::abs(static_cast<double>(scale));
    const double most_q = factor * largest(q), most_k = factor * largest(k), most_dout = largest(dout);
    for (double terms : row_terms) raise(&out.magnitude.dq, terms * most_k);
    for (double terms : key_terms) raise(&out.magnitude.dk, terms * most_q);
    for (double weights : key_weights) raise(&out.magnitude.dv, weights * most_dout);
    for (double terms : bias_terms) raise(&out.magnitude.dbias, terms);
    for (double terms : alibi_terms) raise(&out.magnitude.dalibi, terms);
    for (double terms : sink_terms) raise(&out.magnitude.dsink, terms);
    for (int64_t i = 0; i < sq && !out.dq.empty(); ++i)
      std::copy_n(&dq[static_cast<size_t>(i * d)], d, &out.dq[static_cast<size_t>(in.q_row(b, i, h) * d)]);
    const auto add = [&](const Matrix& from, int64_t width, std::vector<double>* to) {
      for (int64_t j = 0; j < sk && !to->empty(); ++j)
        for (int64_t c = 0; c < width; ++c)
          (*to)[static_cast<size_t>(in.k_row(b, j + e.leftpad, kh) * width + c)] += static_cast<double>(from[static_cast<size_t>(j * width + c)]);
    };
    add(dk, d, &out.dk);
    add(dvs, dv, &out.dv);
  }

  void round_outputs() {
    const auto apply = [](const Buffer& x, std::vector<double>* values) {
      if (x.exists() && !values->empty()) round_all(x.dtype(), values);
    };
    for (const Inputs::Named& output : in.outputs())
      if (auto* values = out.output(output.name)) apply(*output.buffer, values);
  }

  Inputs& in;
  const tw_problem& p;
  const int64_t d, dv;
  const bool oracle, rounds;
  Real scale = 1;
  uint64_t seed = 0, offset = 0;
  StandardResult out;
  std::vector<double> q_values, k_values, v_values, o_values, dout_values;
  int64_t sq = 0, sk = 0;
  Matrix q, k, v, s, exact, slope_of_cap, probability, lse;
  std::vector<bool> seen;
  std::vector<double> key_terms, key_weights, bias_terms, alibi_terms, sink_terms;
};

}  // namespace

std::vector<double>* StandardResult::output(const std::string& name) {
  const struct {
    const char* name;
    std::vector<double>* values;
  } all[] = {{"o", &o},   {"lse", &lse}, {"max_logit", &max_logit}, {"dropout_mask", &dropout_mask}, {"dq", &dq}, {"dk", &dk},
             {"dv", &dv}, {"dbias", &dbias}, {"dalibi", &dalibi},   {"dsink", &dsink},               {"k", &k},   {"v", &v}};
  for (const auto& one : all)
    if (name == one.name) return one.values;
  return nullptr;
}

const std::vector<double>* StandardResult::output(const std::string& name) const {
  return const_cast<StandardResult*>(this)->output(name);
}

double StandardResult::magnitude_of(const std::string& name) const {
  return name == "o"        ? magnitude.o
         : name == "dq"     ? magnitude.dq
         : name == "dk"     ? magnitude.dk
         : name == "dv"     ? magnitude.dv
         : name == "dbias"  ? magnitude.dbias
         : name == "dalibi" ? magnitude.dalibi
         : name == "dsink"  ? magnitude.dsink
                            : 0;
}

StandardResult standard_attention(Inputs& inputs, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kOracle ? Standard<double>(inputs, arithmetic).run() : Standard<float>(inputs, arithmetic).run();
}

}  // namespace tilewise::harness
