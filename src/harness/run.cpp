#include "harness/run.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace tilewise::harness {
namespace {

tw_target target_of(const std::string& kernel, int threads, const tw_executor* executor) {
  tw_target target{};
  target.struct_size = sizeof target;
  target.num_threads = threads;
  target.kernel = kernel.empty() ? nullptr : kernel.c_str();
  target.executor = executor;
  return target;
}

}  // namespace

std::string problem_text(const tw_problem& problem) {
  std::string text(tw_problem_text(&problem, nullptr, 0) + 1, 0);
  text.resize(tw_problem_text(&problem, text.data(), text.size()));
  return text;
}

bool parse_problem(const std::string& text, tw_problem* problem, std::string* error) {
  if (tw_problem_parse(text.c_str(), problem) == TW_OK) return true;
  *error = tw_last_error();
  return false;
}

std::vector<tw_kernel_info> kernels() {
  std::vector<tw_kernel_info> rows(static_cast<size_t>(tw_kernel_count()));
  for (size_t n = 0; n < rows.size(); ++n) {
    rows[n].struct_size = sizeof rows[n];
    if (tw_kernel_at(static_cast<int32_t>(n), &rows[n]) != TW_OK) throw std::runtime_error(tw_last_error());
  }
  return rows;
}

bool takes(const std::string& kernel, const tw_problem& problem, std::string* reason) {
  const tw_target target = target_of(kernel, 1, nullptr);
  tw_plan* plan = nullptr;
  const tw_status status = tw_plan_create(&problem, &target, &plan);
  if (status != TW_OK && reason != nullptr) *reason = tw_last_error();
  tw_plan_destroy(plan);
  return status == TW_OK;
}

RunResult run(Inputs& inputs, const std::string& kernel, int threads, const tw_executor* executor) {
  RunResult result;
  const auto failed = [&](tw_status status) {
    result.status = status;
    result.message = tw_last_error();
    return result;
  };
  inputs.poison_outputs();
  const tw_target target = target_of(kernel, threads, executor);
  tw_plan* raw = nullptr;
  if (const tw_status status = tw_plan_create(&inputs.problem(), &target, &raw); status != TW_OK) return failed(status);
  const std::unique_ptr<tw_plan, void (*)(tw_plan*)> plan(raw, tw_plan_destroy);
  tw_plan_info info{};
  info.struct_size = sizeof info;
  if (const tw_status status = tw_plan_get_info(raw, &info); status != TW_OK) return failed(status);
  result.kernel = info.kernel;

  constexpr size_t kGuard = 256;
  Bytes workspace(static_cast<size_t>(info.workspace_bytes) + kGuard, 0xff);
  const tw_tensors tensors = inputs.tensors();
  const auto begin = std::chrono::steady_clock::now();
  const tw_status status = tw_run(raw, &tensors, workspace.data(), workspace.size() - kGuard, nullptr);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (status != TW_OK) return failed(status);
  result.workspace_ok = std::all_of(workspace.end() - kGuard, workspace.end(), [](uint8_t byte) { return byte == 0xff; });
  return result;
}

std::unique_ptr<Inputs> make_inputs(const tw_problem& problem, const InputOptions& options) {
  std::unique_ptr<Inputs> inputs;
  std::string error;
  if (Inputs::make(problem, options, &inputs, &error) != TW_OK) throw std::runtime_error(error);
  if (problem.pass == TW_FORWARD) return inputs;
  InputOptions forward_options = options;
  forward_options.layout = options.layout == Layout::kExpanded ? options.layout : Layout::kContiguous;
  forward_options.float32_outputs = options.float32_o;
  std::unique_ptr<Inputs> forward;
  if (Inputs::make(inputs->forward_problem(), forward_options, &forward, &error) != TW_OK) throw std::runtime_error(error);
  const RunResult result = run(*forward, "reference");
  if (result.status != TW_OK) throw std::runtime_error(result.message);
  inputs->set_forward(forward->o.values(), forward->lse.values());
  return inputs;
}

std::unique_ptr<Inputs> make_inputs(const std::string& text, const InputOptions& options) {
  tw_problem problem;
  std::string error;
  if (!parse_problem(text, &problem, &error)) throw std::runtime_error(error);
  return make_inputs(problem, options);
}

}  // namespace tilewise::harness
