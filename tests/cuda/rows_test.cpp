// Every CUDA row against the float64 reference, over shapes, layouts and options. Skips where there is no GPU.
//   rows_test [forward|backward] [regular expression] [another]: cases that match both
//   rows_test random SECONDS [SEED]: random problems, until the time is up
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <regex>

#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cuda/backend.h"
#include "random_problem.h"
#include "row_run.h"

namespace tilewise::cuda_test {
namespace {

struct Outcome {
  bool ok = true;
  std::string text;
  void fail(const std::string& why) {
    ok = false;
    text += "    " + why + "\n";
  }
};

void run_oracle(const tw_problem& p, const tw_tensors& t) {
  Plan plan;
  plan.problem = p;
  plan.target.num_threads = default_num_threads();
  if (!plan_reference(p, plan.target, &plan).ok()) std::abort();
  std::vector<double> workspace(static_cast<size_t>(plan.workspace_bytes / 8 + 1));
  if (!run_reference(plan, t, workspace.data(), nullptr).ok()) std::abort();
}

double unit_roundoff(int32_t dtype) { return dtype == TW_BFLOAT16 ? 0x1p-8 : dtype == TW_FLOAT16 ? 0x1p-11 : 0x1p-24; }

// |got - want| <= bound(n) for every element; NaN only where NaN is wanted.
template <class Bound>
void compare(const char* name, const Mirror& m, const std::vector<uint8_t>& bytes, const Mirror& wanted, Bound&& bound, Outcome* out) {
  if (!gaps_intact(m, bytes)) out->fail(std::string(name) + ": wrote outside its elements");
  int64_t bad = 0, first = -1;
  double worst = 0;
  for (int64_t n = 0; n < m.count(); ++n) {
    const double got = m.get_from(bytes, n), want = wanted.get(n);
    if (std::isnan(want) && std::isnan(got)) continue;
    if (got == want) continue;
    const double error = std::fabs(got - want) / bound(n);
    if (!(error <= 1)) {
      if (bad++ == 0) first = n;
    }
    worst = std::max(worst, std::isnan(error) ? 1e30 : error);
  }
  char line[256];
  if (bad > 0) {
    std::snprintf(line, sizeof line, "%s: %lld of %lld wrong, first at %lld: got %g, want %g (bound %g)", name, (long long)bad,
                  (long long)m.count(), (long long)first, m.get_from(bytes, first), wanted.get(first), bound(first));
    out->fail(line);
  }
  std::snprintf(line, sizeof line, " %s %.2f", name, worst);
  if (out->ok) out->text += line;
}

Outcome test_forward(const KernelRow& row, const tw_problem& p, LayoutKind layout, unsigned seed, double value_scale, bool float_out,
                     bool nan_rows) {
  Outcome out;
  Inputs in(p, layout, seed, value_scale);
  if (nan_rows) in.add_nan_rows();
  if (float_out) in.o.make(TW_FLOAT32, std::vector<int64_t>(in.o.tensor.shape, in.o.tensor.shape + in.o.tensor.ndim), layout);
  in.upload();
  if (Status s = run_row(row, p, in.tensors(true)); !s.ok()) {
    out.fail(s.message());
    return out;
  }
  const auto o = in.o.download();
  const auto again = [&] {
    in.o.upload();
    if (!run_row(row, p, in.tensors(true)).ok()) std::abort();
    return in.o.download();
  }();
  if (o != again) out.fail("o differs between two runs");
  const auto k_after = in.k.download(), v_after = in.v.download();
  const auto lse = in.lse.exists ? in.lse.download() : std::vector<uint8_t>();
  const auto maximum = in.max_logit.exists ? in.max_logit.download() : std::vector<uint8_t>();
  const auto mask = in.mask_out.exists ? in.mask_out.download() : std::vector<uint8_t>();
  // The oracle's outputs are float32, so that its own rounding does not count; twice: with |v| it gives the sum that rounding errors are relative to.
  std::vector<double> magnitude(in.o.count());
  Mirror wanted;
  wanted.make(TW_FLOAT32, std::vector<int64_t>(in.o.tensor.shape, in.o.tensor.shape + in.o.tensor.ndim));
  tw_tensors oracle = in.tensors(false);
  oracle.o = &wanted.tensor;
  const std::vector<uint8_t> v_bytes = in.v.host;
  std::vector<double> v_new_values(in.v_new.exists ? in.v_new.count() : 0);
  for (size_t n = 0; n < v_new_values.size(); ++n) {
    v_new_values[n] = in.v_new.get(n);
    in.v_new.set(n, std::fabs(v_new_values[n]));
  }
  for (int64_t n = 0; n < in.v.count(); ++n) in.v.set(n, std::fabs(in.v.get(n)));
  run_oracle(p, oracle);
  for (int64_t n = 0; n < in.o.count(); ++n) magnitude[n] = wanted.get(n);
  std::copy(v_bytes.begin(), v_bytes.end(), in.v.host.begin());
  for (int64_t n = 0; in.v_new.exists && n < in.v_new.count(); ++n) in.v_new.set(n, v_new_values[n]);
  run_oracle(p, oracle);
  const double u = unit_roundoff(p.dtype), slack = p.softcap > 0 ? 1.2 : 1.05;
  // float16: probabilities under 2^-14 of the row's reference are rounded to multiples of 2^-24.
  const double tiny = p.dtype == TW_FLOAT16 ? 0x1p-24 * static_cast<double>(p.seqlen_k) : 0;
  const double logit_error = 1e-6 * value_scale * value_scale;  // float32 q . k, relative to logits of this size
  if (in.k_new.exists) {
    compare("k cache", in.k, k_after, in.k, [&](int64_t n) { return u * std::fabs(in.k.get(n)) + 2e-2 * u; }, &out);
    compare("v cache", in.v, v_after, in.v, [](int64_t) { return 1e-30; }, &out);
  }
  const double rotation = p.rotary_dim > 0 ? 2 * u * value_scale * value_scale : 0;  // a logit's share of rounded q and k
  compare("o", in.o, o, wanted, [&](int64_t n) {
    return slack * (u + logit_error * 4 + rotation) * (magnitude[n] + std::fabs(wanted.get(n))) + tiny + 1e-6;
  }, &out);
  if (in.lse.exists) compare("lse", in.lse, lse, in.lse, [&](int64_t n) { return 2e-6 * (10 + std::fabs(in.lse.get(n))) + 1e-5 * value_scale * value_scale + rotation; }, &out);
  if (in.max_logit.exists) compare("max_logit", in.max_logit, maximum, in.max_logit, [&](int64_t n) { return 2e-6 * (10 + std::fabs(in.max_logit.get(n))); }, &out);
  if (in.mask_out.exists) compare("dropout_mask", in.mask_out, mask, in.mask_out, [](int64_t) { return 0.0; }, &out);
  return out;
}

// Gradients, in norm and element by element. `floor` is the error that rounding o to 16 bits leaves in delta and so in
// one element; `share` the part of it that an average element sees (probabilities near 1 are rare in long rows). The norm of
// n independent roundings scatters by its share 1 / sqrt(2 n): three of these are allowed.
void compare_gradient(const char* name, const Mirror& m, const std::vector<uint8_t>& bytes, double u, double floor, double share,
                      Outcome* out) {
  if (!m.exists) return;
  double error2 = 0, want2 = 0, maximum = 0;
  for (int64_t n = 0; n < m.count(); ++n) {
    const double want = m.get(n), got = m.get_from(bytes, n);
    if (std::isnan(want) && std::isnan(got)) continue;
    error2 += (got - want) * (got - want);
    want2 += want * want;
    maximum = std::max(maximum, std::fabs(want));
  }
  const double spread = 1 + 3 / std::sqrt(2 * static_cast<double>(std::max<int64_t>(m.count(), 1)));
  const double error = std::sqrt(error2), limit = spread * u * std::sqrt(want2) + (share * floor + 2e-6) * std::sqrt(static_cast<double>(m.count()));
  char line[128];
  if (!(error <= limit)) {
    std::snprintf(line, sizeof line, "%s: error %.3g in norm, allowed %.3g", name, error, limit);
    out->fail(line);
  }
  compare(name, m, bytes, m, [&](int64_t n) { return 8 * u * (0.1 * maximum + std::fabs(m.get(n))) + 4 * floor + 1e-5; }, out);
  std::snprintf(line, sizeof line, "(%.1e)", error / (std::sqrt(want2) + 1e-30));
  if (out->ok) out->text += line;
}

Outcome test_backward(const KernelRow& row, const tw_problem& p, LayoutKind layout, unsigned seed, double value_scale, bool nan_rows) {
  Outcome out;
  Inputs in(p, layout, seed, value_scale);
  if (nan_rows) in.add_nan_rows();
  tw_problem forward = p;
  forward.pass = TW_FORWARD;
  forward.features = (p.features & ~uint32_t{TW_HAS_DLSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV | TW_HAS_DBIAS | TW_HAS_DALIBI | TW_HAS_DSINK}) | TW_HAS_LSE;
  tw_tensors t = in.tensors(false);
  run_oracle(forward, t);
  in.upload();
  if (Status s = run_row(row, p, in.tensors(true)); !s.ok()) {
    out.fail(s.message());
    return out;
  }
  Mirror* gradients[] = {&in.dq, &in.dk, &in.dv, &in.dbias, &in.dalibi, &in.dsink};
  const char* names[] = {"dq", "dk", "dv", "dbias", "dalibi", "dsink"};
  std::vector<std::vector<uint8_t>> bytes;
  for (Mirror* m : gradients) bytes.push_back(m->exists ? m->download() : std::vector<uint8_t>());
  if (p.deterministic) {
    for (int n = 0; n < 3; ++n) {
      for (Mirror* m : gradients)
        if (m->exists) m->upload();
      if (!run_row(row, p, in.tensors(true)).ok()) std::abort();
      for (size_t g = 0; g < bytes.size(); ++g)
        if (gradients[g]->exists && gradients[g]->download() != bytes[g]) out.fail(std::string(names[g]) + ": differs between two runs");
    }
  }
  run_oracle(p, in.tensors(false));
  // P = exp(s - lse) is computed again, from an lse that was rounded twice (natural, base 2): relative to P that is 2^-23 |lse|.
  // A softcap adds the rounding of its tanh, 2^-22 (2^-23 in float32) of the cap. Small beside 16-bit roundings.
  double largest_lse = 1;
  for (int64_t n = 0; n < in.lse.count(); ++n)
    if (const double lse = std::fabs(in.lse.get(n)); std::isfinite(lse)) largest_lse = std::max(largest_lse, lse);
  const double probability = 0x1p-23 * largest_lse + (p.dtype == TW_FLOAT32 ? 0x1p-23 : 0x1p-22) * p.softcap;
  const double u = unit_roundoff(p.dtype) * (value_scale > 2 ? 3 : 1) + probability;
  const double delta_error = 0.6 * u * std::sqrt(static_cast<double>(p.head_dim_v));
  const bool few_keys = p.seqlen_k <= 16 || (p.window_left >= 0 && p.window_left < 8);
  const double qk_floor = delta_error * std::fabs(softmax_scale_of(p)) * value_scale;
  const double rows = static_cast<double>(p.batch * p.num_heads_q * p.seqlen_q);
  const double per_bias = in.bias.exists ? std::max(1.0, rows / std::max<double>(1, static_cast<double>(in.bias.count()) / static_cast<double>(p.bias_dims & TW_DIM_K ? std::max<int64_t>(p.seqlen_k, 1) : 1))) : 1;
  const double floors[] = {qk_floor, qk_floor, 0, delta_error * std::sqrt(per_bias), delta_error * 50 * std::sqrt(rows), delta_error * std::sqrt(rows)};
  for (size_t g = 0; g < bytes.size(); ++g)
    compare_gradient(names[g], *gradients[g], bytes[g], g == 3 ? std::max(u, unit_roundoff(p.bias_dtype)) : u, floors[g],
                     g >= 3 || few_keys ? 1 : 0.1, &out);
  return out;
}

struct Case {
  std::string text;
  LayoutKind layout = LayoutKind::kContiguous;
  double value_scale = 1;
  bool float_out = false;
  bool nan_rows = false;  // NaN in rows that some queries see and others do not
};

constexpr const char* kDtypes[] = {"bf16 ", "f16 ", "f32 "};

std::vector<Case> forward_cases() {
  std::vector<Case> cases;
  const auto add = [&](std::string text, LayoutKind layout = LayoutKind::kContiguous, double scale = 1, bool float_out = false) {
    cases.push_back({"fwd " + text, layout, scale, float_out});
  };
  const auto both = [&](const std::string& text, LayoutKind layout = LayoutKind::kContiguous, double scale = 1) {
    for (const char* dtype : kDtypes) add(dtype + text, layout, scale);
  };
  // Head dims: every multiple of 8, plain and general; some that are not.
  for (const int d : {1, 2, 7, 12, 33, 65, 100, 127, 129, 210, 255}) {
    both("b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + " causal");
    both("b=2 hq=4 hk=2 sq=9 sk=700 splits=3 d=" + std::to_string(d) + " dv=" + std::to_string(256 - d));
  }
  for (int d = 8; d <= 256; d += 8) {
    add("f32 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : " softcap=5"));
    add("bf16 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : ""));
    add("f16 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + " softcap=5" + (d % 16 ? "" : " causal"));
    add("f16 b=1 hq=4 hk=2 sq=9 sk=150 d=" + std::to_string(d));
  }
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{64, 128}, {128, 64}, {192, 128}, {40, 256}, {256, 8}, {72, 104}})
    both("b=2 hq=2 sq=140 sk=200 d=" + std::to_string(d) + " dv=" + std::to_string(dv) + " causal");
  // Lengths around the tiles, masks.
  for (auto [sq, sk] : std::vector<std::pair<int, int>>{{1, 1}, {1, 5}, {5, 1}, {2, 5}, {5, 2}, {17, 97}, {64, 64}, {65, 63}, {127, 129}, {128, 128}, {113, 203}, {203, 113}, {256, 511}, {511, 256}, {1000, 1025}}) {
    const std::string s = "b=1 hq=2 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) + " d=64";
    both(s), both(s + " causal"), both(s + " window=10,-1"), both(s + " window=100,3"), both(s + " window=0,0"), both(s + " window=-1,40");
    both(s + " causal window=70,0"), both(s + " causal softcap=10 sink"), both(s + " alibi=h causal maxlogit"), both(s + " mask=bhqk causal");
  }
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=300 sk=333 d=") + d;
    both(s + " causal softcap=20 alibi=bh bias=f32:hqk sink dropout=0.3 seed=5 maxlogit");
    both(s + " dropout=0.1 seed=9 offset=3 dropout_mask"), both(s + " dropout=0.5 rng_state dropout_mask window=50,20");
    both(s + " bias=bf16:bk"), both(s + " bias=f16:q"), both(s + " bias=f32:1"), both(s + " mask=qk"), both(s + " mask=bk"), both(s + " sink no_lse");
    both(s + " scale=0"), both(s + " scale=-0.125 causal"), both(s + " scale=1e-8"), both(s + " scale=2 maxlogit");
    both(s + " causal", LayoutKind::kContiguous, 3), both(s, LayoutKind::kContiguous, 10), both(s + " sink", LayoutKind::kContiguous, 10);
    both(s + " seqused_q seqused_k causal"), both(s + " leftpad seqused_k"), both(s + " leftpad causal sink");
    for (LayoutKind layout : {LayoutKind::kHeadsFirst, LayoutKind::kSliced, LayoutKind::kUnaligned, LayoutKind::kEverySecondRow})
      both(s + " causal", layout), both(s + " softcap=3", layout);
    add("bf16 " + s + " causal", LayoutKind::kContiguous, 1, true), add("bf16 " + s + " sink", LayoutKind::kUnaligned, 1, true);
    const std::string packed = std::string("b=7 hq=4 hk=1 sq=200 sk=210 d=") + d;
    both(packed + " packed_q=900 packed_k=800"), both(packed + " packed_q=900 packed_k=800 causal"), both(packed + " packed_q=900 causal seqused_q seqused_k");
    both(packed + " packed_q=900 packed_k=800 causal sink alibi=h seqused_q"), both(packed + " packed_k=800 window=30,10");
    both(packed + " pages=80x16 seqused_k causal"), both(packed + " pages=300x5 seqused_k packed_q=1000"), both(packed + " pages=10x256 seqused_k sink");
    const std::string decode = std::string("b=3 hq=8 hk=2 sk=1500 d=") + d;
    for (const char* sq : {" sq=1", " sq=3", " sq=64"})
      for (const char* rest : {"", " causal", " seqused_k sink", " splits=5 seqused_k", " splits=3 causal sink maxlogit", " splits=7 alibi=h window=300,-1", " splits=128 leftpad seqused_k", " pages=400x16 seqused_k", " cache_batch=5 cache_batch_idx seqused_k causal softcap=9"})
        both(decode + sq + rest);
    for (const char* sq : {" sq=1", " sq=5", " sq=130"})
      for (const char* rest : {"", " rotary=16", " rotary=32,interleaved causal", " rotary=64 rotary_seqlens causal", " leftpad causal", " pages=400x16 rotary=8 causal", " cache_batch=5 cache_batch_idx rotary=64"})
        both(std::string("b=3 hq=4 hk=2 sk=300 new=5 seqused_k d=") + d + sq + rest);
    both(std::string("b=4 hq=4 hk=2 sq=70 sk=500 packed_q=240 rotary=32 seqused_k causal d=") + d);
    both(std::string("b=3 hq=4 hk=2 sq=200 sk=1500 splits=4 causal d=") + d);
    both(std::string("b=4 hq=4 hk=2 sq=70 sk=500 packed_q=240 splits=4 sink seqused_q seqused_k d=") + d);
    add(std::string("bf16 b=2 hq=4 hk=2 sq=5 sk=500 splits=4 d=") + d, LayoutKind::kUnaligned);
  }
  for (const char* d : {"64", "128", "192"})
    for (const char* rest : {" causal", " window=20,10", " causal softcap=5", " mask=qk", " causal pages=40x16", " causal splits=3"})
      for (const char* dtype : {"bf16", "f16"})
        cases.push_back({std::string("fwd ") + dtype + " b=2 hq=4 hk=2 sq=150 sk=170 d=" + d + rest, LayoutKind::kContiguous, 1, false, true});
  // Several tiles of every kernel in both directions.
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=420 sk=600 d=") + d;
    for (const char* rest : {"", " no_lse", " causal", " causal no_lse", " window=-1,40", " window=-1,300", " window=100,30", " window=300,-1", " window=700,700",
                             " causal scale=-0.2", " causal softcap=20", " softcap=5 sink maxlogit scale=-0.3", " alibi=bh causal", " alibi=h window=200,90",
                             " causal maxlogit", " causal sink", " leftpad seqused_k causal", " leftpad window=99,33", " cache_batch=5 cache_batch_idx seqused_k",
                             " seqused_q seqused_k causal", " sm_margin=100 causal", " batch_invariant", " dropout=0.2 seed=7", " dropout=0.3 causal maxlogit",
                             " dropout=0.5 rng_state window=100,60 dropout_mask"})
      both(s + rest);
    for (const char* rest : {" causal", "", " window=-1,100 no_lse", " sink", " causal softcap=40"})
      both(s + rest, LayoutKind::kContiguous, 10);
    const std::string paged = std::string("b=2 hq=4 hk=2 sq=300 sk=768 d=") + d;
    for (const char* rest : {" pages=100x16 seqused_k causal", " pages=50x32 seqused_k window=200,30", " pages=30x64", " pages=12x128 leftpad seqused_k causal",
                             " pages=7x384 softcap=9 sink seqused_k", " pages=100x16 dropout=0.2 causal seqused_k"})
      both(paged + rest);
    both(paged + " pages=100x16 causal seqused_k", LayoutKind::kContiguous, 10);
    const std::string packed = std::string("b=5 hq=4 hk=1 sq=400 sk=450 packed_q=800 packed_k=900 d=") + d;
    for (const char* rest : {"", " causal", " window=90,50 sink", " causal softcap=7 maxlogit", " causal batch_invariant"}) both(packed + rest);
    both(std::string("b=2 hq=2 hk=1 sq=600 sk=350 causal d=") + d), both(std::string("b=2 hq=2 hk=1 sq=600 sk=200 window=20,100 d=") + d);
    for (const char* rest : {" causal", " window=200,100", " causal softcap=5", " seqused_k", " leftpad causal"})
      for (const char* dtype : {"bf16", "f16"})
        cases.push_back({std::string("fwd ") + dtype + " b=2 hq=4 hk=2 sq=300 sk=420 d=" + d + rest, LayoutKind::kContiguous, 1, false, true});
  }
  // Zero sizes.
  for (const char* rest : {"b=0 hq=2 sq=5 sk=5", "b=2 hq=2 sq=0 sk=5", "b=2 hq=2 sq=5 sk=0", "b=2 hq=2 sq=5 sk=0 sink", "b=1 hq=0 sq=5", "b=2 hq=2 sq=100 sk=0 causal splits=2"})
    both(std::string(rest) + " d=64");
  return cases;
}

std::vector<Case> backward_cases() {
  std::vector<Case> cases;
  const auto both = [&](const std::string& text, LayoutKind layout = LayoutKind::kContiguous, double scale = 1) {
    for (const char* dtype : kDtypes) cases.push_back({std::string("bwd ") + dtype + text, layout, scale});
  };
  for (const int d : {1, 2, 7, 12, 33, 65, 100, 127, 129, 210, 255})
    both("b=1 hq=4 hk=2 sq=133 sk=150 d=" + std::to_string(d) + " dv=" + std::to_string(256 - d) + " causal");
  for (int d = 8; d <= 256; d += 8) both("b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : " softcap=5"));
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{64, 128}, {128, 64}, {192, 128}, {40, 256}, {256, 8}, {72, 104}})
    both("b=2 hq=2 sq=140 sk=200 d=" + std::to_string(d) + " dv=" + std::to_string(dv) + " causal");
  for (auto [sq, sk] : std::vector<std::pair<int, int>>{{1, 1}, {1, 5}, {5, 1}, {2, 5}, {5, 2}, {17, 97}, {64, 64}, {65, 63}, {127, 129}, {128, 128}, {113, 203}, {203, 113}, {256, 511}, {511, 256}}) {
    const std::string s = "b=1 hq=2 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) + " d=64";
    both(s), both(s + " causal"), both(s + " window=10,-1"), both(s + " window=100,3"), both(s + " window=0,0"), both(s + " window=-1,40");
    both(s + " causal window=70,0 deterministic"), both(s + " causal softcap=10 sink dsink"), both(s + " alibi=h causal dalibi"), both(s + " mask=bhqk causal");
  }
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=300 sk=333 d=") + d;
    both(s + " causal"), both(s), both(s + " deterministic"), both(s + " causal deterministic dlse");
    both(s + " causal softcap=20 alibi=bh bias=f32:hqk sink dropout=0.3 seed=5 dbias dalibi dsink dlse");
    both(s + " causal softcap=20 alibi=bh bias=f32:bhqk sink dropout=0.3 seed=5 dbias dalibi dsink dlse deterministic");
    both(s + " dropout=0.1 seed=9 offset=3"), both(s + " dropout=0.5 rng_state window=50,20"), both(s + " dropout=0.4 seed=3 softcap=8 deterministic");
    both(s + " dropout=0.2 causal", LayoutKind::kUnaligned), both(s + " dropout=0.2 causal deterministic");
    both(s + " bias=bf16:bk dbias"), both(s + " bias=f16:q dbias"), both(s + " bias=f32:1 dbias"), both(s + " bias=f32:bhqk dbias"), both(s + " mask=qk"), both(s + " mask=bk");
    both(s + " bias=f32:bhqk dbias deterministic");
    both(s + " scale=0"), both(s + " scale=-0.125 causal"), both(s + " no_dq"), both(s + " no_dk no_dv"), both(s + " no_dk");
    both(s + " causal", LayoutKind::kContiguous, 3);
    both(s + " seqused_q seqused_k causal");
    for (LayoutKind layout : {LayoutKind::kHeadsFirst, LayoutKind::kSliced, LayoutKind::kUnaligned, LayoutKind::kEverySecondRow})
      both(s + " causal", layout), both(s + " softcap=3", layout);
    const std::string packed = std::string("b=7 hq=4 hk=1 sq=200 sk=210 d=") + d;
    both(packed + " packed_q=900 packed_k=800"), both(packed + " packed_q=900 packed_k=800 causal deterministic"), both(packed + " packed_q=900 causal seqused_q seqused_k");
    both(packed + " packed_q=900 packed_k=800 causal sink dsink alibi=h dalibi seqused_q"), both(packed + " packed_k=800 window=30,10");
  }
  for (const char* d : {"64", "128", "192"})
    for (const char* rest : {" causal", " window=20,10", " causal softcap=5", " mask=qk", " causal deterministic"})
      for (const char* dtype : kDtypes)
        cases.push_back({std::string("bwd ") + dtype + "b=2 hq=4 hk=2 sq=150 sk=170 d=" + d + rest, LayoutKind::kContiguous, 1, false, true});
  for (const char* rest : {"b=0 hq=2 sq=5 sk=5", "b=2 hq=2 sq=0 sk=5", "b=2 hq=2 sq=5 sk=0", "b=2 hq=2 sq=5 sk=0 sink dsink", "b=1 hq=0 sq=5"})
    both(std::string(rest) + " d=64");
  return cases;
}

// A random problem, which one row at least must take. Longer than the CPU's: their tiles are larger.
Case random_case(std::mt19937_64& engine) {
  const auto number = [&](int low, int high) { return low + static_cast<int>(engine() % static_cast<uint64_t>(high - low + 1)); };
  const std::string text = random_problem({number(0, 9) < 8 ? 140 : 400, number(0, 9) < 8 ? 200 : 700}, number);
  const LayoutKind layout = number(0, 1) == 0 ? LayoutKind::kContiguous : static_cast<LayoutKind>(number(0, 4));
  return {text, layout, 1, text.starts_with("fwd") && number(0, 9) == 0};
}

bool any_row_available() {
  for (const KernelRow& row : cuda_kernels())
    if (row.available()) return true;
  std::printf("SKIPPED: no GPU of compute capability 8.0 or more\n");
  return false;
}

class Tally {
 public:
  explicit Tally(bool verbose) : verbose_(verbose) {}

  // The case on every row that takes it; one must.
  void run(const Case& c, unsigned seed) {
    tw_problem p;
    if (Status s = parse(c.text, &p); !s.ok()) return fail(c, "parse", s.message());
    std::string refusals;
    bool taken = false;
    for (const KernelRow& row : cuda_kernels()) {
      if (row.pass != p.pass || !row.available()) continue;
      if (const std::string reason = row.refusal(p); !reason.empty()) {
        refusals += concat(row.name, ": ", reason, "; ");
        continue;
      }
      taken = true;
      ++ran_;
      const Outcome outcome = p.pass == TW_FORWARD ? test_forward(row, p, c.layout, seed, c.value_scale, c.float_out, c.nan_rows)
                                                   : test_backward(row, p, c.layout, seed, c.value_scale, c.nan_rows);
      if (!outcome.ok)
        fail(c, row.name, outcome.text);
      else if (verbose_ || ran_ % 97 == 0)
        std::printf("ok   %s %s:%s\n", row.name, c.text.c_str(), outcome.text.c_str());
      std::fflush(stdout);
    }
    if (!taken) fail(c, "no row takes it", refusals);
  }

  int report() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::printf("%d cases, %d failed, %.1f s\n", ran_, failed_, seconds);
    return failed_ != 0;
  }
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  void fail(const Case& c, const std::string& where, const std::string& why) {
    ++failed_;
    std::printf("FAIL %s: %s [%s x%g%s]\n%s\n", where.c_str(), c.text.c_str(), layout_name(c.layout), c.value_scale,
                c.float_out ? " f32 out" : "", why.c_str());
    std::fflush(stdout);
  }
  bool verbose_;
  int ran_ = 0, failed_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

int run_cases(const std::string& pass, const std::string& first_filter, const std::string& second_filter) {
  if (!any_row_available()) return 0;
  const std::regex first(first_filter), second(second_filter);
  std::vector<Case> cases;
  if (pass != "backward") cases = forward_cases();
  if (pass != "forward")
    for (Case& c : backward_cases()) cases.push_back(c);
  Tally tally(!second_filter.empty());
  unsigned seed = 0;
  for (const Case& c : cases)
    if (std::regex_search(c.text, first) && std::regex_search(c.text, second)) tally.run(c, ++seed);
  return tally.report();
}

int run_random(double seconds, uint64_t seed) {
  if (!any_row_available()) return 0;
  std::mt19937_64 engine(seed);
  Tally tally(false);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (unsigned n = 1; tally.seconds() < seconds; ++n) tally.run(random_case(engine), n);
  return tally.report();
}

}  // namespace
}  // namespace tilewise::cuda_test

int main(int argc, char** argv) {
  using namespace tilewise::cuda_test;
  const auto argument = [&](int n) { return std::string(argc > n ? argv[n] : ""); };
  if (argument(1) == "random")
    return run_random(std::atof(argument(2).c_str()), argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  return run_cases(argument(1), argument(2), argument(3));
}
