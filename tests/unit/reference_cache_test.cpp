// The reference over a KV cache: append, rotary embedding, pages, left padding and row indices, against a plain copy of
// what the cache should hold.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "core/dtype.h"
#include "core/problem.h"
#include "cpu/kv_append.h"
#include "cpu/reference.h"

namespace tilewise {
namespace {

// A contiguous tensor that owns its memory.
struct Tensor {
  std::vector<uint8_t> memory;
  tw_tensor view = {};

  Tensor(int32_t dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    view.dtype = dtype, view.ndim = static_cast<int32_t>(shape.size());
    for (size_t n = shape.size(); n-- > 0; count *= shape[n]) view.shape[n] = shape[n], view.stride[n] = count;
    memory.resize(static_cast<size_t>(count * dtype_size(dtype)));
    view.data = memory.data();
  }
  int64_t count() const { return static_cast<int64_t>(memory.size()) / dtype_size(view.dtype); }
  double at(int64_t n) const { return load_element(memory.data(), view.dtype, n); }
  void set(int64_t n, double value) { store_element(memory.data(), view.dtype, n, value); }
  tw_tensor* operator&() { return view.data = memory.data(), &view; }
};

Tensor integers(const std::vector<int64_t>& values) {
  Tensor x(TW_INT32, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) x.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
  return x;
}

enum Rotary { kNone, kHalves, kInterleaved, kOverridden };
enum Store { kDense, kIndexed, kPages3, kPages4 };

class CacheTest : public testing::TestWithParam<std::tuple<int32_t, Store, Rotary, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(
    All, CacheTest,
    testing::Combine(testing::Values(int32_t{TW_FLOAT64}, int32_t{TW_FLOAT32}, int32_t{TW_BFLOAT16}),
                     testing::Values(kDense, kIndexed, kPages3, kPages4),
                     testing::Values(kNone, kHalves, kInterleaved, kOverridden), testing::Bool(), testing::Bool()));

TEST_P(CacheTest, AppendThenAttend) {
  const auto [dtype, store, rotary, causal, padded] = GetParam();
  constexpr int64_t kBatch = 3, kHq = 4, kHk = 2, kD = 8, kDv = 6, kSq = 3, kNew = 2, kCapacity = 12, kRotaryDim = 6;
  const std::vector<int64_t> used = {5, 0, 10}, leftpad = {1, 0, 4}, base = {7, 3, 0}, cache_rows = {3, 0, 2};
  const int64_t page_size = store == kPages3 ? 3 : 4, pages_per_row = kCapacity / page_size,
                num_pages = 3 * kBatch * pages_per_row;
  const bool paged = store >= kPages3;
  std::mt19937 random(3);
  const auto number = [&] { return std::uniform_real_distribution<double>(-1.5, 1.5)(random); };
  const auto filled = [&](int32_t type, std::vector<int64_t> shape) {
    Tensor x(type, std::move(shape));
    for (int64_t n = 0; n < x.count(); ++n) x.set(n, number());
    return x;
  };

  const int64_t outer = paged ? num_pages : store == kIndexed ? 5 : kBatch, inner = paged ? page_size : kCapacity;
  Tensor q = filled(dtype, {kBatch, kSq, kHq, kD}), k = filled(dtype, {outer, inner, kHk, kD}),
         v = filled(dtype, {outer, inner, kHk, kDv}), k_new = filled(dtype, {kBatch, kNew, kHk, kD}),
         v_new = filled(dtype, {kBatch, kNew, kHk, kDv}), o = filled(dtype, {kBatch, kSq, kHq, kDv}),
         lse = filled(TW_FLOAT32, {kBatch, kHq, kSq}), cosines = filled(TW_FLOAT32, {20, kRotaryDim / 2}),
         sines = filled(TW_FLOAT32, {20, kRotaryDim / 2}), seqused = integers(used), pad = integers(leftpad),
         rotary_seqlens = integers(base), batch_idx = integers(cache_rows), table(TW_INT32, {kBatch, pages_per_row});
  std::vector<int64_t> pages(num_pages);
  for (int64_t n = 0; n < num_pages; ++n) pages[n] = n;
  std::shuffle(pages.begin(), pages.end(), random);
  for (int64_t n = 0; n < table.count(); ++n) table.set(n, static_cast<double>(pages[n]));

  // Row of the cache (counted in rows of all heads) at which a position of a batch entry lies.
  const auto cache_row = [&](int64_t b, int64_t position) -> int64_t {
    if (paged)
      return static_cast<int64_t>(table.at(b * pages_per_row + position / page_size)) * page_size +
             position % page_size;
    return (store == kIndexed ? cache_rows[b] : b) * kCapacity + position;
  };
  // Slots beyond the keys in use, and before the left padding, hold NaN.
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t position = 0; position < kCapacity; ++position) {
      if (position < used[b] && !(padded && position < leftpad[b])) continue;
      for (int64_t n = 0; n < kHk * kD; ++n) k.set(cache_row(b, position) * kHk * kD + n, NAN);
      for (int64_t n = 0; n < kHk * kDv; ++n) v.set(cache_row(b, position) * kHk * kDv + n, NAN);
    }

  // Expected cache and rotated queries. Rotation in float32 (float64 for float64), rounded to the dtype.
  const auto rotated = [&](const Tensor& x, int64_t row, int64_t position) {
    std::vector<double> out(kD);
    Tensor rounded(dtype, {kD});
    for (int64_t c = 0; c < kD; ++c) rounded.set(c, x.at(row * kD + c));
    for (int64_t n = 0; n < kRotaryDim / 2 && rotary != kNone; ++n) {
      const int64_t first = rotary == kInterleaved ? 2 * n : n,
                    second = rotary == kInterleaved ? 2 * n + 1 : n + kRotaryDim / 2;
      const double a = x.at(row * kD + first), b = x.at(row * kD + second);
      const double cosine = cosines.at(position * kRotaryDim / 2 + n), sine = sines.at(position * kRotaryDim / 2 + n);
      if (dtype == TW_FLOAT64) {
        rounded.set(first, a * cosine - b * sine), rounded.set(second, a * sine + b * cosine);
      } else {
        const float fa = static_cast<float>(a), fb = static_cast<float>(b), fc = static_cast<float>(cosine),
                    fs = static_cast<float>(sine);
        rounded.set(first, fa * fc - fb * fs), rounded.set(second, fa * fs + fb * fc);
      }
    }
    for (int64_t c = 0; c < kD; ++c) out[c] = rounded.at(c);
    return out;
  };
  const auto position_of = [&](int64_t b, int64_t n) { return (rotary == kOverridden ? base[b] : used[b]) + n; };
  Tensor want_k = k, want_v = v;
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t n = 0; n < kNew; ++n)
      for (int64_t h = 0; h < kHk; ++h) {
        const int64_t from = (b * kNew + n) * kHk + h, to = cache_row(b, used[b] + n) * kHk + h;
        const std::vector<double> row = rotated(k_new, from, position_of(b, n));
        for (int64_t c = 0; c < kD; ++c) want_k.set(to * kD + c, row[c]);
        for (int64_t c = 0; c < kDv; ++c) want_v.set(to * kDv + c, v_new.at(from * kDv + c));
      }

  tw_problem p = default_problem();
  p.dtype = dtype, p.batch = kBatch, p.seqlen_q = kSq, p.seqlen_k = kCapacity, p.num_heads_q = kHq, p.num_heads_k = kHk;
  p.head_dim = kD, p.head_dim_v = kDv, p.seqlen_new = kNew, p.causal = causal;
  p.features = TW_HAS_LSE | TW_HAS_SEQUSED_K;
  tw_tensors t = {};
  t.struct_size = sizeof t;
  t.q = &q, t.k = &k, t.v = &v, t.k_new = &k_new, t.v_new = &v_new, t.o = &o, t.lse = &lse, t.seqused_k = &seqused;
  if (padded) t.leftpad_k = &pad, p.features |= TW_HAS_LEFTPAD_K;
  if (paged) t.page_table = &table, p.k_layout = TW_PAGED, p.page_size = page_size, p.num_pages = num_pages;
  if (store == kIndexed) t.cache_batch_idx = &batch_idx, p.cache_batch = 5, p.features |= TW_HAS_CACHE_BATCH_IDX;
  if (rotary != kNone) {
    t.rotary_cos = &cosines, t.rotary_sin = &sines, p.rotary_dim = kRotaryDim,
    p.rotary_interleaved = rotary == kInterleaved;
    if (rotary == kOverridden) t.rotary_seqlens = &rotary_seqlens, p.features |= TW_HAS_ROTARY_SEQLENS;
  }
  Plan plan;
  plan.problem = p;
  plan.target.num_threads = 2;
  ASSERT_TRUE(plan_reference(p, plan.target, &plan).ok());
  std::vector<double> workspace(plan.workspace_bytes / 8);
  ASSERT_TRUE(run_reference(plan, t, workspace.data(), nullptr).ok());

  EXPECT_EQ(k.memory, want_k.memory);  // appended rows written, every other byte as it was
  EXPECT_EQ(v.memory, want_v.memory);
  const double tolerance = dtype == TW_FLOAT64 ? 1e-12 : dtype == TW_FLOAT32 ? 1e-6 : 0x1p-8;
  for (int64_t b = 0; b < kBatch; ++b) {
    const Sequence s = sequence_of(p, t, b);
    const int64_t first = padded ? leftpad[b] : 0, num_keys = std::max<int64_t>(0, used[b] + kNew - first);
    for (int64_t i = 0; i < kSq; ++i)
      for (int64_t h = 0; h < kHq; ++h) {
        const std::vector<double> row =
            rotated(q, (b * kSq + i) * kHq + h, rotary == kNone ? 0 : position_of(b, causal ? i : 0));
        float row_float[kD];
        rotate_query_row(p, t, s, i, h, row_float);
        for (int64_t c = 0; c < kD; ++c) ASSERT_EQ(row_float[c], static_cast<float>(row[c]));
        std::vector<double> weight(num_keys), sum_v(kDv);
        double sum = 0;
        for (int64_t j = 0; j < num_keys && (!causal || j <= i + num_keys - kSq); ++j) {
          double score = 0;
          for (int64_t c = 0; c < kD; ++c)
            score += row[c] * want_k.at((cache_row(b, first + j) * kHk + h / 2) * kD + c);
          sum += weight[j] = std::exp(score / std::sqrt(8.0));
          for (int64_t c = 0; c < kDv; ++c)
            sum_v[c] += weight[j] * want_v.at((cache_row(b, first + j) * kHk + h / 2) * kDv + c);
        }
        for (int64_t c = 0; c < kDv; ++c)
          ASSERT_NEAR(o.at(((b * kSq + i) * kHq + h) * kDv + c), sum == 0 ? 0 : sum_v[c] / sum, tolerance * 1.5);
        const double got = lse.at((b * kHq + h) * kSq + i);
        if (sum == 0)
          ASSERT_EQ(got, -INFINITY);
        else
          ASSERT_NEAR(got, std::log(sum), 1e-6);
      }
  }
}

}  // namespace
}  // namespace tilewise
