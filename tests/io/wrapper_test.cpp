// tilewise.hpp against the C ABI.
#include "tilewise/tilewise.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/dtype.h"

namespace {

namespace tw = tilewise;

TEST(Wrapper, SixteenBitFloatsAreTheLibrarysOwn) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    tw::float16 half;
    tw::bfloat16 brain;
    half.bits = brain.bits = static_cast<uint16_t>(bits);
    EXPECT_EQ(std::bit_cast<uint32_t>(float(half)), std::bit_cast<uint32_t>(tilewise::f16_to_float(half.bits)));
    EXPECT_EQ(std::bit_cast<uint32_t>(float(brain)), std::bit_cast<uint32_t>(tilewise::bf16_to_float(brain.bits)));
  }
  for (uint64_t word = 0; word <= 0xffffffff; word += 9973) {  // every exponent, many mantissas, NaN and inf
    const float value = std::bit_cast<float>(static_cast<uint32_t>(word));
    ASSERT_EQ(tw::float16(value).bits, tilewise::float_to_f16(value)) << word;
    ASSERT_EQ(tw::bfloat16(value).bits, tilewise::float_to_bf16(value)) << word;
  }
}

TEST(Wrapper, ViewsKnowDtypeShapeAndStrides) {
  tw::bfloat16 data[24];
  const tw::TensorView view(data, {2, 3, 4});
  EXPECT_EQ(view.c()->dtype, TW_BFLOAT16);
  EXPECT_EQ(view.c()->ndim, 3);
  EXPECT_EQ(view.c()->shape[1], 3);
  EXPECT_EQ(view.c()->stride[0], 12);
  EXPECT_EQ(view.c()->stride[2], 1);
  EXPECT_EQ(view.c()->device, TW_CPU);
  const tw::ConstTensorView expanded(data, {5, 4}, {0, 1});
  EXPECT_EQ(expanded.c()->stride[0], 0);
  EXPECT_FALSE(tw::TensorView());
  EXPECT_EQ(std::as_const(*std::make_unique<tw::TensorView>()).c(), nullptr);
  EXPECT_THROW(tw::TensorView(data, {1, 1, 1, 1, 1}), tw::Error);
  EXPECT_THROW(tw::TensorView(data, {2, 2}, {1}), tw::Error);
  static_assert(tw::dtype_of<float> == TW_FLOAT32 && tw::dtype_of<double> == TW_FLOAT64 &&
                tw::dtype_of<int32_t> == TW_INT32 && tw::dtype_of<int64_t> == TW_INT64 &&
                tw::dtype_of<bool> == TW_BOOL && tw::dtype_of<tw::float16> == TW_FLOAT16);
  static_assert(
      !std::is_constructible_v<tw::TensorView, const float*, std::initializer_list<int64_t>>);  // no output into const
}

// Every member arrives at its own place.
TEST(Wrapper, TensorsReachTheirMembers) {
  float memory = 0;
  int count = 0;
  const auto numbered = [&] { return ++count, tw::TensorView(&memory, {count}); };
  tw::Tensors t;
  t.q = numbered(), t.k = numbered(), t.v = numbered(), t.o = numbered(), t.lse = numbered(), t.max_logit = numbered();
  t.bias = numbered(), t.alibi_slopes = numbered(), t.sink = numbered(), t.rng_state = numbered(),
  t.dropout_mask = numbered();
  t.cu_seqlens_q = numbered(), t.cu_seqlens_k = numbered(), t.seqused_q = numbered(), t.seqused_k = numbered();
  t.page_table = numbered(), t.cache_batch_idx = numbered(), t.leftpad_k = numbered(), t.k_new = numbered(),
  t.v_new = numbered();
  t.rotary_cos = numbered(), t.rotary_sin = numbered(), t.rotary_seqlens = numbered();
  t.dout = numbered(), t.dlse = numbered(), t.dq = numbered(), t.dk = numbered(), t.dv = numbered();
  t.dbias = numbered(), t.dalibi = numbered(), t.dsink = numbered();
  const tw_tensors c = t.c();
  EXPECT_EQ(c.struct_size, sizeof c);
  EXPECT_EQ(c.reserved, 0u);
  // The struct holds them in the same order: their sizes are 1, 2, 3, ...
  const tw_tensor* const* members = &c.q;
  const size_t members_count = (sizeof c - offsetof(tw_tensors, q)) / sizeof(void*);
  ASSERT_EQ(static_cast<size_t>(count), members_count) << "tw_tensors has grown: so must tilewise::Tensors";
  for (size_t n = 0; n < members_count; ++n) {
    const tw_tensor* member;
    std::memcpy(&member, reinterpret_cast<const char*>(members) + n * sizeof(void*), sizeof member);
    ASSERT_NE(member, nullptr) << n;
    EXPECT_EQ(member->shape[0], static_cast<int64_t>(n) + 1);
  }
}

TEST(Wrapper, ProblemIsAValue) {
  const std::string text = "fwd bf16 b=2 hq=32 hk=8 sq=1024 d=128 causal";
  const tw::Problem problem = tw::Problem::parse(text);
  EXPECT_EQ(problem.text(), text);
  EXPECT_EQ(problem, tw::Problem::parse("fwd bf16 causal b=2 hk=8 hq=32 d=128 sk=1024 sq=1024"));
  tw::Problem built;
  built.causal()
      .window(7, 0)
      .softmax_scale(-0.5)
      .softcap(30)
      .dropout(0.25, 3, 4)
      .deterministic()
      .batch_invariant()
      .num_splits(2)
      .backward();
  EXPECT_EQ(built.c().causal, 1);
  EXPECT_EQ(built.c().window_left, 7);
  EXPECT_EQ(built.c().window_right, 0);
  EXPECT_EQ(built.c().softmax_scale, -0.5);
  EXPECT_EQ(built.c().softcap, 30);
  EXPECT_EQ(built.c().dropout_p, 0.25);
  EXPECT_EQ(built.c().dropout_seed, 3u);
  EXPECT_EQ(built.c().dropout_offset, 4u);
  EXPECT_EQ(built.c().deterministic, 1);
  EXPECT_EQ(built.c().batch_invariant, 1);
  EXPECT_EQ(built.c().num_splits, 2);
  EXPECT_EQ(built.c().pass, TW_BACKWARD);
}

TEST(Wrapper, ErrorsCarryStatusAndSentence) {
  try {
    tw::Problem::parse("fwd f32 hq=1 sq=1 d=8 frob=3");
    FAIL();
  } catch (const tw::Error& error) {
    EXPECT_EQ(error.status(), TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("frob"), std::string::npos);
  }
  EXPECT_THROW(tw::Plan(tw::Problem::parse("fwd f32 hq=3 hk=2 sq=1 d=8")), tw::Error);
  try {
    tw::Plan(tw::Problem::parse("fwd f32 hq=1 sq=1 d=8"), {.kernel = "no_such_kernel"});
    FAIL();
  } catch (const tw::Error& error) {
    EXPECT_EQ(error.status(), TW_UNSUPPORTED);
  }
}

// Two keys of equal score: o is the mean of their values, lse = score + log 2.
TEST(Wrapper, ForwardBackwardAndPlanAgree) {
  float q[8] = {1}, k[16] = {}, v[16], o[8], lse[1], dout[8], dv[16];
  for (int n = 0; n < 16; ++n) v[n] = static_cast<float>(n);
  for (float& x : dout) x = 2;
  tw::Tensors t{.q = {q, {1, 1, 1, 8}},
                .k = {k, {1, 2, 1, 8}},
                .v = {v, {1, 2, 1, 8}},
                .o = {o, {1, 1, 1, 8}},
                .lse = {lse, {1, 1, 1}}};
  tw::forward(tw::Problem(), t);
  EXPECT_FLOAT_EQ(lse[0], std::log(2.0f));
  for (int n = 0; n < 8; ++n) EXPECT_FLOAT_EQ(o[n], static_cast<float>(n) + 4);

  const tw::Problem problem = tw::describe(tw::Problem(), t);
  EXPECT_EQ(problem.text(), "fwd f32 b=1 hq=1 sq=1 sk=2 d=8");
  tw::Plan plan(problem, {.num_threads = 1});
  const tw::Plan moved = std::move(plan);
  std::memset(o, 0xff, sizeof o);
  moved.run(t, moved.make_workspace());
  for (int n = 0; n < 8; ++n) EXPECT_FLOAT_EQ(o[n], static_cast<float>(n) + 4);
  EXPECT_NE(moved.text().find(moved.info().kernel), std::string::npos);
  EXPECT_NE(tw::explain(problem).find(moved.info().kernel), std::string::npos);
  static_assert(!std::is_copy_constructible_v<tw::Plan>);

  t.dout = {dout, {1, 1, 1, 8}};
  t.dv = {dv, {1, 2, 1, 8}};
  tw::backward(tw::Problem(), t);
  for (float x : dv) EXPECT_FLOAT_EQ(x, 1);
}

TEST(Wrapper, WorkspaceIsAligned) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{1000}}) {
    const tw::Workspace workspace(bytes);
    EXPECT_EQ(workspace.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.data()) % 64, 0u);
  }
}

TEST(Wrapper, SoftmaxAccumulatorAndMerge) {
  const float x[4] = {0, 1, 2, 3};
  float y[4], lse = 0;
  tw::softmax({x, {1, 4}}, {y, {1, 4}}, {&lse, {1}});
  tw::Accumulator left(1, 1), right(1, 1);
  const float values[4] = {5, 6, 7, 8};
  left.push({x, {1, 2}}, {values, {2, 1}});
  right.push({x + 2, {1, 2}}, {values + 2, {2, 1}});
  float o_left = 0, o_right = 0, lse_left = 0, lse_right = 0;
  left.result({&o_left, {1, 1}}), left.lse({&lse_left, {1}});
  right.result({&o_right, {1, 1}}), right.lse({&lse_right, {1}});
  tw::merge_states({&o_left, {1, 1, 1, 1}}, {&lse_left, {1, 1, 1}}, {&o_right, {1, 1, 1, 1}}, {&lse_right, {1, 1, 1}});
  left.merge(right);
  float result = 0, total = 0, p[2];
  left.result({&result, {1, 1}}), left.lse({&total, {1}});
  left.probabilities({x + 2, {1, 2}}, {p, {1, 2}});
  double expected = 0;
  for (int n = 0; n < 4; ++n) expected += static_cast<double>(y[n]) * values[n];
  EXPECT_NEAR(result, expected, 1e-5);
  EXPECT_NEAR(o_left, expected, 1e-5);
  EXPECT_NEAR(total, lse, 1e-6);
  EXPECT_NEAR(lse_left, lse, 1e-6);
  EXPECT_NEAR(p[1], y[3], 1e-6);
}

TEST(Wrapper, Introspection) {
  EXPECT_EQ(tw::version(), tw_version());
  const std::vector<tw_kernel_info> table = tw::kernels();
  ASSERT_FALSE(table.empty());
  EXPECT_STREQ(table.back().name, "reference");
  EXPECT_NE(tw::machine().find(tw_version()), std::string::npos);
}

}  // namespace
