#include "cuda/one_call.h"

#include <cuda_runtime_api.h>

#include <algorithm>

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

std::vector<std::string> gpu_texts() {
  std::vector<std::string> texts;
  for (int n = 0; n < device_count(); ++n) {
    const DeviceFacts& facts = device_facts(n);
    texts.push_back(concat(facts.name, ", sm_", facts.capability, ", ", facts.multiprocessors, " multiprocessors"));
  }
  return texts;
}

std::string machine_text() {
  std::string text;
  for (const std::string& gpu : gpu_texts()) text += concat("cuda ", std::count(text.begin(), text.end(), '\n'), " ", gpu, "\n");
  return text.empty() ? "cuda built in; no usable GPU or driver\n" : text;
}

}  // namespace tilewise::cuda
