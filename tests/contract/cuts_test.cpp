// Every cut that a row accepts computes the same function: within the tolerance that its own cut has.
#include <algorithm>
#include <cmath>

#include "support.h"

namespace tilewise {
namespace {

// Results of `problem` by the row with its blocks as `config` says; o and lse of the forward pass are those of the reference.
void run_with(Inputs& inputs, const std::string& row, const std::string& config, int* refused) {
  tw_target target{};
  target.struct_size = sizeof target;
  target.num_threads = 2;
  target.kernel = row.c_str();
  target.config = config.empty() ? nullptr : config.c_str();
  const tw_tensors tensors = inputs.tensors();
  const tw_problem& p = inputs.problem();
  const tw_status status = p.pass == TW_FORWARD ? tw_forward(&p, &tensors, &target, nullptr) : tw_backward(&p, &tensors, &target, nullptr);
  if (status == TW_INVALID_ARGUMENT && refused != nullptr && std::string(tw_last_error()).starts_with("config:")) {
    ++*refused;
    return;
  }
  ASSERT_EQ(status, TW_OK) << tw_last_error();
}

// Two honest results, relative to the largest element: in bfloat16 each rounds P or dS (2^-9 a term, of random sign) and the
// result (2^-9), in float32 sums of some hundred terms differ in their order.
void expect_near(Buffer& a, Buffer& b, bool bfloat16, const std::string& what) {
  double largest = 0;
  for (const double x : b.values()) largest = std::max(largest, std::abs(x));
  EXPECT_GT(largest, 0) << what;
  EXPECT_LE(largest_difference(a.values(), b.values()), largest * (bfloat16 ? 0x1p-7 : 0x1p-20)) << what;
}

TEST(Cuts, AllComputeTheSame) {
  int compared = 0, refused = 0;
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal", "fwd f32 b=2 hq=4 hk=2 sq=3 sk=700 d=64 causal",
                           "fwd bf16 b=1 hq=2 sq=200 d=40 window=70,30 dropout=0.3 seed=5", "bwd f32 b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal",
                           "bwd bf16 b=1 hq=2 sq=260 d=80 dropout=0.3 seed=5"})
    for (const std::string& row : rows_for(std::string(text))) {
      if (row == "reference") continue;
      const bool backward = std::string(text).starts_with("bwd");
      const auto usual = make_inputs(std::string(text), {});
      run_with(*usual, row, "", nullptr);
      for (const char* config : {"block_m=6", "block_m=24 block_n=64", "block_m=192 block_n=192", "block_n=256 splits=2", "block_n=64 splits=3", "block_n=128 splits=5", "block_m=384 block_n=64"}) {
        const auto cut = make_inputs(std::string(text), {});
        const int before = refused;
        run_with(*cut, row, config, &refused);
        if (refused != before || testing::Test::HasFatalFailure()) continue;
        const std::string what = std::string(text) + " by " + row + ", " + config;
        const bool bfloat16 = std::string(text).find("bf16") != std::string::npos;
        if (backward) {
          expect_near(cut->dq, usual->dq, bfloat16, what + ": dq");
          expect_near(cut->dk, usual->dk, bfloat16, what + ": dk");
          expect_near(cut->dv, usual->dv, bfloat16, what + ": dv");
        } else {
          expect_near(cut->o, usual->o, bfloat16, what + ": o");
          expect_near(cut->lse, usual->lse, false, what + ": lse");
        }
        ++compared;
      }
    }
  EXPECT_GT(compared, 20);
  EXPECT_GT(refused, 0);  // block_m of a backward row
}

}  // namespace
}  // namespace tilewise
