// Plans as golden text: for a row forced by name the plan is the same on every machine. TILEWISE_REGENERATE=1 writes
// plan/golden.txt anew; read the difference before you keep it.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "conformance/cases.h"
#include "support.h"

namespace tilewise {
namespace {

const char* const kProblems[] = {
    "fwd f32 b=1 hq=8 sq=512 d=64",
    "fwd f32 b=1 hq=8 sq=512 d=64 causal",
    "fwd bf16 b=2 hq=32 hk=8 sq=2048 d=128 causal",
    "fwd f16 b=2 hq=32 hk=8 sq=2048 d=128 causal window=511,0",
    "fwd bf16 b=8 hq=32 hk=8 sq=1 sk=8192 d=128 seqused_k causal",
    "fwd bf16 b=1 hq=32 hk=8 sq=1 sk=32768 d=128 pages=2048x16 seqused_k causal",
    "fwd f32 b=1 hq=4 sq=128 d=192 dv=128",
    "fwd f32 b=1 hq=4 sq=128 d=256",
    "fwd bf16 b=16 hq=8 sq=512 d=64 packed_q=4000 packed_k=4000 causal",
    "fwd f32 b=2 hq=4 sq=64 d=32 splits=4 softcap=30 alibi=h sink bias=f32:hqk",
    "fwd f32 b=0 hq=4 sq=64 d=32",
    "bwd f32 b=1 hq=8 sq=512 d=64 causal",
    "bwd bf16 b=2 hq=32 hk=8 sq=2048 d=128 causal deterministic",
    "bwd f16 b=16 hq=8 sq=512 d=64 packed_q=4000 packed_k=4000",
    "bwd f32 b=2 hq=4 sq=64 d=32 bias=f32:hqk dbias alibi=h dalibi sink dsink dropout=0.1"};

std::string plan_text(const std::string& problem_text, const std::string& row) {
  const tw_problem problem = problem_of(problem_text);
  tw_target target{};
  target.struct_size = sizeof target;
  target.num_threads = 2;
  target.kernel = row.c_str();
  tw_plan* plan = nullptr;
  const tw_status status = tw_plan_create(&problem, &target, &plan);
  if (status == TW_UNSUPPORTED) return "refused\n";
  if (status != TW_OK) return std::string(tw_last_error()) + "\n";
  std::string text(tw_plan_text(plan, nullptr, 0) + 1, 0);
  text.resize(tw_plan_text(plan, text.data(), text.size()));
  tw_plan_destroy(plan);
  return text;
}

std::string golden_path() { return std::string(TILEWISE_TESTS_DIR) + "/plan/golden.txt"; }

// "== PROBLEM | ROW" lines, each followed by its plan.
std::map<std::string, std::string> read_golden() {
  std::map<std::string, std::string> golden;
  std::ifstream in(golden_path());
  std::string line, key;
  while (std::getline(in, line)) {
    if (line.starts_with("== "))
      key = line.substr(3);
    else if (!key.empty())
      golden[key] += line + "\n";
  }
  return golden;
}

TEST(Plan, GoldenTexts) {
  std::map<std::string, std::string> golden = read_golden();
  const bool regenerate = std::getenv("TILEWISE_REGENERATE") != nullptr;
  size_t compared = 0;
  for (const char* problem : kProblems)
    for (const tw_kernel_info& kernel : kernels()) {
      // Rows that this machine cannot run are left as they are in the file.
      const int pass = std::string(problem).starts_with("fwd") ? TW_FORWARD : TW_BACKWARD;
      if (!kernel.available || kernel.backend == TW_BACKEND_CUDA || (kernel.pass != -1 && kernel.pass != pass)) continue;
      const std::string key = std::string(problem) + " | " + kernel.name, text = plan_text(problem, kernel.name);
      if (regenerate)
        golden[key] = text;
      else
        EXPECT_EQ(text, golden[key]) << key << "\n(if the change is meant: TILEWISE_REGENERATE=1)";
      ++compared;
    }
  EXPECT_GE(compared, std::size(kProblems));
  if (!regenerate) return;
  std::ofstream out(golden_path());
  out << "# Written by plan_test.cpp with TILEWISE_REGENERATE=1.\n";
  for (const auto& [key, text] : golden) out << "== " << key << "\n" << text;
}

// The plan depends on problem and target alone: not on the number of threads as far as results go, not on time.
TEST(Plan, IsPure) {
  for (const char* problem : kProblems)
    for (const std::string& row : rows_for(std::string(problem))) EXPECT_EQ(plan_text(problem, row), plan_text(problem, row));
}

TEST(Plan, SplitsDoNotDependOnThreads) {
  for (const char* text : kProblems)
    for (const std::string& row : rows_for(std::string(text))) {
      int64_t splits = -1;
      for (const int threads : {1, 2, 7, 64}) {
        const tw_problem problem = problem_of(text);
        tw_target target{};
        target.struct_size = sizeof target;
        target.num_threads = threads;
        target.kernel = row.c_str();
        tw_plan* plan = nullptr;
        ASSERT_EQ(tw_plan_create(&problem, &target, &plan), TW_OK) << tw_last_error();
        tw_plan_info info{};
        info.struct_size = sizeof info;
        ASSERT_EQ(tw_plan_get_info(plan, &info), TW_OK);
        tw_plan_destroy(plan);
        if (splits < 0) splits = info.num_splits;
        EXPECT_EQ(info.num_splits, splits) << row << " with " << threads << " threads: " << text;
      }
    }
}

// Every case plans by itself, on a row of the table, and says so in words.
TEST(Plan, EveryCaseIsExplained) {
  for (const Case& one : read_cases()) {
    const tw_problem problem = problem_of(one.problem);
    std::string text(tw_explain(&problem, nullptr, nullptr, 0) + 1, 0);
    text.resize(tw_explain(&problem, nullptr, text.data(), text.size()));
    EXPECT_NE(text.find("problem " + problem_text(problem)), std::string::npos) << text;
    EXPECT_NE(text.find("\nkernel "), std::string::npos) << one.problem << "\n" << text;
  }
}

// format(parse(text)) is the canonical spelling, and parsing it again changes nothing.
TEST(Plan, TextsReadBack) {
  for (const Case& one : read_cases()) {
    const std::string canonical = problem_text(problem_of(one.problem));
    EXPECT_EQ(problem_text(problem_of(canonical)), canonical) << one.problem;
  }
}

// Linear memory: four times the length, about four times the workspace; never a score matrix.
TEST(Plan, WorkspaceIsLinearInTheLength) {
  for (const char* pass : {"fwd", "bwd"})
    for (const char* tail : {"", " causal", " deterministic"})
      for (const char* dtype : {"f32", "bf16"}) {
        const auto text = [&](int64_t length) { return std::string(pass) + " " + dtype + " b=1 hq=4 hk=2 sq=" + std::to_string(length) + " d=64" + tail; };
        for (const std::string& row : rows_for(text(4096))) {
          int64_t bytes[2];
          for (int n = 0; n < 2; ++n) {
            const tw_problem problem = problem_of(text(n == 0 ? 65536 : 262144));
            tw_target target{};
            target.struct_size = sizeof target;
            target.num_threads = 2;
            target.kernel = row.c_str();
            tw_plan* plan = nullptr;
            ASSERT_EQ(tw_plan_create(&problem, &target, &plan), TW_OK) << tw_last_error();
            tw_plan_info info{};
            info.struct_size = sizeof info;
            ASSERT_EQ(tw_plan_get_info(plan, &info), TW_OK);
            tw_plan_destroy(plan);
            bytes[n] = info.workspace_bytes;
            EXPECT_LT(info.workspace_bytes, info.standard_bytes) << row;
          }
          EXPECT_LE(bytes[1], 4 * bytes[0] + bytes[0] / 16) << row << ": " << bytes[0] << " bytes at 65536, " << bytes[1] << " at 262144: " << text(262144);
        }
      }
}

}  // namespace
}  // namespace tilewise
