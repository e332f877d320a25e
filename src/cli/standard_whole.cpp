#include "cli/standard_whole.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "core/dropout.h"
#include "core/dtype.h"
#include "core/mask.h"

namespace tilewise::cli {
namespace {

struct F32 {
  using Type = float;
  static float get(float x) { return x; }
  static float put(float x) { return x; }
};
struct F16 {
  using Type = uint16_t;
  static float get(uint16_t x) { return f16_to_float(x); }
  static uint16_t put(float x) { return float_to_f16(x); }
};
struct Bf16 {
  using Type = uint16_t;
  static float get(uint16_t x) { return bf16_to_float(x); }
  static uint16_t put(float x) { return float_to_bf16(x); }
};

// A whole tensor: taken from the system when it is made, given back when it is dropped.
template <class T>
struct Whole {
  std::unique_ptr<T, decltype(&std::free)> data{nullptr, &std::free};

  Whole() = default;
  explicit Whole(int64_t count)
      : data(static_cast<T*>(std::malloc(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T))), &std::free) {
    if (!data) throw std::bad_alloc();
  }
  T* at(int64_t n) const { return data.get() + n; }
  void drop() { data.reset(); }
};

constexpr int64_t kBlock = 64;  // rows held in float32
constexpr int64_t kMaxDim = 256;

// C[m, n] = A[m, depth] B[n, depth]^T, for depth up to kMaxDim
template <class E>
void multiply_nt(const typename E::Type* a, const typename E::Type* b, typename E::Type* c, int64_t m, int64_t n,
                 int64_t depth) {
  std::vector<float> bt(static_cast<size_t>(depth * kBlock));
  float row[kMaxDim], sum[kBlock];
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t count = std::min(kBlock, n - j);
    std::fill(bt.begin(), bt.end(), 0.f);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t x = 0; x < depth; ++x) bt[static_cast<size_t>(x * kBlock + r)] = E::get(b[(j + r) * depth + x]);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t x = 0; x < depth; ++x) row[x] = E::get(a[i * depth + x]);
      std::fill(sum, sum + kBlock, 0.f);
      for (int64_t x = 0; x < depth; ++x)
        for (int64_t r = 0; r < kBlock; ++r) sum[r] += row[x] * bt[static_cast<size_t>(x * kBlock + r)];
      for (int64_t r = 0; r < count; ++r) c[i * n + j + r] = E::put(sum[r]);
    }
  }
}

// C[m, n] = A B with A[m, depth], or its transpose stored as [depth, m]; B[depth, n], n up to kMaxDim
template <class E, bool kTransposed>
void multiply_narrow(const typename E::Type* a, const typename E::Type* b, typename E::Type* c, int64_t m, int64_t n,
                     int64_t depth) {
  std::vector<float> sum(static_cast<size_t>(kBlock * n));
  float row[kMaxDim];
  for (int64_t i = 0; i < m; i += kBlock) {
    const int64_t count = std::min(kBlock, m - i);
    std::fill(sum.begin(), sum.end(), 0.f);
    for (int64_t x = 0; x < depth; ++x) {
      for (int64_t y = 0; y < n; ++y) row[y] = E::get(b[x * n + y]);
      for (int64_t r = 0; r < count; ++r) {
        const float factor = E::get(kTransposed ? a[x * m + i + r] : a[(i + r) * depth + x]);
        if (factor == 0) continue;
        float* to = &sum[static_cast<size_t>(r * n)];
        for (int64_t y = 0; y < n; ++y) to[y] += factor * row[y];
      }
    }
    for (int64_t r = 0; r < count; ++r)
      for (int64_t y = 0; y < n; ++y) c[(i + r) * n + y] = E::put(sum[static_cast<size_t>(r * n + y)]);
  }
}

template <class E>
struct Attention {
  using T = typename E::Type;
  static constexpr bool kNarrow = sizeof(T) < 4;

  explicit Attention(const tw_problem& problem) : p(problem) {}

  const tw_problem& p;
  int64_t b = p.batch, hq = p.num_heads_q, hk = p.num_heads_k, sq = p.seqlen_q, sk = p.seqlen_k, d = p.head_dim,
          dv = p.head_dim_v;
  int64_t heads = b * hq, pairs = heads * sq * sk;
  float scale =
            static_cast<float>(std::isnan(p.softmax_scale) ? 1 / std::sqrt(static_cast<double>(d)) : p.softmax_scale),
        cap = static_cast<float>(p.softcap);
  Dropout dropout = Dropout::make(p.dropout_p, p.dropout_seed, p.dropout_offset);
  float kept = dropout.active() ? static_cast<float>(1 / (1 - p.dropout_p)) : 1;

  Whole<T> q_heads, k_heads, v_heads, scores, tanh, rounded, dropped;
  Whole<float> softmax;  // with float32 inputs the only P there is
  Whole<uint8_t> mask, drawn;

  // [b, s, h, width] with h heads to [b, hq, s, width], heads of a group repeated
  Whole<T> by_heads(const T* x, int64_t s, int64_t h, int64_t width) const {
    Whole<T> out(heads * s * width);
    for (int64_t n = 0; n < heads; ++n)
      for (int64_t i = 0; i < s; ++i)
        std::memcpy(out.at((n * s + i) * width), x + ((n / hq * s + i) * h + n % hq / (hq / h)) * width,
                    static_cast<size_t>(width) * sizeof(T));
    return out;
  }
  // and back, summed over the group
  Whole<T> by_rows(const Whole<T>& x, int64_t s, int64_t h, int64_t width) const {
    Whole<T> out(b * s * h * width);
    const int64_t group = hq / h;
    for (int64_t n = 0; n < b * h; ++n)
      for (int64_t i = 0; i < s; ++i)
        for (int64_t c = 0; c < width; ++c) {
          float sum = 0;
          for (int64_t g = 0; g < group; ++g)
            sum += E::get(*x.at(((n / h * hq + n % h * group + g) * s + i) * width + c));
          *out.at(((n / h * s + i) * h + n % h) * width + c) = E::put(sum);
        }
    return out;
  }

  template <class To, class From, class F>
  static Whole<To> map(const Whole<From>& from, int64_t count, F&& f) {
    Whole<To> to(count);
    for (int64_t n = 0; n < count; ++n) *to.at(n) = f(*from.at(n), n);
    return to;
  }

  Whole<T> forward(bool training, const T* q, const T* k, const T* v) {
    q_heads = by_heads(q, sq, hq, d);
    k_heads = by_heads(k, sk, hk, d);
    v_heads = by_heads(v, sk, hk, dv);
    const Mask limits{p.window_left, p.causal ? 0 : p.window_right};
    if (p.causal || p.window_left >= 0 || p.window_right >= 0) {
      mask = Whole<uint8_t>(sq * sk);
      for (int64_t i = 0; i < sq; ++i) {
        const KeyRange seen = limits.keys(i, sq, sk);
        for (int64_t j = 0; j < sk; ++j) *mask.at(i * sk + j) = j >= seen.begin && j < seen.end;
      }
    }
    scores = Whole<T>(pairs);
    for (int64_t n = 0; n < heads; ++n)
      multiply_nt<E>(q_heads.at(n * sq * d), k_heads.at(n * sk * d), scores.at(n * sq * sk), sq, sk, d);
    for (int64_t n = 0; n < pairs; ++n) *scores.at(n) = E::put(E::get(*scores.at(n)) * scale);
    if (cap > 0) {
      tanh = map<T>(scores, pairs, [&](T x, int64_t) { return E::put(std::tanh(E::get(x) / cap)); });
      scores.drop();
      scores = map<T>(tanh, pairs, [&](T x, int64_t) { return E::put(E::get(x) * cap); });
      if (!training) tanh.drop();
    }
    if (mask.data)
      for (int64_t n = 0; n < pairs; ++n)
        if (!*mask.at(n % (sq * sk))) *scores.at(n) = E::put(-INFINITY);
    Whole<float> wide;
    const float* logits = nullptr;
    if constexpr (kNarrow) {
      wide = map<float>(scores, pairs, [](T x, int64_t) { return E::get(x); });
      logits = wide.at(0);
    } else {
      logits = scores.at(0);
    }
    softmax = Whole<float>(pairs);
    for (int64_t row = 0; row < heads * sq; ++row) softmax_row(logits + row * sk, softmax.at(row * sk), sk);
    wide.drop();
    if constexpr (kNarrow) {
      rounded = map<T>(softmax, pairs, [](float x, int64_t) { return E::put(x); });
      if (!training) softmax.drop();
    }
    scores.drop();
    if (dropout.active()) {
      drawn = Whole<uint8_t>(pairs);
      for (int64_t n = 0; n < pairs; ++n) *drawn.at(n) = dropout.keep(n / (sq * sk), n / sk % sq, n % sk);
      dropped = Whole<T>(pairs);
      for (int64_t n = 0; n < pairs; ++n) *dropped.at(n) = *drawn.at(n) ? E::put(E::get(probability(n)) * kept) : T{};
      rounded.drop();
      if (!training) drawn.drop(), softmax.drop();
    }
    Whole<T> o_heads(heads * sq * dv);
    for (int64_t n = 0; n < heads; ++n)
      multiply_narrow<E, false>(multiplied() + n * sq * sk, v_heads.at(n * sk * dv), o_heads.at(n * sq * dv), sq, dv,
                                sk);
    return by_rows(o_heads, sq, hq, dv);
  }

  static void softmax_row(const float* x, float* y, int64_t n) {
    const float max = *std::max_element(x, x + n);
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += y[j] = max == -INFINITY ? 0 : std::exp(x[j] - max);
    for (int64_t j = 0; j < n; ++j) y[j] = sum > 0 ? y[j] / sum : 0;
  }
  T probability(int64_t n) const {
    if constexpr (kNarrow)
      return *rounded.at(n);
    else
      return *softmax.at(n);
  }
  const T* multiplied() const {  // what v is multiplied by
    if (dropped.data) return dropped.at(0);
    if constexpr (kNarrow)
      return rounded.at(0);
    else
      return softmax.at(0);
  }

  void backward(WholeStandard* out) {
    Whole<T> dout(heads * sq * dv);  // all ones
    std::fill(dout.at(0), dout.at(heads * sq * dv), E::put(1));
    Whole<T> dp(pairs), dv_heads(heads * sk * dv);
    for (int64_t n = 0; n < heads; ++n) {
      // every row of dout is the same: [b, sq, hq, dv] and [b, hq, sq, dv] need no telling apart
      multiply_nt<E>(dout.at(n * sq * dv), v_heads.at(n * sk * dv), dp.at(n * sq * sk), sq, sk, dv);
      multiply_narrow<E, true>(multiplied() + n * sq * sk, dout.at(n * sq * dv), dv_heads.at(n * sk * dv), sk, dv, sq);
    }
    v_heads.drop(), rounded.drop(), dropped.drop();
    if (dropout.active()) {
      Whole<T> before(pairs);
      for (int64_t n = 0; n < pairs; ++n) *before.at(n) = *drawn.at(n) ? E::put(E::get(*dp.at(n)) * kept) : T{};
      dp = std::move(before);
      drawn.drop();
    }
    Whole<float> wide;
    if constexpr (kNarrow) {
      wide = map<float>(dp, pairs, [](T x, int64_t) { return E::get(x); });
      dp.drop();
    } else {
      wide = std::move(dp);
    }
    Whole<float> product(pairs), ds(pairs);
    for (int64_t n = 0; n < pairs; ++n) *product.at(n) = *softmax.at(n) * *wide.at(n);
    for (int64_t row = 0; row < heads * sq; ++row) {
      float sum = 0;
      for (int64_t j = 0; j < sk; ++j) sum += *product.at(row * sk + j);
      for (int64_t j = 0; j < sk; ++j)
        *ds.at(row * sk + j) = *product.at(row * sk + j) - *softmax.at(row * sk + j) * sum;
    }
    product.drop(), softmax.drop(), wide.drop();
    Whole<T> dscores;
    if constexpr (kNarrow)
      dscores = map<T>(ds, pairs, [](float x, int64_t) { return E::put(x); });
    else
      dscores = std::move(ds);
    ds.drop();
    if (cap > 0) {
      Whole<T> before = map<T>(dscores, pairs, [&](T x, int64_t n) {
        const float t = E::get(*tanh.at(n));
        return E::put(E::get(x) * (1 - t * t));
      });
      dscores = std::move(before);
      tanh.drop();
    }
    for (int64_t n = 0; n < pairs; ++n) *dscores.at(n) = E::put(E::get(*dscores.at(n)) * scale);
    Whole<T> dq_heads(heads * sq * d), dk_heads(heads * sk * d);
    for (int64_t n = 0; n < heads; ++n) {
      multiply_narrow<E, false>(dscores.at(n * sq * sk), k_heads.at(n * sk * d), dq_heads.at(n * sq * d), sq, d, sk);
      multiply_narrow<E, true>(dscores.at(n * sq * sk), q_heads.at(n * sq * d), dk_heads.at(n * sk * d), sk, d, sq);
    }
    dscores.drop(), mask.drop(), q_heads.drop(), k_heads.drop();
    out->dq = by_rows(dq_heads, sq, hq, d).data.release();
    dq_heads.drop();
    out->dk = by_rows(dk_heads, sk, hk, d).data.release();
    dk_heads.drop();
    out->dv = by_rows(dv_heads, sk, hk, dv).data.release();
  }
};

template <class E>
WholeStandard run(const tw_problem& problem, bool training, bool backward, const void* q, const void* k,
                  const void* v) {
  using T = typename E::Type;
  Attention<E> attention(problem);
  WholeStandard out;
  out.o = attention.forward(training, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v))
              .data.release();
  if (backward) attention.backward(&out);
  return out;
}

}  // namespace

std::string refuse_whole_standard(const tw_problem& p) {
  if (dtype_size(p.dtype) > 4) return "f64";
  if (p.q_layout != TW_DENSE || p.k_layout != TW_DENSE) return "packed or paged tensors";
  constexpr uint32_t kTaken = TW_HAS_LSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV;
  if ((p.features & ~kTaken) || p.rotary_dim > 0 || p.seqlen_new > 0 || p.cache_batch > 0)
    return "options that are tensors";
  return "";
}

WholeStandard run_whole_standard(const tw_problem& problem, bool training, bool backward, const void* q, const void* k,
                                 const void* v) {
  if (problem.dtype == TW_FLOAT32) return run<F32>(problem, training, backward, q, k, v);
  return problem.dtype == TW_FLOAT16 ? run<F16>(problem, training, backward, q, k, v)
                                     : run<Bf16>(problem, training, backward, q, k, v);
}

}  // namespace tilewise::cli
