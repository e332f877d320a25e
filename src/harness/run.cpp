#include "harness/run.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "harness/gpu.h"

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

// The backend of a row; TW_BACKEND_AUTO of "".
int32_t backend_of(const std::string& kernel) {
  for (const tw_kernel_info& row : kernels())
    if (kernel == row.name) return row.backend;
  return TW_BACKEND_AUTO;
}

tw_status run_here(const tw_plan* plan, size_t workspace_bytes, Inputs& inputs, RunResult* result) {
  constexpr size_t kGuard = 256;
  Bytes workspace(workspace_bytes + kGuard, 0xff);
  const tw_tensors tensors = inputs.tensors();
  const auto begin = std::chrono::steady_clock::now();
  const tw_status status = tw_run(plan, &tensors, workspace.data(), workspace_bytes, nullptr);
  result->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  result->workspace_ok = std::all_of(workspace.end() - kGuard, workspace.end(), [](uint8_t byte) { return byte == 0xff; });
  return status;
}

tw_status run_there(const tw_plan* plan, size_t workspace_bytes, Inputs& inputs, RunResult* result) {
  const GpuWorkspace workspace(workspace_bytes);
  GpuTensors there;
  inputs.add_to(&there);
  const tw_status status = run_on_gpu(plan, there.on_gpu(inputs.tensors()), workspace, 1, &result->seconds);
  result->workspace_ok = workspace.guard_intact();  // waits
  there.download();
  return status;
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

bool under_test(const tw_kernel_info& row) {
  const char* backend = std::getenv("TILEWISE_TEST_BACKEND");
  const bool wanted = backend == nullptr || (row.backend == TW_BACKEND_CUDA) == (std::string_view(backend) == "cuda");
  return row.available && wanted;
}

tw_problem on_device_of(const std::string& kernel, tw_problem problem) {
  const int32_t backend = backend_of(kernel);
  if (backend != TW_BACKEND_AUTO) problem.device = backend == TW_BACKEND_CUDA ? TW_CUDA : TW_CPU;
  return problem;
}

bool takes(const std::string& kernel, const tw_problem& problem, std::string* reason) {
  const tw_target target = target_of(kernel, 1, nullptr);
  const tw_problem there = on_device_of(kernel, problem);
  tw_plan* plan = nullptr;
  const tw_status status = tw_plan_create(&there, &target, &plan);
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
  const tw_problem problem = on_device_of(kernel, inputs.problem());
  tw_plan* raw = nullptr;
  if (const tw_status status = tw_plan_create(&problem, &target, &raw); status != TW_OK) return failed(status);
  const std::unique_ptr<tw_plan, void (*)(tw_plan*)> plan(raw, tw_plan_destroy);
  tw_plan_info info{};
  info.struct_size = sizeof info;
  if (const tw_status status = tw_plan_get_info(raw, &info); status != TW_OK) return failed(status);
  result.kernel = info.kernel;
  result.on_gpu = info.backend == TW_BACKEND_CUDA;
  const auto run_it = result.on_gpu ? run_there : run_here;
  if (const tw_status status = run_it(raw, static_cast<size_t>(info.workspace_bytes), inputs, &result); status != TW_OK) return failed(status);
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
