// What tw_forward and tw_backward need beyond a planned run: a workspace that lives in stream order; and the GPUs as text.
#pragma once
#include <string>
#include <vector>

#include "core/plan.h"

namespace tilewise::cuda {

// Allocates the plan's workspace on the stream, runs, and frees it on the stream: nothing waits.
Status run_with_stream_workspace(const Plan& plan, const tw_tensors& tensors, void* stream);

std::vector<std::string> gpu_texts();  // "NVIDIA H200, sm_90, 132 multiprocessors" of each
std::string machine_text();            // a line per GPU, for tw_machine_text

}  // namespace tilewise::cuda
