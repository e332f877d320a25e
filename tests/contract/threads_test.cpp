// Threads change nothing: any number of them, a pool of the caller's, any order of tasks, many callers at once.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support.h"

namespace tilewise {
namespace {

const char* const kThreadProblems[] = {
    "fwd f32 b=2 hq=4 hk=2 sq=100 sk=150 d=32 causal",
    "fwd bf16 b=1 hq=2 sq=200 sk=300 d=64",
    "fwd f16 b=2 hq=8 hk=2 sq=1 sk=700 d=64 seqused_k splits=5",
    "fwd f32 b=1 hq=2 hk=1 sq=1 sk=2000 d=32",
    "fwd bf16 b=4 hq=4 hk=2 sq=60 d=32 packed_q=150 packed_k=150 causal alibi=h sink",
    "fwd f32 b=2 hq=4 hk=2 sq=40 sk=96 d=16 pages=13x16 seqused_k new=3 rotary=8 causal maxlogit",
    "fwd f32 b=2 hq=2 sq=50 sk=70 d=16 dropout=0.3 seed=3 dropout_mask",
    "bwd f32 b=2 hq=4 hk=2 sq=100 sk=150 d=32 causal",
    "bwd bf16 b=1 hq=2 sq=200 sk=300 d=64 deterministic",
    "bwd f16 b=4 hq=4 hk=1 sq=60 d=32 packed_q=150 packed_k=150 causal",
    "bwd f32 b=1 hq=2 hk=1 sq=90 sk=110 d=16 bias=f32:qk dbias alibi=h dalibi sink dsink dropout=0.1 dlse",
    "bwd f32 b=1 hq=1 sq=300 sk=900 d=16 window=100,20"};

// Runs tasks last to first, each worker on a thread of its own taking the next free task.
void backwards(void* pool, int64_t num_tasks, tw_task task, void* context) {
  const int workers = *static_cast<int*>(pool);
  std::atomic<int64_t> next{num_tasks};
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker)
    threads.emplace_back([&, worker] {
      for (int64_t index = --next; index >= 0; index = --next) task(context, index, worker);
    });
  for (std::thread& thread : threads) thread.join();
}

class Threads : public testing::TestWithParam<const char*> {};

TEST_P(Threads, ChangeNothing) {
  const std::string text = GetParam();
  for (const std::string& row : rows_for(text)) {
    const auto one = make_inputs(text, {});
    const Inputs fresh = *one;
    run_ok(*one, row, 1);
    for (const int threads : {2, 3, 5, 8}) {
      Inputs more = fresh;
      run_ok(more, row, threads);
      expect_same_bits(*one, more, row + ", 1 and " + std::to_string(threads) + " threads");
    }
    for (int workers : {1, 4}) {
      Inputs own = fresh;
      const tw_executor executor{sizeof(tw_executor), workers, &workers, backwards};
      run_ok(own, row, 0, &executor);
      expect_same_bits(*one, own, row + ", own pool of " + std::to_string(workers));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Threads, testing::ValuesIn(kThreadProblems));

// Eight threads call mixed problems on the library's pool, forward and backward, at once.
TEST(Concurrency, ManyCallersMixedProblems) {
  struct Job {
    std::string text, row;
    std::unique_ptr<Inputs> expected;
  };
  std::vector<Job> jobs;
  for (const char* text : kThreadProblems)
    for (const std::string& row : rows_for(std::string(text))) {
      if (row == "reference" || row.find("scalar") != std::string::npos) continue;  // slow, and the same pool
      jobs.push_back({text, row, make_inputs(std::string(text), {})});
      run_ok(*jobs.back().expected, row);
    }
  if (jobs.empty()) GTEST_SKIP() << "no fast row on this machine";
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (size_t n = 0; n < jobs.size(); ++n) {
        const Job& job = jobs[(n * 5 + t * 3) % jobs.size()];
        const auto mine = make_inputs(job.text, {});
        const RunResult result = run(*mine, job.row, static_cast<int>(1 + t % 3));
        if (result.status != TW_OK) ++wrong;
        const auto got = mine->outputs(), want = job.expected->outputs();
        for (size_t o = 0; o < got.size(); ++o)
          if (!got[o].buffer->same_elements(*want[o].buffer, nullptr)) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// One plan serves many threads, each with a workspace of its own.
TEST(Concurrency, OnePlanManyThreads) {
  const std::string text = "fwd f32 b=2 hq=4 hk=2 sq=100 sk=150 d=32 causal";
  const tw_problem problem = problem_of(text);
  tw_plan* plan = nullptr;
  ASSERT_EQ(tw_plan_create(&problem, nullptr, &plan), TW_OK) << tw_last_error();
  tw_plan_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(tw_plan_get_info(plan, &info), TW_OK);
  const auto expected = make_inputs(text, {});
  run_ok(*expected, "");
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      const auto mine = make_inputs(text, {});
      const tw_tensors tensors = mine->tensors();
      Bytes workspace(static_cast<size_t>(info.workspace_bytes) + 64);
      for (int n = 0; n < 20; ++n) {
        mine->poison_outputs();
        if (tw_run(plan, &tensors, workspace.data(), static_cast<size_t>(info.workspace_bytes), nullptr) != TW_OK) ++wrong;
        if (!mine->o.same_elements(expected->o, nullptr) || !mine->lse.same_elements(expected->lse, nullptr)) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  tw_plan_destroy(plan);
  EXPECT_EQ(wrong, 0);
}

// The last error belongs to its thread.
TEST(Concurrency, LastErrorIsPerThread) {
  tw_problem problem;
  ASSERT_NE(tw_problem_parse("fwd f32 sq=1", &problem), TW_OK);
  const std::string mine = tw_last_error();
  std::thread([] {
    EXPECT_STREQ(tw_last_error(), "");
    tw_problem other;
    EXPECT_NE(tw_problem_parse("nonsense", &other), TW_OK);
  }).join();
  EXPECT_EQ(tw_last_error(), mine);
}

// Child of IsaCap: prints the rows that plans choose under the cap of the environment, after checking each.
TEST(IsaChild, DISABLED_PrintRows) {
  for (const char* text : {"fwd f32 b=1 hq=2 sq=70 sk=90 d=40 causal", "fwd bf16 b=1 hq=2 sq=70 sk=90 d=40 causal", "fwd f16 b=1 hq=2 hk=1 sq=1 sk=290 d=64",
                           "bwd f32 b=1 hq=2 sq=70 sk=90 d=40 causal", "bwd bf16 b=1 hq=2 sq=70 sk=90 d=40 causal"}) {
    CheckRequest request;
    request.problem = text;
    const CheckResult result = check(request);
    std::printf("ROW %s %s\n", result.kernel.c_str(), result.ok ? "ok" : result.message.c_str());
  }
}

TEST(IsaCap, ForcedRowsRunAndAreRight) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  ASSERT_GT(length, 0);
  self[length] = 0;
  const auto run_capped = [&](const std::string& isa) {
    const std::string command = "TILEWISE_CPU_ISA=" + isa + " '" + self + "' --gtest_also_run_disabled_tests --gtest_filter=IsaChild.DISABLED_PrintRows 2>&1";
    std::string output;
    FILE* pipe = popen(command.c_str(), "r");
    char buffer[512];
    while (pipe != nullptr && fgets(buffer, sizeof buffer, pipe)) output += buffer;
    if (pipe != nullptr) pclose(pipe);
    return output;
  };
  bool any_cpu_row = false;
  for (const tw_kernel_info& kernel : kernels()) any_cpu_row |= kernel.backend == TW_BACKEND_CPU;
  if (!any_cpu_row) GTEST_SKIP() << "only the reference row";
  for (const std::string isa : {"scalar", "avx2", "avx512", "avx512bf16"}) {
    bool available = false;
    for (const tw_kernel_info& kernel : kernels()) available |= kernel.available && isa == kernel.isa;
    if (!available) continue;
    const std::string output = run_capped(isa);
    int rows = 0;
    for (size_t at = output.find("ROW "); at != std::string::npos; at = output.find("ROW ", at + 1)) {
      const std::string line = output.substr(at, output.find('\n', at) - at);
      EXPECT_NE(line.find(" ok"), std::string::npos) << isa << ": " << line;
      // avx512bf16 has rows for bf16 alone: f32 and f16 run on avx512.
      const bool capped = line.find("_" + isa + " ") != std::string::npos || (isa == "avx512bf16" && line.find("_avx512 ") != std::string::npos);
      EXPECT_TRUE(capped) << "capped at " << isa << ": " << line;
      ++rows;
    }
    EXPECT_EQ(rows, 5) << output;
    if (isa == "avx512bf16") {
      EXPECT_NE(output.find("_avx512bf16 ok"), std::string::npos) << output;
    }
  }
}

}  // namespace
}  // namespace tilewise
