// Any text: parse() says no in words, or gives a problem whose text form is its own fixed point; validate_problem()
// takes whatever parse() lets through.
#include "core/problem.h"
#include "core/validate.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tw_problem problem;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const tilewise::Status parsed = tilewise::parse(text, &problem);
  if (!parsed.ok()) {
    FUZZ_REQUIRE(parsed.code() == TW_INVALID_ARGUMENT && !parsed.message().empty());
    return 0;
  }
  const std::string canonical = tilewise::format(problem);
  tw_problem again;
  FUZZ_REQUIRE(tilewise::parse(canonical, &again).ok());
  FUZZ_REQUIRE(tilewise::format(again) == canonical);
  if (tilewise::validate_problem(problem).ok()) {
    FUZZ_REQUIRE(tilewise::flops(problem) >= 0);
    FUZZ_REQUIRE(tilewise::bytes_moved(problem) >= 0);
  }
  return 0;
}
