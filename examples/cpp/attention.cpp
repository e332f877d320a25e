// Attention from C++: grouped-query attention in bfloat16, forward and backward in one call each, and a plan.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "tilewise/tilewise.hpp"

using tilewise::bfloat16;

int main() try {
  const int64_t b = 1, s = 384, hq = 8, hk = 2, d = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto filled = [&](int64_t heads) {
    std::vector<bfloat16> x(static_cast<size_t>(b * s * heads * d));
    for (bfloat16& value : x) value = bfloat16(normal(random));
    return x;
  };
  std::vector<bfloat16> q = filled(hq), k = filled(hk), v = filled(hk), dout = filled(hq), o(q.size());
  std::vector<float> lse(static_cast<size_t>(b * hq * s)), dq(q.size()), dk(k.size()),
      dv(v.size());  // float32 gradients

  const tilewise::Problem options = tilewise::Problem().causal().window(128, 0);
  tilewise::Tensors tensors{.q = {q.data(), {b, s, hq, d}},
                            .k = {k.data(), {b, s, hk, d}},
                            .v = {v.data(), {b, s, hk, d}},
                            .o = {o.data(), {b, s, hq, d}},
                            .lse = {lse.data(), {b, hq, s}}};
  tilewise::forward(options, tensors);

  tensors.dout = {dout.data(), {b, s, hq, d}};
  tensors.dq = {dq.data(), {b, s, hq, d}};
  tensors.dk = {dk.data(), {b, s, hk, d}};
  tensors.dv = {dv.data(), {b, s, hk, d}};
  tilewise::backward(options, tensors);

  // Row 0 sees key 0 alone: o is v, and all of dout goes to dv.
  for (int64_t h = 0; h < hq; ++h)
    for (int64_t c = 0; c < d; ++c)
      if (o[static_cast<size_t>(h * d + c)] != v[static_cast<size_t>(h / (hq / hk) * d + c)])
        return std::puts("o[0] is not v[0]"), 1;
  double gradient = 0;  // of softmax along a shift of all scores: 0, so sum dq.q = sum dk.k
  for (size_t n = 0; n < q.size(); ++n) gradient += static_cast<double>(dq[n]) * static_cast<double>(q[n]);
  for (size_t n = 0; n < k.size(); ++n) gradient -= static_cast<double>(dk[n]) * static_cast<double>(k[n]);
  if (!(std::fabs(gradient) < 1)) return std::printf("dq.q and dk.k differ by %g\n", gradient), 1;

  // Plan once, run often: no allocation in run(). A plan knows what it will need and why it was chosen.
  const tilewise::Plan plan(tilewise::Problem::parse("fwd bf16 b=1 hq=8 hk=2 sq=384 d=64 causal window=128,0"));
  const tilewise::Workspace workspace = plan.make_workspace();
  tensors = {.q = tensors.q, .k = tensors.k, .v = tensors.v, .o = tensors.o, .lse = tensors.lse};
  for (int n = 0; n < 3; ++n) plan.run(tensors, workspace);
  std::printf("%s", plan.text().c_str());

  // Errors name the argument, the value got and what is allowed.
  try {
    tilewise::Plan(tilewise::Problem::parse("fwd f32 hq=7 hk=2 sq=16 d=64"));
    return std::puts("7 query heads over 2 key heads went unnoticed"), 1;
  } catch (const tilewise::Error& error) {
    std::printf("an error reads: %s\n", error.what());
  }
  return 0;
} catch (const tilewise::Error& error) {
  std::fprintf(stderr, "error %d: %s\n", error.status(), error.what());
  return 1;
}
