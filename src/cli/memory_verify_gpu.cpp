// Predicted against measured memory on a GPU: outputs and workspaces come from the device's pool, which counts them.
#include <algorithm>

#include "cli/memory_verify.h"
#include "core/dtype.h"
#include "harness/gpu.h"

namespace tilewise::cli {
namespace {

// Memory for a tensor of the same shape, contiguous.
struct Fresh {
  tw_tensor tensor{};
  harness::GpuPoolMemory memory;

  static size_t bytes(const tw_tensor* like) {
    int64_t count = like != nullptr ? dtype_size(like->dtype) : 0;
    for (int32_t dim = 0; like != nullptr && dim < like->ndim; ++dim) count *= like->shape[dim];
    return static_cast<size_t>(count);
  }
  explicit Fresh(const tw_tensor* like) : memory(bytes(like)) {
    if (like == nullptr) return;
    int64_t n[TW_MAX_DIMS] = {1, 1, 1, 1};
    std::copy_n(like->shape, like->ndim, n);
    tensor = tw_tensor_contiguous(memory.data(), static_cast<tw_dtype>(like->dtype), like->ndim, n[0], n[1], n[2], n[3]);
    tensor.device = TW_CUDA;
  }
  tw_tensor* get() { return tensor.ndim > 0 ? &tensor : nullptr; }
};

// Bytes above q, k and v at the worst moment of the forward pass, or of both.
int64_t measure(const tw_problem& problem, const tw_problem& forward, const tw_tensors& host, const tw_tensors& device, bool backward,
                const tw_target& target) {
  const harness::GpuPeakMemory peak;
  Fresh o(host.o), lse(host.lse);
  tw_tensors t = device;
  t.o = o.get(), t.lse = lse.get();
  const tw_tensors first = harness::without_gradients(t);
  detail::require(tw_forward(&forward, &first, &target, nullptr));
  if (!backward) return peak.growth();
  Fresh dout(host.dout), dq(host.dq), dk(host.dk), dv(host.dv), dbias(host.dbias);
  dout.memory.upload(host.dout->data);
  t.dout = dout.get(), t.dq = dq.get(), t.dk = dk.get(), t.dv = dv.get(), t.dbias = dbias.get();
  detail::require(tw_backward(&problem, &t, &target, nullptr));
  return peak.growth();
}

}  // namespace

std::vector<MemoryCheck> verify_memory_on_gpu(const Problem& problem) {
  const tw_problem& p = problem.c();
  if (const std::string why = harness::gpu_missing(); !why.empty())
    throw UsageError("--verify: \"" + problem.text() + "\" is of a GPU: " + why);
  const auto inputs = verify_inputs(p);
  const tw_problem forward = p.pass == TW_FORWARD ? p : inputs->forward_problem();
  const tw_tensors host = inputs->tensors();
  tw_tensors given = host;  // what is no part of a peak; the rest is allocated while it is watched
  given.o = given.lse = nullptr;
  given.dout = nullptr;
  given.dq = given.dk = given.dv = given.dbias = nullptr;
  const harness::GpuTensors copies(given);
  const tw_tensors device = copies.on_gpu(given);
  const Target target = target_named("cuda", "", 0);
  const tw_target where = target.c();
  const tw_memory_info info = memory(problem, target);
  std::vector<MemoryCheck> checks;
  for (const bool backward : {false, true}) {
    if (backward && p.pass == TW_FORWARD) continue;
    const int64_t predicted = backward ? std::max(info.tiled.peak_forward, info.tiled.peak_backward) : info.tiled.peak_forward;
    measure(p, forward, host, device, backward, where);  // kernels are loaded when they first run
    checks.push_back({problem.text(), "tilewise", backward ? "backward" : "forward", predicted,
                      measure(p, forward, host, device, backward, where)});
  }
  return checks;
}

}  // namespace tilewise::cli
