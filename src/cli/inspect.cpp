// explain, plan, list, info: what would run, and why.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cli.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InspectOptions {
  std::string problem, backend = "auto", kernel, threads;
  bool json = false, markdown = false;
};

void add_target(CLI::App* command, const std::shared_ptr<InspectOptions>& options) {
  command->add_option("problem", options->problem, "The problem's text")->required()->type_name("PROBLEM");
  command->add_option("--backend", options->backend, "Default: auto, by the problem")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "cpu", "cuda", "reference"}));
  add_text(command, "--kernel", options->kernel, "NAME", "One row of `tilewise list`");
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)");
}

Target target_of(const InspectOptions& options) {
  return target_named(options.backend, options.kernel, thread_count(options.threads));
}

void run_explain(const InspectOptions& options) {
  const Problem problem = parse_problem(options.problem);
  const Target target = target_of(options);
  print(explain(problem, target));
  Plan(problem, target);  // throws, after the refusals, if there is no plan
}

void run_plan(const InspectOptions& options) {
  const Problem problem = parse_problem(options.problem);
  const Plan plan(problem, target_of(options));
  if (!options.json) return print("problem " + problem.text() + "\n" + plan.text());
  const tw_plan_info info = plan.info();
  const Json json = {{"problem", problem.text()},
                     {"kernel", info.kernel},
                     {"backend", backend_text(info.backend)},
                     {"config", info.config},
                     {"num_splits", info.num_splits},
                     {"num_tasks", info.num_tasks},
                     {"workspace_bytes", info.workspace_bytes},
                     {"standard_bytes", info.standard_bytes},
                     {"flops", info.flops},
                     {"bytes_moved", info.bytes_moved}};
  print(json.dump(2) + "\n");
}

void run_list(const InspectOptions& options) {
  const std::vector<tw_kernel_info> table = kernels();
  if (options.json) {
    Json json = Json::array();
    for (const tw_kernel_info& k : table)
      json.push_back({{"name", k.name},
                      {"backend", backend_text(k.backend)},
                      {"pass", pass_text(k.pass)},
                      {"isa", k.isa},
                      {"available", k.available != 0},
                      {"summary", k.summary}});
    return print(json.dump(2) + "\n");
  }
  if (options.markdown) {  // of the build, not of this machine
    std::string text = "| kernel | backend | pass | needs | takes |\n|---|---|---|---|---|\n";
    for (const tw_kernel_info& k : table)
      text += fmt::format("| `{}` | {} | {} | {} | {} |\n", k.name, backend_text(k.backend), pass_text(k.pass), k.isa,
                          k.summary);
    return print(text);
  }
  std::string text =
      fmt::format("{:<22} {:<9} {:<8} {:<10} {:<4}  {}\n", "kernel", "backend", "pass", "needs", "here", "takes");
  for (const tw_kernel_info& k : table)
    text += fmt::format("{:<22} {:<9} {:<8} {:<10} {:<4}  {}\n", k.name, backend_text(k.backend), pass_text(k.pass),
                        k.isa, k.available ? "yes" : "no", k.summary);
  print(text);
}

}  // namespace

void add_inspect(CLI::App& app) {
  {
    auto options = std::make_shared<InspectOptions>();
    CLI::App* command = add_command(app, "explain", "Say which kernel would run, and why not the others",
                                    "  tilewise explain \"fwd bf16 b=2 hq=32 hk=8 sq=1024 d=128 causal\"");
    add_target(command, options);
    command->callback([options] { run_explain(*options); });
  }
  {
    auto options = std::make_shared<InspectOptions>();
    CLI::App* command = add_command(app, "plan", "Print the plan of a problem: kernel, tiles, workspace, FLOPs",
                                    "  tilewise plan \"fwd f32 hq=8 sq=4096 d=64\" --json");
    add_target(command, options);
    command->add_flag("--json", options->json, "As JSON");
    command->callback([options] { run_plan(*options); });
  }
  {
    auto options = std::make_shared<InspectOptions>();
    CLI::App* command =
        add_command(app, "list", "List every kernel, best first", "  tilewise list\n  tilewise list --markdown");
    CLI::Option* json = command->add_flag("--json", options->json, "As JSON");
    command->add_flag("--markdown", options->markdown, "As a table for a README (without this machine's column)")
        ->excludes(json);
    command->callback([options] { run_list(*options); });
  }
  {
    CLI::App* command = add_command(app, "info", "Describe the machine as the library sees it", "  tilewise info");
    command->callback([] {
      std::string text = machine();
      if (text.empty() || text.back() != '\n') text += '\n';
      print(text);
    });
  }
}

}  // namespace tilewise::cli
