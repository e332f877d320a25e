// Limits: counts at and beyond 65,535, offsets beyond 2^32, logits beyond all reason.
#include <sys/mman.h>

#include <cstring>

#include "support.h"

namespace tilewise {
namespace {

TEST(Extremes, CountsBeyond65535) {
  for (const char* text : {"fwd f32 b=65537 hq=1 sq=1 sk=2 d=8", "fwd f32 b=1 hq=65536 hk=1 sq=1 sk=3 d=8", "fwd f32 b=1 hq=65536 sq=1 sk=2 d=8 causal", "fwd f32 b=1 hq=1 sq=70000 sk=3 d=8",
                           "fwd f32 b=1 hq=1 sq=2 sk=70000 d=8", "fwd bf16 b=1 hq=1 sq=3 sk=33728 d=16 causal", "fwd f32 b=70000 hq=1 sq=1 sk=1 d=8 packed_q=70000 packed_k=70000",
                           "bwd f32 b=65537 hq=1 sq=1 sk=2 d=8", "bwd f32 b=1 hq=65536 hk=1 sq=1 sk=3 d=8", "bwd f32 b=1 hq=1 sq=70000 sk=3 d=8", "bwd f32 b=1 hq=1 sq=2 sk=70000 d=8"})
    for (const std::string& row : rows_for(std::string(text))) {
      CheckRequest request;
      request.problem = text;
      request.kernel = row;
      expect_check(request);
    }
}

// Zeros everywhere, S above 2^15: o is the mean of v, 0, and lse = log S.
TEST(Extremes, ZerosOverManyKeys) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const std::string text = std::string("fwd ") + dtype + " b=1 hq=1 sq=2 sk=33728 d=8";
    for (const std::string& row : rows_for(text)) {
      const auto inputs = make_inputs(text, {});
      for (Buffer* x : {&inputs->q, &inputs->k, &inputs->v}) x->set_values(std::vector<double>(static_cast<size_t>(x->size()), 0));
      run_ok(*inputs, row);
      for (int64_t n = 0; n < inputs->o.size(); ++n) ASSERT_EQ(inputs->o.get(n), 0) << row;
      for (int64_t n = 0; n < 2; ++n) ASSERT_NEAR(inputs->lse.get(n), std::log(33728.0), 2e-5) << row;
    }
  }
}

// Large values of one sign under a uniform softmax: sums of 16-bit numbers must not overflow.
TEST(Extremes, LargeValuesUniformSoftmax) {
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    const std::string text = std::string("fwd ") + dtype + " b=1 hq=2 sq=3 sk=5000 d=16";
    for (const std::string& row : rows_for(text)) {
      const auto inputs = make_inputs(text, {});
      inputs->q.set_values(std::vector<double>(static_cast<size_t>(inputs->q.size()), 0));
      inputs->v.set_values(std::vector<double>(static_cast<size_t>(inputs->v.size()), 60000));
      const double v = inputs->v.get(0);
      run_ok(*inputs, row);
      for (int64_t n = 0; n < inputs->o.size(); ++n) ASSERT_NEAR(inputs->o.get(n), v, std::string(dtype) == "f32" ? 0.02 : std::string(dtype) == "f16" ? 32 : 256) << row << " " << dtype;
    }
  }
}

// q = k = v = 133120: one key with |s| about 1e12 gives v exactly; so do several that are equal.
TEST(Extremes, HugeLogitGivesExactlyV) {
  for (const char* dtype : {"f32", "bf16"})
    for (const int keys : {1, 2, 4, 17, 64})
      for (const double sign : {1.0, -1.0}) {
        const std::string text = std::string("fwd ") + dtype + " b=1 hq=2 sq=2 sk=" + std::to_string(keys) + " d=64";
        for (const std::string& row : rows_for(text)) {
          const auto inputs = make_inputs(text, {});
          inputs->q.set_values(std::vector<double>(static_cast<size_t>(inputs->q.size()), 133120 * sign));
          for (Buffer* x : {&inputs->k, &inputs->v}) x->set_values(std::vector<double>(static_cast<size_t>(x->size()), 133120));
          const double v = inputs->v.get(0);
          run_ok(*inputs, row);
          for (int64_t n = 0; n < inputs->o.size(); ++n)
            ASSERT_NEAR(inputs->o.get(n), v, keys == 1 ? 0 : v * 1e-6) << row << ", " << keys << " keys, in \"" << text << "\"";
          const double score = sign * 64.0 * v * v / 8;
          ASSERT_NEAR(inputs->lse.get(0), score + std::log(keys), 5e-6 + 2e-6 * std::abs(score)) << row;
        }
      }
}

// No finite number stands for minus infinity: all logits at a level far below any sentinel.
TEST(Extremes, LevelsFarBelowAnySentinel) {
  for (const char* shape : {" b=1 hq=16 hk=1 sq=1 sk=64 d=128", " b=1 hq=4 hk=2 sq=40 sk=100 d=64", " b=1 hq=4 hk=1 sq=1 sk=300 d=128 splits=3"})
    for (const char* dtype : {"f32", "bf16"})
      for (const double level : {-1e3, -1e4, -3e4, -5e4, -1e5, -5e5, -524288.0, -1e7}) {
        const std::string text = std::string("fwd ") + dtype + shape;
        for (const std::string& row : rows_for(text)) {
          const auto inputs = make_inputs(text, {});
          const tw_problem& p = inputs->problem();
          const double d = static_cast<double>(p.head_dim);
          inputs->q.set_values(std::vector<double>(static_cast<size_t>(inputs->q.size()), 1));
          inputs->k.set_values(std::vector<double>(static_cast<size_t>(inputs->k.size()), level / d));
          inputs->v.set_values(std::vector<double>(static_cast<size_t>(inputs->v.size()), 1));
          const double score = inputs->k.get(0) * d / std::sqrt(d);
          run_ok(*inputs, row);
          for (int64_t n = 0; n < inputs->o.size(); ++n) ASSERT_NEAR(inputs->o.get(n), 1, 1e-5) << row << ", level " << level << ", in \"" << text << "\"";
          for (int64_t n = 0; n < inputs->lse.size(); ++n)
            ASSERT_NEAR(inputs->lse.get(n), score + std::log(static_cast<double>(p.seqlen_k)), 2e-5 + 2e-6 * std::abs(score)) << row << ", level " << level;
        }
      }
}

// lse about -200 for every length of the tail, backward: keys that only pad a tile must not overflow.
TEST(Extremes, BackwardTailsWithLowLse) {
  for (const char* dtype : {"f32", "f16", "bf16"})
    for (const int d : {16, 32, 64})
      for (const int s : {1, 2, 5, 17, 97, 128, 129})
        for (const char* tail : {"", " causal"}) {
          const std::string text = std::string("bwd ") + dtype + " b=1 hq=1 sq=" + std::to_string(s) + " d=" + std::to_string(d) + tail;
          for (const std::string& row : rows_for(text)) {
            if (row == "reference") continue;  // the matrix has it
            CheckRequest request;
            request.problem = text;
            request.kernel = row;
            request.input = InputKind::kNegative;
            request.run_twice = false;
            expect_check(request);
          }
        }
}

// A bias of the lowest finite number everywhere in a row is a constant like any other: the mean of v.
TEST(Extremes, LowestFiniteBias) {
  const std::string text = "fwd f32 b=1 hq=1 sq=3 sk=70 d=16 bias=f32:qk";
  for (const std::string& row : rows_for(text)) {
    const auto inputs = make_inputs(text, {});
    for (int64_t n = 0; n < inputs->bias.size(); ++n) inputs->bias.set(n, n / 70 == 1 ? -3.4028234663852886e38 : 0);
    inputs->q.set_values(std::vector<double>(static_cast<size_t>(inputs->q.size()), 0));
    run_ok(*inputs, row);
    double difference = 0;
    for (int64_t c = 0; c < 16; ++c) difference = std::max(difference, std::abs(inputs->o.get(16 + c) - inputs->o.get(c)));
    EXPECT_LT(difference, 1e-5) << row << ": the row of the lowest bias is " << inputs->o.get(16) << ", ..., the mean of v " << inputs->o.get(0) << ", ...";
  }
}

// Sparse address space of many gigabytes, of which only the pages that are touched exist.
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  uint16_t* data() const { return static_cast<uint16_t*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

// The same pages under low numbers and under numbers whose offsets pass 2^32 bytes and 2^32 elements.
TEST(Extremes, HighPageNumbers) {
  constexpr int64_t kPage = 16, kHeads = 8, kDim = 128, kElements = kPage * kHeads * kDim, kPages = 262144 + 8;
  Sparse k_memory(kPages * kElements * 2), v_memory(kPages * kElements * 2);
  if (!k_memory.ok() || !v_memory.ok()) GTEST_SKIP() << "no address space of " << kPages * kElements * 2 << " bytes";
  const std::string text = "fwd bf16 b=1 hq=8 sq=2 sk=48 d=128 pages=262152x16 seqused_k";
  const auto small = make_inputs(std::string("fwd bf16 b=1 hq=8 sq=2 sk=48 d=128 pages=4x16 seqused_k"), {});
  small->seqused_k.set(0, 40);
  std::vector<uint16_t> k_content(static_cast<size_t>(3 * kElements)), v_content(k_content.size());
  for (size_t n = 0; n < k_content.size(); ++n) {
    k_content[n] = static_cast<uint16_t>(0x3f00 + n * 37 % 200);
    v_content[n] = static_cast<uint16_t>(0x3f80 + n * 11 % 120 + (n % 3 ? 0x8000 : 0));
  }
  for (const std::string& row : rows_for(text)) {
    std::vector<double> low;
    for (const int64_t first : {int64_t{1}, int64_t{131072 - 1}, int64_t{262144 - 1}, int64_t{262144 + 4}}) {
      const int64_t pages[3] = {first, first + 2, first + 1};
      for (int n = 0; n < 3; ++n) {
        std::memcpy(k_memory.data() + pages[n] * kElements, &k_content[static_cast<size_t>(n * kElements)], kElements * 2);
        std::memcpy(v_memory.data() + pages[n] * kElements, &v_content[static_cast<size_t>(n * kElements)], kElements * 2);
        small->page_table.set(n, static_cast<double>(pages[n]));
      }
      tw_tensors t = small->tensors();
      tw_tensor k = tw_tensor_contiguous(k_memory.data(), TW_BFLOAT16, 4, kPages, kPage, kHeads, kDim);
      tw_tensor v = tw_tensor_contiguous(v_memory.data(), TW_BFLOAT16, 4, kPages, kPage, kHeads, kDim);
      t.k = &k, t.v = &v;
      tw_target target{};
      target.struct_size = sizeof target;
      target.kernel = row.c_str();
      small->poison_outputs();
      ASSERT_EQ(tw_forward(nullptr, &t, &target, nullptr), TW_OK) << tw_last_error();
      if (low.empty())
        low = small->o.values();
      else
        EXPECT_EQ(largest_difference(low, small->o.values()), 0) << row << ": pages from " << first;
    }
  }
}

// A cache whose batch entries lie 2^30 elements apart: an append lands in its own entry.
TEST(Extremes, CacheStrideOfTwoToTheThirty) {
  constexpr int64_t kStride = int64_t{1} << 30, kRows = 5;
  Sparse k_memory(kRows * kStride * 2), v_memory(kRows * kStride * 2);
  if (!k_memory.ok() || !v_memory.ok()) GTEST_SKIP() << "no address space of " << kRows * kStride * 2 << " bytes";
  const std::string text = "fwd bf16 b=4 hq=2 sq=1 sk=20 d=16 cache_batch=5 cache_batch_idx seqused_k new=1 causal";
  for (const std::string& row : rows_for(text)) {
    const auto inputs = make_inputs(text, {}), plain = make_inputs(text, {});
    const int64_t per_row = 20 * 2 * 16;
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t n = 0; n < per_row; ++n) {
        std::memcpy(k_memory.data() + r * kStride + n, static_cast<const char*>(inputs->k.tensor()->data) + (r * per_row + n) * 2, 2);
        std::memcpy(v_memory.data() + r * kStride + n, static_cast<const char*>(inputs->v.tensor()->data) + (r * per_row + n) * 2, 2);
      }
    run_ok(*plain, row);
    tw_tensors t = inputs->tensors();
    tw_tensor k = tw_tensor_contiguous(k_memory.data(), TW_BFLOAT16, 4, kRows, 20, 2, 16), v = tw_tensor_contiguous(v_memory.data(), TW_BFLOAT16, 4, kRows, 20, 2, 16);
    k.stride[0] = v.stride[0] = kStride;
    t.k = &k, t.v = &v;
    tw_problem options;
    tw_problem_init(&options);
    options.causal = 1;
    tw_target target{};
    target.struct_size = sizeof target;
    target.kernel = row.c_str();
    ASSERT_EQ(tw_forward(&options, &t, &target, nullptr), TW_OK) << tw_last_error();
    expect_same_bits(*plain, *inputs, row);
    for (int64_t r = 0; r < kRows; ++r) {
      EXPECT_EQ(std::memcmp(k_memory.data() + r * kStride, static_cast<const char*>(plain->k.tensor()->data) + r * per_row * 2, per_row * 2), 0) << row << ": k, entry " << r;
      EXPECT_EQ(std::memcmp(v_memory.data() + r * kStride, static_cast<const char*>(plain->v.tensor()->data) + r * per_row * 2, per_row * 2), 0) << row << ": v, entry " << r;
    }
  }
}

}  // namespace
}  // namespace tilewise
