// tilewise check: a kernel against float64, and against what standard attention makes of the same dtype.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "cli/cases.h"
#include "cli/cli.h"
#include "harness/check.h"

namespace tilewise::cli {
namespace {

struct CheckOptions {
  std::vector<std::string> problems;
  std::string cases, kernel, input = "gaussian", layout = "contiguous", seed, threads;
  bool all = false, float32_outputs = false, float32_o = false;
};

std::string names_of_inputs() {
  std::string names;
  for (int n = 0; n < harness::kNumInputKinds; ++n)
    names += std::string(n ? ", " : "") + harness::input_kind_name(static_cast<harness::InputKind>(n));
  return names;
}

std::string names_of_layouts() {
  std::string names;
  for (int n = 0; n < harness::kNumLayouts; ++n)
    names += std::string(n ? ", " : "") + harness::layout_name(static_cast<harness::Layout>(n));
  return names;
}

std::string row(const std::string& name, const std::string& a, const std::string& b, const std::string& c,
                const std::string& d, const std::string& note) {
  std::string text = fmt::format("  {:<13} {:>11} {:>11} {:>11} {:>11}  {}", name, a, b, c, d, note);
  while (text.back() == ' ') text.pop_back();
  return text + "\n";
}

std::string error_text(double error) { return fmt::format("{:.2e}", error); }

std::string header() {
  return "error: against float64, largest and relative. baseline: that of standard attention in the problem's "
         "dtype.\n" +
         row("output", "max error", "baseline", "rel. error", "baseline", "");
}

void print_result(const std::string& problem, const harness::CheckResult& result) {
  const std::string verdict = result.ok ? "ok" : result.refused ? "refused" : "FAILED";
  std::string text = fmt::format("{}  {}\n", verdict, problem);
  if (!result.kernel.empty()) text += fmt::format("  kernel {}\n", result.kernel);
  for (const harness::OutputError& output : result.outputs) {
    const bool bad = output.max_abs > output.limit_max_abs || output.rel_fro > output.limit_rel_fro;
    text +=
        row(output.name, error_text(output.max_abs), error_text(output.baseline_max_abs), error_text(output.rel_fro),
            error_text(output.baseline_rel_fro),
            bad ? "<- allowed " + error_text(output.limit_max_abs) + " and " + error_text(output.limit_rel_fro) : "");
  }
  if (!result.ok && !result.message.empty()) text += "  " + one_line(result.message) + "\n";
  if (!result.ok && !result.refused) text += "  " + result.reproduce + "\n";
  print(text);
}

// The kernels to check a problem with: "" = the planned one; "all" = every one that this machine can run.
std::vector<std::string> kernels_to_check(const std::string& kernel, const Problem& problem) {
  if (kernel != "all") return {kernel};
  std::vector<std::string> names;
  for (const tw_kernel_info& info : kernels()) {
    std::string reason;
    if (harness::takes(info.name, problem.c(), &reason)) names.push_back(info.name);
  }
  return names;
}

int run(const CheckOptions& o) {
  if (o.all == !o.problems.empty())
    throw UsageError(o.all ? "--all: cannot stand beside problems; must be one or the other"
                           : "problem: is required (or --all)");
  if (!o.cases.empty() && !o.all) throw UsageError("--cases: needs --all");
  harness::CheckRequest request;
  if (!harness::input_kind_from_name(o.input, &request.input))
    throw UsageError("--input: \"" + o.input + "\": must be one of " + names_of_inputs());
  if (!harness::layout_from_name(o.layout, &request.layout))
    throw UsageError("--layout: \"" + o.layout + "\": must be one of " + names_of_layouts());
  if (!o.seed.empty())
    request.seed = to_number<uint64_t>("--seed", o.seed, 0, UINT64_MAX, "an integer of 0 to 2^64 - 1");
  request.threads = o.threads.empty() ? 0 : thread_count(o.threads);
  request.float32_outputs = o.float32_outputs;
  request.float32_o = o.float32_o;
  if (o.kernel != "all") target_named("auto", o.kernel, 0);  // refuses an unknown name

  const std::vector<std::string> texts = !o.all ? o.problems : o.cases.empty() ? embedded_cases() : read_cases(o.cases);
  std::vector<Problem> problems;
  for (const std::string& text : texts) problems.push_back(parse_problem(text));

  int passed = 0, failed = 0, refused = 0;
  for (size_t n = 0; n < texts.size(); ++n) {
    for (const std::string& kernel : kernels_to_check(o.kernel, problems[n])) {
      request.problem = texts[n];
      request.kernel = kernel;
      const harness::CheckResult result = harness::check(request);
      if (result.refused && !o.all) throw UsageError(result.message);
      if (!result.ok && !result.refused && result.status == TW_INVALID_ARGUMENT && !o.all)
        throw UsageError(result.message);
      if (passed + failed + refused == 0) print(header());
      result.ok ? ++passed : result.refused ? ++refused : ++failed;
      print_result(texts[n], result);
    }
  }
  print(fmt::format("{} passed, {} failed{}\n", passed, failed,
                    refused > 0 ? fmt::format(", {} not taken by the kernel", refused) : ""));
  return failed > 0 || passed == 0 ? kFailed : kSuccess;
}

}  // namespace

void add_check(CLI::App& app, int* exit_status) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = add_command(
      app, "check", "Check a kernel's results against float64",
      "  tilewise check \"fwd bf16 b=2 hq=8 hk=2 sq=300 d=64 causal\"\n"
      "  tilewise check \"bwd f32 hq=4 sq=129 d=80 softcap=15\" --input peaked --seed 3\n"
      "  tilewise check --all --kernel all\n"
      "\nAn error may be twice (with softcap: 3 times) that of standard attention in the same dtype, plus a small\n"
      "absolute term. Exit status 1 if a check fails.");
  command->add_option("problem", options->problems, "Problem texts")->type_name("PROBLEM");
  command->add_flag("--all", options->all, "Every case of the project's conformance tests");
  add_text(command, "--cases", options->cases, "FILE",
           "With --all: the cases of this file instead, one problem a line");
  add_text(command, "--kernel", options->kernel, "NAME",
           "One row of `tilewise list` (default: the planned one), or all");
  add_text(command, "--input", options->input, "KIND", "Values: " + names_of_inputs())->capture_default_str();
  add_text(command, "--layout", options->layout, "NAME", "Memory: " + names_of_layouts())->capture_default_str();
  add_text(command, "--seed", options->seed, "N", "Of the values (default 1)");
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)");
  command->add_flag("--float32-outputs", options->float32_outputs,
                    "o and the gradients in float32 beside 16-bit inputs");
  command->add_flag("--float32-o", options->float32_o, "Only o in float32");
  command->callback([options, exit_status] { *exit_status = run(*options); });
}

}  // namespace tilewise::cli
