// The row forward_sm80: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"

namespace tilewise::cuda {

std::string refuse_forward_sm80(const tw_problem& problem);
Status plan_forward_sm80(const tw_problem& problem, const Target& target, Plan* plan);
Status run_forward_sm80(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);

// Reasons that rows share: sizes; and, with them, all but 16-bit elements and head dims in whole chunks.
std::string refuse_limits(const tw_problem& problem);
std::string refuse_common(const tw_problem& problem);

}  // namespace tilewise::cuda
