// The row backward_sm80: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"

namespace tilewise::cuda {

std::string refuse_backward_sm80(const tw_problem& problem);
Status plan_backward_sm80(const tw_problem& problem, const Target& target, Plan* plan);
Status run_backward_sm80(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);

}  // namespace tilewise::cuda
