// Random problems over everything that the contract allows, on every row. rapidcheck shrinks a failing problem to a small
// one; the line to reproduce it is printed. Time-boxed: TILEWISE_PROPERTY_SECONDS (default 60), TILEWISE_PROPERTY_SEED (default 1:
// a run that fails must fail again; other seeds are for whoever looks for trouble).
#include <rapidcheck.h>

#include <chrono>
#include <cstdlib>

#include "random_problem.h"
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
  return out << "\"" << draw.problem << "\" " << input_kind_name(draw.kind) << " " << layout_name(draw.layout) << " seed " << draw.seed
             << " threads " << draw.threads << (draw.float32_outputs ? ", float32 outputs" : "");
}

rc::Gen<Draw> any_draw() {
  return rc::gen::exec([] {
    const auto number = [](int low, int high) { return *rc::gen::inRange(low, high + 1); };
    const std::string text = random_problem({90, 160}, number);
    return Draw{text, static_cast<InputKind>(number(0, kNumInputKinds - 1)), static_cast<Layout>(number(0, kNumLayouts - 1)), static_cast<uint64_t>(number(1, 1000000)),
                number(0, 99) >= 80, number(0, 3)};
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
      CheckRequest request{.problem = draw.problem, .kernel = row, .input = draw.kind, .seed = draw.seed, .layout = draw.layout, .threads = draw.threads};
      request.float32_outputs = draw.float32_outputs;
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
