// The row backward_sm90: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"

namespace tilewise::cuda {

std::string refuse_backward_sm90(const tw_problem& problem);
Status plan_backward_sm90(const tw_problem& problem, const Target& target, Plan* plan);
Status run_backward_sm90(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);
KernelRow backward_sm90_row();

}  // namespace tilewise::cuda
