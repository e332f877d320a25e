// A problem's tensors on the GPU and one kernel's plan for it: to run it again and again, on any stream.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "harness/run.h"

namespace tilewise {

using namespace harness;

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

class Session {
 public:
  struct Case {
    std::string problem, kernel;
    int32_t device_index = 0;
  };
  // The problem on every CUDA row that takes it; `first`: on the best of them alone.
  static std::vector<Case> cases(const std::string& problem, bool first = false) {
    std::vector<Case> found;
    tw_problem p;
    if (std::string error; !parse_problem(problem, &p, &error)) std::printf("%s\n", error.c_str()), std::exit(1);
    for (const tw_kernel_info& row : kernels())
      if (row.available && row.backend == TW_BACKEND_CUDA && takes(row.name, p, nullptr) && !(first && !found.empty()))
        found.push_back({problem, row.name});
    return found;
  }

  explicit Session(const Case& c, uint64_t seed = 1, bool nan_rows = false) : name_(c.kernel + " \"" + c.problem + "\"") {
    InputOptions options;
    options.seed = seed, options.dead = Dead::kZero, options.nan_rows = nan_rows;
    tw_problem p;
    std::string error;
    if (!parse_problem(c.problem, &p, &error) || Inputs::make(p, options, &inputs_, &error) != TW_OK)
      std::printf("%s\n", error.c_str()), std::exit(1);
    if (p.pass == TW_BACKWARD) {  // o and lse need not belong to q, k and v: they only have to be the same each time
      for (int64_t n = 0; n < inputs_->o.size(); ++n) inputs_->o.set(n, static_cast<double>(n % 17) / 16 - 0.5);
      for (int64_t n = 0; n < inputs_->lse.size(); ++n) inputs_->lse.set(n, 8);  // keeps P small
    }
    inputs_->add_to(&there_);
    tensors_ = there_.on_gpu(inputs_->tensors());
    tw_target target{};
    target.struct_size = sizeof target, target.kernel = c.kernel.c_str(), target.device_index = c.device_index;
    const tw_problem placed = on_device_of(c.kernel, p);
    tw_plan* plan = nullptr;
    if (tw_plan_create(&placed, &target, &plan) != TW_OK) std::printf("%s: %s\n", name_.c_str(), tw_last_error()), std::exit(1);
    plan_.reset(plan);
    tw_plan_info info{};
    info.struct_size = sizeof info;
    if (tw_plan_get_info(plan, &info) != TW_OK) std::abort();
    workspace_ = std::make_unique<GpuWorkspace>(static_cast<size_t>(info.workspace_bytes));
  }

  const std::string& name() const { return name_; }
  Inputs& inputs() { return *inputs_; }
  tw_status run(cudaStream_t stream) const { return tw_run(plan_.get(), &tensors_, workspace_->data(), workspace_->size(), stream); }
  bool guard_intact() const { return workspace_->guard_intact(); }
  // Outputs anew as before the first run, inputs as they are on the host.
  void poison() {
    inputs_->poison_outputs();
    there_.upload();
  }
  std::vector<Bytes> results() {  // waits
    std::vector<Bytes> bytes;
    for (const Inputs::Named& output : inputs_->outputs()) {
      there_.download(output.buffer->tensor());
      bytes.push_back(output.buffer->bytes());
    }
    return bytes;
  }
  // Runs that fail, or whose results are not those of the first, bit for bit: as whatever comes next on the stream finds them, so that a last
  // kernel that does not wait for one before it shows. `busy` is called beside each.
  template <class Busy>
  int differing_repeats(int times, const Busy& busy) {
    std::vector<Bytes> first;
    int differ = 0;
    poison();
    there_.keep(kBehind);  // takes its memory, which waits
    there_.keep();  // copies from the host took five to ten times as long as all the rest
    for (int n = 0; n < times; ++n) {
      there_.restore();
      busy(n);
      const tw_status status = run(nullptr);
      there_.keep(kBehind);
      check_cuda(cudaDeviceSynchronize(), "kernel");
      if (n > 0) there_.restore(kBehind);
      auto bytes = results();
      if (n == 0) first = std::move(bytes);
      differ += status != TW_OK || (n > 0 && bytes != first);
    }
    return differ;
  }

 private:
  static constexpr int kBehind = 1;
  struct Destroy {
    void operator()(tw_plan* plan) const { tw_plan_destroy(plan); }
  };
  std::string name_;
  std::unique_ptr<Inputs> inputs_;
  GpuTensors there_;
  tw_tensors tensors_;
  std::unique_ptr<tw_plan, Destroy> plan_;
  std::unique_ptr<GpuWorkspace> workspace_;
};

}  // namespace tilewise
