// Every row of the kernel table on every case, in f32, f16 and bf16, against the float64 reference.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "conformance/cases.h"
#include "support.h"

namespace tilewise {
namespace {

using namespace harness;

// Two sets of inputs per case and dtype: Gaussian, and another kind in another layout, which go round over the cases.
void check_rows(const std::string& problem, int pass, size_t turn) {
  const auto other_kind = static_cast<InputKind>(1 + turn % (kNumInputKinds - 1));
  const auto other_layout = static_cast<Layout>(turn % kNumLayouts);
  for (const bool second : {false, true})
    for (const tw_kernel_info& kernel : kernels()) {
      if (!under_test(kernel) || (kernel.pass != -1 && kernel.pass != pass)) continue;
      CheckRequest request;
      request.problem = problem;
      request.kernel = kernel.name;
      request.input = second ? other_kind : InputKind::kGaussian;
      request.layout = second ? other_layout : Layout::kContiguous;
      request.seed = 1 + turn;
      const CheckResult result = check(request);
      if (result.refused) {
        EXPECT_STRNE(kernel.name, "reference") << "the reference takes everything; it said: " << result.message;
        continue;
      }
      EXPECT_TRUE(result.ok) << to_text(result);
    }
}

class Matrix : public testing::TestWithParam<Case> {};

std::string name_of(const testing::TestParamInfo<Case>& info) { return info.param.name; }

size_t turn_of(const std::string& text) {  // the same for a case wherever it stands in the list
  size_t turn = 0;
  for (const char c : text) turn = turn * 31 + static_cast<unsigned char>(c);
  return turn % 100003;
}

class Forward : public Matrix {};
TEST_P(Forward, EveryRow) {
  const Case& one = GetParam();
  SCOPED_TRACE(one.comment);
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    const std::string problem = with_dtype(one.problem, dtype);
    check_rows(problem, TW_FORWARD, turn_of(problem));
  }
}

class Backward : public Matrix {};
TEST_P(Backward, EveryRow) {
  const Case& one = GetParam();
  SCOPED_TRACE(one.comment);
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    const std::string problem = with_dtype(one.problem, dtype);
    check_rows(problem, TW_BACKWARD, turn_of(problem));
  }
}

std::vector<Case> cases_of(const std::string& pass) {
  std::vector<Case> cases;
  for (Case one : read_cases()) {
    if (pass == "bwd" && one.problem.starts_with("fwd")) {
      if (one.comment.starts_with("forward only")) continue;
      one.problem = backward_of(one.problem);
      one.name += "_backward";
    }
    if (one.problem.starts_with(pass)) cases.push_back(one);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Forward, Forward, testing::ValuesIn(cases_of("fwd")), name_of);
INSTANTIATE_TEST_SUITE_P(Backward, Backward, testing::ValuesIn(cases_of("bwd")), name_of);

}  // namespace
}  // namespace tilewise
