// The tiles of tiles.h, written once over an instruction set S (simd_*.h). Included by tiles_<isa>.cpp only.
//
// Accumulators are indexed by compile-time constants and everything is force-inlined: with one plain loop or call left
// in the hot path g++ spills them to the stack and runs 4 times slower.
#pragma once
#include <cstring>
#include <utility>

#include "core/dropout.h"
#include "cpu/tiles.h"
#include "tilewise/tilewise.h"

namespace tilewise {

#define TW_INLINE inline __attribute__((always_inline))
#define TW_LAMBDA __attribute__((always_inline))

template <int N, class F>
constexpr TW_INLINE void unroll(F&& f) {
  [&]<int... n>(std::integer_sequence<int, n...>) TW_LAMBDA {
    (f(std::integral_constant<int, n>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// ---- exp2, tanh ----------------------------------------------------------------------------------------------------

// 2^x for x <= 127: 2^round(x) times a minimax polynomial on [-1/2, 1/2] that is exactly 1 at 0, so that one key that
// dominates gives exactly v. Relative error 7.5e-8 (degree 5), 2.8e-6 (degree 4). -inf gives 0, NaN stays.
template <class S>
TW_INLINE typename S::V exp2(typename S::V x) {
  const auto clamped = S::max(S::set1(-160), x);  // max(c, NaN) is NaN
  const auto n = S::round(clamped);
  const auto f = S::sub(clamped, n);
  typename S::V p;
  if constexpr (S::kExp2Degree == 5) {
    p = S::set1(0x1.5db6196781225p-10f);
    p = S::fma(p, f, S::set1(0x1.3cebd27db0f78p-7f));
    p = S::fma(p, f, S::set1(0x1.c6b3154d00653p-5f));
    p = S::fma(p, f, S::set1(0x1.ebf9bf95b1c07p-3f));
    p = S::fma(p, f, S::set1(0x1.62e42a98a7c7fp-1f));
  } else {
    p = S::set1(0x1.39fed0a45d57ep-7f);
    p = S::fma(p, f, S::set1(0x1.c9fc9312c287cp-5f));
    p = S::fma(p, f, S::set1(0x1.ec0388f038d13p-3f));
    p = S::fma(p, f, S::set1(0x1.62e12c0722e9ep-1f));
  }
  return S::scale2(S::fma(p, f, S::set1(1)), n);
}

// tanh x: an odd polynomial below 0.65 (relative error 2e-9 before rounding), 1 - 2 / (e^2x + 1) above.
template <class S>
TW_INLINE typename S::V tanh(typename S::V x) {
  const auto magnitude = S::min(S::set1(15), S::abs(x));  // min(15, NaN) is NaN
  const auto square = S::mul(x, x);
  auto p = S::set1(-0.005960363068459678f);
  p = S::fma(p, square, S::set1(0.020953990565537425f));
  p = S::fma(p, square, S::set1(-0.053865940986467346f));
  p = S::fma(p, square, S::set1(0.13333231874486096f));
  p = S::fma(p, square, S::set1(-0.3333333311190306f));
  const auto small = S::fma(S::mul(p, square), x, x);
  const auto e = exp2<S>(S::mul(magnitude, S::set1(2.885390081777927f)));
  const auto large = S::sub(S::set1(1), S::mul(S::set1(2), S::reciprocal(S::add(e, S::set1(1)))));
  return S::select_less(S::abs(x), S::set1(0.65f), small, S::copy_sign(large, x));
}

// ---- products ------------------------------------------------------------------------------------------------------

template <int MR, int NV, class S, class V>
TW_INLINE void multiply(const float* a, int64_t row_stride, int64_t step_stride, const float* b, int64_t ldb, int64_t steps,
                        V (&acc)[MR][NV]) {
  for (int64_t s = 0; s < steps; ++s) {
    V column[NV];
    unroll<NV>([&](auto j) TW_LAMBDA { column[j] = S::load(b + S::kLanes * j); });
    unroll<MR>([&](auto r) TW_LAMBDA {
      const V value = S::set1(a[r * row_stride]);
      unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::dot(value, column[j], acc[r][j]); });
    });
    a += step_stride;
    b += ldb;
  }
}

// The steps are summed on their own and then added to C, so that a sum over many tiles is one of tiles and its rounding error
// that of their number: 2.5 times less at 4,096 keys than adding key by key.
template <class S, int MR, int NV, bool strided>
void product_tile(const ProductTile& t) {
  using V = typename S::V;
  V acc[MR][NV];
  unroll<MR>([&](auto r) TW_LAMBDA {
    unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = t.resume ? S::load(t.c + r * t.ldc + S::kLanes * j) : S::zero(); });
  });
  if constexpr (strided)
    multiply<MR, NV, S>(t.a, 1, t.step_stride, t.b, t.ldb, t.steps, acc);
  else
    multiply<MR, NV, S>(t.a, t.row_stride, 1, t.b, t.ldb, t.steps, acc);
  unroll<MR>([&](auto r) TW_LAMBDA {
    unroll<NV>([&](auto j) TW_LAMBDA {
      float* c = t.c + r * t.ldc + S::kLanes * j;
      S::store(c, t.resume ? acc[r][j] : S::add(S::load(c), acc[r][j]));
    });
  });
}

// ---- logits --------------------------------------------------------------------------------------------------------

template <int MR, int NV, class S, class V>
TW_INLINE void raw_logits(const LogitTile& t, V (&acc)[MR][NV]) {
  if (t.k == nullptr) {
    unroll<MR>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::load(t.q + r * t.ldq + S::kLanes * j); });
    });
    return;
  }
  unroll<MR>([&](auto r) TW_LAMBDA { unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::zero(); }); });
  multiply<MR, NV, S>(t.q, t.ldq, 1, t.k, S::kLanes * S::kPanelVectors, t.steps, acc);
}

// Softcap, additive terms, then the mask. `factor` takes d(capped)/d(raw) of each element.
template <int MR, int NV, class S, class V, class Factor>
TW_INLINE void modify_logits(const LogitTile& t, V (&acc)[MR][NV], Factor&& factor) {
  constexpr int kPanel = S::kLanes * S::kPanelVectors;
  const V hidden = S::set1(-__builtin_inff());
  if (t.modified) {
    if (t.softcap > 0) {
      const V inverse = S::set1(t.pre / t.softcap), cap = S::set1(t.softcap);
      unroll<MR>([&](auto r) TW_LAMBDA {
        unroll<NV>([&](auto j) TW_LAMBDA {
          const V y = tanh<S>(S::mul(acc[r][j], inverse));
          factor(r, j, y);
          acc[r][j] = S::mul(cap, y);
        });
      });
    } else {
      const V pre = S::set1(t.pre);
      unroll<MR>([&](auto r) TW_LAMBDA { unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::mul(acc[r][j], pre); }); });
    }
    if (t.addend != nullptr)
      unroll<MR>([&](auto r) TW_LAMBDA {
        unroll<NV>([&](auto j) TW_LAMBDA {
          // -inf hides the key whatever its logit is, NaN included.
          const V term = S::load(t.addend + r * kPanel + S::kLanes * j);
          acc[r][j] = S::select_equal(term, hidden, hidden, S::add(acc[r][j], term));
        });
      });
  }
  unroll<MR>([&](auto r) TW_LAMBDA {
    unroll<NV>([&](auto j) TW_LAMBDA {
      acc[r][j] = S::keep_range(acc[r][j], hidden, t.begin[r] - S::kLanes * j, t.end[r] - S::kLanes * j);
    });
  });
}

template <int MR, int NV, class S, class V>
TW_INLINE void drop(const LogitTile& t, V (&acc)[MR][NV]) {
  if (t.keep == nullptr) return;
  unroll<MR>([&](auto r) TW_LAMBDA {
    const uint64_t bits = t.keep[r * t.keep_stride] >> t.keep_shift;
    unroll<NV>([&](auto j) TW_LAMBDA {
      acc[r][j] = S::keep_bits(acc[r][j], static_cast<uint32_t>(bits >> (S::kLanes * j)));
    });
  });
}

// ---- forward -------------------------------------------------------------------------------------------------------

// Row r's maximum moves up to `new_max`: everything summed so far shrinks. Rare, hence out of line.
template <class S>
__attribute__((noinline, cold)) void raise_max(const ForwardTile& t, int r, float new_max) {
  using V = typename S::V;
  const bool first = t.limit[r] == -__builtin_inff();  // nothing summed yet: sum, o and p are zero
  const float difference = (t.max[r] - new_max) * t.post;
  t.max[r] = new_max;
  t.limit[r] = new_max + t.slack;
  if (first) return;
  float lanes[kMaxLanes];
  S::store(lanes, exp2<S>(S::set1(difference)));
  const V factor = S::set1(lanes[0]);
  float* sum = t.sum + static_cast<int64_t>(r) * S::kLanes;
  S::store(sum, S::mul(factor, S::load(sum)));
  float* o = t.o + r * t.ldo;
  for (int64_t c = 0; c < t.o_columns; c += S::kLanes) S::store(o + c, S::mul(factor, S::load(o + c)));
  float* row = t.p + r * t.ldp;
  if constexpr (S::kPairs) {
    uint16_t* p = reinterpret_cast<uint16_t*>(row) - t.p_written;
    for (int64_t c = 0; c < t.p_written; c += S::kLanes)
      S::store_pairs(reinterpret_cast<float*>(p + c), S::mul(factor, S::load_bf16(p + c)));
  } else {
    float* p = row - t.p_written;
    for (int64_t c = 0; c < t.p_written; c += S::kLanes) S::store(p + c, S::mul(factor, S::load(p + c)));
  }
}

template <class S, int MR, int NV, bool general>
void forward_tile(const ForwardTile& t) {
  using V = typename S::V;
  V acc[MR][NV];
  raw_logits<MR, NV, S>(t, acc);
  if constexpr (general) modify_logits<MR, NV, S>(t, acc, [](int, int, V) {});

  bool over = false;
  unroll<MR>([&](auto r) TW_LAMBDA {
    V m = acc[r][0];
    unroll<NV - 1>([&](auto j) TW_LAMBDA { m = S::max(m, acc[r][j + 1]); });
    over |= S::any_greater(m, S::set1(t.limit[r]));
  });
  if (__builtin_expect(over, 0)) {
    unroll<MR>([&](auto r) TW_LAMBDA {
      V m = acc[r][0];
      unroll<NV - 1>([&](auto j) TW_LAMBDA { m = S::max(m, acc[r][j + 1]); });
      // Row by row, so that a row's result does not depend on its neighbours in the strip.
      if (S::any_greater(m, S::set1(t.limit[r]))) raise_max<S>(t, r, S::reduce_max(m));
    });
  }

  const V post = S::set1(t.post);
  unroll<MR>([&](auto r) TW_LAMBDA {
    const V m = S::set1(t.max[r]);
    V total = S::load(t.sum + r * S::kLanes);
    unroll<NV>([&](auto j) TW_LAMBDA {
      // The difference first: equal logits give exactly exp2(0) = 1, however large they are.
      const V x = S::sub(acc[r][j], m);
      V p;
      if constexpr (S::kPairs)
        p = exp2<S>(S::mul(x, post));
      else
        p = exp2<S>(x);
      total = S::add(total, p);
      if constexpr (general)
        if (t.mark_masked) p = S::select_equal(acc[r][j], S::set1(-__builtin_inff()), S::set1(-0.0f), p);
      acc[r][j] = p;
    });
    S::store(t.sum + r * S::kLanes, total);
  });
  if constexpr (general) drop<MR, NV, S>(t, acc);
  unroll<MR>([&](auto r) TW_LAMBDA {
    float* p = t.p + r * t.ldp;
    if constexpr (S::kPairs) {
      unroll<NV / 2>([&](auto j) TW_LAMBDA { S::store_pairs(p + S::kLanes * j, acc[r][2 * j], acc[r][2 * j + 1]); });
      if constexpr (NV % 2 == 1) S::store_pairs(p + S::kLanes * (NV / 2), acc[r][NV - 1]);
    } else {
      unroll<NV>([&](auto j) TW_LAMBDA { S::store(p + S::kLanes * j, acc[r][j]); });
    }
  });
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class S, int NV, bool general>
void probability_tile(const ProbabilityTile& t) {
  using V = typename S::V;
  constexpr int MR = kStrip;
  V acc[MR][NV];
  raw_logits<MR, NV, S>(t, acc);
  if constexpr (general)
    modify_logits<MR, NV, S>(t, acc, [&](auto r, auto j, V y) TW_LAMBDA {
      S::store(t.softcap_factor + r * t.ld + S::kLanes * j, S::sub(S::set1(1), S::mul(y, y)));
    });
  const V post = S::set1(t.post);
  unroll<MR>([&](auto r) TW_LAMBDA {
    const V lse = S::set1(t.lse[r]);
    unroll<NV>([&](auto j) TW_LAMBDA {
      const V x = S::kPairs ? S::sub(S::mul(acc[r][j], post), lse) : S::sub(acc[r][j], lse);
      // A probability is at most 1: where logits are so large that lse has lost their difference, overflow is excluded.
      V p = exp2<S>(S::min(S::zero(), x));
      if constexpr (general)
        if (t.mark_masked) p = S::select_equal(acc[r][j], S::set1(-__builtin_inff()), S::set1(-0.0f), p);
      acc[r][j] = p;
      S::store(t.probability + r * t.ld + S::kLanes * j, p);
    });
  });
  if constexpr (general) drop<MR, NV, S>(t, acc);
  if constexpr (S::kPairs) {
    unroll<MR / 2>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA {
        S::store_row_pairs(t.p + r * t.ldp + S::kLanes * j, acc[2 * r][j], acc[2 * r + 1][j]);
      });
    });
  } else if (general && t.p != t.probability) {
    unroll<MR>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA { S::store(t.p + r * t.ldp + S::kLanes * j, acc[r][j]); });
    });
  }
}

template <class S, int NV, bool general>
void gradient_tile(const GradientTile& t) {
  using V = typename S::V;
  constexpr int MR = kStrip;
  V acc[MR][NV];
  unroll<MR>([&](auto r) TW_LAMBDA { unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::zero(); }); });
  multiply<MR, NV, S>(t.dout, t.ld_dout, 1, t.v, S::kLanes * S::kPanelVectors, t.steps, acc);
  unroll<MR>([&](auto r) TW_LAMBDA {
    const V delta = S::set1(t.delta[r]);
    [[maybe_unused]] const uint64_t bits = general && t.keep != nullptr ? t.keep[r * t.keep_stride] >> t.keep_shift : 0;
    unroll<NV>([&](auto j) TW_LAMBDA {
      const V p = S::load(t.probability + r * t.ld + S::kLanes * j);
      V dp = acc[r][j];
      if constexpr (general)
        if (t.keep != nullptr)
          dp = S::mul(S::keep_bits(dp, static_cast<uint32_t>(bits >> (S::kLanes * j))), S::set1(t.keep_scale));
      V ds = S::mul(p, S::sub(dp, delta));
      if constexpr (general) {
        // p = 0 hides whatever a masked v holds, and a masked k (the factor of a NaN logit is NaN).
        const V hidden = S::set1(t.mark_masked ? -0.0f : 0.0f);
        const auto seen = [&](V x) TW_LAMBDA { return S::select_equal(p, S::zero(), hidden, x); };
        if (t.ds_logit != nullptr) S::store(t.ds_logit + r * t.ld + S::kLanes * j, seen(ds));
        if (t.softcap_factor != nullptr) ds = S::mul(ds, S::load(t.softcap_factor + r * t.ld + S::kLanes * j));
        ds = seen(ds);
      }
      acc[r][j] = ds;
      if constexpr (!S::kPairs) S::store(t.ds + r * t.ld_ds + S::kLanes * j, ds);
    });
  });
  if constexpr (S::kPairs) {
    unroll<MR / 2>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA {
        S::store_row_pairs(t.ds + r * t.ld_ds + S::kLanes * j, acc[2 * r][j], acc[2 * r + 1][j]);
      });
    });
    unroll<MR>([&](auto r) TW_LAMBDA {
      float* row = t.ds_rows + r * t.ld_ds_rows;
      unroll<NV / 2>([&](auto j) TW_LAMBDA { S::store_pairs(row + S::kLanes * j, acc[r][2 * j], acc[r][2 * j + 1]); });
      if constexpr (NV % 2 == 1) S::store_pairs(row + S::kLanes * (NV / 2), acc[r][NV - 1]);
    });
  }
}

// ---- packing -------------------------------------------------------------------------------------------------------

// kLanes elements of a row from column c on, as floats; columns past head_dim are 0 and their memory is not touched.
template <class S>
TW_INLINE typename S::V load_elements(const void* row, int64_t c, int64_t head_dim, int32_t dtype) {
  const int64_t size = dtype == TW_FLOAT32 ? 4 : 2;
  const char* from = static_cast<const char*>(row) + c * size;
  alignas(64) char tail[64];
  if (head_dim - c < S::kLanes) {
    std::memset(tail, 0, sizeof tail);
    std::memcpy(tail, from, static_cast<size_t>((head_dim - c) * size));
    from = tail;
  }
  if (dtype == TW_FLOAT32) return S::load(reinterpret_cast<const float*>(from));
  return dtype == TW_BFLOAT16 ? S::load_bf16(from) : S::load_f16(from);
}

// kLanes lanes of two bfloat16 each, from column 2 * lane on.
template <class S>
TW_INLINE typename S::V load_raw_pairs(const void* row, int64_t lane, int64_t head_dim) {
  const char* from = static_cast<const char*>(row) + lane * 4;
  alignas(64) char tail[64];
  if (head_dim - 2 * lane < 2 * S::kLanes) {
    std::memset(tail, 0, sizeof tail);
    std::memcpy(tail, from, static_cast<size_t>((head_dim - 2 * lane) * 2));
    from = tail;
  }
  return S::load(reinterpret_cast<const float*>(from));
}

// x - x is 0 for a number and NaN for inf and NaN: the sum tells whether any element was not finite.
template <class S>
struct FiniteCheck {
  typename S::V sum = S::zero();
  TW_INLINE void see(typename S::V x) { sum = S::add(sum, S::sub(x, x)); }
  TW_INLINE void see_pairs(typename S::V lanes) {
    if constexpr (S::kPairs) {
      see(S::first_of_pairs(lanes));
      see(S::second_of_pairs(lanes));
    }
  }
  TW_INLINE bool found_nonfinite() const {
    const float total = S::reduce_add(sum);
    return total != total;
  }
};

template <class S>
bool pack_rows(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype, float scale, float* out, int64_t ld) {
  FiniteCheck<S> check;
  for (int64_t r = 0; r < n; ++r, out += ld) {
    const void* row = rows[r];
    if (row == nullptr) {
      std::memset(out, 0, static_cast<size_t>(ld) * sizeof(float));
      continue;
    }
    // Whole vectors while they fit in ld lanes; the rest through a buffer.
    for (int64_t lane = 0; lane < ld; lane += S::kLanes) {
      typename S::V v = S::zero();
      if constexpr (S::kPairs) {
        if (2 * lane < head_dim) v = load_raw_pairs<S>(row, lane, head_dim);
        check.see_pairs(v);
        if (scale < 0) v = S::negate_pairs(v);  // only sign and zero fit into q itself
        if (scale == 0) v = S::zero();
      } else {
        if (lane < head_dim) v = load_elements<S>(row, lane, head_dim, dtype);
        check.see(v);
        v = S::mul(v, S::set1(scale));
      }
      if (ld - lane >= S::kLanes) {
        S::store(out + lane, v);
      } else {
        float buffer[kMaxLanes];
        S::store(buffer, v);
        std::memcpy(out + lane, buffer, static_cast<size_t>(ld - lane) * sizeof(float));
      }
    }
  }
  return check.found_nonfinite();
}

template <class S>
bool pack_keys(const void* const* rows, int64_t head_dim, int32_t dtype, float* out) {
  constexpr int kPanel = S::kLanes * S::kPanelVectors;
  FiniteCheck<S> check;
  const int64_t steps = S::kPairs ? (head_dim + 1) / 2 : head_dim;
  for (int c = 0; c < kPanel; c += S::kLanes)
    for (int64_t step = 0; step < steps; step += S::kLanes) {
      typename S::V r[S::kLanes];
      for (int n = 0; n < S::kLanes; ++n) {
        const void* row = rows[c + n];
        if (row == nullptr) {
          r[n] = S::zero();
        } else if constexpr (S::kPairs) {
          r[n] = load_raw_pairs<S>(row, step, head_dim);
          check.see_pairs(r[n]);
        } else {
          r[n] = load_elements<S>(row, step, head_dim, dtype);
          check.see(r[n]);
        }
      }
      S::transpose(r);
      const int64_t count = steps - step < S::kLanes ? steps - step : S::kLanes;
      for (int64_t n = 0; n < count; ++n) S::store(out + (step + n) * kPanel + c, r[n]);
    }
  return check.found_nonfinite();
}

// Columns are padded with zeros to whole vectors; the last panel is not filled further.
template <class S>
bool pack_values(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype, float* out, int64_t panel_stride) {
  constexpr int kPanel = S::kLanes * S::kPanelVectors;
  FiniteCheck<S> check;
  for (int64_t r = 0; r < n; r += S::kPairs ? 2 : 1) {
    float* to = out + (S::kPairs ? r / 2 : r) * kPanel;
    for (int64_t c = 0; c < head_dim; c += S::kLanes) {
      float* at = to + c / kPanel * panel_stride + c % kPanel;
      const auto element = [&](const void* row) TW_LAMBDA {
        return row == nullptr ? S::zero() : load_elements<S>(row, c, head_dim, dtype);
      };
      if constexpr (S::kPairs) {
        const auto even = element(rows[r]), odd = r + 1 < n ? element(rows[r + 1]) : S::zero();
        check.see(even);
        check.see(odd);
        S::store(at, S::pairs_of(even, odd));
      } else {
        const auto v = element(rows[r]);
        check.see(v);
        S::store(at, v);
      }
    }
  }
  return check.found_nonfinite();
}

template <class S>
void store_row(const float* row, float scale, int64_t n, int32_t dtype, void* out) {
  const auto factor = S::set1(scale);
  const int64_t size = dtype == TW_FLOAT32 ? 4 : 2;
  for (int64_t c = 0; c < n; c += S::kLanes) {
    const auto v = S::mul(S::load(row + c), factor);  // rows are padded to whole vectors
    char* to = static_cast<char*>(out) + c * size;
    alignas(64) char tail[64];
    char* at = n - c < S::kLanes ? tail : to;
    if (dtype == TW_FLOAT32)
      S::store(reinterpret_cast<float*>(at), v);
    else if (dtype == TW_BFLOAT16)
      S::store_bf16(at, v);
    else
      S::store_f16(at, v);
    if (at == tail) std::memcpy(to, tail, static_cast<size_t>((n - c) * size));
  }
}

// sum a_c b_c in float32, lane by lane.
template <class S>
float dot_rows(const void* a, const void* b, int64_t n, int32_t dtype) {
  auto sum = S::zero();
  for (int64_t c = 0; c < n; c += S::kLanes)
    sum = S::fma(load_elements<S>(a, c, n, dtype), load_elements<S>(b, c, n, dtype), sum);
  return S::reduce_add(sum);
}

// ---- direct: few query rows, unpacked keys ----------------------------------------------------------------------------

template <class S, class F>
TW_INLINE void with_dtype(int32_t dtype, F&& f) {
  if (dtype == TW_FLOAT32)
    f(std::integral_constant<int32_t, TW_FLOAT32>{});
  else if (dtype == TW_BFLOAT16)
    f(std::integral_constant<int32_t, TW_BFLOAT16>{});
  else
    f(std::integral_constant<int32_t, TW_FLOAT16>{});
}

// One vector of keys at a time: a dot product per key and row, summed across lanes by a transpose.
template <class S, int MR>
void direct_scores(const DirectTile& t) {
  with_dtype<S>(t.dtype, [&](auto dtype) TW_LAMBDA {
    constexpr int64_t kSize = dtype() == TW_FLOAT32 ? 4 : 2;
    for (int64_t key = 0; key < t.n; key += S::kLanes) {
      typename S::V part[MR][S::kLanes];
      for (int x = 0; x < S::kLanes; ++x) {
        const void* row = t.keys[key + x];
        const char* ahead = static_cast<const char*>(t.keys[key + S::kLanes < t.n ? key + S::kLanes + x : key + x]);
        typename S::V acc[MR];
        unroll<MR>([&](auto r) TW_LAMBDA { acc[r] = S::zero(); });
        for (int64_t c = 0; c < t.head_dim; c += S::kLanes) {
          __builtin_prefetch(ahead + c * kSize);
          const auto k = load_elements<S>(row, c, t.head_dim, dtype());
          unroll<MR>([&](auto r) TW_LAMBDA { acc[r] = S::fma(S::load(t.a + r * t.lda + c), k, acc[r]); });
        }
        unroll<MR>([&](auto r) TW_LAMBDA { part[r][x] = acc[r]; });
      }
      unroll<MR>([&](auto r) TW_LAMBDA {
        S::transpose(part[r]);
        for (int half = S::kLanes / 2; half > 0; half /= 2)
          for (int x = 0; x < half; ++x) part[r][x] = S::add(part[r][x], part[r][x + half]);
        S::store(t.c + r * t.ldc + key, part[r][0]);
      });
    }
  });
}

template <class S, int MR, int NV>
TW_INLINE void direct_value_columns(const DirectTile& t, int64_t c) {
  with_dtype<S>(t.dtype, [&](auto dtype) TW_LAMBDA {
    typename S::V acc[MR][NV];
    unroll<MR>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::zero(); });
    });
    for (int64_t key = 0; key < t.n; ++key) {
      typename S::V v[NV];
      unroll<NV>([&](auto j) TW_LAMBDA {
        v[j] = load_elements<S>(t.keys[key], c + S::kLanes * j, t.head_dim, dtype());
      });
      unroll<MR>([&](auto r) TW_LAMBDA {
        const auto p = S::set1(t.a[r * t.lda + key]);
        unroll<NV>([&](auto j) TW_LAMBDA { acc[r][j] = S::fma(p, v[j], acc[r][j]); });
      });
    }
    unroll<MR>([&](auto r) TW_LAMBDA {
      unroll<NV>([&](auto j) TW_LAMBDA {
        float* sum = t.c + r * t.ldc + c + S::kLanes * j;
        S::store(sum, S::add(S::load(sum), acc[r][j]));
      });
    });
  });
}

template <class S, int MR>
void direct_values(const DirectTile& t) {
  constexpr int kPanel = S::kLanes * S::kPanelVectors;
  int64_t c = 0;
  for (; c + kPanel <= t.head_dim; c += kPanel) direct_value_columns<S, MR, S::kPanelVectors>(t, c);
  for (; c < t.head_dim; c += S::kLanes) direct_value_columns<S, MR, 1>(t, c);
}

template <class S>
bool any_nonfinite(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype) {
  FiniteCheck<S> check;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < head_dim; c += S::kLanes) check.see(load_elements<S>(rows[r], c, head_dim, dtype));
  return check.found_nonfinite();
}

// ---- dropout -------------------------------------------------------------------------------------------------------

// The 32 draws of a 16 x 32 block side by side: draw (g, t) is lane 4 g + t. Loops that compilers vectorise.
template <class S>
void dropout_bits(const Dropout& dropout, int64_t batch_head, int64_t row_block, int64_t col_block, uint32_t* bits) {
  constexpr int kDraws = 32;
  const DropoutHead draws(dropout.seed, dropout.offset, batch_head);
  DropoutHead::Part rows[8], columns[4];
  for (int g = 0; g < 8; ++g) rows[g] = draws.row_part(row_block * 8 + g);
  for (int t = 0; t < 4; ++t) columns[t] = draws.column_part(col_block * 4 + t);
  uint32_t word[4][kDraws];
  for (int n = 0; n < kDraws; ++n) {
    const Draw draw = DropoutHead::draw(rows[n / 4], columns[n % 4]);
    for (int k = 0; k < 4; ++k) word[k][n] = draw.word[k];
  }
  uint32_t kept[kDraws] = {};  // bit e: element e
  unroll<16>([&](auto e) TW_LAMBDA {
    for (int n = 0; n < kDraws; ++n)
      kept[n] |= static_cast<uint32_t>(dropout.keeps(Dropout::number({{word[0][n], word[1][n], word[2][n], word[3][n]}}, e))) << e;
  });
  for (int r = 0; r < 16; ++r) {  // bits 4 k + 2 half and + 1 of draw (g, t) are columns 8 k + 2 t and + 1 of row g + 8 half
    bits[r] = 0;
    for (int t = 0; t < 4; ++t) {
      const uint32_t half = kept[4 * (r % 8) + t] >> (2 * (r / 8));
      bits[r] |= ((half & 3) | (half & 0x30) << 4 | (half & 0x300) << 8 | (half & 0x3000) << 12) << (2 * t);
    }
  }
}

// ---- the table -----------------------------------------------------------------------------------------------------

template <class S>
constexpr TileKernels make_tiles(Isa isa) {
  TileKernels k{};
  k.isa = isa;
  k.pairs = S::kPairs;
  k.lanes = S::kLanes;
  k.panel_vectors = S::kPanelVectors;
  constexpr int kRows[kRowVariants] = {1, 2, 4, kStrip};
  unroll<S::kPanelVectors>([&](auto j) {
    unroll<kRowVariants>([&](auto m) {
      k.forward[0][m][j] = forward_tile<S, kRows[m], j + 1, false>;
      k.forward[1][m][j] = forward_tile<S, kRows[m], j + 1, true>;
      k.product[0][m][j] = product_tile<S, kRows[m], j + 1, false>;
      k.product[1][m][j] = product_tile<S, kRows[m], j + 1, true>;
    });
    k.probability[0][j] = probability_tile<S, j + 1, false>;
    k.probability[1][j] = probability_tile<S, j + 1, true>;
    k.gradient[0][j] = gradient_tile<S, j + 1, false>;
    k.gradient[1][j] = gradient_tile<S, j + 1, true>;
  });
  if constexpr (!S::kPairs) {
    unroll<kRowVariants>([&](auto m) {
      k.direct_scores[m] = direct_scores<S, kRows[m]>;
      k.direct_values[m] = direct_values<S, kRows[m]>;
    });
    k.any_nonfinite = any_nonfinite<S>;
  }
  k.pack_rows = pack_rows<S>;
  k.pack_keys = pack_keys<S>;
  k.pack_values = pack_values<S>;
  k.store_row = store_row<S>;
  k.dot_rows = dot_rows<S>;
  k.dropout_bits = dropout_bits<S>;
  return k;
}

}  // namespace tilewise
