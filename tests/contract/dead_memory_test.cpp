// What must not matter does not: NaN or infinity in cache tails, page tails, unreferenced pages, holes, packed tails,
// masked bias and masked keys leave every bit as zeros there do.
#include "support.h"

namespace tilewise {
namespace {

const char* const kDeadMemoryProblems[] = {
    "fwd f32 b=3 hq=4 hk=2 sq=3 sk=70 d=32 seqused_k causal",
    "fwd f32 b=4 hq=4 hk=2 sq=1 sk=128 d=64 seqused_k",
    "fwd f32 b=3 hq=8 hk=1 sq=70 sk=90 d=64 seqused_q seqused_k window=20,3",
    "fwd f32 b=3 hq=4 hk=2 sq=5 sk=133 d=32 pages=30x19 seqused_k causal",
    "fwd f32 b=3 hq=4 hk=2 sq=1 sk=192 d=64 pages=17x64 seqused_k splits=3",
    "fwd f32 b=3 hq=4 hk=2 sq=2 sk=64 d=16 pages=17x16 seqused_k leftpad new=2 rotary=16 causal",
    "fwd f32 b=3 hq=4 hk=2 sq=2 sk=64 d=16 cache_batch=6 cache_batch_idx seqused_k leftpad",
    "fwd f32 b=4 hq=4 hk=2 sq=30 sk=40 d=40 packed_q=90 packed_k=100 seqused_q seqused_k causal",
    "fwd f32 b=3 hq=2 sq=30 d=16 packed_q=200 packed_k=150",
    "fwd f32 b=2 hq=2 sq=40 sk=70 d=16 bias=f32:bhqk causal seqused_k",
    "fwd f32 b=2 hq=2 sq=40 sk=70 d=16 mask=bqk window=9,9 seqused_q",
    "bwd f32 b=4 hq=4 hk=2 sq=30 sk=40 d=40 packed_q=90 packed_k=100 seqused_q seqused_k causal dlse",
    "bwd f32 b=3 hq=2 sq=30 d=16 packed_q=200 packed_k=150",
    "bwd f32 b=3 hq=8 hk=1 sq=70 sk=90 d=64 seqused_q seqused_k window=20,3 sink dsink",
    "bwd f32 b=2 hq=2 sq=40 sk=70 d=16 bias=f32:bhqk dbias causal seqused_k"};

class DeadMemory : public testing::TestWithParam<const char*> {};

TEST_P(DeadMemory, NeverLeaks) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    tw_problem problem = problem_of(GetParam());
    problem.dtype = std::string(dtype) == "f32" ? TW_FLOAT32 : std::string(dtype) == "f16" ? TW_FLOAT16 : TW_BFLOAT16;
    for (const std::string& row : rows_for(problem))
      for (const uint64_t seed : {1, 2, 3}) {
        if (computes_again(row)) {  // dead memory is NaN there
          expect_check({.problem = problem_text(problem), .kernel = row, .seed = seed});
          continue;
        }
        InputOptions options;
        options.seed = seed;
        options.dead = Dead::kZero;
        const auto zeros = make_inputs(problem, options);
        run_ok(*zeros, row);
        for (const Dead dead : {Dead::kNan, Dead::kInfinity}) {
          options.dead = dead;
          const auto poisoned = make_inputs(problem, options);
          run_ok(*poisoned, row);
          expect_same_bits(*zeros, *poisoned, row + (dead == Dead::kNan ? ", NaN" : ", infinity") + ", seed " + std::to_string(seed));
        }
      }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeadMemory, testing::ValuesIn(kDeadMemoryProblems));

// Keys hidden from every row by a boolean mask: NaN in k alone, in v alone, in both.
TEST(MaskedKeys, HiddenFromAllNeverLeak) {
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32 mask=k", "fwd bf16 b=2 hq=4 hk=2 sq=33 sk=70 d=32 mask=k causal",
                           "fwd f16 b=1 hq=4 hk=1 sq=1 sk=300 d=64 mask=k", "bwd f32 b=2 hq=4 hk=2 sq=33 sk=70 d=32 mask=k",
                           "bwd bf16 b=2 hq=4 hk=2 sq=33 sk=70 d=32 mask=k"})
    for (const std::string& row : rows_for(std::string(text)))
      for (const int which : {1, 2, 3}) {
        const auto poison = [which](Inputs& x) {
          const tw_problem& p = x.problem();
          for (int64_t j = 0; j < p.seqlen_k; ++j) {
            if (x.bias.get(j) != 0) continue;
            for (int64_t b = 0; b < p.batch; ++b)
              for (int64_t h = 0; h < p.num_heads_k; ++h)
                for (int64_t c = 0; c < p.head_dim; ++c) {
                  const int64_t n = x.k_row(b, j, h) * p.head_dim + c;
                  if (which & 1) x.k.set(n, NAN);
                  if (which & 2) x.v.set(n, c % 2 ? INFINITY : NAN);
                }
          }
        };
        if (computes_again(row)) {
          expect_check({.problem = text, .kernel = row, .poison = poison});
          continue;
        }
        const auto clean = make_inputs(std::string(text), {}), poisoned = make_inputs(std::string(text), {});
        poison(*poisoned);
        run_ok(*clean, row);
        run_ok(*poisoned, row);
        expect_same_bits(*clean, *poisoned, row + (which == 1 ? ", k" : which == 2 ? ", v" : ", k and v"));
      }
}

// NaN and inf in whole rows of k, v, q and dout: what does not see them is as if they were not there, gradients too. A softcap's
// derivative at a NaN logit is NaN.
TEST(MaskedKeys, NanRowsLeaveOthersAlone) {
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=70 sk=90 d=32 causal softcap=5", "fwd bf16 b=1 hq=2 sq=60 sk=80 d=16 window=10,3",
                           "bwd f32 b=1 hq=1 sq=30 sk=1 d=8 window=-1,0 softcap=1", "bwd f32 b=2 hq=4 hk=2 sq=70 sk=90 d=32 causal softcap=5",
                           "bwd bf16 b=2 hq=4 hk=2 sq=70 sk=90 d=32 causal softcap=5", "bwd f16 b=1 hq=2 sq=60 sk=80 d=16 window=10,3"})
    for (const std::string& row : rows_for(std::string(text))) expect_check({.problem = text, .kernel = row, .nan_rows = true});
}

// A NaN in a key reaches the rows that see it, and no other: causal and window put it behind the diagonal of most rows.
TEST(MaskedKeys, NanReachesItsRowsOnly) {
  for (const char* text : {"fwd f32 b=1 hq=2 sq=70 sk=70 d=16 causal", "fwd bf16 b=1 hq=2 sq=130 sk=150 d=32 window=10,5",
                           "fwd f16 b=1 hq=2 hk=1 sq=50 sk=130 d=16 causal window=20,0", "fwd f32 b=1 hq=2 sq=5 sk=300 d=16 window=3,3"})
    for (const std::string& row : rows_for(std::string(text))) {
      const auto clean = make_inputs(std::string(text), {});
      run_ok(*clean, row);
      const tw_problem& p = clean->problem();
      // Computed again, P is not rounded; before, by half a unit in its last place: a sum of P v moves by as much of the largest
      // |v|, and two roundings of o by less than that again.
      double largest_v = 0;
      for (const double v : clean->v.values()) largest_v = std::max(largest_v, std::abs(v));
      const double o_slack = computes_again(row) ? largest_v * (p.dtype == TW_BFLOAT16 ? 0x1p-8 : 0x1p-11) : 0;
      const auto expect_same = [&](double got, double wanted, double slack, const char* what, int64_t i, int64_t j) {
        ASSERT_LE(std::abs(got - wanted), slack)
            << row << ": " << what << " row " << i << " does not see NaN key " << j << "\n  in \"" << text << "\"";
      };
      for (const int64_t j : {int64_t{0}, p.seqlen_k / 2, p.seqlen_k - 3})
        for (const bool in_v : {false, true}) {
          const auto poisoned = make_inputs(std::string(text), {});
          Buffer& target = in_v ? poisoned->v : poisoned->k;
          for (int64_t h = 0; h < p.num_heads_k; ++h)
            for (int64_t c = 0; c < p.head_dim; ++c) target.set(poisoned->k_row(0, j, h) * p.head_dim + c, NAN);
          run_ok(*poisoned, row);
          for (int64_t h = 0; h < p.num_heads_q; ++h)
            for (int64_t i = 0; i < p.seqlen_q; ++i) {
              const bool sees = poisoned->visible(0, h, i, j);
              for (int64_t c = 0; c < p.head_dim_v; ++c) {
                const int64_t n = poisoned->q_row(0, i, h) * p.head_dim_v + c;
                if (sees)
                  ASSERT_TRUE(std::isnan(poisoned->o.get(n))) << row << ": o row " << i << " sees NaN key " << j << "\n  in \"" << text << "\"";
                else
                  expect_same(poisoned->o.get(n), clean->o.get(n), o_slack, "o", i, j);
              }
              const int64_t at = poisoned->lse_index(0, i, h);
              if (sees && !in_v)
                ASSERT_TRUE(std::isnan(poisoned->lse.get(at))) << row << ": lse of row " << i;
              else
                expect_same(poisoned->lse.get(at), clean->lse.get(at), o_slack > 0 ? 1e-5 : 0, "lse", i, j);
            }
        }
    }
}

}  // namespace
}  // namespace tilewise
