#include "cuda/one_call.h"

#include <cuda_runtime_api.h>

#include "cuda/device.h"

namespace tilewise::cuda {

Status run_with_stream_workspace(const Plan& plan, const tw_tensors& tensors, void* stream) {
  const DeviceGuard guard(plan.target.device_index);
  if (!guard.status().ok()) return guard.status();
  const auto where = static_cast<cudaStream_t>(stream);
  void* workspace = nullptr;
  if (plan.workspace_bytes > 0)
    if (cudaError_t error = cudaMallocAsync(&workspace, static_cast<size_t>(plan.workspace_bytes), where); error != cudaSuccess)
      return error == cudaErrorMemoryAllocation
                 ? Status(TW_OUT_OF_MEMORY, concat("workspace of ", plan.workspace_bytes, " bytes: out of device memory"))
                 : device_error("cudaMallocAsync", error);
  Status status = plan.row->run(plan, tensors, workspace, stream);
  if (workspace != nullptr)
    if (cudaError_t error = cudaFreeAsync(workspace, where); error != cudaSuccess && status.ok())
      status = device_error("cudaFreeAsync", error);
  return status;
}

std::string machine_text() {
  const int count = device_count();
  if (count == 0) return "cuda built in; no usable GPU or driver\n";
  std::string text;
  for (int n = 0; n < count; ++n) {
    const DeviceFacts& facts = device_facts(n);
    text += concat("cuda ", n, " ", facts.name, ", sm_", facts.capability, ", ", facts.multiprocessors, " multiprocessors\n");
  }
  return text;
}

}  // namespace tilewise::cuda
