// The row forward_sm90: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"

namespace tilewise::cuda {

bool forward_sm90_available();
std::string refuse_forward_sm90(const tw_problem& problem);
Status plan_forward_sm90(const tw_problem& problem, const Target& target, Plan* plan);
Status run_forward_sm90(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);

KernelRow forward_sm90_row();  // for the table, before forward_sm80

}  // namespace tilewise::cuda
