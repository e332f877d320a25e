// The harness itself: what it promises to notice, it notices.
#include "core/dtype.h"
#include "harness/standard.h"
#include "support.h"

namespace tilewise {
namespace {

TEST(Harness, LayoutsHoldTheSameValues) {
  for (const char* text : {"fwd bf16 b=2 hq=4 hk=2 sq=9 sk=21 d=8 bias=f32:bhqk", "fwd f16 b=3 hq=2 sq=9 d=8 packed_q=20 packed_k=20"}) {
    const auto plain = make_inputs(std::string(text), {});
    for (int layout = 1; layout < kNumLayouts; ++layout) {
      if (static_cast<Layout>(layout) == Layout::kExpanded) continue;
      InputOptions options;
      options.layout = static_cast<Layout>(layout);
      const auto other = make_inputs(std::string(text), options);
      const auto a = plain->inputs(), b = other->inputs();
      ASSERT_EQ(a.size(), b.size());
      for (size_t n = 0; n < a.size(); ++n) EXPECT_TRUE(a[n].buffer->same_elements(*b[n].buffer, nullptr)) << a[n].name << ", " << layout_name(options.layout);
    }
  }
}

// One byte changed anywhere that is no element, before, between or behind the rows.
TEST(Harness, GuardsNoticeEveryStrayWrite) {
  for (const auto use : {Buffer::Use::kInput, Buffer::Use::kOutput})
    for (int layout = 0; layout < kNumLayouts; ++layout) {
      Buffer buffer(TW_FLOAT16, {2, 3, 2, 5}, use, static_cast<Layout>(layout));
      ASSERT_TRUE(buffer.guards_intact());
      std::vector<bool> is_element(buffer.bytes().size(), false);
      const auto* begin = static_cast<const uint8_t*>(buffer.tensor()->data);
      for (int64_t n = 0; n < buffer.size(); ++n)
        for (int64_t byte = 0; byte < 2; ++byte) is_element[static_cast<size_t>(begin + 2 * buffer.offset(n) + byte - buffer.bytes().data())] = true;
      const Bytes clean = buffer.bytes();
      for (size_t n = 0; n < clean.size(); ++n) {
        Bytes changed = clean;
        changed[n] ^= 0x10;
        buffer.restore(changed);
        ASSERT_EQ(buffer.guards_intact(), is_element[n]) << layout_name(static_cast<Layout>(layout)) << ", byte " << n;
      }
    }
}

TEST(Harness, PoisonShowsWhatWasNotWritten) {
  for (const int32_t dtype : {TW_FLOAT32, TW_FLOAT16, TW_BFLOAT16, TW_FLOAT64, TW_BOOL}) {
    Buffer buffer(dtype, {3, 4}, Buffer::Use::kOutput);
    buffer.poison();
    EXPECT_TRUE(buffer.all_poisoned());
    EXPECT_EQ(std::isnan(buffer.get(5)), is_float(dtype));
    buffer.set(5, 1);
    EXPECT_FALSE(buffer.all_poisoned());
    EXPECT_FALSE(buffer.poisoned(5));
    EXPECT_TRUE(buffer.poisoned(4));
  }
}

// A pool that forgets a task leaves outputs unwritten, and the comparison says so.
TEST(Harness, ForgottenTasksAreNoticed) {
  const auto whole = make_inputs("fwd f32 b=2 hq=4 sq=40 d=16", {}), partly = make_inputs("fwd f32 b=2 hq=4 sq=40 d=16", {});
  run_ok(*whole, "reference");
  const tw_executor forgetful{sizeof(tw_executor), 2, nullptr, [](void*, int64_t num_tasks, tw_task task, void* context) {
                                for (int64_t n = 0; n + 1 < num_tasks; ++n) task(context, n, 0);
                              }};
  run_ok(*partly, "reference", 0, &forgetful);
  EXPECT_FALSE(whole->o.same_elements(partly->o, nullptr));
}

// The o of a backward pass is rounded, which no kernel can mend: where standard attention's few roundings happen to cancel that
// (seed 93), its error is no measure. Elsewhere (seed 1) it is.
TEST(Harness, RoundingOfTheGivenOutputIsNoFault) {
  CheckRequest request;
  request.problem = "bwd f16 b=1 hq=2 sq=5 sk=2 d=64 mask=bhqk causal", request.kernel = "backward_scalar";
  for (const uint64_t seed : {93, 1}) {
    request.seed = seed;
    const CheckResult result = check(request);
    EXPECT_TRUE(result.ok) << to_text(result);
    for (const OutputError& error : result.outputs)
      if (error.name == "dk") {
        EXPECT_EQ(error.max_abs > 3 * error.baseline_max_abs, seed == 93) << to_text(result);
      }
  }
}

// Lengths are as the problem says: totals kept, longest not passed, something of everything over the seeds.
TEST(Harness, LengthsFitTheProblem) {
  bool tail = false, empty = false, full = false;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    InputOptions options;
    options.seed = seed;
    const auto inputs = make_inputs("fwd f32 b=5 hq=1 sq=30 sk=40 d=8 packed_q=90 packed_k=120 seqused_k", options);
    int64_t rows = 0, longest = 0;
    for (const Lengths& entry : inputs->lengths()) {
      rows += entry.seqlen_q;
      longest = std::max(longest, entry.seqlen_q);
      empty |= entry.seqlen_q == 0;
    }
    EXPECT_LE(rows, 90);
    EXPECT_EQ(longest, 30);
    tail |= rows < 90;
    full |= rows == 90;
  }
  EXPECT_TRUE(tail && empty && full);
}

// The two float64 implementations, which share no code, agree to float64's precision.
TEST(Harness, OracleAndReferenceAgreeInFloat64) {
  for (const char* text : {"fwd f64 b=2 hq=4 hk=2 sq=20 sk=33 d=24 causal softcap=9 alibi=bh sink dropout=0.2 bias=f32:hk", "fwd f64 b=3 hq=2 sq=20 d=16 packed_q=50 packed_k=50 window=5,5",
                           "fwd f64 b=2 hq=2 sq=5 sk=32 d=16 pages=9x8 seqused_k new=3 rotary=8,interleaved causal leftpad"}) {
    const auto inputs = make_inputs(std::string(text), {});
    const StandardResult oracle = standard_attention(*inputs, Arithmetic::kOracle);
    run_ok(*inputs, "reference");
    EXPECT_LT(largest_difference(inputs->o.values(), oracle.o), 1e-13) << text;
  }
}

}  // namespace
}  // namespace tilewise
