// Every layout of memory, alone and mixed: right, within its elements, and the same problem.
#include "support.h"

namespace tilewise {
namespace {

const char* const kLayoutProblems[] = {
    "fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32 causal",      "fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=46 dv=20",
    "fwd f32 b=3 hq=4 hk=2 sq=30 d=64 packed_q=70 packed_k=70 causal", "fwd f32 b=2 hq=8 hk=2 sq=1 sk=140 d=64 seqused_k",
    "fwd f32 b=2 hq=2 sq=20 sk=48 d=24 pages=9x16 seqused_k new=2 rotary=8 causal maxlogit",
    "fwd f32 b=2 hq=2 sq=20 sk=33 d=16 bias=f32:bhqk alibi=bh sink dropout=0.2 dropout_mask",
    "bwd f32 b=2 hq=4 hk=2 sq=33 sk=50 d=32 causal",      "bwd f32 b=2 hq=4 hk=2 sq=33 sk=50 d=46 dv=20 dlse",
    "bwd f32 b=3 hq=4 hk=2 sq=30 d=64 packed_q=70 packed_k=70 causal", "bwd f32 b=1 hq=2 sq=20 sk=33 d=256",
    "bwd f32 b=2 hq=2 sq=20 sk=33 d=16 bias=f32:bhqk dbias alibi=bh dalibi sink dsink dropout=0.2"};

class Layouts : public testing::TestWithParam<const char*> {};

TEST_P(Layouts, EveryRowEveryLayout) {
  for (const int32_t dtype : {TW_FLOAT32, TW_BFLOAT16, TW_FLOAT16}) {
    tw_problem problem = problem_of(GetParam());
    problem.dtype = dtype;
    for (int layout = 0; layout < kNumLayouts; ++layout)
      for (const uint64_t seed : {uint64_t{3}, uint64_t{4}}) {
        if (seed == 4 && static_cast<Layout>(layout) != Layout::kMixed && static_cast<Layout>(layout) != Layout::kUnaligned) continue;
        for (const std::string& row : rows_for(problem)) {
          CheckRequest request;
          request.problem = problem_text(problem);
          request.kernel = row;
          request.layout = static_cast<Layout>(layout);
          request.seed = seed;
          expect_check(request);
        }
      }
  }
}

TEST_P(Layouts, Float32Outputs) {
  for (const int32_t dtype : {TW_BFLOAT16, TW_FLOAT16}) {
    tw_problem problem = problem_of(GetParam());
    problem.dtype = dtype;
    for (const std::string& row : rows_for(problem))
      for (const int which : {1, 2, 3}) {
        if (problem.pass == TW_FORWARD && which != 1) continue;
        CheckRequest request;
        request.problem = problem_text(problem);
        request.kernel = row;
        request.float32_outputs = which & 1;
        request.float32_o = which & 2;
        expect_check(request);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Layouts, testing::ValuesIn(kLayoutProblems));

}  // namespace
}  // namespace tilewise
