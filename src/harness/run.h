// Plan and run one kernel on harness inputs, in a workspace that is poisoned before and guarded behind.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "harness/inputs.h"

namespace tilewise::harness {

std::string problem_text(const tw_problem& problem);
bool parse_problem(const std::string& text, tw_problem* problem, std::string* error);

// All rows of tw_kernel_at.
std::vector<tw_kernel_info> kernels();

// Is the row one that tests take: one that this machine can run; TILEWISE_TEST_BACKEND=cuda: only those of the GPU, =cpu: only
// the others.
bool under_test(const tw_kernel_info& row);

// The problem where the row computes: of tensors on the GPU for a CUDA row, on the CPU for the others; "": as it is.
tw_problem on_device_of(const std::string& kernel, tw_problem problem);

// Does the row take the problem, here and now? If not, why.
bool takes(const std::string& kernel, const tw_problem& problem, std::string* reason);

struct RunResult {
  tw_status status = TW_OK;
  std::string message;       // of a failure
  std::string kernel;        // the row that ran
  double seconds = 0;
  bool workspace_ok = true;  // nothing was written behind the workspace
  bool on_gpu = false;       // inputs and outputs were copied there and back, guards included
};

// kernel "" = the one that the plan chooses. Outputs are poisoned first.
RunResult run(Inputs& inputs, const std::string& kernel, int threads = 0, const tw_executor* executor = nullptr);

// Inputs of a problem, with o and lse of the reference where the backward pass needs them. Throws std::runtime_error.
std::unique_ptr<Inputs> make_inputs(const tw_problem& problem, const InputOptions& options);
std::unique_ptr<Inputs> make_inputs(const std::string& problem, const InputOptions& options);

}  // namespace tilewise::harness
