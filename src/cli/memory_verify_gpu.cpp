// Predicted against measured memory on a GPU: outputs and workspaces come from the device's pool, which counts them.
#include <algorithm>

#include "cli/memory_verify.h"
#include "harness/gpu.h"

namespace tilewise::cli {

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
    const auto measure = [&] {
      return measure_passes<harness::GpuPeakMemory, harness::GpuPoolMemory>(p, forward, host, device, backward, where);
    };
    measure();  // kernels are loaded when they first run
    checks.push_back({problem.text(), "tilewise", backward ? "backward" : "forward", predicted, measure()});
  }
  return checks;
}

}  // namespace tilewise::cli
