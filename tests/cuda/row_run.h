// Running one row of the CUDA table on a problem's inputs: workspace poisoned before and guarded behind.
#pragma once
#include "core/plan.h"
#include "device_inputs.h"

namespace tilewise::cuda_test {

// Device memory for a plan's workspace with guard bytes after it.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    check_cuda(cudaMalloc(&data_, bytes_ + kGuardBytes), "workspace");
    check_cuda(cudaMemset(data_, 0xff, bytes_ + kGuardBytes), "workspace");
  }
  ~Workspace() { cudaFree(data_); }
  Workspace(const Workspace&) = delete;
  void* data() const { return data_; }
  bool guard_intact() const {
    std::vector<uint8_t> guard(kGuardBytes);
    check_cuda(cudaMemcpy(guard.data(), static_cast<uint8_t*>(data_) + bytes_, kGuardBytes, cudaMemcpyDeviceToHost), "guard");
    for (const uint8_t byte : guard)
      if (byte != 0xff) return false;
    return true;
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

inline Status plan_row(const KernelRow& row, const tw_problem& p, Plan* plan) {
  plan->problem = p;
  plan->row = &row;
  return row.plan(p, plan->target, plan);
}

inline Status run_row(const KernelRow& row, const tw_problem& p, const tw_tensors& t) {
  Plan plan;
  TW_RETURN_IF_ERROR(plan_row(row, p, &plan));
  const Workspace workspace(plan.workspace_bytes);
  const Status status = row.run(plan, t, plan.workspace_bytes > 0 ? workspace.data() : nullptr, nullptr);
  check_cuda(cudaDeviceSynchronize(), "kernel");
  if (!workspace.guard_intact()) return Status(TW_INTERNAL, concat(row.name, ": wrote behind its workspace"));
  return status;
}

}  // namespace tilewise::cuda_test
