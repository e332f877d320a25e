// The ways to call: one call or plan and run, options that carry shapes or not, one plan again and again.
#include "support.h"

namespace tilewise {
namespace {

TEST(Calls, OneCallEqualsPlanAndRun) {
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32 causal", "fwd bf16 b=3 hq=4 hk=2 sq=30 d=64 packed_q=70 packed_k=80",
                           "fwd f32 b=2 hq=2 sq=20 sk=48 d=24 pages=9x16 seqused_k causal softcap=9", "bwd f32 b=2 hq=4 hk=2 sq=33 sk=50 d=32 window=7,7"})
    for (const std::string& row : rows_for(std::string(text))) {
      const auto planned = make_inputs(std::string(text), {});
      run_ok(*planned, row);
      const auto direct = make_inputs(std::string(text), {});
      tw_problem options;  // options alone: shapes come from the tensors
      tw_problem_init(&options);
      const tw_problem& p = direct->problem();
      options.causal = p.causal, options.window_left = p.window_left, options.window_right = p.window_right, options.softcap = p.softcap;
      const tw_tensors tensors = direct->tensors();
      const tw_target target = target_for(row);
      const auto call = p.pass == TW_FORWARD ? tw_forward : tw_backward;
      ASSERT_EQ(call(&options, &tensors, &target, nullptr), TW_OK) << tw_last_error();
      expect_same_bits(*planned, *direct, row + ", options without shapes");
      direct->poison_outputs();
      ASSERT_EQ(call(&p, &tensors, &target, nullptr), TW_OK) << tw_last_error();
      expect_same_bits(*planned, *direct, row + ", options with shapes");
    }
}

TEST(Calls, NullOptionsAndTargetAreDefaults) {
  const auto planned = make_inputs("fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32", {});
  run_ok(*planned, "");
  const auto direct = make_inputs("fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32", {});
  const tw_tensors tensors = direct->tensors();
  ASSERT_EQ(tw_forward(nullptr, &tensors, nullptr, nullptr), TW_OK) << tw_last_error();
  expect_same_bits(*planned, *direct, "NULL options");
}

// tw_describe fills in the same problem that the text names.
TEST(Calls, DescribeFindsTheProblem) {
  for (const char* text :
       {"fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32", "fwd f32 b=3 hq=4 hk=2 sq=30 sk=40 d=64 packed_q=90 packed_k=110", "fwd f32 b=1 hq=2 sq=20 sk=48 d=24 pages=9x16 seqused_k",
        "fwd f32 b=2 hq=2 sq=3 sk=40 d=16 cache_batch=5 seqused_k cache_batch_idx leftpad", "fwd f32 b=2 hq=2 sq=3 sk=40 d=16 new=2 rotary=8 seqused_k rotary_seqlens",
        "fwd bf16 b=2 hq=2 sq=20 sk=33 d=16 dv=8 alibi=bh bias=f32:hqk sink dropout_mask maxlogit no_lse dropout=0.1",
        "bwd f16 b=2 hq=2 sq=20 sk=33 d=16 alibi=h bias=f32:bk sink dlse dbias dalibi dsink", "bwd f32 b=2 hq=2 sq=20 d=16 mask=bq no_dk"}) {
    const auto inputs = make_inputs(std::string(text), {});
    const tw_tensors tensors = inputs->tensors();
    tw_problem options, found;
    tw_problem_init(&options);
    options.pass = inputs->problem().pass;
    options.dropout_p = inputs->problem().dropout_p;
    ASSERT_EQ(tw_describe(&options, &tensors, &found), TW_OK) << tw_last_error();
    EXPECT_EQ(problem_text(found), problem_text(inputs->problem()));
  }
}

// One plan, alternating contents: nothing of a call is left for the next.
TEST(Calls, PlansKeepNothing) {
  for (const char* text : {"fwd f32 b=2 hq=2 sq=40 sk=70 d=16 mask=bqk", "fwd bf16 b=3 hq=4 hk=2 sq=40 d=32 packed_q=100 packed_k=100 causal",
                           "fwd f32 b=3 hq=4 hk=2 sq=1 sk=200 d=64 pages=60x16 seqused_k splits=4", "bwd f32 b=3 hq=4 hk=2 sq=40 d=32 packed_q=100 packed_k=100"})
    for (const std::string& row : rows_for(std::string(text))) {
      const tw_problem problem = problem_of(text);
      const tw_target target = target_for(row);
      tw_plan* plan = nullptr;
      ASSERT_EQ(tw_plan_create(&problem, &target, &plan), TW_OK) << tw_last_error();
      tw_plan_info info{};
      info.struct_size = sizeof info;
      ASSERT_EQ(tw_plan_get_info(plan, &info), TW_OK);
      Bytes workspace(static_cast<size_t>(info.workspace_bytes) + 64, 0xff);
      for (int round = 0; round < 6; ++round) {
        InputOptions options;
        options.seed = static_cast<uint64_t>(1 + round % 3);
        options.layout = round % 2 ? Layout::kPadded : Layout::kContiguous;
        const auto reused = make_inputs(problem, options), fresh = make_inputs(problem, options);
        run_ok(*fresh, row);
        const tw_tensors tensors = reused->tensors();
        ASSERT_EQ(tw_run(plan, &tensors, workspace.data(), static_cast<size_t>(info.workspace_bytes), nullptr), TW_OK) << tw_last_error();
        expect_same_bits(*fresh, *reused, row + ", round " + std::to_string(round));
      }
      tw_plan_destroy(plan);
    }
}

// Options one after the other in one process: softcap on, another, off; dtype and layout changed in between.
TEST(Calls, OrderOfProblemsDoesNotMatter) {
  for (const char* pass : {"fwd", "bwd"})
    for (const char* tail : {"", "softcap=10", "softcap=15 causal", "softcap=50", ""})
      for (const char* dtype : {"f16", "bf16", "f32"}) {
        const std::string text = std::string(pass) + " " + dtype + " b=2 hq=4 hk=2 sq=60 d=32 packed_q=100 packed_k=100 " + tail;
        for (const std::string& row : rows_for(text)) {
          CheckRequest request;
          request.problem = text;
          request.kernel = row;
          expect_check(request);
        }
      }
}

TEST(Calls, RngStateOverridesTheSeed) {
  const std::string text = "fwd f32 b=2 hq=2 sq=40 sk=50 d=16 dropout=0.4 dropout_mask";
  for (const std::string& row : rows_for(text)) {
    const auto from_state = make_inputs(text + " rng_state seed=1", {});
    tw_problem problem = problem_of(text);
    problem.dropout_seed = static_cast<uint64_t>(from_state->rng_state.get(0));
    problem.dropout_offset = static_cast<uint64_t>(from_state->rng_state.get(1));
    const auto from_problem = make_inputs(problem, {});
    run_ok(*from_state, row);
    run_ok(*from_problem, row);
    expect_same_bits(*from_problem, *from_state, row);
    problem.dropout_offset += 1;
    const auto next = make_inputs(problem, {});
    run_ok(*next, row);
    EXPECT_FALSE(next->dropout_mask.same_elements(from_problem->dropout_mask, nullptr)) << row << ": the next offset drew the same mask";
  }
}

// The mask written out is the mask applied, forward and backward: v = identity shows P, kept or dropped.
TEST(Calls, DropoutMaskIsTheMaskApplied) {
  const std::string text = "fwd f32 b=1 hq=2 sq=32 sk=32 d=32 dropout=0.5 seed=11 dropout_mask";
  for (const std::string& row : rows_for(text)) {
    const auto inputs = make_inputs(text, {});
    for (int64_t j = 0; j < 32; ++j)
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t c = 0; c < 32; ++c) inputs->v.set(inputs->k_row(0, j, h) * 32 + c, c == j);
    run_ok(*inputs, row);
    int64_t kept = 0;
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 32; ++i)
        for (int64_t j = 0; j < 32; ++j) {
          const bool in_mask = inputs->dropout_mask.get((h * 32 + i) * 32 + j) != 0;
          kept += in_mask;
          ASSERT_EQ(in_mask, inputs->o.get(inputs->q_row(0, i, h) * 32 + j) != 0) << row << " " << h << ", " << i << ", " << j;
          ASSERT_EQ(in_mask, tw_dropout_keep(0.5, 11, 0, h, i, j) != 0);
        }
    EXPECT_NEAR(static_cast<double>(kept), 1024, 120);  // 2048 draws, five standard deviations
  }
}

}  // namespace
}  // namespace tilewise
