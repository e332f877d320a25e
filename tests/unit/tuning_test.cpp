// core/tuning.h: choices as text, the file of winners, and that a stale one changes nothing.
#include "core/tuning.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "core/plan.h"
#include "cpu/backend.h"
#include "unit/helpers.h"

namespace tilewise {
namespace {

constexpr const char* kHead = "tilewise 1.2.3\nmachine here\nthreads 2\n";

Tuning tuning_of(const std::string& text) { return Tuning::parse("file", text, "1.2.3", "here"); }

Plan plan_of(const std::string& text, const Tuning* tuning, const Choice& choice = {}, const std::string& kernel = "") {
  Target target;
  target.num_threads = 2, target.tuning = tuning, target.choice = choice, target.kernel = kernel;
  Plan plan;
  const Status status = make_plan(problem_of(text), target, cpu_kernels(), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

TEST(Choice, Text) {
  Choice choice;
  ASSERT_TRUE(parse_choice(" block_m=48  block_n=128 splits=2 ", &choice).ok());
  EXPECT_EQ(choice, (Choice{48, 128, 2}));
  EXPECT_EQ(format(choice), "block_m=48 block_n=128 splits=2");
  EXPECT_EQ(format(Choice{}), "");
  EXPECT_TRUE(parse_choice("", &choice).ok());
  EXPECT_TRUE(choice.empty());
  for (const char* wrong : {"block_m=0", "block_m=-6", "block_m=x", "block_m", "blocks=3", "block_m=1e3"})
    EXPECT_NE(parse_choice(wrong, &choice).message().find(wrong), std::string::npos) << wrong;
}

TEST(Tuning, File) {
  const Tuning tuning = tuning_of(std::string("# made by hand\n") + kHead +
                                  "fwd f32 b=1 hq=8 sq=512 d=64: forward_scalar block_m=48  # 1 ms, default 2 ms\n"
                                  "\nbwd f32 hq=2 sq=64 d=8: backward_scalar block_n=64 splits=2\n"
                                  "fwd f32 hq=8: forward_scalar block_m=48\nnonsense\nfwd f32 hq=1 sq=8 d=8: forward_scalar size=3\n");
  EXPECT_EQ(tuning.size(), 2u);
  EXPECT_EQ(tuning.note(), "tuning file: 2 problems for 2 threads, 3 lines that do not read");
  const Tuning::Entry* entry = tuning.find(problem_of("fwd f32 hq=8 sq=512 d=64 seed=4 offset=9"), 2);
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->kernel, "forward_scalar");
  EXPECT_EQ(entry->choice, (Choice{48, 0, 0}));
  EXPECT_EQ(tuning.find(problem_of("fwd f32 hq=8 sq=512 d=64"), 3), nullptr);
  EXPECT_EQ(tuning.find(problem_of("fwd f32 hq=8 sq=513 d=64"), 2), nullptr);
}

TEST(Tuning, OfAnotherVersionOrMachineIsNotUsed) {
  const std::string line = "fwd f32 hq=8 sq=512 d=64: forward_scalar block_m=48\n";
  for (const auto& [text, why] : {std::pair{"tilewise 1.2.2\nmachine here\nthreads 2\n" + line, "made by version \"1.2.2\", this is 1.2.3"},
                                  std::pair{"tilewise 1.2.3\nmachine there\nthreads 2\n" + line, "made on \"there\", this is \"here\""},
                                  std::pair{line, "made by version \"\""},
                                  std::pair{std::string("\0\xff\n:\n: \n", 8), "made by version"}}) {
    const Tuning tuning = tuning_of(text);
    EXPECT_EQ(tuning.size(), 0u);
    EXPECT_NE(tuning.note().find(why), std::string::npos) << tuning.note();
    EXPECT_EQ(tuning.find(problem_of("fwd f32 hq=8 sq=512 d=64"), 2), nullptr);
  }
  EXPECT_EQ(Tuning().note(), "");
}

// A row of a GPU that this machine need not have.
KernelRow gpu_row(const char* name, const char* cuts) {
  return {name, TW_BACKEND_CUDA, TW_FORWARD, "sm_80", "for a test", [] { return true; }, [](const tw_problem&) { return std::string(); },
          [](const tw_problem&, const Target& target, Plan* plan) {
            plan->config = format(target.choice);
            return Status();
          },
          nullptr, cuts};
}

TEST(Tuning, ProblemsOfAGpuBelongToThatGpu) {
  const std::string problem = "fwd bf16 cuda hq=8 sq=512 d=64", gpu = "NVIDIA B1, sm_80, 4 multiprocessors";
  const std::string text = kHead + ("gpu " + gpu) + "\n" + problem + ": second splits=3\nfwd f32 hq=8 sq=512 d=64: forward_scalar block_m=48\n";
  const Tuning here = Tuning::parse("file", text, "1.2.3", "here", {"another", gpu}), elsewhere = tuning_of(text);
  EXPECT_EQ(here.find_on_gpu(problem_of(problem), 0), nullptr);
  EXPECT_EQ(here.find_on_gpu(problem_of(problem), 2), nullptr);
  ASSERT_NE(here.find_on_gpu(problem_of(problem), 1), nullptr);
  EXPECT_EQ(elsewhere.find_on_gpu(problem_of(problem), 0), nullptr);
  EXPECT_NE(elsewhere.find(problem_of("fwd f32 hq=8 sq=512 d=64"), 2), nullptr);
  EXPECT_NE(here.note().find("2 problems for 2 threads and for \"" + gpu + "\""), std::string::npos) << here.note();
  const KernelRow rows[] = {gpu_row("first", "splits"), gpu_row("second", "block_n splits")};
  const auto plan_on = [&](int32_t device, const Tuning* tuning, const Choice& choice = {}) {
    Target target;
    target.num_threads = 9, target.device_index = device, target.tuning = tuning, target.choice = choice;
    Plan plan;
    const Status status = make_plan(problem_of(problem), target, rows, &plan);
    return status.ok() ? std::string(plan.row->name) + " " + plan.config : status.message();
  };
  EXPECT_EQ(plan_on(1, &here), "second splits=3, tuned");
  EXPECT_EQ(plan_on(0, &here), "first ");
  EXPECT_EQ(plan_on(1, &elsewhere), "first ");
  EXPECT_EQ(plan_on(1, &here, {0, 0, 2}), "first splits=2");  // a caller's choice comes first
  EXPECT_EQ(plan_on(1, nullptr, {0, 64, 2}), "config: \"block_n=64\": first takes splits");
}

TEST(Tuning, PlansUseIt) {
  const std::string text = "fwd f32 hq=8 sq=512 d=64";
  const Tuning tuning = tuning_of(kHead + text + ": forward_scalar block_m=48 block_n=128 splits=2\n");
  const Plan tuned = plan_of(text, &tuning), usual = plan_of(text, nullptr);
  EXPECT_EQ(std::string(tuned.row->name), "forward_scalar");
  EXPECT_EQ(tuned.block_m, 48);
  EXPECT_EQ(tuned.block_n, 128);
  EXPECT_EQ(tuned.num_splits, 2);
  EXPECT_TRUE(tuned.config.ends_with(", tuned")) << tuned.config;
  EXPECT_NE(tuned.config, usual.config);
  // A caller's kernel or choice comes first, and batch_invariant leaves no room for either.
  EXPECT_EQ(plan_of(text, &tuning, Choice{96, 0, 0}).block_m, 96);
  EXPECT_EQ(plan_of(text, &tuning, {}, "forward_scalar").config, plan_of(text, nullptr, {}, "forward_scalar").config);
  EXPECT_EQ(plan_of(text + " batch_invariant", &tuning).config, plan_of(text + " batch_invariant", nullptr).config);
}

TEST(Tuning, WhatNoRowTakesIsAsIfNothingWasSaid) {
  const std::string text = "fwd f32 hq=8 sq=512 d=64";
  const Plan usual = plan_of(text, nullptr);
  for (const char* entry : {"forward_abacus block_m=48", "backward_scalar block_n=64", "reference block_m=48", "forward_scalar block_m=50", "forward_scalar block_n=1000"}) {
    const Tuning tuning = tuning_of(kHead + text + ": " + entry + "\n");
    ASSERT_EQ(tuning.size(), 1u) << entry;
    EXPECT_EQ(plan_of(text, &tuning).text(), usual.text()) << entry;
    Target target;
    target.num_threads = 2, target.tuning = &tuning;
    EXPECT_NE(explain(problem_of(text), target, cpu_kernels()).find("tuning file: 1 problems for 2 threads; for this one"), std::string::npos);
  }
}

TEST(Choice, RowsRefuseWhatTheyCannotCut) {
  const auto refusal = [](const std::string& text, const Choice& choice, const char* kernel) {
    Target target;
    target.num_threads = 2, target.choice = choice, target.kernel = kernel;
    Plan plan;
    return make_plan(problem_of(text), target, cpu_kernels(), &plan).message();
  };
  EXPECT_EQ(refusal("fwd f32 hq=8 sq=512 d=64", {50, 0, 0}, "forward_scalar"), "config: block_m 50: must be a multiple of 6 up to 384");
  EXPECT_EQ(refusal("fwd f32 hq=8 sq=512 d=64", {0, 100, 0}, "forward_scalar"), "config: block_n 100: must be a multiple of 64 up to 256");
  EXPECT_NE(refusal("fwd f32 hq=8 sq=512 d=64", {0, 0, 9}, "forward_scalar").find("config: splits 9: must be at most 8"), std::string::npos);
  EXPECT_NE(refusal("fwd f32 hq=8 sq=512 d=64 splits=2", {0, 0, 4}, "forward_scalar").find("num_splits"), std::string::npos);
  EXPECT_NE(refusal("bwd f32 hq=8 sq=512 d=64", {96, 0, 0}, "backward_scalar").find("block_m 96: backward has 192 alone"), std::string::npos);
  EXPECT_NE(refusal("bwd f32 hq=8 sq=512 d=64", {0, 0, 9}, "backward_scalar").find("splits 9: must be at most 8"), std::string::npos);
  EXPECT_NE(refusal("fwd f32 hq=8 sq=512 d=64", {48, 0, 0}, "reference").find("reference cuts by itself"), std::string::npos);
}

}  // namespace
}  // namespace tilewise
