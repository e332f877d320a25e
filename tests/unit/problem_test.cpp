// core/problem.h: the text form of a problem, there and back, and what is derived from it.
#include "core/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

namespace tilewise {
namespace {

tw_problem parsed(const std::string& text) {
  tw_problem p = default_problem();
  const Status status = parse(text, &p);
  EXPECT_TRUE(status.ok()) << status.message();
  return p;
}

std::string error_of(const std::string& text) {
  tw_problem p = default_problem();
  p.batch = 77;
  const Status status = parse(text, &p);
  EXPECT_EQ(status.code(), TW_INVALID_ARGUMENT) << text;
  EXPECT_EQ(p.batch, 77) << "written in spite of the error: " << text;
  return status.message();
}

TEST(Problem, DefaultsOfWhatIsOmitted) {
  const tw_problem p = parsed("fwd bf16 hq=8 sq=512 d=64");
  EXPECT_EQ(p.struct_size, sizeof(tw_problem));
  EXPECT_EQ(p.pass, TW_FORWARD);
  EXPECT_EQ(p.dtype, TW_BFLOAT16);
  EXPECT_EQ(p.batch, 1);
  EXPECT_EQ(p.num_heads_k, 8);
  EXPECT_EQ(p.seqlen_k, 512);
  EXPECT_EQ(p.head_dim_v, 64);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_TRUE(std::isnan(p.softmax_scale));
  EXPECT_EQ(p.features, uint32_t{TW_HAS_LSE});
  EXPECT_EQ(parsed("bwd f32 hq=1 sq=1 d=8").features, uint32_t{TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV});
}

TEST(Problem, CanonicalTextsStay) {
  for (const char* text : {
           "fwd f32 b=1 hq=8 sq=512 d=64",
           "bwd f16 cuda b=3 hq=12 hk=4 sq=100 sk=200 d=64 dv=32 causal window=128,0 softcap=30 deterministic",
           "fwd f64 b=2 hq=1 sq=0 sk=7 d=8 scale=0 sink",
           "fwd bf16 b=4 hq=8 hk=2 sq=1 sk=4096 d=128 pages=1024x16 new=1 rotary=64,interleaved seqused_k leftpad",
           "fwd f16 b=4 hq=8 hk=2 sq=2 sk=64 d=128 cache_batch=9 rotary=32 seqused_k cache_batch_idx rotary_seqlens",
           "bwd bf16 b=3 hq=8 sq=90 d=64 packed_q=200 packed_k=210 alibi=bh bias=f32:hqk dropout=0.1 seed=7 offset=9 "
           "rng_state "
           "dlse dbias dalibi",
           "fwd f32 b=1 hq=8 sq=16 d=64 alibi=h mask=bk no_lse",
           "bwd f32 b=1 hq=8 sq=16 d=64 bias=f16:1 sink dsink no_dq no_dk no_dv",
           "fwd f32 b=1 hq=8 sq=16 d=64 dropout=0.48 dropout_mask maxlogit batch_invariant splits=3 sm_margin=8",
           "fwd f32 b=1 hq=8 sq=16 d=64 scale=-0.125 seqused_q",
       }) {
    const tw_problem p = parsed(text);
    const std::string canonical = format(p);
    EXPECT_EQ(canonical, text);
    EXPECT_TRUE(parsed(canonical) == p);
  }
  // Any order and spacing; what equals its default goes.
  EXPECT_EQ(format(parsed("  fwd   bf16 causal d=128 sk=1024 sq=1024 hk=8 hq=32 b=2 ")),
            "fwd bf16 b=2 hq=32 hk=8 sq=1024 d=128 causal");
}

TEST(Problem, NumbersSurviveExactly) {
  std::mt19937_64 random(1);
  for (int n = 0; n < 1000; ++n) {
    tw_problem p = parsed("fwd f32 b=1 hq=1 sq=1 d=8");
    p.softmax_scale = std::uniform_real_distribution<double>(-3, 3)(random);
    p.softcap =
        std::ldexp(1.0 + std::uniform_real_distribution<double>(0, 1)(random), static_cast<int>(random() % 200) - 100);
    p.dropout_p = std::uniform_real_distribution<double>(0, 1)(random);
    p.dropout_seed = random(), p.dropout_offset = random();
    p.window_left = static_cast<int64_t>(random() >> 1), p.window_right = static_cast<int64_t>(random() >> 1);
    const tw_problem back = parsed(format(p));
    ASSERT_EQ(back.softmax_scale, p.softmax_scale);
    ASSERT_EQ(back.softcap, p.softcap);
    ASSERT_EQ(back.dropout_p, p.dropout_p);
    ASSERT_EQ(back.dropout_seed, p.dropout_seed);
    ASSERT_EQ(back.dropout_offset, p.dropout_offset);
    ASSERT_EQ(back.window_left, p.window_left);
    ASSERT_EQ(back.window_right, p.window_right);
  }
}

// Each member that the grammar has makes a difference to the text, hence to ==.
TEST(Problem, EqualityKnowsEveryMember) {
  const std::string base = "bwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16 dv=8";
  for (const char* more : {"causal",
                           "window=3,4",
                           "scale=2",
                           "softcap=1",
                           "alibi=h",
                           "alibi=bh",
                           "bias=f32:q",
                           "bias=bf16:q",
                           "bias=f32:k",
                           "mask=q",
                           "sink",
                           "dropout=0.5",
                           "seed=1",
                           "offset=1",
                           "seqused_q",
                           "seqused_k",
                           "cache_batch_idx",
                           "leftpad",
                           "rotary_seqlens",
                           "rng_state",
                           "dropout_mask",
                           "maxlogit",
                           "dlse",
                           "no_dq",
                           "no_dk",
                           "no_dv",
                           "dbias",
                           "dalibi",
                           "dsink",
                           "deterministic",
                           "batch_invariant",
                           "splits=2",
                           "sm_margin=2",
                           "packed_q=16",
                           "packed_k=18",
                           "pages=4x16",
                           "cache_batch=3",
                           "new=1",
                           "rotary=8",
                           "rotary=8,interleaved",
                           "cuda"})
    EXPECT_FALSE(parsed(base + " " + more) == parsed(base)) << more;
  EXPECT_FALSE(parsed("fwd f32 b=1 hq=1 sq=1 d=8") == parsed("fwd f32 b=1 hq=1 sq=1 d=8 no_lse"));
}

TEST(Problem, ErrorsNameTheToken) {
  const std::string base = "fwd f32 hq=2 sq=4 d=8 ";
  for (const char* bad :
       {"hq=x",    "hq=",      "sq=4.5",         "b=2b",       "window=3",   "window=a,b", "scale=abc",  "dropout=",
        "pages=4", "pages=4x", "rotary=8,other", "alibi=q",    "alibi=",     "bias=f32",   "bias=i32:q", "bias=f32:z",
        "mask=x",  "mask=",    "seed=-1",        "splits=two", "colour=red", "casual",     "dropout=0,1"}) {
    const std::string message = error_of(base + bad);
    EXPECT_NE(message.find(bad), std::string::npos) << message;
  }
}

TEST(Problem, ErrorsOfTheFrame) {
  EXPECT_NE(error_of("").find("fwd or bwd"), std::string::npos);
  EXPECT_NE(error_of("fwd").find("fwd or bwd"), std::string::npos);
  EXPECT_NE(error_of("forward f32 hq=1 sq=1 d=8").find("fwd or bwd"), std::string::npos);
  EXPECT_NE(error_of("fwd f8 hq=1 sq=1 d=8").find("f8"), std::string::npos);
  EXPECT_NE(error_of("fwd i32 hq=1 sq=1 d=8").find("i32"), std::string::npos);
  EXPECT_NE(error_of("fwd f32 sq=1 d=8").find("hq="), std::string::npos);
  EXPECT_NE(error_of("fwd f32 hq=1 d=8").find("sq="), std::string::npos);
  EXPECT_NE(error_of("fwd f32 hq=1 sq=1").find("d="), std::string::npos);
}

TEST(Problem, DerivedQuantities) {
  const tw_problem p = parsed("fwd f32 b=2 hq=8 hk=2 sq=100 sk=50 d=64 dv=32");
  EXPECT_EQ(group_size(p), 4);
  EXPECT_EQ(query_rows(p), 200);
  EXPECT_EQ(key_rows(p), 100);
  EXPECT_DOUBLE_EQ(softmax_scale_of(p), 0.125);
  EXPECT_EQ(softmax_scale_of(parsed("fwd f32 hq=1 sq=1 d=64 scale=0")), 0);
  EXPECT_EQ(query_rows(parsed("fwd f32 b=2 hq=1 sq=100 d=8 packed_q=130")), 130);
  EXPECT_EQ(key_rows(parsed("fwd f32 b=2 hq=1 sq=100 d=8 packed_k=140")), 140);
  EXPECT_EQ(group_size(parsed("fwd f32 hq=0 sq=1 d=8")), 0);
  EXPECT_EQ(mask_of(parsed("fwd f32 hq=1 sq=1 d=8 causal window=5,7")).right, 0);
  EXPECT_EQ(mask_of(parsed("fwd f32 hq=1 sq=1 d=8 window=5,7")).right, 7);
  EXPECT_EQ(mask_of(parsed("fwd f32 hq=1 sq=1 d=8 window=5,7")).left, 5);
}

TEST(Problem, FlopsFollowTheConvention) {
  EXPECT_DOUBLE_EQ(flops(parsed("fwd f32 b=2 hq=8 hk=2 sq=100 sk=50 d=64")), 4.0 * 2 * 8 * 100 * 50 * 64);
  EXPECT_DOUBLE_EQ(flops(parsed("bwd f32 b=2 hq=8 hk=2 sq=100 sk=50 d=64")), 10.0 * 2 * 8 * 100 * 50 * 64);
  EXPECT_DOUBLE_EQ(flops(parsed("fwd f32 hq=8 sq=100 d=64 dv=32")), 2.0 * 8 * 100 * 100 * (64 + 32));
  EXPECT_DOUBLE_EQ(flops(parsed("fwd f32 hq=8 sq=128 d=64 causal")), 2.0 * 8 * 128 * 128 * 64);
  // A window of the row's own key alone: one pair per row.
  EXPECT_DOUBLE_EQ(flops(parsed("fwd f32 hq=1 sq=128 d=64 window=0,0")), 4.0 * 128 * 64);
}

}  // namespace
}  // namespace tilewise
