// core/memory.h: the model against sums written out by hand, its solver, its tables.
#include "core/memory.h"

#include <gtest/gtest.h>

#include <string>

#include "cpu/backend.h"
#include "unit/helpers.h"

namespace tilewise {
namespace {

constexpr int64_t kMiB = 1 << 20;

Target two_threads() {
  Target target;
  target.num_threads = 2;
  return target;
}

tw_memory_info memory(const std::string& text, tw_memory_options options = default_memory_options()) {
  tw_memory_info info{};
  const Status status = memory_of(problem_of(text), options, two_threads(), cpu_kernels(), &info);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  return info;
}

std::string refusal(const std::string& text, const tw_memory_options& options) {
  tw_memory_info info{};
  return memory_of(problem_of(text), options, two_threads(), cpu_kernels(), &info).message();
}

TEST(Ledger, KeepsThePeakAndWhatItHeld) {
  Ledger ledger;
  ledger.take("a", "1", 10), ledger.take("b", "2", 5);
  ledger.give("a");
  ledger.take("c", "3", 8);
  EXPECT_EQ(ledger.live(), 13);
  EXPECT_EQ(ledger.peak(), 15);
  ASSERT_EQ(ledger.at_peak().size(), 2u);
  EXPECT_EQ(ledger.at_peak()[0].name + ledger.at_peak()[1].name, "ab");
  ledger.restart_peak();
  EXPECT_EQ(ledger.peak(), 13);
  ledger.give("nothing of that name");
  EXPECT_EQ(ledger.live(), 13);
}

// b1 h16 d64 bf16 at 16k: the published table has 65,760 MiB for the math backend of a framework.
TEST(Memory, StandardAttentionIn16Bits) {
  const tw_memory_info info = memory("bwd bf16 cuda b=1 hq=16 sq=16384 d=64");
  const int64_t matrix = int64_t{16} * 16384 * 16384, rows = int64_t{2} * 16 * 16384 * 64;
  EXPECT_EQ(info.inputs, 3 * rows);
  EXPECT_EQ(info.standard.peak_forward, 3 * rows + (2 + 4 + 4) * matrix);             // q k v by heads; S, S and P in float32
  EXPECT_EQ(info.standard.saved, 3 * rows + (4 + 2) * matrix);                         // q k v by heads; P twice
  EXPECT_EQ(info.standard.peak_backward, 5 * rows + 4 * 4 * matrix);                   // q k by heads, o, dout, dv; P, dP, P dP, dS
  EXPECT_EQ(info.standard.peak_backward, 65696 * kMiB);
  EXPECT_NEAR(static_cast<double>(info.standard.peak_backward), 65760.0 * kMiB, 0.002 * 65760 * kMiB);
  EXPECT_EQ(info.standard.total, info.inputs + info.standard.peak_backward);
}

TEST(Memory, TilewiseOnAGpuByFormula) {
  const tw_memory_info info = memory("bwd bf16 cuda b=1 hq=16 sq=16384 d=64");
  const int64_t rows = int64_t{2} * 16 * 16384 * 64, numbers = int64_t{4} * 16 * 16384;
  EXPECT_EQ(info.planned, 0);
  EXPECT_EQ(info.tiled.peak_forward, rows + numbers);                            // o, lse
  EXPECT_EQ(info.tiled.peak_backward, 5 * rows + numbers + 2 * rows + 2 * numbers);  // o dout dq dk dv, lse; float32 dq, two numbers a row
  EXPECT_EQ(info.tiled.peak_backward, 227 * kMiB);
  EXPECT_LT(info.tiled.peak_backward, 258 * kMiB);
}

TEST(Memory, StandardAttentionInFloat32) {
  const tw_memory_info info = memory("bwd f32 b=2 hq=4 hk=2 sq=512 d=64 causal");
  const int64_t matrix = int64_t{2} * 4 * 512 * 512, rows = int64_t{4} * 2 * 4 * 512 * 64, mask = 512 * 512;
  EXPECT_EQ(info.inputs, 2 * rows);  // k and v have half the heads
  EXPECT_EQ(info.standard.peak_forward, 3 * rows + mask + 8 * matrix);
  EXPECT_EQ(info.standard.saved, 3 * rows + mask + 4 * matrix);
  EXPECT_EQ(info.standard.peak_backward, 5 * rows + mask + 16 * matrix);
  EXPECT_EQ(memory("fwd f32 b=2 hq=4 hk=2 sq=512 d=64 causal").standard.saved, 0);
}

TEST(Memory, DropoutAndSoftcapAreKept) {
  const int64_t matrix = int64_t{16} * 1024 * 1024;
  const auto saved = [](const std::string& more) { return memory("bwd bf16 cuda b=1 hq=16 sq=1024 d=64" + more).standard.saved; };
  EXPECT_EQ(saved(" dropout=0.1") - saved(""), matrix);       // the mask; P after dropout in place of P
  EXPECT_EQ(saved(" softcap=30") - saved(""), 2 * matrix);    // tanh of the scores
}

TEST(Memory, TilewiseIsItsOutputsAndItsPlans) {
  for (const char* text : {"bwd f32 b=1 hq=4 sq=700 d=64 causal", "bwd bf16 b=2 hq=8 hk=2 sq=300 d=80", "bwd f16 b=3 hq=2 sq=100 d=64 packed_q=250 packed_k=250"}) {
    const tw_problem backward = problem_of(text), forward = forward_problem(backward);
    Plan plan;
    const tw_memory_info info = memory(text);
    EXPECT_EQ(info.planned, 1);
    ASSERT_TRUE(make_plan(forward, two_threads(), cpu_kernels(), &plan).ok());
    EXPECT_EQ(info.tiled.workspace_forward, plan.workspace_bytes) << text;
    EXPECT_EQ(info.tiled.peak_forward, info.tiled.outputs + plan.workspace_bytes) << text;
    ASSERT_TRUE(make_plan(backward, two_threads(), cpu_kernels(), &plan).ok());
    EXPECT_EQ(info.tiled.workspace_backward, plan.workspace_bytes) << text;
    EXPECT_EQ(info.tiled.peak_backward, info.tiled.outputs + info.tiled.gradients + plan.workspace_bytes) << text;
  }
}

TEST(Memory, LayersAndCheckpoints) {
  const std::string text = "bwd bf16 cuda b=1 hq=32 hk=8 sq=4096 d=128 causal";
  const tw_memory_info one = memory(text);
  tw_memory_options options = default_memory_options();
  options.layers = 32;
  const tw_memory_info all = memory(text, options);
  EXPECT_EQ(all.tiled.peak_backward, one.tiled.peak_backward);  // of a layer
  EXPECT_EQ(all.tiled.total, one.tiled.total + 31 * (one.inputs + one.tiled.saved));
  EXPECT_EQ(all.standard.total, one.standard.total + 31 * (one.inputs + one.standard.saved + one.standard.outputs));
  options.checkpointing = 1;
  EXPECT_EQ(memory(text, options).tiled.total, one.tiled.total + 32 * int64_t{2} * 4096 * 4096);
  const std::string decode = "fwd bf16 cuda b=4 hq=32 hk=8 sq=1 sk=8192 d=128 seqused_k causal";
  const int64_t cache = int64_t{4} * 8192 * 8 * 256 * 2;
  EXPECT_EQ(memory(decode, options).tiled.total - memory(decode).tiled.total, 31 * cache);  // each layer's KV cache
  const std::string paged = "fwd bf16 cuda b=4 hq=32 hk=8 sq=1 sk=8192 d=128 pages=3000x16 seqused_k causal";
  EXPECT_EQ(memory(paged).inputs, int64_t{2} * 4 * 32 * 128 + int64_t{3000} * 16 * 8 * 256 * 2);
}

TEST(Memory, WindowedLayersKeepTheirWindow) {
  tw_memory_options options = default_memory_options();
  options.layers = 36, options.window_layers = 18, options.window = 128;
  const std::string decode = "fwd bf16 cuda b=4 hq=64 hk=8 sq=1 sk=8192 d=64 seqused_k causal sink", paged = decode + " pages=3000x16";
  const int64_t key = int64_t{8} * 128 * 2;  // bytes of one key and value
  EXPECT_EQ(memory(decode, options).tiled.total - memory(decode).tiled.total, 4 * key * (17 * 8192 + 18 * 128));
  EXPECT_EQ(memory(decode, options).standard.total - memory(decode).standard.total, 4 * key * (17 * 8192 + 18 * 128));
  EXPECT_EQ(memory(paged, options).tiled.total - memory(paged).tiled.total, key * (17 * 3000 * 16 + 18 * 4 * 9 * 16));
  options.window = 100000;  // longer than the cache
  EXPECT_EQ(memory(decode, options).tiled.total - memory(decode).tiled.total, 35 * 4 * key * 8192);
  options.window = 128, options.window_layers = 36;  // the layer at work has one too
  EXPECT_EQ(memory(decode, options).tiled.total - memory(decode).tiled.total, 35 * 4 * key * 128);
  const std::string training = "bwd bf16 cuda b=1 hq=64 hk=8 sq=4096 d=64 causal";  // keeps every row
  tw_memory_options plain = options;
  plain.window_layers = plain.window = 0;
  EXPECT_EQ(memory(training, options).tiled.total, memory(training, plain).tiled.total);
  options.window = 0;
  EXPECT_EQ(refusal(decode, options), "window 0: must be >= 1 with window_layers");
  options.window_layers = 37, options.window = 1;
  EXPECT_EQ(refusal(decode, options), "window_layers 37: must be in [0, layers 36]");
}

TEST(Memory, SharesOfADevice) {
  tw_memory_options options = default_memory_options();
  options.tensor_parallel = 16;  // more than key heads: each device has one
  tw_problem share;
  ASSERT_TRUE(device_share(problem_of("bwd bf16 cuda hq=32 hk=8 sq=4096 d=128"), options, &share).ok());
  EXPECT_EQ(share.num_heads_q, 2);
  EXPECT_EQ(share.num_heads_k, 1);
  options.tensor_parallel = 1, options.context_parallel = 4;
  const tw_memory_info info = memory("bwd bf16 cuda hq=8 sq=4096 d=128", options);
  const int64_t rows = int64_t{2} * 8 * 4096 * 128;
  EXPECT_EQ(info.inputs, 3 * rows / 4);
  EXPECT_EQ(info.tiled.workspace_forward, 2 * rows);  // all keys and values, gathered
  options.tensor_parallel = 3;
  EXPECT_NE(refusal("bwd bf16 cuda hq=32 hk=8 sq=64 d=64", options).find("tensor_parallel 3: must divide num_heads_q 32"), std::string::npos);
  options = default_memory_options(), options.context_parallel = 2;
  EXPECT_NE(refusal("bwd f32 b=3 hq=2 sq=100 d=64 packed_q=250 packed_k=250", options).find("context_parallel 2"), std::string::npos);
  options = default_memory_options(), options.layers = 0;
  EXPECT_EQ(refusal("fwd f32 hq=1 sq=8 d=8", options), "layers 0: must be >= 1");
  EXPECT_NE(refusal("fwd f64 cuda hq=1 sq=8 d=8", default_memory_options()).find("f64"), std::string::npos);
  const int64_t padded = int64_t{2} * 128;
  EXPECT_EQ(memory("bwd f32 cuda b=1 hq=2 sq=100 d=40").tiled.workspace_backward, padded * 4 * (2 + 64));
}

TEST(Memory, TheLargestFitsAndTheNextDoesNot) {
  const tw_memory_options options = default_memory_options();
  for (const char* text : {"bwd bf16 cuda b=1 hq=32 hk=8 sq=4096 d=128 causal", "fwd f32 b=2 hq=4 sq=64 d=64", "fwd bf16 b=2 hq=8 hk=2 sq=1 sk=512 d=64 seqused_k"})
    for (const char* key : {"sq", "b", "hq"})
      for (const bool standard : {true, false}) {
        const tw_problem problem = problem_of(text);
        const int64_t budget = int64_t{30} << 30;
        int64_t most = 0;
        ASSERT_TRUE(largest_that_fits(problem, options, two_threads(), cpu_kernels(), budget, key, standard, &most).ok());
        const auto total = [&](int64_t value) {
          tw_problem p = problem;
          if (std::string(key) == "b") p.batch = value;
          if (std::string(key) == "hq") p.num_heads_q = value, p.num_heads_k = value / group_size(problem);
          if (std::string(key) == "sq") p.seqlen_k = value, p.seqlen_q = problem.seqlen_q == 1 ? 1 : value;
          tw_memory_info info{};
          EXPECT_TRUE(memory_of(p, options, two_threads(), cpu_kernels(), &info).ok());
          return standard ? info.standard.total : info.tiled.total;
        };
        const int64_t step = std::string(key) == "hq" ? group_size(problem) : 1;
        ASSERT_GT(most, 0) << text << " " << key;
        EXPECT_LE(total(most), budget) << text << " " << key;
        EXPECT_GT(total(most + step), budget) << text << " " << key;
      }
}

TEST(Memory, SolverRefuses) {
  int64_t most = -1;
  const tw_memory_options options = default_memory_options();
  const auto ask = [&](const char* text, int64_t budget, const char* key) {
    return largest_that_fits(problem_of(text), options, two_threads(), cpu_kernels(), budget, key, false, &most).message();
  };
  EXPECT_EQ(ask("fwd f32 hq=1 sq=8 d=8", 0, "sq"), "budget 0: must be >= 1 byte");
  EXPECT_EQ(ask("fwd f32 hq=1 sq=8 d=8", 9, "d"), "key \"d\": must be sq, b or hq");
  EXPECT_NE(ask("fwd f32 b=3 hq=2 sq=100 d=64 packed_q=250 packed_k=250", 1 << 30, "sq"), "");
  EXPECT_EQ(ask("fwd f32 hq=1 sq=8 d=8", 1, "sq"), "");
  EXPECT_EQ(most, 0);  // not even one row
}

TEST(Memory, NothingOverflows) {
  const tw_memory_info info = memory("bwd bf16 cuda b=1 hq=128 sq=1000000000 d=128");
  EXPECT_GE(info.standard.total, int64_t{1} << 58);
  EXPECT_GT(info.standard.total, info.tiled.total);
  EXPECT_GT(info.tiled.total, 0);
}

TEST(Memory, ExplanationHoldsTheNumbers) {
  const tw_gpu* h200 = nullptr;
  for (const tw_gpu& gpu : gpus())
    if (std::string(gpu.name) == "H200") h200 = &gpu;
  ASSERT_NE(h200, nullptr);
  const std::string text = explain_memory(problem_of("bwd bf16 cuda b=1 hq=16 sq=16384 d=64"), default_memory_options(), two_threads(), cpu_kernels(), h200);
  for (const char* part : {"4 x 1 x 16 x 16384 x 16384", "64.2 GiB", "P * dP", "FLOPs 3.848e+12", "standard: ", "bound by bytes", "bound by arithmetic"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(Tables, AreSane) {
  for (const tw_model& m : models()) {
    EXPECT_EQ(m.num_heads_q % m.num_heads_k, 0) << m.name;
    EXPECT_LE(m.head_dim, 256) << m.name;
    EXPECT_LE(m.layers_full, m.layers) << m.name;
    EXPECT_EQ(m.window == 0, m.layers_full == m.layers) << m.name;
  }
  for (const tw_gpu& gpu : gpus()) {
    EXPECT_GT(gpu.tensor_flops, gpu.vector_flops) << gpu.name;
    EXPECT_GT(gpu.memory_bytes, 10'000'000'000) << gpu.name;
  }
}

}  // namespace
}  // namespace tilewise
