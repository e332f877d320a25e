// One result, cut in pieces: splits of the keys, chunks of the queries, a decode step, a batch entry alone, a ring.
#include "support.h"

namespace tilewise {
namespace {

double tolerance(int32_t dtype) { return dtype == TW_FLOAT32 ? 4e-6 : dtype == TW_FLOAT16 ? 2e-3 : 1.6e-2; }

TEST(Splits, AnyNumberGivesTheSameResult) {
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=1 sk=500 d=64 seqused_k", "fwd bf16 b=2 hq=4 hk=1 sq=1 sk=500 d=64 seqused_k causal",
                           "fwd f16 b=2 hq=4 hk=2 sq=9 sk=500 d=32 pages=70x16 seqused_k causal", "fwd f32 b=1 hq=2 sq=40 sk=300 d=32 window=40,3 sink",
                           "fwd f32 b=4 hq=2 sq=1 sk=60 d=16 packed_q=4 packed_k=150", "fwd f32 b=2 hq=2 sq=7 sk=0 d=16"})
    for (const std::string& row : rows_for(std::string(text)))
      for (const int splits : {0, 1, 2, 3, 5, 8, 16, 32, 128}) {
        CheckRequest request;  // poisons o, lse and the workspace before each run
        request.problem = std::string(text) + (splits ? " splits=" + std::to_string(splits) : "");
        request.kernel = row;
        expect_check(request);
      }
}

// Rows [begin, end) of the queries with the keys that they may see equal those rows of the whole.
TEST(Chunks, ChunkedPrefillEqualsOneShot) {
  for (const char* text : {"fwd f32 b=2 hq=4 hk=2 sq=210 d=32 causal", "fwd bf16 b=1 hq=4 hk=1 sq=210 d=64 causal", "fwd f32 b=1 hq=2 sq=210 d=32 causal window=50,0 softcap=20",
                           "fwd f16 b=1 hq=2 sq=210 d=32 causal sink alibi=h"})
    for (const std::string& row : rows_for(std::string(text))) {
      const auto whole = make_inputs(std::string(text), {});
      run_ok(*whole, row);
      const std::vector<double> expected_o = whole->o.values(), expected_lse = whole->lse.values();
      const tw_problem& p = whole->problem();
      const int64_t size = p.dtype == TW_FLOAT32 ? 4 : 2;
      for (const int64_t chunk : {1, 7, 64, 100}) {
        Inputs pieces = *whole;
        pieces.poison_outputs();
        for (int64_t begin = chunk == 1 ? p.seqlen_q - 20 : 0; begin < p.seqlen_q; begin += chunk) {
          const int64_t end = std::min(begin + chunk, p.seqlen_q);
          tw_tensors t = pieces.tensors();
          tw_tensor q = slice(*t.q, 1, begin, end - begin, size), k = slice(*t.k, 1, 0, end, size), v = slice(*t.v, 1, 0, end, size);
          tw_tensor o = slice(*t.o, 1, begin, end - begin, size), lse = slice(*t.lse, 2, begin, end - begin, 4);
          t.q = &q, t.k = &k, t.v = &v, t.o = &o, t.lse = &lse;
          tw_problem options = p;
          options.seqlen_q = options.seqlen_k = 0;
          const tw_target target = target_for(row);
          ASSERT_EQ(tw_forward(&options, &t, &target, nullptr), TW_OK) << tw_last_error();
        }
        for (int64_t b = 0; b < p.batch; ++b)
          for (int64_t h = 0; h < p.num_heads_q; ++h)
            for (int64_t i = chunk == 1 ? p.seqlen_q - 20 : 0; i < p.seqlen_q; ++i) {
              for (int64_t c = 0; c < p.head_dim_v; ++c) {
                const int64_t n = pieces.q_row(b, i, h) * p.head_dim_v + c;
                ASSERT_NEAR(pieces.o.get(n), expected_o[static_cast<size_t>(n)], tolerance(p.dtype)) << row << ", chunks of " << chunk << ", row " << i << "\n  in \"" << text << "\"";
              }
              const int64_t at = pieces.lse_index(b, i, h);
              ASSERT_NEAR(pieces.lse.get(at), expected_lse[static_cast<size_t>(at)], 3e-5) << row << ", chunks of " << chunk << ", row " << i;
            }
      }
    }
}

TEST(Chunks, LastRowOfPrefillEqualsDecodeStep) {
  for (const int window : {-1, 0, 1, 15, 16, 17, 127, 128, 129})
    for (const char* dtype : {"f32", "bf16"}) {
      const std::string tail = " b=1 hq=4 hk=2 sk=200 d=32 causal" + (window >= 0 ? " window=" + std::to_string(window) + ",0" : std::string());
      const std::string prefill_text = std::string("fwd ") + dtype + " sq=200" + tail;
      for (const std::string& row : rows_for(prefill_text)) {
        const auto prefill = make_inputs(prefill_text, {});
        run_ok(*prefill, row);
        const auto decode = make_inputs(std::string("fwd ") + dtype + " sq=1" + tail, {});
        const tw_problem& p = decode->problem();
        for (int64_t h = 0; h < 4; ++h)
          for (int64_t c = 0; c < 32; ++c) decode->q.set(h * 32 + c, prefill->q.get(prefill->q_row(0, 199, h) * 32 + c));
        run_ok(*decode, row);
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t c = 0; c < 32; ++c)
            ASSERT_NEAR(decode->o.get(h * 32 + c), prefill->o.get(prefill->q_row(0, 199, h) * 32 + c), tolerance(p.dtype)) << row << ", window " << window << " in \"" << prefill_text << "\"";
          ASSERT_NEAR(decode->lse.get(h), prefill->lse.get(prefill->lse_index(0, 199, h)), 3e-5) << row;
        }
      }
    }
}

// Appending n keys and attending equals attending to a cache that holds them.
TEST(Chunks, AppendEqualsCacheThatHoldsThem) {
  for (const char* text : {"fwd f32 b=3 hq=4 hk=2 sq=4 sk=90 d=32 seqused_k new=4 causal", "fwd bf16 b=3 hq=4 hk=2 sq=4 sk=96 d=32 pages=20x16 seqused_k new=4 causal"})
    for (const std::string& row : rows_for(std::string(text))) {
      const auto append = make_inputs(std::string(text), {});
      run_ok(*append, row);
      Inputs after = *append;  // k and v now hold the new keys
      tw_tensors held = after.tensors();
      held.k_new = held.v_new = nullptr;
      for (int64_t b = 0; b < 3; ++b) after.seqused_k.set(b, after.seqused_k.get(b) + 4);
      tw_problem options;
      tw_problem_init(&options);
      options.causal = 1;
      after.poison_outputs();
      const tw_target target = target_for(row);
      ASSERT_EQ(tw_forward(&options, &held, &target, nullptr), TW_OK) << tw_last_error();
      expect_same_bits(*append, after, row);
    }
}

// batch_invariant: a sequence alone and within a batch, dense or packed, bit for bit.
TEST(BatchInvariance, AloneEqualsInTheBatch) {
  const char* const kProblems[][2] = {{"fwd ", "sq=100 sk=150 d=32 causal"},
                                      {"fwd ", "sq=1 sk=700 d=64"},
                                      {"fwd ", "sq=5 sk=300 d=64 window=40,0"},
                                      {"bwd ", "sq=200 sk=260 d=32 causal deterministic"},
                                      {"bwd ", "sq=100 sk=260 d=128 deterministic"}};
  for (const auto& [pass, tail] : kProblems)
    for (const char* dtype : {"f32", "f16", "bf16"}) {
      const auto text = [&](const char* batch) { return std::string(pass) + dtype + batch + " hq=8 hk=2 " + tail + " batch_invariant"; };
      for (const std::string& row : rows_for(text(" b=4"))) {
        const auto batch = make_inputs(text(" b=4"), {}), alone = make_inputs(text(" b=1"), {});
        run_ok(*batch, row);
        for (int64_t b = 0; b < 4; ++b) {
          const auto many = batch->inputs();
          auto one = alone->inputs();
          for (size_t k = 0; k < one.size(); ++k)
            for (int64_t n = 0; n < one[k].buffer->size(); ++n) one[k].buffer->set(n, many[k].buffer->get(b * one[k].buffer->size() + n));
          run_ok(*alone, row);
          const auto wanted = batch->outputs(), got = alone->outputs();
          for (size_t k = 0; k < got.size(); ++k)
            for (int64_t n = 0; n < got[k].buffer->size(); ++n)
              ASSERT_EQ(got[k].buffer->get(n), wanted[k].buffer->get(b * got[k].buffer->size() + n))
                  << row << ", entry " << b << ", " << got[k].name << ", element " << n << "\n  in \"" << text(" b=4") << "\"";
        }
      }
    }
}

// Ring attention: halves of the keys, merged by lse, are the whole; backward with the whole's o and lse, the halves'
// gradients add up. P comes from the lse that is given, not from the keys at hand.
TEST(Ring, HalvesMergeToTheWhole) {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string text = std::string("fwd ") + dtype + " b=2 hq=4 hk=2 sq=40 sk=128 d=32";
    for (const std::string& row : rows_for(text)) {
      const auto whole = make_inputs(text, {});
      run_ok(*whole, row);
      const int64_t size = whole->problem().dtype == TW_FLOAT32 ? 4 : 2;
      Inputs first = *whole, second = *whole;
      for (Inputs* half : {&first, &second}) {
        half->poison_outputs();
        tw_tensors t = half->tensors();
        const int64_t begin = half == &first ? 0 : 50, count = half == &first ? 50 : 78;
        tw_tensor k = slice(*t.k, 1, begin, count, size), v = slice(*t.v, 1, begin, count, size);
        t.k = &k, t.v = &v;
        const tw_target target = target_for(row);
        ASSERT_EQ(tw_forward(nullptr, &t, &target, nullptr), TW_OK) << tw_last_error();
      }
      ASSERT_EQ(tw_merge_states(first.o.tensor(), first.lse.tensor(), second.o.tensor(), second.lse.tensor(), nullptr), TW_OK) << tw_last_error();
      EXPECT_LT(largest_difference(first.o.values(), whole->o.values()), tolerance(whole->problem().dtype)) << row;
      EXPECT_LT(largest_difference(first.lse.values(), whole->lse.values()), 3e-5) << row;
    }
  }
}

TEST(Ring, GradientsOfHalvesAddUp) {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string text = std::string("bwd ") + dtype + " b=2 hq=4 hk=2 sq=40 sk=128 d=32";
    for (const std::string& row : rows_for(text)) {
      InputOptions options;
      options.float32_outputs = true;
      const auto whole = make_inputs(text, options);
      run_ok(*whole, row);
      const int64_t size = whole->problem().dtype == TW_FLOAT32 ? 4 : 2;
      std::vector<double> dq(static_cast<size_t>(whole->dq.size()), 0);
      Inputs halves = *whole;
      halves.poison_outputs();
      for (const bool second : {false, true}) {
        tw_tensors t = halves.tensors();
        const int64_t begin = second ? 50 : 0, count = second ? 78 : 50;
        tw_tensor k = slice(*t.k, 1, begin, count, size), v = slice(*t.v, 1, begin, count, size);
        tw_tensor dk = slice(*t.dk, 1, begin, count, 4), dv = slice(*t.dv, 1, begin, count, 4);
        t.k = &k, t.v = &v, t.dk = &dk, t.dv = &dv;
        const tw_target target = target_for(row);
        ASSERT_EQ(tw_backward(nullptr, &t, &target, nullptr), TW_OK) << tw_last_error();
        const std::vector<double> part = halves.dq.values();
        for (size_t n = 0; n < dq.size(); ++n) dq[n] += part[n];
      }
      // 16 bits: the reference rounds nothing, the rows round P and dS; either way both runs do alike.
      const double limit = whole->problem().dtype == TW_FLOAT32 ? 2e-5 : 2e-2;
      EXPECT_LT(largest_difference(dq, whole->dq.values()), limit) << row << ": dq does not come from the lse and o that are given";
      EXPECT_LT(largest_difference(halves.dk.values(), whole->dk.values()), limit) << row << ": dk does not come from the lse and o that are given";
      EXPECT_LT(largest_difference(halves.dv.values(), whole->dv.values()), limit) << row << ": dv does not come from the lse and o that are given";
    }
  }
}

// Partial results without keys: two of them stay empty, one leaves the other as it is.
TEST(Merge, EmptyPartials) {
  for (const bool packed : {false, true}) {
    const int64_t tokens = 6, heads = 2, width = 5;
    std::vector<float> o(static_cast<size_t>(tokens * heads * width), 0), other(o.size()), lse(static_cast<size_t>(tokens * heads), -INFINITY), lse_other(lse.size(), -INFINITY);
    const auto tensor = [&](std::vector<float>& x, bool vectors) {
      if (packed) return vectors ? tw_tensor_contiguous(x.data(), TW_FLOAT32, 3, tokens, heads, width, 0) : tw_tensor_contiguous(x.data(), TW_FLOAT32, 2, heads, tokens, 0, 0);
      return vectors ? tw_tensor_contiguous(x.data(), TW_FLOAT32, 4, 1, tokens, heads, width) : tw_tensor_contiguous(x.data(), TW_FLOAT32, 3, 1, heads, tokens, 0);
    };
    // Rows: 0 both empty, 1 the first empty, 2 the second empty, 3 both; an empty partial's o may hold anything finite.
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < tokens; ++i) {
        const bool first = i % 4 == 2 || i % 4 == 3, second = i % 4 == 1 || i % 4 == 3;
        lse[static_cast<size_t>(h * tokens + i)] = first ? 1.5f : -INFINITY;
        lse_other[static_cast<size_t>(h * tokens + i)] = second ? -2.5f : -INFINITY;
        for (int64_t c = 0; c < width; ++c) {
          o[static_cast<size_t>((i * heads + h) * width + c)] = first ? 3.0f + static_cast<float>(c) : 0;
          other[static_cast<size_t>((i * heads + h) * width + c)] = second ? -1.0f - static_cast<float>(c) : 0;
        }
      }
    tw_tensor a = tensor(o, true), b = tensor(other, true), la = tensor(lse, false), lb = tensor(lse_other, false);
    ASSERT_EQ(tw_merge_states(&a, &la, &b, &lb, nullptr), TW_OK) << tw_last_error();
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t c = 0; c < width; ++c) {
          const float got = o[static_cast<size_t>((i * heads + h) * width + c)], got_lse = lse[static_cast<size_t>(h * tokens + i)];
          const float x = 3.0f + static_cast<float>(c), y = -1.0f - static_cast<float>(c);
          const double wa = 1 / (1 + std::exp(-4.0));
          const double expected[] = {0, y, x, wa * x + (1 - wa) * y};
          const double expected_lse[] = {-INFINITY, -2.5, 1.5, 1.5 + std::log1p(std::exp(-4.0))};
          if (i % 4 < 3) {  // exactly
            ASSERT_EQ(got, expected[i % 4]);
            ASSERT_EQ(got_lse, expected_lse[i % 4]);
          } else {
            ASSERT_NEAR(got, expected[3], 1e-6);
            ASSERT_NEAR(got_lse, expected_lse[3], 1e-6);
          }
        }
  }
}

}  // namespace
}  // namespace tilewise
