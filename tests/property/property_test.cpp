// Random problems over everything that the contract allows, on every row. rapidcheck shrinks a failing problem to a small
// one; the line to reproduce it is printed. Time-boxed: TILEWISE_PROPERTY_SECONDS (default 60), TILEWISE_PROPERTY_SEED (default 1:
// a run that fails must fail again; other seeds are for whoever looks for trouble).
#include <rapidcheck.h>

#include <chrono>
#include <cstdlib>

#include "support.h"

namespace tilewise {
namespace {

double seconds_allowed() {
  const char* text = std::getenv("TILEWISE_PROPERTY_SECONDS");
  return text != nullptr ? std::atof(text) : 60;
}

struct Draw {  // a problem and how to try it
  std::string problem;
  InputKind kind;
  Layout layout;
  uint64_t seed;
  bool float32_outputs;
  int threads;
};

std::ostream& operator<<(std::ostream& out, const Draw& draw) {
  return out << "\"" << draw.problem << "\" " << input_kind_name(draw.kind) << " " << layout_name(draw.layout) << " seed " << draw.seed;
}

// Shrinks towards small sizes and no options: every choice is a number that shrinks to 0 or to its lower bound.
rc::Gen<Draw> any_draw() {
  return rc::gen::exec([] {
    const auto number = [](int low, int high) { return *rc::gen::inRange(low, high + 1); };
    const auto chance = [&](int percent) { return number(0, 99) >= 100 - percent; };
    const auto size_of = [&](int most) {  // often near a multiple of 16, sometimes 0 or 1
      switch (number(0, 5)) {
        case 0: return number(0, 2);
        case 1: return std::min(most, 16 * number(0, 9) + number(0, 2));
        default: return number(1, most);
      }
    };
    const bool backward = chance(40);
    std::string text = backward ? "bwd " : "fwd ";
    const char* dtypes[] = {"f32", "bf16", "f16"};
    text += dtypes[number(0, 2)];
    const int batch = number(1, 4) - (chance(3) ? 1 : 0), heads_k = number(1, 3), group = number(1, 4);
    const int sq = size_of(chance(30) ? 3 : 90), sk = size_of(160);
    const auto put = [&](const char* key, auto value) { text += std::string(" ") + key + "=" + std::to_string(value); };
    const int d = chance(15) ? number(1, 130) : 8 * number(1, chance(20) ? 32 : 16), dv = chance(80) ? d : 8 * number(1, 16);
    put("b", batch), put("hq", heads_k * group), put("hk", heads_k), put("sq", sq);
    const int dense = 0, packed = 1, paged = 2;
    const int q_layout = chance(30) ? packed : dense;
    int k_layout = backward ? (chance(40) ? packed : dense) : number(0, 2);
    const int page_size = number(1, 40), pages_each = (sk + page_size - 1) / page_size;
    put("sk", k_layout == paged ? pages_each * page_size : sk), put("d", d), put("dv", dv);
    if (q_layout == packed) put("packed_q", sq == 0 ? 0 : number(0, batch * sq + 5));
    if (k_layout == packed) put("packed_k", sk == 0 ? 0 : number(0, batch * sk + 5));
    if (k_layout == paged) text += " pages=" + std::to_string(batch * pages_each + number(1, 5)) + "x" + std::to_string(page_size);
    const int capacity = k_layout == paged ? pages_each * page_size : sk;
    const bool cache = !backward && k_layout != packed && chance(50);
    const bool cache_rows = cache && k_layout == dense && batch > 0 && chance(30);
    if (cache_rows) put("cache_batch", batch + number(1, 3));
    const int appended = cache && capacity > 0 && chance(50) ? number(1, std::min(capacity, 7)) : 0;
    if (appended > 0) put("new", appended);
    const bool rotary = cache && d >= 2 && chance(40);
    if (rotary) text += " rotary=" + std::to_string(2 * number(1, d / 2)) + (chance(50) ? ",interleaved" : "");
    const int mask = number(0, 3);
    if (mask == 1) text += " causal";
    if (mask == 2) text += " window=" + std::to_string(number(-1, 40)) + "," + std::to_string(number(-1, 40));
    if (mask == 3) text += " causal window=" + std::to_string(number(0, 60)) + ",0";
    if (chance(15)) text += std::string(" scale=") + (const char*[]){"0", "-0.2", "0.05", "1", "3"}[number(0, 4)];
    if (chance(20)) text += std::string(" softcap=") + (const char*[]){"1", "20", "50"}[number(0, 2)];
    const bool alibi = chance(20), bias = chance(20), sink = chance(20), boolean = bias && chance(50);
    if (alibi) text += chance(50) ? " alibi=h" : " alibi=bh";
    if (bias) {
      std::string dims;
      for (const char letter : {'b', 'h', 'q', 'k'})
        if (chance(60)) dims += letter;
      if (dims.empty()) dims = "1";
      text += boolean ? " mask=" + dims : std::string(" bias=") + dtypes[number(0, 2)] + ":" + dims;
    }
    if (sink) text += " sink";
    if (chance(15)) {
      text += " dropout=0.25 seed=" + std::to_string(number(0, 1000)) + (chance(30) ? " rng_state" : "");
      if (!backward && chance(50)) text += " dropout_mask";
    }
    if (chance(25)) text += " seqused_q";
    if (appended > 0 || rotary || chance(30)) text += " seqused_k";
    if (cache_rows) text += " cache_batch_idx";
    if (cache && chance(30)) text += " leftpad";
    if (rotary && chance(30)) text += " rotary_seqlens";
    if (!backward && chance(15)) text += " no_lse";
    if (!backward && chance(20)) text += " maxlogit";
    if (backward) {
      if (chance(20)) text += " dlse";
      if (chance(15)) text += " no_dq";
      if (chance(15)) text += " no_dk";
      if (chance(15)) text += " no_dv";
      if (bias && !boolean && chance(70)) text += " dbias";
      if (alibi && chance(70)) text += " dalibi";
      if (sink && chance(70)) text += " dsink";
      if (chance(20)) text += " deterministic";
    }
    if (chance(10)) text += " batch_invariant";
    if (!backward && chance(25)) put("splits", number(1, 9));
    return Draw{text, static_cast<InputKind>(number(0, kNumInputKinds - 1)), static_cast<Layout>(number(0, kNumLayouts - 1)), static_cast<uint64_t>(number(1, 1000000)),
                chance(20), number(0, 3)};
  });
}

TEST(Property, EveryRowOnRandomProblems) {
  const auto begin = std::chrono::steady_clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  int problems = 0, checks = 0;
  rc::detail::TestParams params;
  const char* seed = std::getenv("TILEWISE_PROPERTY_SEED");
  params.seed = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1;
  params.maxSuccess = 100000;
  params.maxSize = 100;
  const auto property = [&] {
    if (spent() > seconds_allowed()) return;  // the rest of the 100000 pass at once
    const Draw draw = *any_draw();
    std::string error;
    tw_problem problem;
    RC_ASSERT(parse_problem(draw.problem, &problem, &error));
    ++problems;
    for (const std::string& row : rows_for(problem)) {
      CheckRequest request{draw.problem, row, draw.kind, draw.seed, draw.layout, draw.threads, draw.float32_outputs, false, true};
      const CheckResult result = check(request);
      if (!result.ok && !result.refused) RC_LOG() << to_text(result);
      RC_ASSERT(result.ok || result.refused);
      checks += result.ok;
    }
  };
  const auto result = rc::detail::checkTestable(property, rc::detail::TestMetadata{"Property", "EveryRowOnRandomProblems"}, params);
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  std::printf("%d problems, %d checks in %.0f s, seed %llu\n", problems, checks, spent(), static_cast<unsigned long long>(params.seed));
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>()) << message.str() << "\nTILEWISE_PROPERTY_SEED=" << params.seed;
  EXPECT_GE(checks, problems) << "hardly any row took a problem";
  EXPECT_GE(problems, 20);
}

}  // namespace
}  // namespace tilewise
